"""What published measurements of like systems say about an asked one: their terms' errors, as far as systems are alike.

Enters: a system and `data/speed_published.json`. Leaves: a factor for each term of its plans, and how like the most
like system is. Always true: a factor depends on the system and never on its load, so what grows with a load still
does; a system like none that was measured keeps its plan; only systems of the same engine, with experts or without,
count. Next: `transfer.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

MOST = math.log(5)
"""No term is moved further than five times up or down."""


class Kin(msgspec.Struct, frozen=True, array_like=True):
    """A system, its engine aside."""

    model: str
    gpu: str
    weights: str
    tp: int
    ep: bool
    attention_dp: bool


class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    """How much two systems' terms have in common: exp(- sum of costs), a cost for what differs and for each octave of
    ranks. `terms`, `whole`, `nugget`: variances of one term's error, of the whole plan's, and of one measurement's.
    Chosen by leaving one measurement out, on the half that everything is fitted to."""

    model: float
    gpu: float
    weights: float
    tp: float
    ep: float
    attention_dp: float
    terms: float = 0.0
    whole: float = 0.0
    nugget: float = 0.0

    def of(self, one: Kin, other: Kin) -> float:
        """1 for the same system, less for any other."""
        cost = self.model * (one.model != other.model) + self.gpu * (one.gpu != other.gpu)
        cost += self.weights * (one.weights != other.weights) + self.tp * abs(math.log2(one.tp / other.tp))
        cost += self.ep * (one.ep != other.ep) + self.attention_dp * (one.attention_dp != other.attention_dp)
        return math.exp(-cost)


class Moved(msgspec.Struct, frozen=True):
    """A measured system's part in others' terms, as logarithms."""

    kin: Kin
    moves: dict[str, float]


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """What moved terms leave of one measured time to a first token: measured / planned, as a logarithm."""

    kin: Kin
    concurrency: float
    input: float
    output: float
    error: float


class Beside(msgspec.Struct, frozen=True):
    """What to multiply each term by; a term that isn't named stays. `likeness`: of the most like system, 0 to 1."""

    factors: dict[str, float] = {}
    likeness: float = 0.0
    nearest: Kin | None = None


def beside(kin: Kin, systems: Sequence[Moved], likeness: Likeness) -> Beside:
    """The sum of all measured systems' parts, each as far as it is alike."""
    if not systems:
        return Beside()
    alike = [likeness.of(kin, other.kin) for other in systems]
    told: dict[str, float] = {}
    for share, other in zip(alike, systems, strict=True):
        for name, move in other.moves.items():
            told[name] = told.get(name, 0.0) + share * move
    factors = {name: math.exp(max(-MOST, min(MOST, move))) for name, move in told.items()}
    best = max(range(len(alike)), key=alike.__getitem__)
    return Beside(factors, alike[best], systems[best].kin)


class Seen(msgspec.Struct, frozen=True):
    """One measurement: its system, its plan's terms in milliseconds, and what was measured."""

    kin: Kin
    terms: dict[str, float]
    measured: float

    @property
    def error(self) -> float:
        """Logarithm of measured / planned."""
        return math.log(self.measured / sum(self.terms.values()))


def learn(seen: Sequence[Seen], likeness: Likeness) -> tuple[list[Moved], list[float]]:
    """Systems' parts, and for each measurement the factor between what all others say of it and what all say with it.

    Gaussian process regression (Rasmussen and Williams, 2006, equation 2.25) over errors that are sums of terms' errors
    by their share of a plan: two measurements have in common what their systems have, times terms * sum of products of
    shares + whole. Leaving one out: equation 5.12."""
    shares = [_shares(one.terms) for one in seen]
    errors = [one.error for one in seen]
    matrix = [
        [
            likeness.of(one.kin, other.kin) * (likeness.terms * _product(mine, its) + likeness.whole)
            for other, its in zip(seen, shares, strict=True)
        ]
        for one, mine in zip(seen, shares, strict=True)
    ]
    for index, line in enumerate(matrix):
        line[index] += likeness.nugget
    inverse = inverted(matrix)
    weights = [sum(x * y for x, y in zip(line, errors, strict=True)) for line in inverse]
    systems: dict[Kin, dict[str, float]] = {}
    for one, mine, weight in zip(seen, shares, weights, strict=True):
        moves = systems.setdefault(one.kin, {})
        for name in _names(shares):
            move = weight * (likeness.terms * mine.get(name, 0.0) + likeness.whole)
            moves[name] = moves.get(name, 0.0) + move
    without = [math.exp(weight * (likeness.nugget - 1 / inverse[i][i])) for i, weight in enumerate(weights)]
    return [
        Moved(kin, {name: round(move, 4) for name, move in moves.items()}) for kin, moves in systems.items()
    ], without


def _shares(terms: Mapping[str, float]) -> dict[str, float]:
    total = sum(terms.values())
    return {name: value / total for name, value in terms.items()}


def _names(shares: Iterable[Mapping[str, float]]) -> list[str]:
    return sorted({name for one in shares for name in one})


def _product(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    return sum(value * other[name] for name, value in one.items() if name in other)


def inverted(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """By elimination; a nugget keeps a matrix of likenesses regular, so no pivots are needed."""
    size = len(matrix)
    rows = [[*line, *(1.0 if i == j else 0.0 for j in range(size))] for i, line in enumerate(matrix)]
    for i in range(size):
        head = rows[i][i]
        top = rows[i] = [value / head for value in rows[i]]
        for j in range(size):
            if j != i and (share := rows[j][i]):
                rows[j] = [x - share * y for x, y in zip(rows[j], top, strict=True)]
    return [line[size:] for line in rows]
