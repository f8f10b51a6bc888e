"""Lists, percentiles, the live stream and the money route at the edge: what is asked is checked, roles are kept."""

import asyncio
import json

import pytest

from hitsend.core import events as ev
from hitsend.core.request import Principal, SamplingParams
from hitsend.serve.api.live import MAX_OF_ONE, MAX_WATCHERS
from tests.edge import Call, Edge

KEYS = {
    "ann": Principal(key_id="k-ann", name="ann"),
    "bob": Principal(key_id="k-bob", name="bob"),
    "reader": Principal(key_id="k-r", name="reader", role="reader"),
}


def bearer(name):
    return (b"authorization", f"Bearer {name}".encode())


def frames(answer):
    return [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: ")]


def fly(edge, request_id, who, step=7, engine="embedded"):
    """A request that computed its prompt of 9 tokens and takes part in a step."""
    flight = edge.flights.open(request_id, KEYS[who])
    flight.engine = engine
    flight.record(ev.Tokenized(0.0, 0.0, 9, 1, ()))
    flight.record(ev.Fitted(20, (), SamplingParams(), {}))
    flight.record(ev.Step(step - 1, 0.0, 0.1, 9, 0, 9, 0, 1))
    flight.record(ev.Step(step, 0.1, 0.2, 0, 1, 0, 2, 2))
    return flight


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=1&limit=2", "limit"),
        ("nonsense=1", "nonsense"),
        ("name=", "name"),
        ("model=" + "x" * 513, "model"),
        ("model=a%00b", "model"),
        ("min_wall_ms=-1", "min_wall_ms"),
        ("min_wall_ms=nan", "min_wall_ms"),
        ("min_wall_ms=1e99", "min_wall_ms"),
        ("min_cost_microusd=1.5", "min_cost_microusd"),
        ("before=yesterday", "before"),
        ("before=1~", "before"),
    ],
)
async def test_a_query_that_says_nothing_clear_is_refused_by_field(query, param):
    answer = await Edge().ask(f"/inspect/requests?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)
    if not query.startswith("limit"):
        assert (await Edge().ask(f"/inspect/percentiles?{query}")).status == 400


async def test_what_no_database_can_look_for_is_never_looked_for():
    edge = Edge()
    edge.flights.open("a\0b", Principal())
    assert (await edge.ask("/inspect/requests/a\0b")).error["message"] == "no such route"


async def test_the_live_stream_shows_a_caller_its_own_and_a_reader_everybody_s():
    edge = Edge(keys=KEYS)
    fly(edge, "r-ann", "ann")
    fly(edge, "r-bob", "bob")
    other = edge.flights.open("r-other", KEYS["reader"])  # the same step number of another engine is another step
    other.engine = "second"
    other.record(ev.Step(7, 0.0, 0.1, 0, 1, 0, 1, 1))
    sees = {"ann": ["r-ann"], "bob": ["r-bob"], "reader": ["r-ann", "r-bob", "r-other"]}
    answers = await asyncio.gather(*(edge.ask("/inspect/live?frames=2", None, bearer(who)) for who in sees))
    for (who, shown), answer in zip(sees.items(), answers, strict=True):
        assert answer.headers[b"content-type"].startswith(b"text/event-stream")
        first, second = frames(answer)
        assert [each["request_id"] for each in second["requests"]] == shown
        assert [each["request_id"] for each in first["step"]["members"]] == [one for one in shown if one != "r-other"]
        assert (first["state"] is None) == (who != "reader")
        one = first["requests"][0]
        told = ("prompt_tokens", "prefilled_tokens", "output_tokens", "max_tokens", "step")
        assert [one[name] for name in told] == [9, 9, 1, 20, 7]


async def test_the_live_stream_ends_with_its_watcher_and_with_the_server():
    edge = Edge()
    leaving = Call(edge.app, "/inspect/live", None, (), None)
    watching = asyncio.create_task(leaving.run())
    while not leaving.answer.body:
        await asyncio.sleep(0.01)
    leaving.leave()
    await watching
    assert not leaving.answer.is_complete
    staying = Call(edge.app, "/inspect/live", None, (), None)
    watching = asyncio.create_task(staying.run())
    while not staying.answer.body:
        await asyncio.sleep(0.01)
    edge.app.stop()
    await watching
    assert staying.answer.is_complete
    assert frames(staying.answer)


async def test_no_more_than_so_many_watch():
    edge = Edge()
    calls = [Call(edge.app, "/inspect/live", None, (), None) for _ in range(MAX_WATCHERS)]
    tasks = [asyncio.create_task(call.run()) for call in calls]
    while not all(call.answer.body for call in calls):
        await asyncio.sleep(0.01)
    refused = await edge.ask("/inspect/live?frames=1")
    assert (refused.status, refused.error["code"]) == (503, "server_overloaded")
    for call in calls:
        call.leave()
    await asyncio.gather(*tasks)
    assert (await edge.ask("/inspect/live?frames=1")).status == 200


async def test_one_caller_leaves_others_room_to_watch():
    edge = Edge(keys=KEYS)
    calls = [Call(edge.app, "/inspect/live", None, (bearer("ann"),), None) for _ in range(MAX_OF_ONE)]
    tasks = [asyncio.create_task(call.run()) for call in calls]
    while not all(call.answer.body for call in calls):
        await asyncio.sleep(0.01)
    refused = await edge.ask("/inspect/live?frames=1", None, bearer("ann"))
    assert (refused.status, refused.error["code"]) == (503, "server_overloaded")
    assert (await edge.ask("/inspect/live?frames=1", None, bearer("bob"))).status == 200
    for call in calls:
        call.leave()
    await asyncio.gather(*tasks)
    assert (await edge.ask("/inspect/live?frames=1", None, bearer("ann"))).status == 200


@pytest.mark.parametrize("now", [None, Principal(key_id="k-r", name="reader")])
async def test_whose_key_is_not_good_any_more_sees_nothing_more(now):
    """Revoked, or with less of a role than when the stream began."""
    keys = dict(KEYS)
    edge = Edge(keys=keys)
    fly(edge, "r-ann", "ann")
    call = Call(edge.app, "/inspect/live?frames=100", None, (bearer("reader"),), None)
    watching = asyncio.create_task(call.run())
    while not frames(call.answer):
        await asyncio.sleep(0.01)
    keys.pop("reader")
    if now is not None:
        keys["reader"] = now
    fly(edge, "r-later", "ann")
    await watching
    seen = [each["request_id"] for frame in frames(call.answer) for each in frame.get("requests", [])]
    assert "r-ann" in seen
    assert "r-later" not in seen
    assert json.loads(call.answer.body.decode().split("data: ")[-1])["error"]["code"] == "invalid_api_key"


async def test_prompt_tokens_are_told_only_where_they_were_captured():
    edge = Edge(keys=KEYS)
    for name, ids in (("with", (104, 105)), ("without", None)):
        flight = edge.flights.open(name, KEYS["ann"])
        flight.model = "m"
        flight.record(ev.Tokenized(0.0, 0.0, 2, 0, (), ids))
        flight.keep_text = ids is not None
        flight.capture_tokens(0, (105, 104))
    shown = (await edge.ask("/inspect/requests/with/tokens", None, bearer("ann"))).json()
    letters = [{"id": 104, "text": "h", "is_control": False}, {"id": 105, "text": "i", "is_control": False}]
    assert shown == {"is_captured": True, "prompt": letters, "answers": {"0": letters[::-1]}}
    shown = (await edge.ask("/inspect/requests/without/tokens", None, bearer("ann"))).json()
    assert shown == {"is_captured": False, "prompt": [], "answers": {}}
    assert (await edge.ask("/inspect/requests/with/tokens", None, bearer("bob"))).status == 404
