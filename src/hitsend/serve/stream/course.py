"""The work of one response in a task of its own: what interrupts who waits for it, and how it is ended.

Enters: tasks. Leaves: them, ended. Always true: who waits is interrupted by the work's end, by the clock or from
outside, and not any more once it stopped waiting; a task that is cancelled is waited for, however often its waiter is
cancelled meanwhile. Next: `deliver.py`.
"""

import asyncio
import logging
import traceback
from typing import Any

from hitsend.core.errors import ServeError

logger = logging.getLogger(__name__)


class Course:
    """The work of one response, and what interrupts who waits for it."""

    def __init__(self, working: "asyncio.Task[None]", waiting: "asyncio.Task[Any]", *, wants_pings: bool) -> None:
        self.working = working
        self.waiting = waiting
        self.wants_pings = wants_pings
        self.pinging: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.fault: Exception | None = None

    def interrupt(self, _: object = None) -> None:
        """The one who waits for the client needn't any longer."""
        self.waiting.cancel()

    def end(self) -> None:
        """Nothing interrupts it from now on."""
        self.working.remove_done_callback(self.interrupt)
        if self.timer is not None:
            self.timer.cancel()


def current_task() -> "asyncio.Task[Any]":
    """The one that runs this."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def cancel_and_wait(*tasks: "asyncio.Task[None]") -> None:
    """Cancel, then wait until every task has really ended; being cancelled oneself meanwhile only counts after that."""
    for task in tasks:
        task.cancel()
    interrupted: asyncio.CancelledError | None = None
    while pending := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interrupted = error
    for task in tasks:
        broke = None if task.cancelled() else task.exception()
        if broke is not None and not isinstance(broke, ServeError | OSError):
            stack = "".join(traceback.format_tb(broke.__traceback__))  # without its text, which may hold a prompt's
            logger.error("an ended request's work or clean-up broke: %s\n%s", type(broke).__name__, stack)
    if interrupted is not None:
        raise interrupted
