"""serve/child.py and serve/parent.py: a small echo child over the real socket pair."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
import uvloop

from hitsend.core.frames import MAX_BYTES
from hitsend.serve.child import Child, ChildExit, ChildGone

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

ECHO = """
import sys
from hitsend.serve.parent import ParentLine
line = ParentLine(int(sys.argv[sys.argv.index("--fd") + 1]))
while not line.is_closed:
    for body in line.receive(1.0):
        if body == b"die":
            print("last words", file=sys.stderr, flush=True)
            line.send(b"dying")
            sys.exit(7)
        if body == b"nonsense":
            line._socket.send(b"\\xff" * 8)
        line.send(body)
line.drain(1.0)
"""


class Edge:
    """Collects what a child says."""

    def __init__(self, script: str = ECHO) -> None:
        self.bodies: asyncio.Queue[bytes] = asyncio.Queue()
        self.exits: asyncio.Queue[ChildExit] = asyncio.Queue()
        self.child = Child(["-c", script], on_message=self.bodies.put_nowait, on_exit=self.exits.put_nowait)

    async def body(self) -> bytes:
        async with asyncio.timeout(30):
            return await self.bodies.get()

    async def exit(self) -> ChildExit:
        async with asyncio.timeout(30):
            return await self.exits.get()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_messages_go_both_ways_in_order_and_stop_reaps() -> None:
    edge = Edge()
    await edge.child.start()
    for i in range(100):
        edge.child.send(b"%d" % i)
    assert [await edge.body() for _ in range(100)] == [b"%d" % i for i in range(100)]
    await edge.child.stop()
    await edge.child.stop()
    assert (await edge.exit()).status == 0
    with pytest.raises(ChildGone):
        edge.child.send(b"late")


async def test_a_large_body_passes_while_both_buffers_are_small() -> None:
    edge = Edge()
    await edge.child.start()
    big = os.urandom(5_000_000)
    for _ in range(3):
        edge.child.send(big)
    for _ in range(3):
        assert await edge.body() == big
    await edge.child.stop()


async def test_words_before_death_arrive_before_the_exit() -> None:
    edge = Edge()
    await edge.child.start()
    edge.child.send(b"die")
    ended = await edge.exit()
    assert edge.bodies.get_nowait() == b"dying"
    assert (ended.status, ended.signal, ended.lines) == (7, None, ("last words",))
    assert ended.how == "exit code 7"


async def test_kill_is_reported_with_its_signal() -> None:
    edge = Edge()
    await edge.child.start()
    edge.child.send(b"up")
    await edge.body()
    edge.child.kill()
    ended = await edge.exit()
    assert (ended.status, ended.signal, ended.how) == (None, signal.SIGKILL, "signal 9")
    assert edge.child.pid is None
    assert not edge.child.is_running


async def test_a_frame_over_the_limit_ends_the_child() -> None:
    assert MAX_BYTES < 0xFFFFFFFF
    edge = Edge()
    await edge.child.start()
    edge.child.send(b"nonsense")
    assert (await edge.exit()).status == 0


async def test_a_child_that_closes_its_line_but_lingers_is_killed() -> None:
    edge = Edge("import sys, os, time; os.close(int(sys.argv[2])); time.sleep(600)")
    await edge.child.start()
    assert (await edge.exit()).signal == signal.SIGKILL


async def test_twenty_children_leave_no_descriptor_zombie_or_task() -> None:
    async def once(kill: bool) -> None:
        edge = Edge()
        await edge.child.start()
        edge.child.send(b"up")
        await edge.body()
        if kill:
            edge.child.kill()
        await edge.child.stop()
        await edge.exit()

    await once(kill=False)
    before, children = descriptors(), {child.pid for child in psutil.Process().children()}
    for i in range(20):
        await once(kill=bool(i % 2))
    assert descriptors() == before
    assert len(asyncio.all_tasks()) == 1
    assert {child.pid for child in psutil.Process().children()} <= children


@pytest.mark.parametrize("steps", range(8))
def test_a_start_that_is_cancelled_leaves_nothing_and_closes_nothing_of_others(steps: int) -> None:
    """Under uvloop, which serves: socket and transport both believed to own a descriptor, and whoever got its number
    next lost it when the first of them was collected."""

    async def cancelled() -> tuple[int | None, list[int]]:
        edge = Edge()
        task = asyncio.create_task(edge.child.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})  # it keeps its traceback, and with it whatever the frames hold
        edge.child.kill()
        await edge.child.stop(0.0)
        pid = edge.child._process.pid if edge.child._process is not None else None
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]
        del edge, task
        gc.collect()
        return pid, [number for number in others if not is_ours(number)]

    def is_ours(number: int) -> bool:
        try:
            os.close(number)
        except OSError:
            return False
        return True

    pid, lost = uvloop.run(cancelled())
    assert lost == []
    assert pid is None or not psutil.pid_exists(pid)
