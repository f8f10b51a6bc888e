"""A route to the model that is here: a dry run sees the request as that model gets it."""

from tests.batching.conftest import batching, line

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
