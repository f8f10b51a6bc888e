"""Routes that look at a chat request without running it."""

import msgspec
import pytest

from hitsend.core.request import Principal
from hitsend.serve.api.routes import Routes
from tests.edge import Edge, chat_body

ROUTES = ("/v1/chat/completions/render", "/v1/chat/completions/input_tokens", "/v1/estimate")


async def test_render_shows_the_prompt_and_where_each_message_lies():
    answer = (await Edge().ask(ROUTES[0], chat_body())).json()
    assert answer["prompt"] == "hi"
    assert answer["prompt_token_ids"] == [104, 105]
    assert answer["num_tokens"] == 2
    assert answer["spans"] == [{"message": 0, "role": "user", "start": 0, "end": 2}]
    assert answer["template_sha256"] == "sha"


async def test_input_tokens_has_the_shape_of_the_responses_api():
    answer = await Edge().ask(ROUTES[1], chat_body())
    assert answer.json() == {"object": "chat.completion.input_tokens", "input_tokens": 2}


async def test_the_request_is_looked_at_as_the_template_would_get_it():
    edge = Edge()
    edge.services = msgspec.structs.replace(
        edge.services, suited=lambda request: msgspec.structs.replace(request, model=f"suited {request.model}")
    )
    edge.app = Routes(edge.services)
    assert (await edge.ask(ROUTES[0], chat_body())).json()["model"] == "suited m"


async def test_an_estimate_knows_the_limits_that_were_tested():
    answer = (await Edge().ask(ROUTES[2], chat_body(n=3))).json()
    assert answer["n"] == 3
    assert {"name": "max_n", "value": 3, "limit": 8} in answer["limits"]


@pytest.mark.parametrize("path", ROUTES)
async def test_nothing_runs_and_nothing_is_recorded(path: str):
    edge = Edge()
    assert (await edge.ask(path, chat_body(stream=True))).status == 200
    assert edge.pipeline.requests == []
    assert edge.flights.all == []


@pytest.mark.parametrize("path", ROUTES)
async def test_the_same_refusals_as_for_a_chat(path: str):
    edge = Edge()
    assert (await edge.ask(path, chat_body(temperature=9))).error["param"] == "temperature"
    assert (await edge.ask(path, chat_body(nonsense=1))).error["param"] == "nonsense"
    answer = await edge.ask(path, chat_body(model="other"))
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert (await edge.ask(path, method="GET")).status == 405


@pytest.mark.parametrize("path", [*ROUTES, "/v1/completions", "/v1/embeddings"])
async def test_a_key_is_needed(path: str):
    edge = Edge(keys={"hs_good": Principal(key_id="k")})
    assert (await edge.ask(path, chat_body())).status == 401
