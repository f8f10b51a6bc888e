"""Where the wall time of one request went: named intervals laid over each other so that they add up.

Enters: intervals with a name, in any order (the engine's arrive late when a slow client kept the edge from reading).
Leaves: milliseconds per segment. Always true: the segments partition the time from arrival to close: every instant
belongs to exactly one of them, the one of highest rank that covers it, and to `edge` where none does. Next:
`record.py`.
"""

from typing import NamedTuple

SEGMENTS = (
    "edge",
    "render",
    "tokenize",
    "wait",
    "prefill_own",
    "prefill_shared",
    "decode_own",
    "decode_shared",
    "upstream",
    "client_wait",
    "settle",
)
"""All names, in the order in which a request usually meets them. "own": only this request's tokens were in the step."""

_BY_RANK = (
    "client_blocked",
    "client_wait",
    "upstream",
    "wait",
    "decode_shared",
    "decode_own",
    "prefill_shared",
    "prefill_own",
    "settle",
    "tokenize",
    "render",
)
_RANKS = {name: rank for rank, name in enumerate(_BY_RANK, start=1)}


class Interval(NamedTuple):
    """A stretch of the clock's seconds under one name."""

    start: float
    end: float
    name: str


class Timeline:
    """Collects intervals. Neighbouring steps of one kind are merged, so that a long answer stays a short list."""

    def __init__(self) -> None:
        self._spans: list[Interval] = []

    def add(self, name: str, start: float, end: float) -> None:
        """Lay [start, end) under `name` (a segment, or `client_blocked`: a send that waited, of lowest rank)."""
        if end <= start:
            return
        if self._spans:
            last = self._spans[-1]
            if last.name == name and last.end == start:
                self._spans[-1] = Interval(last.start, end, name)
                return
        self._spans.append(Interval(start, end, name))

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """All of them as they were laid down: they may overlap."""
        return tuple(self._spans)

    def partition(self, start: float, end: float) -> dict[str, float]:
        """Milliseconds per segment between two instants; the values add up to (end - start) · 1000."""
        if (simple := self._in_a_row(start, end)) is not None:
            return simple
        edges: list[tuple[float, int, str]] = []
        for span in self._spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                edges.append((low, 1, span.name))
                edges.append((high, -1, span.name))
        edges.sort(key=lambda edge: edge[0])
        spent = dict.fromkeys(SEGMENTS, 0.0)
        open_spans: dict[str, int] = {}
        cursor = start
        for at, change, name in edges:
            spent[_on_top(open_spans)] += at - cursor
            cursor = at
            open_spans[name] = open_spans.get(name, 0) + change
        spent["edge"] += end - cursor
        return {name: seconds * 1000.0 for name, seconds in spent.items()}

    def _in_a_row(self, start: float, end: float) -> dict[str, float] | None:
        """The usual case: none lies over another one, and none sticks out."""
        spent, edge_s, cursor = dict.fromkeys(SEGMENTS, 0.0), 0.0, start
        for low, high, name in self._spans:
            if low < cursor or high > end:
                return None
            edge_s += low - cursor
            spent["client_wait" if name == "client_blocked" else name] += (high - low) * 1000.0
            cursor = high
        spent["edge"] = (edge_s + end - cursor) * 1000.0
        return spent


def _on_top(open_spans: dict[str, int]) -> str:
    best, best_rank = "edge", 0
    for name, count in open_spans.items():
        if count > 0 and _RANKS[name] > best_rank:
            best, best_rank = name, _RANKS[name]
    return "client_wait" if best == "client_blocked" else best
