"""Limits of every level around the real model: what a short bucket leaves of an answer, and what is given back."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hitsend.core.limits import Level, Limits
from hitsend.core.request import Principal
from hitsend.serve.api.routes import Routes
from hitsend.serve.app import built
from hitsend.settings import EngineSettings, PriceSettings, ServerSettings, Settings
from tests.edge import Answer, Call, FakeAuth

pytestmark = pytest.mark.model

LEVELS = (
    Level("global", (), Limits(requests_per_minute=1_000, parallel_requests=100)),
    Level("org", ("acme",), Limits(input_tokens_per_minute=4_000, output_tokens_per_minute=60)),
    Level("app", ("acme", "bot"), Limits(tokens_per_request=300)),
    Level("key", ("k1",), Limits(usd_per_day_microusd=1_000, parallel_requests=2)),
)
PRINCIPAL = Principal(key_id="k1", name="n", app="bot", org="acme", levels=LEVELS)
HELLO = [{"role": "user", "content": "Say hello."}]


async def ask(app: Routes, path: str = "/v1/chat/completions", **fields: Any) -> Answer:
    call = Call(app, path, {"messages": HELLO} | fields, ((b"authorization", b"Bearer good"),), None)
    await call.run()
    return call.answer


async def test_four_levels_around_a_real_model(tmp_path: Path) -> None:
    settings = Settings(
        server=ServerSettings(data_dir=str(tmp_path)),
        engine=EngineSettings(num_slots=4, context=512),
        prices=(PriceSettings(model="*", input=1.0, output=2.0, id="p"),),
    )
    began = datetime.now(UTC).date()
    async with built(settings) as real:
        services = msgspec.structs.replace(real, auth=FakeAuth({"good": PRINCIPAL}))
        app = Routes(services)
        estimate = (await ask(app, "/v1/estimate")).json()
        assert estimate["max_output_tokens"] == 60
        assert {"level": "org acme", "name": "output_tokens_per_minute", "value": 60, "limit": 60} in estimate[
            "buckets"
        ]

        whole = await ask(app, temperature=0, seed=1)
        usage = whole.json()["usage"]
        assert whole.status == 200
        assert usage["completion_tokens"] <= 60
        assert whole.headers[b"x-ratelimit-remaining-output-tokens"] == b"0"
        assert services.state()["quota_holds_open"] == 0
        left = (await ask(app, "/v1/estimate", max_tokens=1)).json()["buckets"]
        used = {(check["level"], check["name"]): check["value"] for check in left}
        assert used["org acme", "output_tokens_per_minute"] <= usage["completion_tokens"] + 1
        asked = estimate["prompt_tokens"] + 2
        sums = {whole.json()["hitsend"]["cost_microusd"] + asked}
        sums |= {asked} if datetime.now(UTC).date() != began else set()  # at 00:00 UTC what was spent is over
        assert used["key k1", "usd_per_day"] in sums

        never = await ask(app, max_tokens=61)
        assert (never.status, never.error["param"]) == (400, "max_tokens")
        assert "output_tokens_per_minute of org acme is 60" in never.error["message"]

        answers = await asyncio.gather(*(ask(app, max_tokens=5, stream=True) for _ in range(20)))
        statuses = [answer.status for answer in answers]
        assert set(statuses) <= {200, 429}
        assert 0 < statuses.count(200) <= 12
        refused = next(answer for answer in answers if answer.status == 429)
        assert b"retry-after-ms" in refused.headers
        state = services.state()
        assert (state["quota_holds_open"], state["holds_open"], state["cells_used"]) == (0, 0, 0)
