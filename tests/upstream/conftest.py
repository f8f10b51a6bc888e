"""A server in front of a scripted upstream, both on real sockets."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from hitsend import settings
from hitsend.serve.app import running
from tests.mock_upstream import mock_upstream

PRICES = settings.UpstreamPrices(input=1.0, output=2.0)


class Gateway:
    """Asks the server; `mock` is what stands behind it."""

    def __init__(self, url, session, mock):
        self.url, self.session, self.mock = url, session, mock

    def ask(self, *, path="/v1/chat/completions", headers=None, **fields):
        body = {"model": "near", "messages": [{"role": "user", "content": "hi"}]} | fields
        return self.session.post(self.url + path, json=body, headers=headers)

    async def answer(self, **fields):
        async with self.ask(**fields) as answer:
            text = await answer.text()
            return answer.status, (text if fields.get("stream") and answer.status == 200 else json.loads(text)), answer

    async def get(self, path):
        async with self.session.get(self.url + path) as answer:
            return await answer.json()

    async def text(self, path):
        async with self.session.get(self.url + path) as answer:
            return await answer.text()

    async def idle(self):
        """The state once nothing runs or is held, or after 10 s as it then is."""
        for _ in range(500):
            state = await self.get("/inspect/state")
            if not (state["running"] or state["holds_open"]):
                break
            await asyncio.sleep(0.02)
        return state

    async def record(self, request_id):
        """It with its row, which comes a commit after its end; as it is where nothing was held, or after 10 s."""
        for _ in range(500):
            record = await self.get(f"/inspect/requests/{request_id}")
            has_held = any(one["type"] == "reserved" for one in record.get("events", ()))
            if record.get("ledger") or (record.get("state") in ("failed", "cancelled") and not has_held):
                break
            await asyncio.sleep(0.02)
        return record


@asynccontextmanager
async def gateway(tmp_path, mock, engine=None, **fields):
    """`engine` in place of one of kind openai that `fields` say more of."""
    fields = {"models": {"near": "far"}, "prices": PRICES, "base_url": mock.url} | fields
    upstream = engine or settings.UpstreamSettings(name="there", **fields)
    tree = settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(model="none"),
        engines=(upstream,),
    )
    async with running(tree) as server, aiohttp.ClientSession() as session:
        yield Gateway(server.base_url, session, mock)


@pytest.fixture
async def mock():
    async with mock_upstream() as one:
        yield one


@pytest.fixture
async def gate(tmp_path, mock):
    async with gateway(tmp_path, mock) as one:
        yield one
