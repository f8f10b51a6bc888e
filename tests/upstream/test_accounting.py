"""Many requests to three kinds of upstreams that fail in every way: the ledger has what they really produced."""

import asyncio
import random

import aiohttp
import pytest

from hitsend import settings
from hitsend.serve.app import running
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings, WorkersAISettings
from tests.mock_upstream import mock_upstream
from tests.upstream.conftest import PRICES, Gateway

pytestmark = pytest.mark.slow  # hundreds of requests

NUM_REQUESTS = 300
AT_ONCE = 12
WAYS = ("whole", "whole", "no usage", "cut", "garbled", "refused", "limited", "busy once", "error inside")
MODELS = ("openai", "vllm", "cf")


class Upstream:
    """Does to each request what a seed says, and writes down what it produced for it: words, and the bill it gave."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.ways = {}
        self.produced = {}
        self.runs = {}

    async def __call__(self, call):
        name = call.body["messages"][-1]["content"]
        is_again = name in self.ways
        way = "whole" if is_again else self.chance.choice(WAYS)
        self.ways.setdefault(name, way)
        if way == "refused":
            await call.answer("400 No", {"error": {"code": "bad", "message": "no"}})
        elif way == "limited":
            await call.answer("429 No", {"errors": [{"code": 3021, "message": "slow down"}]})
        elif way == "busy once":
            await call.answer("503 No", {"errors": [{"code": 3040, "message": "no capacity"}]})
        else:
            await self.run(call, name, way)

    async def run(self, call, name, way):
        self.runs[name] = self.runs.get(name, 0) + 1
        words = self.chance.randint(1, 9)
        usage = {"prompt_tokens": self.chance.randint(5, 50), "completion_tokens": words + self.chance.randint(0, 5)}
        self.produced[name] = (words, usage if way == "whole" else None)
        await call.start()
        await call.say(*(f"w{number} " for number in range(words)))
        if way == "garbled":
            await call.event('{"choices": [')
        elif way == "error inside":
            await call.event({"error": {"message": "broke"}})
        elif way != "cut":
            await call.finish(usage=usage if way == "whole" else None)


def engines(mock):
    root = mock.url.removesuffix("/v1")
    patient = {"prices": PRICES, "breaker_failures": 10**6, "breaker_share": 1.0, "retry_share": 1.0}
    names = {model: {"models": {model: f"@cf/{model}"}} for model in MODELS}
    return (
        UpstreamSettings(name="a", base_url=mock.url, **names["openai"], **patient),
        VllmSettings(name="b", base_url=root, metrics_poll_s=0.0, counts_prompts="bytes", **names["vllm"], **patient),
        WorkersAISettings(name="c", base_url=f"{root}/ai", plan="paid", **names["cf"], **patient),
    )


async def row_of(gate, request_id):
    for _ in range(1000):
        row = (await gate.get(f"/inspect/requests/{request_id}")).get("ledger")
        if row is not None:
            return row
        await asyncio.sleep(0.02)
    raise AssertionError(f"no row for {request_id}")


def check(row, way, produced, status):
    counts = (row["prompt_tokens"], row["completion_tokens"])
    if way in ("whole", "busy once"):
        _, usage = produced or (0, None)
        if usage is None:  # its one retry was spent, or nothing came of it
            assert (counts, status != 200) == ((0, 0), True)
            return
        assert (counts, row["is_estimate"]) == ((usage["prompt_tokens"], usage["completion_tokens"]), False)
    elif way in ("refused", "limited"):
        assert (counts, row["cost_microusd"]) == ((0, 0), 0)
    else:
        assert (row["completion_tokens"], row["is_estimate"]) == (produced[0], True)
        assert row["prompt_tokens"] > 0
    assert row["cost_microusd"] == row["prompt_tokens"] + 2 * row["completion_tokens"]


async def test_every_row_is_what_its_upstream_produced(tmp_path):
    async with mock_upstream() as mock:
        mock.script = upstream = Upstream(7)
        tree = settings.Settings(
            server=settings.ServerSettings(data_dir=str(tmp_path)),
            engine=settings.EngineSettings(model="none"),
            engines=engines(mock),
        )
        async with running(tree) as server, aiohttp.ClientSession() as session:
            gate, turns, statuses = Gateway(server.base_url, session, mock), asyncio.Semaphore(AT_ONCE), {}

            async def one(number):
                name = f"q{number}"
                fields = {"messages": [{"role": "user", "content": name}], "stream": bool(number % 2)}
                async with turns:
                    model = MODELS[number % 3]
                    status, _, _ = await gate.answer(model=model, headers={"x-request-id": name}, **fields)
                statuses[name] = status

            await asyncio.gather(*map(one, range(NUM_REQUESTS)))
            rows = {f"q{number}": await row_of(gate, f"q{number}") for number in range(NUM_REQUESTS)}
            for name, row in rows.items():
                check(row, upstream.ways[name], upstream.produced.get(name), statuses[name])
            assert max(upstream.runs.values()) == 1, "nothing ran twice"
            assert set(upstream.ways.values()) == set(WAYS), "each way was gone"
            state = await gate.idle()
            assert (state["running"], state["holds_open"]) == (0, 0)
