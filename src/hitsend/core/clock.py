"""Time, behind one small protocol so that tests and the planner can bring their own.

Enters: nothing. Leaves: instants in seconds. Always true: `now()` never goes backwards and is comparable between the
processes of one machine (CLOCK_MONOTONIC), so the edge and its children can put their stamps on one time line;
`wall()` is only ever shown to people or written to the ledger. Next: `request.py`.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where every stage reads the time."""

    def now(self) -> float:
        """Monotonic seconds, comparable across processes of this machine since boot."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, UTC."""
        ...


class SystemClock:
    """The machine's clocks: the functions themselves, because a request reads them forty times."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
