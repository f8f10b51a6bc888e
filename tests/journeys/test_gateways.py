"""Two whole gateways around the real model that count their limits together, and one that can't."""

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
            assert b"hitsend_quota_up 1.0" in one.render_metrics()[1]
            server.kill()


async def test_a_url_that_can_be_no_server_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="access.quota_url"):
        async with built(settings(tmp_path, "http://127.0.0.1:1")):
            pass
