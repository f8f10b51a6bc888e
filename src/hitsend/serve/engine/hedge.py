"""One request, asked of a second server while the first is silent: whoever speaks first answers.

Enters: how the first is being asked, and how a second would be. Leaves: which of them spoke. Always true: the other's
connection is closed before anything of the answer is passed on; a refusal counts only when nobody is asked any more;
cancelling it closes both. Next: `upstream_generation.py`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from hitsend.core.request import Request, Usage
from hitsend.serve.engine.opening import Opened

Asking = Coroutine[Any, Any, Opened]


class Lost(msgspec.Struct, frozen=True):
    """What the server that was left may bill: an estimate. `began_at`: when it was asked, by the clock."""

    request: Request
    usage: Usage
    began_at: float

    @property
    def request_id(self) -> str:
        """Of its record and its row."""
        return f"{self.request.request_id}/hedge/{self.request.model}"


async def first_to_speak(first: Asking, second: Callable[[], Asking | None], after_s: float) -> int:
    """0 or 1: who speaks first. `second` is asked after so much silence, None: nobody is there."""
    tasks = [asyncio.create_task(first)]
    chosen: asyncio.Task[Opened] | None = None
    try:
        await asyncio.wait(tasks, timeout=after_s)
        if not tasks[0].done() and (other := second()) is not None:
            tasks.append(asyncio.create_task(other))
        pending = set(tasks)
        while pending and chosen is None:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((task for task in tasks if task.done() and task.result().refusal is None), None)
        chosen = chosen or tasks[-1]
        return tasks.index(chosen)
    finally:
        for task in tasks:
            task.cancel()
        kept = chosen
        try:
            await asyncio.wait(tasks)
        except BaseException:  # cancelled here, nobody gets what was chosen
            kept = None
            raise
        finally:
            for task in tasks:
                if task is not kept and task.done():
                    _close(task)


def _close(task: asyncio.Task[Opened]) -> None:
    if not task.cancelled() and task.exception() is None and (answer := task.result().answer) is not None:
        answer.close()
