"""When to leave an upstream alone: a circuit breaker, and a budget of second attempts. Pure but for the clock.

Enters: how requests to one upstream ended. Leaves: whether the next may go, and seconds until it is worth asking again.
Always true: an open breaker refuses at once; half open it lets one request through at a time and waits for what becomes
of it; what ends late, from before the last change, changes nothing; a request whose client left says nothing about the
upstream. Retries are at most a share of all requests, so a failing upstream gets no second wave. Next: `upstream.py`.

    closed ── failures in a row, or a share of the last ones ──► open ── after open_s ──► half open
       ▲                                                          ▲                        │    │
       └────────────────────── a probe went well ─────────────────┼────────────────────────┘    │
                                                                  └── it failed: open_s doubles ┘
"""

from collections import deque
from typing import Literal

from hitsend.core.clock import Clock

BreakerState = Literal["closed", "open", "half_open"]
Outcome = Literal["ok", "failed", "left"]

WINDOW = 50
LEAST = 20
"""Results of late that a share is taken from, and how many there must be."""
LONGEST_OPEN_S = 60.0
PROBING_S = 1.0
"""When to ask again while a probe is under way."""


class Breaker:
    """One upstream's. `failures` in a row or `share` of the last results open it, for `open_s` at first."""

    def __init__(self, clock: Clock, *, failures: int, share: float, open_s: float) -> None:
        self._clock = clock
        self._failures = failures
        self._share = share
        self._first_open_s = self._open_s = open_s
        self._in_a_row = 0
        self._results: deque[bool] = deque(maxlen=WINDOW)
        self._open_until: float | None = None
        self._is_probing = False
        self._epoch = 0
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        """Where it stands now."""
        if self._open_until is None:
            return "closed"
        return "open" if self._clock.now() < self._open_until else "half_open"

    def refused_s(self) -> float | None:
        """None: a request may go. Else how long to wait before it is worth trying."""
        if self._open_until is None:
            return None
        left = self._open_until - self._clock.now()
        if left > 0:
            return left
        return PROBING_S if self._is_probing else None

    def enter(self) -> int:
        """A request goes (ask `refused_s` first); give what is returned back to `leave`."""
        if self._open_until is not None:
            self._is_probing = True
        return self._epoch

    def leave(self, ticket: int, outcome: Outcome) -> None:
        """It has ended. Call once per `enter`."""
        if ticket != self._epoch:
            return
        if self._open_until is not None:
            self._end_probe(outcome)
        elif outcome != "left":
            self._count(is_failure=outcome == "failed")

    def _end_probe(self, outcome: Outcome) -> None:
        self._is_probing = False
        if outcome == "ok":
            self._epoch += 1
            self._open_until = None
            self._open_s = self._first_open_s
        elif outcome == "failed":
            self._open_s = min(LONGEST_OPEN_S, self._open_s * 2)
            self._open()

    def _count(self, *, is_failure: bool) -> None:
        self._results.append(is_failure)
        self._in_a_row = self._in_a_row + 1 if is_failure else 0
        if not is_failure:
            return
        is_share_reached = len(self._results) >= LEAST and sum(self._results) >= self._share * len(self._results)
        if self._in_a_row >= self._failures or is_share_reached:
            self._open()

    def _open(self) -> None:
        self._epoch += 1
        self.num_openings += 1
        self._open_until = self._clock.now() + self._open_s
        self._in_a_row = 0
        self._results.clear()


class RetryBudget:
    """Second attempts as a share of requests: each request pays `share` in, each retry takes 1 out.

    What can be saved up is bounded by `burst`, which is also what there is at the start.
    """

    def __init__(self, share: float, burst: float = 10.0) -> None:
        self._share = share
        self._burst = burst
        self._saved = burst if share else 0.0
        self.num_retries = 0

    @property
    def left(self) -> float:
        """Retries that may be taken at once."""
        return self._saved

    def pay_in(self) -> None:
        """A request begins."""
        self._saved = min(self._burst, self._saved + self._share) if self._share else 0.0

    def take(self) -> bool:
        """Whether one may be repeated; if so, it is paid for."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        self.num_retries += 1
        return True
