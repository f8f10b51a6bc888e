from hitsend.core.errors import EngineFailed
from hitsend.core.request import Principal
from tests.api.test_responses import RICH, TOOL, ask
from tests.edge import STARTED, Edge, text


async def test_a_response_goes_on_from_a_stored_one():
    edge = Edge()
    first = (await ask(edge, instructions="only for this one")).json()
    second = (await ask(edge, previous_response_id=first["id"], input=[{"role": "user", "content": "more"}])).json()
    turns = [(turn.role, turn.content) for turn in edge.pipeline.requests[-1].messages]
    assert turns == [("user", "hi"), ("assistant", "hi"), ("user", "more")]
    assert second["previous_response_id"] == first["id"]
    await ask(edge, previous_response_id=second["id"], input="third")
    assert [turn.content for turn in edge.pipeline.requests[-1].messages] == ["hi", "hi", "more", "hi", "third"]
    assert (await edge.ask(f"/v1/responses/{second['id']}")).json() == second


async def test_a_call_s_output_may_come_with_the_next_request():
    edge = Edge(*RICH)
    first = (await ask(edge, tools=[TOOL])).json()
    output = [{"type": "function_call_output", "call_id": "call_a", "output": "1"}]
    assert (await ask(edge, input=output, previous_response_id=first["id"])).status == 200
    messages = edge.pipeline.requests[-1].messages
    assert [turn.role for turn in messages] == ["user", "assistant", "tool"]
    assert messages[1].fields["reasoning_content"] == "hmm"


async def test_the_items_that_led_to_a_response_are_listed_in_pages():
    edge = Edge()
    first = (await ask(edge)).json()
    second = (await ask(edge, previous_response_id=first["id"], input="more")).json()
    path = f"/v1/responses/{second['id']}/input_items"
    page = (await edge.ask(f"{path}?order=asc&limit=2")).json()
    assert [item["role"] for item in page["data"]] == ["user", "assistant"]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert page["has_more"]
    rest = (await edge.ask(f"{path}?order=asc&after={page['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["more"]
    assert not rest["has_more"]
    assert len({item["id"] for item in (*page["data"], *rest["data"])}) == 3
    assert (await edge.ask(path)).json()["data"][0] == rest["data"][0]
    for query in ("limit=0", "limit=101", "order=up", "after=nothing", "x=1"):
        assert (await edge.ask(f"{path}?{query}")).status == 400


async def test_a_stored_response_is_its_key_s_alone():
    keys = {name: Principal(key_id=name, name=name) for name in ("one", "two")}
    edge = Edge(keys=keys)
    one, two = ((b"authorization", f"Bearer {name}".encode()) for name in keys)
    made = (await ask(edge, one)).json()["id"]
    assert (await edge.ask(f"/v1/responses/{made}", None, one)).status == 200
    for path, method in (("", "GET"), ("/input_items", "GET"), ("", "DELETE")):
        strange = await edge.ask(f"/v1/responses/{made}{path}", None, two, method=method)
        assert (strange.status, strange.error["code"]) == (404, "not_found")
    assert (await ask(edge, two, previous_response_id=made)).status == 404
    gone = await edge.ask(f"/v1/responses/{made}", None, one, method="DELETE")
    assert gone.json() == {"id": made, "object": "response", "deleted": True}
    assert (await edge.ask(f"/v1/responses/{made}", None, one)).status == 404


async def test_nothing_is_stored_unless_asked_and_allowed():
    edge = Edge()
    made = (await ask(edge, store=False)).json()
    assert (made["store"], edge.responses.rows) == (False, {})
    assert (await ask(edge, previous_response_id=made["id"])).error["param"] == "previous_response_id"
    forbidden = Edge(stores_responses=False)
    made = (await ask(forbidden, store=True)).json()
    assert (made["store"], forbidden.responses.rows) == (False, {})
    assert any("responses.store" in warning for warning in made["hitsend"]["warnings"])
    assert "responses.store" in (await forbidden.ask(f"/v1/responses/{made['id']}")).error["message"]
    assert (await ask(Edge(STARTED, text("a"), EngineFailed("x")), stream=True)).status == 200


async def test_a_storage_that_fails_costs_the_successor_and_not_the_answer():
    edge = Edge()
    edge.responses.fails = True
    made = (await ask(edge)).json()
    assert (made["status"], made["store"]) == ("completed", False)
    assert made["hitsend"]["warnings"][-1].startswith("store: ")


async def test_input_tokens_are_counted_without_running():
    edge = Edge()
    answer = await edge.ask("/v1/responses/input_tokens", {"model": "m", "input": "abc", "instructions": "de"})
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 5}
    assert edge.pipeline.requests == []
    refused = await edge.ask("/v1/responses/input_tokens", {"input": "a", "temperature": 1})
    assert refused.error["param"] == "temperature"
