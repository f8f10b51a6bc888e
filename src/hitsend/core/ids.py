"""Random ids.

Enters: how many bytes. Leaves: them as hex. Always true: every byte (but those of the time) comes from the system's
generator and is given out once; they are drawn many at a time, because asking for a few costs a system call and a
switch between threads, several times per request; a forked child draws its own. Next: `request.py`.
"""

import os
import time

_DRAWN = 4096


class Ids:
    """A store of random bytes. Not for secrets, which have no need to be cheap."""

    def __init__(self) -> None:
        self._hex = ""
        self._at = 0
        os.register_at_fork(after_in_child=self._forget)

    def take(self, num_bytes: int) -> str:
        """Twice as many hex digits."""
        end = self._at + 2 * num_bytes
        if end > len(self._hex):
            self._hex, end = os.urandom(_DRAWN).hex(), 2 * num_bytes
            self._at = 0
        found, self._at = self._hex[self._at : end], end
        return found

    def dated(self, num_bytes: int) -> str:
        """The same, six bytes of it the time in milliseconds. In an index by such ids, rows of one moment stand beside
        each other, on one page that is written once, and not on a page of their own each."""
        return f"{time.time_ns() // 1_000_000:012x}{self.take(num_bytes - 6)}"

    def _forget(self) -> None:
        self._hex, self._at = "", 0


IDS = Ids()
"""For one thread: that of the event loop."""
