"""kill -9 while an engine is given up: every engine that was asked is named by a row of the ledger. Real processes."""

import asyncio
import contextlib
import sqlite3
from functools import partial

import aiohttp
import pytest

from tests.mock_upstream import good, mock_upstream
from tests.served import serving
from tests.upstream.conftest import Gateway

pytestmark = pytest.mark.slow  # a server each, twice

CONFIG = """
[engine]
model = "none"

[[engines]]
name = "engine-a"
base_url = "{a}"
models = {{ a = "a-there" }}
prices = {{ input = 1, output = 2 }}
retry_share = 0.0

[[engines]]
name = "engine-b"
base_url = "{b}"
models = {{ b = "b-there" }}
prices = {{ input = 10, output = 20 }}

[[routes]]
model = "auto"
engines = ["a", "b"]

[[routes]]
model = "copied"
engines = ["a"]
shadow = "b"
shadow_share = 1.0
"""
LOST = ("recovered_after_crash", True, 0, 0)


async def hangs(call):
    await asyncio.Event().wait()


async def breaks(after, call):
    """Before its first word, and bills its prompt all the same."""
    await call.start()
    await after.wait()
    await call.event({"error": {"code": 500}, "usage": {"prompt_tokens": 7, "completion_tokens": 0}})


async def until(good_enough, what):
    for _ in range(1500):
        if good_enough():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(what)


def found(tmp_path, table, columns):
    (file,) = tmp_path.glob("*.sqlite3")
    with contextlib.closing(sqlite3.connect(file)) as database:
        return database.execute(f"SELECT {columns} FROM {table} ORDER BY request_id").fetchall()


def rows(tmp_path):
    """By request id: engine, and what of it counts."""
    columns = "request_id, engine, reason, is_estimate, completion_tokens, cost_microusd, key_name"
    return {row[0]: row[1:] for row in found(tmp_path, "ledger", columns)}


async def ask(gate, model, request_id):
    with contextlib.suppress(aiohttp.ClientError):  # it is killed
        await gate.answer(model=model, headers={"x-request-id": request_id})


async def is_being_given_up(gate, name):
    for _ in range(1500):
        if name in {one["request_id"] for one in (await gate.get("/inspect/requests"))["requests"]}:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never given up")


async def leave_three_and_kill(served, gate, a, b):
    """`copied`: its shadow is at work. `later`: its first engine was given up, the next one is at work. `now`: its
    first engine is given up, and that has no row yet, because nobody can write."""
    scripts = [good]
    may_break = asyncio.Event()

    async def as_told(call):
        await scripts[-1](call)

    a.script, b.script = as_told, hangs
    await ask(gate, "copied", "copied")
    await until(lambda: b.calls, "no copy")
    at_once = asyncio.Event()
    at_once.set()
    scripts.append(partial(breaks, at_once))
    later = asyncio.create_task(ask(gate, "auto", "later"))
    await until(lambda: ("later", "engine-b") in found(served.data, "holds", "request_id, engine"), "never moved")
    await until(lambda: len(b.calls) == 2, "the next one was never asked")
    scripts.append(partial(breaks, may_break))
    now = asyncio.create_task(ask(gate, "auto", "now"))
    await until(lambda: len(a.calls) == 3, "never asked")
    (file,) = served.data.glob("*.sqlite3")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=20)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        may_break.set()
        await is_being_given_up(gate, "now/tried/a")
        served.kill()
        lock.execute("ROLLBACK")
    await asyncio.gather(later, now)


async def test_every_engine_that_was_asked_has_its_row_after_a_kill(tmp_path):
    async with mock_upstream() as a, mock_upstream() as b, aiohttp.ClientSession() as session:
        config = tmp_path / "routes.toml"
        config.write_text(CONFIG.format(a=a.url, b=b.url))
        with serving("--config", str(config), data=tmp_path) as served:
            await leave_three_and_kill(served, Gateway(served.url, session, None), a, b)
        before = rows(tmp_path)
        assert (list(before), len(b.calls)) == (["copied", "later/tried/a"], 2)
        with serving("--config", str(config), data=tmp_path) as served:  # it closes what the dead one left
            assert served.wait_idle()["holds_open"] == 0
            assert served.get("/admin/reconcile")["drifted"] == []
    engine, reason, is_estimate, _, cost, payer = before["later/tried/a"]
    assert (engine, reason, is_estimate, payer) == ("engine-a", "engine_unavailable", False, "route:auto")
    assert cost == 7
    assert before["copied"][:2] == ("engine-a", "stop")
    left = {name: row[:5] for name, row in rows(tmp_path).items() if name not in before}
    assert left == {
        "copied/shadow": ("engine-b", *LOST),  # a copy has a hold of its own
        "later": ("engine-b", *LOST),  # the hold was moved: the row names the engine that was asked last
        "now": ("engine-a", *LOST),  # the hold still stood for the engine that was being given up
    }
