"""`Idempotency-Key` over the real routes: what is replayed, what is refused, what frees a key."""

import asyncio
import json

import msgspec
import pytest

from hitsend.core.errors import EngineFailed, ServerOverloaded
from hitsend.core.request import Principal
from hitsend.serve.api.services import ServedModel
from hitsend.serve.usage.idempotency import IdempotencyStore
from hitsend.settings import UsageSettings
from tests.edge import STARTED, Call, Edge, Wait, chat_body, text
from tests.usage.storage import storage

MODEL = ServedModel("e", 1, 512)
MESSAGES = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
ROUTES = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/embeddings": {"model": "e", "input": "hi"},
    "/v1/messages": MESSAGES,
    "/v1/responses": {"model": "m", "input": "hi"},
}
KEY = (b"idempotency-key", b"one")


@pytest.fixture
async def opened(url):
    async with storage(url) as opened:
        yield opened


def edge_of(opened, *script, settings=None, **options):
    edge = Edge(*script, **options)
    store = IdempotencyStore(opened.writer, opened.clock, settings or UsageSettings(), "gateway")
    edge.app._services = msgspec.structs.replace(edge.services, idempotency=store)
    return edge


def num_runs(edge):
    return len(edge.pipeline.requests) + len(edge.embedded)


def is_replay(answer):
    return answer.headers.get(b"idempotent-replayed") == b"true"


STREAMED = [(path, body | {"stream": True}) for path, body in ROUTES.items() if path != "/v1/embeddings"]


@pytest.mark.parametrize(("path", "body"), [*ROUTES.items(), *STREAMED])
async def test_the_second_answer_is_the_first_one_s(opened, path, body):
    edge = edge_of(opened, embedding_model=MODEL)
    first = await edge.ask(path, body, KEY)
    second = await edge.ask(path, body, KEY)
    assert first.status == second.status == 200
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert first.body == second.body
    assert len(first.body) > 20
    assert first.headers[b"content-type"] == second.headers[b"content-type"]
    assert (first.headers[b"content-type"].startswith(b"text/event-stream")) == bool(body.get("stream"))
    assert first.headers[b"x-request-id"] != second.headers[b"x-request-id"]
    assert num_runs(edge) == len(edge.flights.all) == 1
    assert edge.flights.num_open == 0


async def test_another_body_or_route_is_another_request(opened):
    edge = edge_of(opened)
    await edge.ask("/v1/chat/completions", chat_body(), KEY)
    for path, body in (
        ("/v1/chat/completions", chat_body(seed=1)),
        ("/v1/chat/completions", json.dumps(chat_body(), indent=1).encode()),
        ("/v1/responses", chat_body()),
    ):
        answer = await edge.ask(path, body, KEY)
        assert (answer.status, answer.error["code"]) == (422, "idempotency_mismatch")
    answer = await edge.ask("/v1/messages", MESSAGES, KEY)
    assert answer.status == 422
    assert num_runs(edge) == 1


async def test_of_50_at_once_exactly_one_runs(opened):
    wait = Wait()
    edge = edge_of(opened, STARTED, wait, text("x"), EngineFailed("never reached"))
    calls = [Call(edge.app, "/v1/chat/completions", chat_body(), (KEY,), None) for _ in range(50)]
    running = [asyncio.create_task(call.run()) for call in calls]
    await wait.reached.wait()
    while sum(task.done() for task in running) < 49:
        await asyncio.sleep(0.005)
    assert sorted(call.answer.status for call in calls) == [0] + [409] * 49
    conflict = next(call.answer for call in calls if call.answer.status == 409)
    assert conflict.error["code"] == "idempotency_conflict"
    assert conflict.headers[b"retry-after"] == b"1"
    assert num_runs(edge) == 1
    wait.event.set()
    await asyncio.gather(*running)


async def test_keys_belong_to_their_callers(opened):
    callers = {name: Principal(key_id=f"k-{name}", name=name) for name in ("a", "b")}
    edge = edge_of(opened, keys=callers)
    for name in callers:
        answer = await edge.ask(
            "/v1/chat/completions", chat_body(seed=ord(name)), KEY, (b"authorization", name.encode())
        )
        assert (answer.status, is_replay(answer)) == (200, False)
    answer = await edge.ask("/v1/chat/completions", chat_body(seed=ord("a")), KEY, (b"authorization", b"Bearer a"))
    assert is_replay(answer)


