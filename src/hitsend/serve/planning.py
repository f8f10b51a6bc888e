"""The planner's processes: a question goes out, an answer comes back, the process ends.

Enters: a question as JSON. Leaves: the answer as JSON. Always true: nothing of the planner is loaded in this process;
at most `MAX_AT_ONCE` plan at once, one of them for long, and further ones are refused; whoever stops waiting takes its
process along. Next: `cli/plan_page.py`, the other end.
"""

import asyncio

from hitsend.core.errors import ServeError, ServerOverloaded
from hitsend.serve.child import Child, ChildExit

MAX_AT_ONCE = 3
DEADLINE_S = 300.0
"""The process counts what it computes and gives up by itself; this is for one that gets no processor."""

_running: dict[Child, bool] = {}
"""Whether it will take long."""


async def ask(question: bytes, *, is_long: bool = False) -> bytes:
    """The planner's answer. Raises ServerOverloaded, ServeError."""
    if is_long and any(_running.values()):
        raise ServerOverloaded("a long plan is made already (limit 1 of one process)", retry_after_s=10.0)
    if len(_running) >= MAX_AT_ONCE:
        raise ServerOverloaded(f"{MAX_AT_ONCE} plans are made already (limit of one process)", retry_after_s=2.0)
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def heard(body: bytes) -> None:
        if not answer.done():
            answer.set_result(body)

    def ended(exit_: ChildExit) -> None:
        if not answer.done():
            answer.set_exception(ServeError(f"the planner's process ended with {exit_.how}"))

    child = Child(["-m", "hitsend.cli.plan_page"], on_message=heard, on_exit=ended)
    _running[child] = is_long
    try:
        await child.start()
        child.send(question)
        async with asyncio.timeout(DEADLINE_S):
            return await answer
    except TimeoutError as error:
        raise ServeError(f"the planner did not answer within {DEADLINE_S:g} s") from error
    finally:
        child.kill()
        try:
            await child.stop()
        finally:
            del _running[child]
