"""A server with routes over scripted upstreams, all on real sockets."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import aiohttp
import pytest

from hitsend import settings
from hitsend.serve.app import running
from tests.mock_upstream import mock_upstream
from tests.upstream.conftest import Gateway

CHEAP = settings.UpstreamPrices(input=1.0, output=2.0)
DEAR = settings.UpstreamPrices(input=10.0, output=20.0)


class Routed(Gateway):
    """Asks the route `auto`; `a` and `b` stand behind it."""

    def __init__(self, url, session, mocks):
        super().__init__(url, session, mocks[0])
        self.a, self.b, *self.more = mocks

    def ask(self, **fields):
        return super().ask(**({"model": "auto"} | fields))

    async def asked(self, request_id, **fields):
        """Status, body and record of one request of that id."""
        status, body, _ = await self.answer(headers={"x-request-id": request_id}, **fields)
        return status, body, await self.record(request_id)

    async def explain(self, **fields):
        return (await self.answer(path="/v1/routes/explain", **fields))[1]

    async def drifted(self):
        """What doesn't agree once nothing runs."""
        await self.idle()
        found = await self.get("/admin/reconcile")
        return [check for check in found["checks"] if check["name"] in found["drifted"]]

    async def rows(self):
        return [one["row"] for one in (await self.get("/admin/ledger"))["data"]]

    async def compared(self):
        """The shadow's figures once one copy was compared, or after 10 s as they then are."""
        for _ in range(500):
            shadow = (await self.route())["shadow"]
            if shadow["num_compared"]:
                break
            await asyncio.sleep(0.02)
        return shadow

    async def route(self):
        return (await self.get("/inspect/state"))["routes"]["auto"]


@pytest.fixture
async def routed(tmp_path):
    """`routed(strategy=…, …)` opens a server over two upstreams, or as many as `num`."""

    @asynccontextmanager
    async def opened(*, num=2, of_engine=None, stream=None, **route):
        async with contextlib.AsyncExitStack() as stack:
            mocks = [await stack.enter_async_context(mock_upstream()) for _ in range(num)]
            engines = tuple(
                settings.UpstreamSettings(
                    **{
                        "name": f"engine-{name}",
                        "base_url": mock.url,
                        "models": {name: f"{name}-there"},
                        "prices": CHEAP if name == "a" else DEAR,
                        "retry_share": 0.0,
                    }
                    | (of_engine or {}).get(name, {})
                )
                for name, mock in zip("abcd", mocks, strict=False)
            )
            tree = settings.Settings(
                server=settings.ServerSettings(data_dir=str(tmp_path)),
                engine=settings.EngineSettings(model="none"),
                stream=settings.StreamSettings(**(stream or {})),
                engines=engines,
                routes=(settings.RouteSettings(**{"model": "auto", "engines": tuple("abcd"[:num])} | route),),
            )
            server = await stack.enter_async_context(running(tree))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            yield Routed(server.base_url, session, mocks)

    return opened
