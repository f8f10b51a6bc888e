"""Rules that may take for ever, kept from holding anything up: the operator's code, and a regular expression.

Enters: a draft. Leaves: what the rule says, or an error. Always true: whatever the code does (raise anything, leave the
interpreter, never come back), it ends no server, takes no thread that anything else needs, and only so many of it run
at once; a pattern that goes through all of a text's parts again and again is given up. Next: `cascade.py`.
"""

import asyncio
import contextlib
import re
import signal
import threading
from collections.abc import Callable
from types import FrameType

Code = Callable[[str, str], object]

MOST_THREADS = 32
"""Of one route's code that hasn't come back yet: what hangs keeps its thread for good."""
MATCH_S = 0.1
"""Of processor time for one pattern: the event loop stands still meanwhile."""


class Busy(Exception):
    """So much code hasn't come back that no more of it is started."""


class Raised(Exception):
    """The code raised something; its text is the type's name alone, as the rest may quote a prompt."""


class TooLong(Exception):
    """A pattern needs more time than it may have."""


class CodeThreads:
    """Where one route's code runs. `num_running`: calls that haven't come back."""

    def __init__(self, most: int = MOST_THREADS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.num_running = 0

    async def call(self, code: Code, question: str, answer: str) -> object:
        """What it returns. Raises Busy, Raised. Who stops waiting leaves it running."""
        with self._lock:
            if self.num_running >= self._most:
                raise Busy
            self.num_running += 1
        loop = asyncio.get_running_loop()
        found: asyncio.Future[object] = loop.create_future()

        def told(value: object, raised: str | None) -> None:
            if found.done():
                return
            if raised is None:
                found.set_result(value)
            else:
                found.set_exception(Raised(raised))

        def work() -> None:
            value, raised = None, None
            try:
                value = code(question, answer)
            except BaseException as error:  # noqa: BLE001  # SystemExit too: it is a verdict and not the server's end
                raised = type(error).__name__
            with self._lock:
                self.num_running -= 1
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(told, value, raised)

        # a daemon, and none of the loop's own: neither waits for it at the end
        threading.Thread(target=work, name="cascade code", daemon=True).start()
        return await found


def full_match(pattern: re.Pattern[str], text: str) -> bool:
    """Whether all of the text is matched. Raises TooLong, from the main thread; elsewhere there is no bound."""
    if threading.current_thread() is not threading.main_thread():
        return pattern.fullmatch(text) is not None
    before = signal.signal(signal.SIGVTALRM, _give_up)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_S)
            return pattern.fullmatch(text) is not None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise TooLong
