"""What measured loads say about another one: the errors of their plans, as far as they are its own.

Enters: measured loads with measured / planned, and another load. Leaves: what to multiply its plan by.
Always true: a load that was measured is nearly met; far from all that were measured nothing is left, and the plan
stands; between two it is between; published systems count as far as they are like the one that measured. Next:
`calibrate.py`.
"""

import math
from collections.abc import Sequence

import msgspec

from hitsend.plan.published import Kin, Likeness, Wait

NOBODY = Kin("", "", "", 1, False, False)
WAIT_LIKENESS = Likeness(model=0.53, gpu=0.87, weights=1.1, tp=0.26, ep=1.6, attention_dp=0.52)
"""Of what moved terms leave of first tokens. Chosen by leaving one measurement of the fitted half out."""
TPOT_FADE = 0.25
"""What is left, an octave of load away, of an error that terms don't explain. Chosen on the half that is fitted to."""
LENGTHS = (8.0, 2.0, 8.0)
"""Octaves of concurrency, prompt and answer over which an error falls to 1 / e. Chosen, as the next, on the half of the
published measurements that everything is fitted to: each load from each other one of its system."""
NUGGET = 0.02
"""Variance of one measurement beside that of plans."""
LOCAL = 0.95
"""How much of that is of the load, and is met again where it is asked for: one measured twice differs by 2 %."""
LOCAL_FADE = 0.05
"""What is left of it an octave away."""
OWN = 0.02
"""Variance of what is of one's own system at all loads beside a published one of the same kind: another version, other
settings. Chosen on the fitted half, each load from the first of its system, both left out of what is published."""
OWN_FADE = 0.25
"""The power of nearness with which it fades: four times as far."""
NEARBY = 2.0
"""Octaves of concurrency and lengths together within which a measured load is near another."""
FAR = 6.0
"""So many octaves beyond that a measured load says hardly more than none: intervals are as wide as without. Chosen so
that intervals around loads at any distance hold four in five of the fitted half."""
SAME = 0.5
"""How much of an interval is gone at the measured load itself, fading over an octave: one measured twice by the same
version differs by 1.6 % in TTFT and 0.2 % in TPOT, so half is careful."""
OWN_ERRORS = ((0.0, 0.002, 0.02), (1.0, 0.028, 0.072), (2.0, 0.034, 0.08), (4.0, 0.037, 0.088), (99.0, 0.043, 0.09))
"""Median errors of TPOT and TTFT where one load is known that is at most so many octaves away, of the judged half: of
systems that are among the published ones."""
STRANGERS_ERRORS = ((0.0, 0.003, 0.02), (1.0, 0.056, 0.086), (2.0, 0.067, 0.13), (4.0, 0.07, 0.16), (99.0, 0.085, 0.18))
"""The same of systems whose model nobody published: what published systems say was left out."""
MOST = 32
"""Measured loads that are taken, the nearest ones."""

Load = tuple[float, float, float]
"""Concurrency, prompt and answer in tokens."""


def nearness(one: Load, other: Load) -> float:
    """How much two loads' errors have in common: 1 to 0, exponential in the octaves between them."""
    pairs = zip(one, other, LENGTHS, strict=True)
    return math.exp(-sum(abs(math.log2(mine / its)) / length for mine, its, length in pairs))


def expected(
    known: Sequence[tuple[Load, float]], load: Load, kin: Kin | None = None, waits: Sequence[Wait] = ()
) -> float:
    """Of the logarithm of measured / planned. Simple kriging: k (K + nugget)^-1 y (Rasmussen and Williams, Gaussian
    Processes, 2006, equation 2.25), with a mean of 0, which is the plan. `waits`: what is known of other systems, as
    far as they are like `kin`."""
    if not known:
        return 0.0
    asked = Wait(kin or NOBODY, *load, 0.0)
    own = [Wait(asked.kin, *where, value) for where, value in known]
    found = []
    for told in (own, waits if kin is not None else ()):
        found += sorted(told, key=lambda one: -_common(one, asked))[:MOST]
    matrix = [
        [_common(one, other) + ((1 - LOCAL) * NUGGET if i == j else 0.0) for j, other in enumerate(found)]
        for i, one in enumerate(found)
    ]
    weights = _solved(matrix, [one.error for one in found])
    return sum(weight * _common(one, asked) for weight, one in zip(weights, found, strict=True))


def _common(one: Wait, other: Wait) -> float:
    """Covariance; what is of a load alone counts among measurements of whoever asks only (their kin is one object)."""
    loads = (one.concurrency, one.input, one.output), (other.concurrency, other.input, other.output)
    near = nearness(*loads)
    if one.kin is not other.kin:
        return near * WAIT_LIKENESS.of(one.kin, other.kin)
    octaves = sum(abs(math.log2(mine / its)) for mine, its in zip(*loads, strict=True))
    return near + OWN * math.pow(near, OWN_FADE) + LOCAL * NUGGET * math.pow(LOCAL_FADE, octaves)


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


def typical_errors(octaves: float, *, is_published: bool) -> tuple[float, float]:
    """Of TPOT and TTFT, in the median, with one measured load so many octaves away."""
    told = OWN_ERRORS if is_published else STRANGERS_ERRORS
    return next((tpot, ttft) for most, tpot, ttft in told if octaves <= most or most == told[-1][0])


def farness(octaves: float) -> float:
    """0 where a measured load is near, 1 where it says as little as none."""
    return min(1.0, max(0.0, (octaves - NEARBY) / FAR))


class Near(msgspec.Struct, frozen=True, kw_only=True):
    """A measured load, and measured / planned: TPOT with the moved terms, TTFT as planned without a calibration. `ttft`
    None: it wasn't measured."""

    batch: float
    input: float
    output: float
    tpot: float
    ttft: float | None

    def each(self, batch: float, entry: float, leave: float) -> tuple[float, float, float]:
        """How far another load is, in octaves of concurrency, prompt and answer."""
        return (
            abs(math.log2(self.batch / batch)),
            abs(math.log2(self.input / entry)),
            abs(math.log2(self.output / leave)),
        )

    def octaves(self, batch: float, entry: float, leave: float) -> float:
        """All three together."""
        return sum(self.each(batch, entry, leave))


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration multiplies a step's terms by; a term that isn't named stays. `near`: what was left at each
    load."""

    tpot: dict[str, float] = {}
    near: tuple[Near, ...] = ()
    kin: Kin | None = None
    waits: tuple[Wait, ...] = ()
    """Of the system that measured, and of published ones like it."""

    def nearest(self, load: Load, *, with_ttft: bool = False) -> Near | None:
        """The measured load that is nearest, or the nearest with a time to a first token."""
        found = [one for one in self.near if one.ttft is not None or not with_ttft]
        return min(found, key=lambda one: one.octaves(*load), default=None)

    def distance(self, load: Load, *, with_ttft: bool = False) -> float:
        """Octaves to the nearest measured load; infinite where none is."""
        near = self.nearest(load, with_ttft=with_ttft)
        return math.inf if near is None else near.octaves(*load)

    def rest(self, load: Load) -> tuple[float, float]:
        """Of TPOT from the nearest measured load, of TTFT from all of them."""
        if not self.near:
            return 1.0, 1.0
        best = self.nearest(load) or self.near[0]
        waits = [((one.batch, one.input, one.output), math.log(one.ttft)) for one in self.near if one.ttft is not None]
        return math.pow(best.tpot, TPOT_FADE ** best.octaves(*load)), math.exp(
            expected(waits, load, self.kin, self.waits)
        )
