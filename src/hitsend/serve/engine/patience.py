"""How long measuring a model may take, and what is said meanwhile.

Enters: how many measurements there are, and how long those took that are done. Leaves: lines for whoever waits, and how
many turns and texts there is time for. Always true: what takes a few seconds with a small model takes hours with a
large one, so everything after the first turn is cut to the time that is left; never below what a result needs. Next:
`tuned.py`.
"""

import math
from collections.abc import Sequence

from hitsend.core.clock import Clock
from hitsend.serve.engine.layouts import Say
from hitsend.serve.engine.measure import WINDOW, held_texts

_BYTES_PER_TOKEN = 3.5
_LEAST_WINDOWS = 4
_SPEED_SHARE = 0.5
"""Of the time, that goes into speeds; the rest is for perplexity."""

_SLACK = 1.3
"""Perplexity takes so many times as long as its tokens' prefill: weights are loaded, and logits are summed up."""


class Patience:
    """Counts measurements, and bounds them. `bound_s` is kept as far as one turn and four texts allow."""

    def __init__(self, say: Say, clock: Clock, bound_s: float) -> None:
        self._say = say
        self._clock = clock
        self._bound_s = bound_s
        self._start = clock.now()
        self._turns = self._ways = self._done = 0
        self._turn_s = 0.0

    @property
    def left_s(self) -> float:
        """Of the time."""
        return self._bound_s - (self._clock.now() - self._start)

    def begin(self, ways: Sequence[object], turns: int) -> None:
        """Say what comes: in each turn all of them, and the first one once more."""
        self._ways, self._turns, self._start = len(ways) + 1, turns, self._clock.now()
        about = f"about {_span(self._bound_s)} at most"
        each = f"speed {turns} times each in turns that end with the first one again"
        self._say(f"{len(ways)} ways to run it: {each}, then perplexity; {about}")

    def has_time_for(self, turn: int) -> bool:
        """Whether another turn fits; the first one always does. Says so where it doesn't."""
        spent_s = self._clock.now() - self._start
        if turn == 0:
            return True
        self._turn_s = spent_s / turn
        if spent_s + self._turn_s <= self._bound_s * _SPEED_SHARE:
            return True
        self._say(f"speed: {turn} of {self._turns} turns; there is no time for more ({_span(self._turn_s)} each)")
        return False

    def speed(self, turn: int, number: int, what: str) -> None:
        """This is measured now."""
        left_s = self._turn_s * (self._turns - turn - number / self._ways)
        about = f"; about {_span(left_s)} left for speeds" if turn else ""
        self._say(f"speed {turn * self._ways + number + 1}/{self._turns * self._ways}: {what}{about}")

    def every(self, prefills: Sequence[float], least: int) -> int:
        """Of the held texts every so-manieth window has time, if all of these ways (tokens/s) are to be measured."""
        windows = sum(map(len, held_texts())) / _BYTES_PER_TOKEN / WINDOW
        seconds = _SLACK * sum(windows * WINDOW / prefill for prefill in prefills)
        most = max(1, int(windows / _LEAST_WINDOWS))
        return max(least, min(most, math.ceil(seconds / max(self.left_s, 1.0))))

    def perplexity(self, number: int, speeds: Sequence[float], every: int, what: str) -> None:
        """This one of several ways, whose prefills are `speeds`, is measured now."""
        windows = sum(map(len, held_texts())) / _BYTES_PER_TOKEN / WINDOW / every
        left_s = _SLACK * sum(windows * WINDOW / speed for speed in speeds[number:])
        self._say(f"perplexity {number + 1}/{len(speeds)}: {what}; about {_span(left_s)} left")


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
