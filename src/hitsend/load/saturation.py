"""Where it saturates: the load beyond which more of it brings nothing.

Enters: levels, each with its load and its figures. Leaves: the saturation point, and the next rate of a ramp. Always
true: a rate counts as sustained only when requests didn't pile up and at most one in a hundred failed; a ramp ends.
Next: `compare.py`.
"""

import msgspec

from hitsend.load.report import Level

GAIN = 0.1
"""A step in concurrency that brings less than this part more tokens per second is past the knee."""
FAILED = 0.01
BISECTIONS = 3


class Saturation(msgspec.Struct, frozen=True):
    """`at`: the highest rate (requests/s) or the concurrency before the knee; `is_reached`: whether a level beyond it
    was seen to bring no more; `goodput_at`: the load with the most answers within the SLO."""

    by: str
    at: float | None
    is_reached: bool
    output_tokens_per_s: float | None
    goodput_at: float | None
    goodput_per_s: float | None


def is_sustained(level: Level) -> bool:
    """Whether the server kept up with this open-loop level."""
    counts = level.requests
    tried = counts.ok + counts.errors + counts.aborted
    return not level.is_growing and tried > 0 and counts.errors <= FAILED * tried


def find(levels: list[Level]) -> Saturation | None:
    """Of one target's levels (medians over rounds, or one round); None without two levels of one mode, or an answer."""
    if not any(one.requests.ok for one in levels):
        return None  # a server that is gone has no point at which it is full
    rated = sorted((one for one in levels if one.rate_per_s is not None), key=lambda one: one.rate_per_s or 0)
    closed = sorted((one for one in levels if one.concurrency is not None), key=lambda one: one.concurrency or 0)
    if len(rated) > 1:
        good = [one for one in rated if is_sustained(one)]
        reached = len(good) < len(rated)
        best = good[-1] if good else None
        return _found("rate", rated, None if best is None else best.rate_per_s, best, reached=reached)
    if len(closed) > 1:
        knee = _knee(closed)
        best = closed[knee]
        return _found("concurrency", closed, best.concurrency, best, reached=knee < len(closed) - 1)
    return None


def _knee(closed: list[Level]) -> int:
    """The first level after which no level is better by the gain."""
    for at, level in enumerate(closed):
        later = max((one.output_tokens_per_s for one in closed[at + 1 :]), default=0.0)
        if later < level.output_tokens_per_s * (1 + GAIN):
            return at
    return len(closed) - 1


def _found(by: str, levels: list[Level], at: float | None, best: Level | None, *, reached: bool) -> Saturation:
    rated = [one for one in levels if one.goodput_per_s]
    top = max(rated, key=lambda one: one.goodput_per_s or 0.0, default=None)
    return Saturation(
        by,
        at,
        reached,
        None if best is None else best.output_tokens_per_s,
        None if top is None else top.rate_per_s or top.concurrency,
        None if top is None else top.goodput_per_s,
    )


class Ramp:
    """The rates of a ramp, each after the last one's outcome: times `factor` until one isn't sustained, then between
    the best and the worst known, `BISECTIONS` times."""

    def __init__(self, start: float, stop: float, factor: float = 2.0) -> None:
        self._next, self._stop, self._factor = start, stop, factor
        self._best: float | None = None
        self._worst: float | None = None
        self._halvings = BISECTIONS

    def next(self) -> float | None:
        """The next rate, None at the end."""
        return self._next or None

    def tell(self, *, sustained: bool) -> None:
        """How the rate that `next` gave went."""
        at = self._next
        if sustained:
            self._best = at
        else:
            self._worst = at
        if self._worst is None:
            self._next = min(self._stop, at * self._factor) if at < self._stop else 0.0
        elif self._best is None or self._halvings == 0:
            self._next = 0.0
        else:
            self._halvings -= 1
            self._next = (self._best + self._worst) / 2