@pytest.mark.parametrize("script", [(ServerOverloaded("full"),), (STARTED, text("x"), EngineFailed("broke"))])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_failed_frees_its_key(opened, script, stream):
    edge = edge_of(opened, *script)
    body = chat_body(stream=stream)
    await edge.ask("/v1/chat/completions", body, KEY)
    edge.pipeline.script = ()
    answer = await edge.ask("/v1/chat/completions", body, KEY)
    assert (answer.status, is_replay(answer)) == (200, False)
    assert num_runs(edge) == 2


async def test_a_body_that_is_refused_frees_its_key(opened):
    edge = edge_of(opened)
    for bad in ({"model": "m"}, b"{", chat_body(n=1000)):
        assert (await edge.ask("/v1/chat/completions", bad, KEY)).status == 400
    assert (await edge.ask("/v1/chat/completions", chat_body(), (b"content-type", b"text/html"), KEY)).status == 415
    assert (await edge.ask("/v1/chat/completions", chat_body(), KEY)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_in_between_may_ask_again(opened, stream):
    wait = Wait()
    edge = edge_of(opened, STARTED, text("x"), wait)
    call = Call(edge.app, "/v1/chat/completions", chat_body(stream=stream), (KEY,), None)
    running = asyncio.create_task(call.run())
    await wait.reached.wait()
    call.leave()
    await running
    edge.pipeline.script = ()
    answer = await edge.ask("/v1/chat/completions", chat_body(stream=stream), KEY)
    assert (answer.status, is_replay(answer)) == (200, False)


async def test_a_client_that_lost_the_answer_finds_it(opened):
    edge = edge_of(opened)
    call = Call(edge.app, "/v1/chat/completions", chat_body(), (KEY,), None)

    async def break_off(_):
        raise OSError("broken pipe")

    call.accept = break_off
    await call.run()
    answer = await edge.ask("/v1/chat/completions", chat_body(), KEY)
    assert is_replay(answer)
    assert answer.json()["choices"]
    assert num_runs(edge) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_too_large_is_given_once_and_then_refused(opened, stream):
    edge = edge_of(opened, settings=UsageSettings(idempotency_answer_bytes=50))
    assert (await edge.ask("/v1/chat/completions", chat_body(stream=stream), KEY)).status == 200
    answer = await edge.ask("/v1/chat/completions", chat_body(stream=stream), KEY)
    assert (answer.status, answer.error["code"]) == (409, "idempotency_conflict")
    assert "usage.idempotency_answer_bytes" in answer.error["message"]
    assert num_runs(edge) == 1


@pytest.mark.parametrize("value", [b"", b"  ", b"x" * 256, b"a b", b"caf\xc3\xa9", b"\x01", b"tab\there"])
async def test_a_key_that_is_none_is_refused(opened, value):
    edge = edge_of(opened)
    answer = await edge.ask("/v1/chat/completions", chat_body(), (b"idempotency-key", value))
    assert (answer.status, answer.error["param"]) == (400, "idempotency-key")
    assert num_runs(edge) == 0


async def test_the_longest_key_is_fine_and_two_are_not(opened):
    edge = edge_of(opened)
    assert (await edge.ask("/v1/chat/completions", chat_body(), (b"idempotency-key", b"~" * 255))).status == 200
    assert (await edge.ask("/v1/chat/completions", chat_body(), KEY, (b"idempotency-key", b"two"))).status == 400


async def test_without_the_header_and_elsewhere_the_database_is_not_asked(opened):
    edge = edge_of(opened)
    before = opened.writer.num_operations
    for _ in range(2):
        assert not is_replay(await edge.ask("/v1/chat/completions", chat_body()))
        assert not is_replay(await edge.ask("/v1/chat/completions/render", chat_body(), KEY))
        assert (await edge.ask("/v1/models", None, KEY)).status == 200
    assert opened.writer.num_operations == before
    assert num_runs(edge) == 2
