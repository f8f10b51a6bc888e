"""A line of a batch may name whatever a request may: a route, an upstream's embedding model. Real sockets."""

import pytest

from hitsend import settings
from tests.batching.conftest import Client, line

VECTORS = {"data": [{"index": 0, "embedding": [0.0, 1.0]}], "usage": {"prompt_tokens": 1_000_000}}


async def both(call):
    """Vectors where those are wanted, else what the mock always says."""
    if call.head.startswith("POST /v1/embeddings "):
        await call.answer("200 OK", VECTORS)
    else:
        await call.start()
        await call.say("Hello!")
        await call.finish(usage={"prompt_tokens": 999_998, "completion_tokens": 1})


@pytest.mark.slow  # a server
async def test_lines_go_to_routes_and_embedding_models_elsewhere_at_their_batch_prices(routed):
    prices = settings.UpstreamPrices(input=1.0, output=2.0, batch_discount=0.5)
    engine = {"embedding_models": {"small": "small-there"}, "prices": prices}
    async with routed(of_engine={"a": engine}) as gate:
        gate.a.script = both
        client = Client(gate.session, gate.url)
        for asked in (
            line("routed", model="auto", stop=None),
            {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "small", "input": "x"}},
        ):
            batch = await client.until(await client.begin(asked, endpoint=asked["url"]))
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, await client.lines(
                batch["error_file_id"]
            )
            (answer,) = await client.lines(batch["output_file_id"])
            assert answer["response"]["body"]["model"] == asked["body"]["model"]
        assert [(row["model"], row["cost_microusd"], row["price_id"]) for row in await gate.rows()] == [
            ("a", 500_000, "engines.engine-a-batch"),
            ("small", 500_000, "engines.engine-a-batch"),
        ]
        assert await gate.drifted() == []
