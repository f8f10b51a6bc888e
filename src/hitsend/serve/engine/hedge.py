"""One request, asked of a second server while the first is silent: whoever speaks first answers.

Enters: how the first is being asked, and how a second would be. Leaves: what the one that spoke first said. Always
true: the other's connection is closed before anything of the answer is passed on; a refusal counts only when nobody is
asked any more; cancelling it closes both. Next: `upstream_generation.py`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from hitsend.serve.engine.breaker import Outcome
from hitsend.serve.engine.refusals import Refusal
from hitsend.serve.engine.upstream import UpstreamAnswer

Asked = tuple[UpstreamAnswer | None, Refusal | None]
Asking = Coroutine[Any, Any, Asked]


class Heard(msgspec.Struct, frozen=True):
    """`number` of who is listened to, 0 or 1, and what it said. `outcomes`: how it went with each that was asked."""

    number: int
    asked: Asked
    outcomes: tuple[Outcome, ...]


async def spoken(asking: Asking) -> Asked:
    """The same, once the first bytes of its answer are there too: a head says nothing of how long they take."""
    answer, refusal = await asking
    if answer is not None and refusal is None:
        try:
            await answer.hear()
        except BaseException:
            answer.close()
            raise
    return answer, refusal


async def first_to_speak(first: Asking, second: Callable[[], Asking | None], after_s: float) -> Heard:
    """Who speaks first; `second` is asked after so much silence, None: nobody is there."""
    tasks = [asyncio.create_task(first)]
    chosen: asyncio.Task[Asked] | None = None
    try:
        await asyncio.wait(tasks, timeout=after_s)
        if not tasks[0].done() and (other := second()) is not None:
            tasks.append(asyncio.create_task(other))
        pending = set(tasks)
        while pending and chosen is None:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            chosen = next((task for task in tasks if task.done() and task.result()[1] is None), None)
        chosen = chosen or tasks[-1]
        return Heard(tasks.index(chosen), chosen.result(), tuple(map(_outcome, tasks)))
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


def _outcome(task: asyncio.Task[Asked]) -> Outcome:
    refusal = task.result()[1] if task.done() else None
    return "left" if refusal is None else refusal.outcome


def _close(task: asyncio.Task[Asked]) -> None:
    if not task.cancelled() and task.exception() is None and (answer := task.result()[0]) is not None:
        answer.close()
