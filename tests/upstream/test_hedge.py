"""A second server is asked while the first is silent: who speaks first answers, and nothing is left of the other."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from hitsend.core.errors import ConfigError
from hitsend.core.events import Sent
from hitsend.core.route_events import Hedged
from hitsend.serve.app import running
from hitsend.settings import EngineSettings, ServerSettings, Settings
from hitsend.settings_upstreams import UpstreamPrices, VllmSettings
from tests.mock_upstream import USAGE, good, mock_upstream
from tests.upstream.asking import ask, engine_of, job_of

pytestmark = pytest.mark.slow  # waits for sockets

SOON_S, NEVER_S = 0.02, 60.0


class Pair:
    """Two servers with one script each, by the order in which they are asked."""

    def __init__(self, mocks):
        self.mocks = mocks
        self.calls = []
        self.scripts = []

    async def __call__(self, call):
        self.calls.append(call)
        await self.scripts[min(len(self.calls), len(self.scripts)) - 1](call)

    def settings(self, **fields):
        urls = tuple(mock.url.removesuffix("/v1") for mock in self.mocks)
        given = {"hedge_after_s": SOON_S, "retry_share": 1.0, "metrics_poll_s": 0.0, "counts_prompts": "bytes"}
        return VllmSettings(name="gpu", base_urls=urls, models={"near": "far"}, **given | fields)


@asynccontextmanager
async def paired(*scripts):
    async with mock_upstream() as one, mock_upstream() as other:
        pair = Pair((one, other))
        one.script = other.script = pair
        pair.scripts = scripts
        yield pair


async def silent(call):
    await call.has_left.wait()


async def silent_after_its_head(call):
    await call.start()
    await call.has_left.wait()


def late(until):
    async def script(call):
        await call.start()
        await until.wait()
        await call.say("late")
        await call.finish(usage=USAGE)

    return script


async def refuses(call):
    await call.answer("500 no", {})


def places(engine):
    return [one.running for one in engine.replicas.all]


@pytest.mark.parametrize("first", [silent, silent_after_its_head])
async def test_who_is_silent_is_left_for_who_speaks(first):
    async with paired(first, good) as pair, engine_of(pair.settings()) as engine:
        answer = await ask(engine)
        assert (answer.text, answer.reasons, answer.error) == ("Hello!", ["stop"], None)
        assert (answer.produced.usage.completion_tokens, answer.produced.is_estimate) == (3, False)
        assert [type(one) for one in answer.events[:3]] == [Sent, Sent, Hedged]
        async with asyncio.timeout(10):
            await pair.calls[0].has_left.wait()
        assert (places(engine), len(pair.calls)) == ([0, 0], 2)
        assert {mock.num_connections for mock in pair.mocks} == {1}, "two servers were asked"


async def test_the_first_may_still_be_the_one_that_speaks_first():
    asked = asyncio.Event()

    async def second(call):
        asked.set()
        await call.has_left.wait()

    async with paired(late(asked), second) as pair, engine_of(pair.settings()) as engine:
        answer = await ask(engine)
        assert (answer.text, answer.error) == ("late", None)
        async with asyncio.timeout(10):
            await pair.calls[1].has_left.wait()
        assert places(engine) == [0, 0]


@pytest.mark.parametrize("fields", [{"hedge_after_s": 0.0}, {"retry_share": 0.0}, {"hedge_after_s": NEVER_S}])
async def test_nobody_else_is_asked_where_it_is_off_or_the_budget_is_gone_or_it_is_not_time(fields):
    stall = {"stall_timeout_s": 0.3}
    async with paired(silent_after_its_head, good) as pair, engine_of(pair.settings(**stall | fields)) as engine:
        assert (await ask(engine)).error.code == "engine_timeout"
        assert (places(engine), len(pair.calls)) == ([0, 0], 1)


async def test_where_both_refuse_nobody_is_asked_a_third_time():
    async def first(call):
        await asyncio.sleep(SOON_S * 5)
        await refuses(call)

    async with paired(first, refuses) as pair, engine_of(pair.settings(breaker_failures=1)) as engine:
        answer = await ask(engine)
        assert (answer.error.code, answer.produced.usage.total_tokens) == ("engine_unavailable", 0)
        assert (places(engine), len(pair.calls)) == ([0, 0], 2)
        assert [one.breaker.state for one in engine.replicas.all] == ["open", "open"], "both breakers know"


async def test_a_refusal_of_one_leaves_the_answer_to_the_other():
    refused = asyncio.Event()

    async def second(call):
        await refuses(call)
        refused.set()

    async with paired(late(refused), second) as pair, engine_of(pair.settings()) as engine:
        assert (await ask(engine)).text == "late"
        assert places(engine) == [0, 0]


@pytest.mark.parametrize("first", [silent, silent_after_its_head])
async def test_a_client_that_leaves_takes_both_along(first):
    async with paired(first, silent_after_its_head) as pair, engine_of(pair.settings()) as engine:
        generation = engine.generate(job_of())

        async def read():
            async for _ in generation:
                pass

        reading = asyncio.ensure_future(read())
        async with asyncio.timeout(10):
            while len(pair.calls) < 2:
                await asyncio.sleep(0.01)
            reading.cancel()
            await asyncio.wait({reading})
            await generation.aclose()
            for call in pair.calls:
                await call.has_left.wait()
        assert places(engine) == [0, 0]
        assert generation.produced.is_estimate


async def test_a_stop_takes_both_along():
    async with paired(silent, silent) as pair, engine_of(pair.settings()) as engine:
        asking = asyncio.ensure_future(ask(engine))
        async with asyncio.timeout(10):
            while len(pair.calls) < 2:
                await asyncio.sleep(0.01)
        await engine.stop()
        asking.cancel()
        await asyncio.wait({asking})
        assert places(engine) == [0, 0]


async def test_it_needs_a_second_server(tmp_path):
    engine = VllmSettings(
        name="gpu",
        base_url="http://127.0.0.1:1",
        models={"near": "far"},
        prices=UpstreamPrices(1.0, 1.0),
        hedge_after_s=1.0,
    )
    server = ServerSettings(data_dir=str(tmp_path))
    tree = Settings(server=server, engine=EngineSettings(model="none"), engines=(engine,))
    with pytest.raises(ConfigError, match="hedge_after_s"):
        async with running(tree):
            pass
