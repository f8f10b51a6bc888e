"""An embedded model and an upstream behind one server."""

import aiohttp
import pytest

from hitsend import settings
from hitsend.core.errors import ConfigError
from hitsend.serve.app import running
from tests.upstream.conftest import PRICES, Gateway

pytestmark = pytest.mark.model


def tree(tmp_path, mock, models, **fields):
    there = settings.UpstreamSettings(name="there", base_url=mock.url, models=models, prices=PRICES, **fields)
    return settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(alias="here", num_slots=2, context=512),
        engines=(there,),
    )


async def test_both_serve_side_by_side(tmp_path, mock):
    asked = tree(tmp_path, mock, {"near": "far"}, counts_prompts="embedded")
    async with running(asked) as server, aiohttp.ClientSession() as session:
        gate = Gateway(server.base_url, session, mock)
        assert [one["id"] for one in (await gate.get("/v1/models"))["data"]] == ["here", "near"]
        status, ours, _ = await gate.answer(model="here", max_tokens=3, temperature=0)
        assert (status, ours["hitsend"]["cost_microusd"]) == (200, 0)
        status, theirs, _ = await gate.answer()
        assert (status, theirs["hitsend"]["cost_microusd"]) == (200, 13)
        record = await gate.record(theirs["hitsend"]["request_id"])
        reserved = next(event for event in record["events"] if event["type"] == "reserved")
        assert reserved["input_tokens"] == ours["usage"]["prompt_tokens"], "counted, not bounded"
        state = await gate.idle()
        assert (state["cells_used"], state["engine"]["model"] is not None) == (0, True)
        assert (await gate.get("/readyz"))["status"] == "ready"


async def test_two_engines_cannot_have_one_name(tmp_path, mock):
    with pytest.raises(ConfigError, match="here"):
        async with running(tree(tmp_path, mock, {"here": "far"})):
            pass
