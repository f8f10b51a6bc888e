"""What measured loads say about another one: the errors of their plans, as far as they are its own.

Enters: measured loads with measured / planned, and another load. Leaves: what to multiply its plan by.
Always true: a load that was measured is nearly met; far from all that were measured nothing is left, and the plan
stands; between two it is between. Next: `calibrate.py`.
"""

import math
from collections.abc import Sequence

import msgspec

TPOT_FADE = 0.25
"""What is left, an octave of load away, of an error that terms don't explain. Chosen on the half that is fitted to."""
LENGTHS = (8.0, 2.0, 8.0)
"""Octaves of concurrency, prompt and answer over which an error falls to 1 / e. Chosen, as the next, on the half of the
published measurements that everything is fitted to: each load from each other one of its system."""
NUGGET = 0.02
"""Variance of one measurement beside that of plans."""
MOST = 32
"""Measured loads that are taken, the nearest ones."""

Load = tuple[float, float, float]
"""Concurrency, prompt and answer in tokens."""


def nearness(one: Load, other: Load) -> float:
    """How much two loads' errors have in common: 1 to 0, exponential in the octaves between them."""
    pairs = zip(one, other, LENGTHS, strict=True)
    return math.exp(-sum(abs(math.log2(mine / its)) / length for mine, its, length in pairs))


def expected(known: Sequence[tuple[Load, float]], load: Load) -> float:
    """Of the logarithm of measured / planned. Simple kriging: k (K + nugget)^-1 y (Rasmussen and Williams, Gaussian
    Processes, 2006, equation 2.25), with a mean of 0, which is the plan."""
    if not known:
        return 0.0
    near = sorted(known, key=lambda one: -nearness(one[0], load))[:MOST]
    matrix = [[nearness(one, other) + (NUGGET if i == j else 0.0) for j, (other, _) in enumerate(near)]
              for i, (one, _) in enumerate(near)]  # fmt: skip
    weights = _solved(matrix, [value for _, value in near])
    return sum(weight * nearness(one, load) for weight, (one, _) in zip(weights, near, strict=True))


def _solved(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """By elimination; the nugget keeps a matrix of nearnesses regular, so no pivots are needed."""
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i, line in enumerate(rows):
        for other in rows[i + 1 :]:
            share = other[i] / line[i]
            for j in range(i, len(line)):
                other[j] -= share * line[j]
    found = [0.0] * len(rows)
    for i in range(len(rows) - 1, -1, -1):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, len(rows)))
        found[i] = (rows[i][-1] - rest) / rows[i][i]
    return found


class Near(msgspec.Struct, frozen=True, kw_only=True):
    """A measured load, and measured / planned: TPOT with the moved terms, TTFT as planned without a calibration. `ttft`
    None: it wasn't measured."""

    batch: float
    input: float
    output: float
    tpot: float
    ttft: float | None

    def octaves(self, batch: float, entry: float, leave: float) -> float:
        """How far another load is."""
        pairs = ((self.batch, batch), (self.input, entry), (self.output, leave))
        return sum(abs(math.log2(mine / its)) for mine, its in pairs)


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration multiplies a step's terms by; a term that isn't named stays. `near`: what was left at each
    load."""

    tpot: dict[str, float] = {}
    near: tuple[Near, ...] = ()

    @property
    def has_ttft(self) -> bool:
        """Whether a time to a first token was measured."""
        return any(one.ttft is not None for one in self.near)

    def rest(self, load: Load) -> tuple[float, float]:
        """Of TPOT from the nearest measured load, of TTFT from all of them."""
        if not self.near:
            return 1.0, 1.0
        best = min(self.near, key=lambda one: one.octaves(*load))
        waits = [((one.batch, one.input, one.output), math.log(one.ttft)) for one in self.near if one.ttft is not None]
        return math.pow(best.tpot, TPOT_FADE ** best.octaves(*load)), math.exp(expected(waits, load))
