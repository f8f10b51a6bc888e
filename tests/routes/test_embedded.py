"""A route to the model that is here: a dry run sees the request as that model gets it."""

import asyncio
import json

import pytest

from hitsend.core.request import IDLE_TIER, Message, Request
from hitsend.serve.api.routes import Routes
from hitsend.serve.app import built
from hitsend.serve.children import Children
from hitsend.serve.engine.models import ModelFile
from hitsend.settings_source import load
from tests.batching.conftest import batching, line
from tests.drills.scripted import ScriptedEngine, ScriptedText
from tests.edge import Call

ROUTES = '[{"model":"auto","engines":["scripted"]}]'


async def test_an_estimate_for_a_route_is_that_of_its_engine(tmp_path):
    body = line("x", model="auto", reasoning_effort="high")["body"]
    async with batching(tmp_path, routes=ROUTES) as client:
        status, routed = await client.ask("POST", "/v1/estimate", body)
        assert status == 200, routed
        direct = (await client.ask("POST", "/v1/estimate", body | {"model": "scripted"}))[1]
        assert routed["warnings"] == direct["warnings"] != []
        answer = (await client.ask("POST", "/v1/chat/completions", body))[1]
        assert answer["hitsend"]["warnings"] == direct["warnings"]


@pytest.mark.parametrize("thinking", ["leave", "on"])
async def test_what_only_looks_at_a_routes_prompt_sees_it_as_its_first_engine_gets_it(tmp_path, thinking):
    asked = []

    class Text(ScriptedText):
        async def prepare(self, request, **fields):
            asked.append(request.template_kwargs)
            return await super().prepare(request, **fields)

        async def tokenize_chat(self, request):
            return (await self.prepare(request)).prompt_token_ids

    async def start(_settings, clock, _metrics, _stack):
        engine = ScriptedEngine(clock, lambda _: None)
        return Children(ModelFile("x.gguf", "scripted", "test"), Text(), engine, None)

    flags = {"server.data_dir": str(tmp_path), "engine.alias": "scripted", "engine.context": "512"}
    flags["routes"] = json.dumps([{"model": "auto", "engines": ["scripted"], "thinking": thinking}])
    async with built(load(flags=flags).settings, start) as services:
        app, body = Routes(services), line("x", model="auto", reasoning_effort="high")["body"]
        for path in ("/render", "/input_tokens", ""):
            call = Call(app, f"/v1/chat/completions{path}", body, (), None)
            await call.run()
            assert call.answer.status == 200, call.answer.body
            if path == "/render":
                assert any("reasoning_effort" in one for one in call.answer.json()["warnings"])
    assert asked == [{"enable_thinking": True} if thinking == "on" else {}] * 3


async def test_a_copy_goes_after_all_that_is_somebodys_even_after_lines_of_batches(tmp_path):
    served = []

    class Engine(ScriptedEngine):
        def generate(self, job):
            served.append((job.request_id, job.tier))
            return super().generate(job)

    async def start(_settings, clock, _metrics, _stack):
        return Children(ModelFile("x.gguf", "scripted", "test"), ScriptedText(), Engine(clock, lambda _: None), None)

    routes = '[{"model":"auto","engines":["scripted"],"shadow":"scripted"}]'
    flags = {"server.data_dir": str(tmp_path), "engine.alias": "scripted", "engine.context": "512", "routes": routes}
    async with built(load(flags=flags).settings, start) as services:
        request = Request("r", "auto", (Message("user", "x"),), max_tokens=9)
        flight = services.flights.open("r", request.principal)
        assert [item async for item in services.pipeline(request, flight)]
        services.flights.close(flight)
        async with asyncio.timeout(20):
            while len(served) < 2:
                await asyncio.sleep(0.01)
    assert served == [("r", 1), ("r/shadow", IDLE_TIER)]
