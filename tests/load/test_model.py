"""Against the real server with the real model: lengths are exact, usage holds, hanging up cancels."""

import asyncio
import os
import socket
import sys
from functools import partial

import pytest

from hitsend.load.document import document
from hitsend.load.lengths import fixed
from hitsend.load.result import Plan
from hitsend.load.run import run
from hitsend.load.target import Target
from hitsend.load.workload import Shape
from hitsend.plan.steps import read_calibration
from hitsend.plan.timing import Work
from tests.load.scripted import Quiet
from tests.served import until

pytestmark = pytest.mark.model


async def test_a_load_on_the_real_server(served):
    target = Target("here", served.url)
    shape = Shape(fixed(40), fixed(8), system=30, turns=2)
    plan = Plan(targets=(target,), shape=shape, concurrency=(3,), requests=6, warmup=1)
    done = await run(plan, Quiet())
    found = document(done)
    level = done.targets[0].measured[0].level
    assert (level.requests.ok, level.errors) == (6, {})
    assert level.output_tokens_mean == 8
    assert found["targets"][0]["prompt_lengths"] == "exact"
    assert found["targets"][0]["context"] == 1024
    assert (level.usage.method, level.usage.is_believable, level.usage.prompts_differ) == ("tokenize", True, 0)
    assert level.usage.prompts_checked >= 3
    for sample in done.targets[0].measured[0].samples:
        usage = served.record(sample.request_id)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sample.claimed_input, sample.claimed_output)


async def test_hanging_up_cancels_on_the_real_server(served):
    plan = Plan(
        targets=(Target("here", served.url),),
        shape=Shape(fixed(40), fixed(200)),
        concurrency=(2,),
        requests=2,
        warmup=0,
        abort=1.0,
        seed=600,  # draws 1 and 6 pieces: far from the end of 200
    )
    done = await run(plan, Quiet())
    level = done.targets[0].measured[0].level
    assert (level.requests.aborted, level.requests.errors) == (2, 0)
    for sample in done.targets[0].measured[0].samples:
        record = until(partial(served.record, sample.request_id), lambda found: found["ledger"] is not None)
        assert record["state"] == "cancelled"
        assert record["usage"]["completion_tokens"] < 200


async def test_a_server_s_own_records_tell_what_its_steps_take(served, tmp_path):
    plan = Plan(
        targets=(Target("here", served.url),),
        shape=Shape(fixed(40), fixed(30), turns=2),
        concurrency=(2,),
        requests=4,
        warmup=0,
        seed=700,
    )
    done = await run(plan, Quiet())
    asked = {sample.request_id: sample for sample in done.targets[0].measured[0].samples}
    assert sorted((one.conversation, one.turn) for one in asked.values()) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    file = tmp_path / "timing.json"
    words = [sys.executable, "-m", "hitsend", "plan", "steps", "--url", served.url, "--newest", "4", "--out", str(file)]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    assert process.returncode == 0
    assert b"off in the median" in told
    found = read_calibration(file)
    assert found.steps >= 30
    assert found.room is not None
    assert found.room.cells_per_slot == 1024
    assert found.timing.step_s(Work(decodes=2, held=100)) > 0


OWN = """
import asyncio
from hitsend.cli.load_server import own_server

async def main():
    async with own_server() as url:
        print(url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_server_of_its_own_ends_with_a_load_test_that_is_killed(tmp_path):
    where = os.environ | {"TMPDIR": str(tmp_path)}
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", OWN, stdout=asyncio.subprocess.PIPE, env=where)
    url = (await child.stdout.readline()).decode().strip()
    host, port = url.removeprefix("http://").split(":")
    socket.create_connection((host, int(port))).close()
    child.kill()
    await child.wait()

    def is_gone():
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            return True
        return False

    assert await asyncio.to_thread(until, is_gone, bool)
