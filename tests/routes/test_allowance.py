"""A route over an engine whose account has an allowance for the day. Real sockets."""

import time

import aiohttp
import pytest

from hitsend import settings
from hitsend.serve.app import running
from hitsend.settings_upstreams import WorkersAISettings
from tests.mock_upstream import good, mock_upstream
from tests.routes.conftest import DEAR, Routed
from tests.upstream.workers_ai import ACCOUNT, KEY, Emulator

pytestmark = pytest.mark.slow  # servers


async def away(call):
    await call.answer("503 Away", {})


@pytest.mark.parametrize("strategy", ["fallback", "cascade"])
async def test_an_engine_whose_day_is_used_up_is_given_up_for_the_next_one(tmp_path, monkeypatch, strategy):
    """Its allowance is the account's there and no limit of the caller's: refused by what is held here, and by it."""
    if time.time() % 86_400 > 86_280:
        pytest.skip("the UTC day is about to end, and what is left of it with it")
    monkeypatch.setenv("CF_TEST_TOKEN", KEY)
    cascade = settings.CascadeSettings(regex="never")
    async with mock_upstream() as there, mock_upstream() as other:
        there.script = emulator = Emulator()
        near = WorkersAISettings(
            name="cf",
            base_url=there.url.removesuffix("/v1") + ACCOUNT,
            models={"near": "@cf/qwen/qwen3.8-27b"},
            api_key_env="CF_TEST_TOKEN",
        )
        far = settings.UpstreamSettings(name="far", base_url=other.url, models={"far": "x"}, prices=DEAR)
        for engines in (("near", "far"), ("far", "near")):
            route = settings.RouteSettings(model="auto", engines=engines, strategy=strategy, cascade=cascade)
            tree = settings.Settings(
                server=settings.ServerSettings(data_dir=str(tmp_path / engines[0])),
                engine=settings.EngineSettings(model="none"),
                access=settings.AccessSettings(max_tokens=1_000_000),
                engines=(near, far),
                routes=(route,),
            )
            async with running(tree) as server, aiohttp.ClientSession() as session:
                gate = Routed(server.base_url, session, (there, other))
                other.script = good if engines[0] == "near" else away
                status, body, record = await gate.asked("r", max_tokens=40_000)
                if engines[0] == "far":
                    assert (status, body["error"]["code"]) == (429, "insufficient_quota"), "its limit counts there too"
                    assert emulator.calls == []
                else:
                    assert (status, record["ledger"]["model"]) == (200, "far")
                    status, _, record = await gate.asked("most", max_tokens=25_000)
                    assert (status, record["ledger"]["model"]) == (200, "near" if strategy == "fallback" else "far")
                    tried = [row["neurons_micro"] for row in await gate.rows() if "/draft/" in row["request_id"]]
                    assert tried == ([] if strategy == "fallback" else [186_363_500])
                    emulator.fails = 3036
                    assert (await gate.answer())[0] == 200
                    emulator.fails, emulator.calls = None, []
                assert await gate.drifted() == []
