"""Two whole gateways around the real model that count their limits together, and one that can't."""

import asyncio
import contextlib
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.core.limits import Level, Limits
from hitsend.core.request import Principal
from hitsend.serve.api.routes import Routes
from hitsend.serve.app import built
from hitsend.settings import AccessSettings, EngineSettings, PriceSettings, ServerSettings, Settings
from tests.access.valkey_server import valkey_server
from tests.edge import Call, FakeAuth
from tests.journeys.test_kills import TALKATIVE
from tests.journeys.test_workers import ask_many, make_key
from tests.served import MANY, serving, until

pytestmark = pytest.mark.model

PRINCIPAL = Principal(key_id="k1", name="n", levels=(Level("key", ("k1",), Limits(requests_per_minute=3)),))


def settings(folder: Path, url: str) -> Settings:
    return Settings(
        server=ServerSettings(data_dir=str(folder)),
        access=AccessSettings(quota_url=url, quota_timeout_s=10.0),
        engine=EngineSettings(num_slots=2, context=256),
        prices=(PriceSettings(model="*", input=1.0, output=2.0, id="p"),),
    )


async def test_two_gateways_share_what_a_key_may_do(tmp_path: Path) -> None:
    with valkey_server() as server:
        url = server.url.replace("redis://", "valkey://")
        async with built(settings(tmp_path / "a", url)) as one, built(settings(tmp_path / "b", url)) as two:
            statuses = []
            for number in range(5):
                services = msgspec.structs.replace((one, two)[number % 2], auth=FakeAuth({"good": PRINCIPAL}))
                body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 2}
                headers = ((b"authorization", b"Bearer good"),)
                call = Call(Routes(services), "/v1/chat/completions", body, headers, None)
                await call.run()
                statuses.append(call.answer.status)
            assert statuses == [200, 200, 200, 429, 429]
            assert one.state()["quota_holds_open"] == two.state()["quota_holds_open"] == 0
            assert b"hitsend_quota_up 1.0" in one.render_metrics(False)[1]
            server.kill()


async def test_a_url_that_can_be_no_server_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="access.quota_url"):
        async with built(settings(tmp_path, "http://127.0.0.1:1")):
            pass


@pytest.mark.slow
async def test_of_many_requests_to_three_servers_never_more_pass_than_fit(tmp_path: Path) -> None:
    """Three processes of `hitsend serve`, one ledger, one Valkey: a budget admits what it would admit in one."""
    config = tmp_path / "hitsend.toml"
    config.write_text('[[prices]]\nmodel = "*"\ninput = 1.0\noutput = 1.0\n')
    with contextlib.ExitStack() as stack:
        valkey = stack.enter_context(valkey_server())
        words = ("--config", str(config), "--set", f"access.quota_url={valkey.url}")
        words += ("--set", "engine.num_slots=4", "--set", "engine.context=512", "--set", "engine.wait_timeout_s=300")
        words += ("--set", "access.quota_timeout_s=20", "--set", "engine.max_waiting=1000")
        data = tmp_path / "data"
        data.mkdir()
        first = stack.enter_context(serving(*words, data=data))
        prompt = first.chat("Hi", max_tokens=1)["usage"]["prompt_tokens"]
        others = [stack.enter_context(serving(*words, data=data)) for _ in range(2)]
        admitted = 25
        key = make_key(data, "--name", "n", "--role", "admin", "--usd-day", f"{admitted * (prompt + 2) / 1e6:.6f}")
        await asyncio.sleep(2.5)  # every server reads keys again within two seconds
        shares = zip((first, *others), (MANY - 2 * (MANY // 3), MANY // 3, MANY // 3), strict=True)
        asked = [ask_many(one.url, key, number, max_tokens=2, logit_bias=TALKATIVE) for one, number in shares]
        statuses = sum(await asyncio.gather(*asked), Counter())
        assert statuses == {200: admitted, 429: MANY - admitted}
        for server in (first, *others):
            look = partial(server.get, "/inspect/state", key)
            state = until(look, lambda now: not (now["holds_open"] or now["quota_holds_open"]))
            assert (state["holds_open"], state["quota_holds_open"], state["cells_used"]) == (0, 0, 0)
