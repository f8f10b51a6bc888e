"""Workers AI: shapes that were seen in the wild, and errors where an answer should be."""

import json

import pytest

from hitsend.core.errors import ConfigError
from hitsend.core.request import Message
from hitsend.serve.engine.lenient_wire import LenientReader
from hitsend.serve.engine.terms import addresses
from hitsend.serve.usage.pricing import PriceBook
from hitsend.settings_upstreams import WorkersAISettings
from hitsend.testing import FakeClock
from tests.upstream.asking import ask, engine_of, request_of
from tests.upstream.workers_ai import ACCOUNT, KEY, envelope

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
PARTS = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "t"}]
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}


def settings_of(mock, **fields):
    root = mock.url.removesuffix("/v1")
    fields = {"models": {"near": "@cf/qwen/qwen3.8-27b"}, "base_url": root + ACCOUNT, "retry_share": 0.0} | fields
    return WorkersAISettings(name="cf", **fields)


def frames(*events):
    async def script(call):
        await call.start()
        for event in events:
            await call.event(event)
        await call.event("[DONE]")

    return script


def piece(**delta):
    return {"choices": [{"index": 0, "delta": delta}]}


@pytest.mark.parametrize(
    ("events", "text", "reasoning", "reason"),
    [
        ((piece(reasoning_content=42), piece(content="b"), END), "b", "42", "stop"),
        ((piece(reasoning=3.50), piece(content="b"), END), "b", "3.5", "stop"),
        ((piece(refusal=7), END), "7", "", "stop"),
        (({"choices": [{"index": None, "delta": {"content": "a"}}]}, END), "a", "", "stop"),
        (
            (piece(content=[{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "t"}]), END),
            "a",
            "t",
            "stop",
        ),
        (({"choices": [{"index": 0, "text": "abc"}]}, END), "abc", "", "stop"),
        (({"choices": [{"index": 0, "message": {"content": "abc"}, "finish_reason": "stop"}]},), "abc", "", "stop"),
        (({"response": "Hel"}, {"response": "", "finish_reason": "length", "usage": USAGE}), "Hel", "", "length"),
        (({"response": "Hel"}, {"finish_reason": "stop", "usage": USAGE}), "Hel", "", "stop"),
        (({"response": {"a": [1]}, "usage": USAGE},), '{"a": [1]}', "", "stop"),
        (({"response": [1, 2]}, {"response": None, "usage": USAGE}), "[1, 2]", "", "stop"),
    ],
)
def test_whatever_a_text_came_as_is_shown_and_whatever_the_end_was_is_told(events, text, reasoning, reason):
    reader = LenientReader(1, 99)
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    deltas = reader.feed(stream)
    assert reader.fault is None
    assert ("".join(one.text for one in deltas), "".join(one.reasoning for one in deltas)) == (text, reasoning)
    assert [str(one.finish_reason) for one in deltas if one.finish_reason] == [reason]


@pytest.mark.parametrize("body", [{"a": 1}, "text", 42])
async def test_an_answer_of_its_json_mode_comes_whole(mock, body):
    async def script(call):
        await call.answer("200 OK", {"result": {"response": body, "usage": USAGE}, "success": True, "errors": []})

    mock.script = script
    async with engine_of(settings_of(mock), key=KEY) as engine:
        answer = await ask(engine)
    assert (answer.text, answer.error) == (body if isinstance(body, str) else json.dumps(body), None)


@pytest.mark.parametrize("where", ["errors", "error"])
async def test_a_code_in_place_of_the_first_frame_means_what_it_means_in_place_of_an_answer(mock, where):
    clock = FakeClock(wall=20_000 * 86_400.0 + 80_000.0)
    said = {"code": 3040, "message": "x"}
    mock.script = frames({"success": False, where: [said] if where == "errors" else said})
    async with engine_of(settings_of(mock, breaker_failures=1), clock=clock, key=KEY) as engine:
        first = await ask(engine)
        assert (first.error.code, first.produced.usage.total_tokens) == ("server_overloaded", 0)
        assert not first.produced.is_estimate, "it did no work"
        said["code"] = 3036
        assert (await ask(engine)).error.code == "insufficient_quota", "and the breaker stayed closed"
        again = await ask(engine)
        assert (again.error.code, len(mock.calls)) == ("insufficient_quota", 2), "nothing is asked before midnight"


async def test_a_code_after_the_first_token_is_told_and_what_came_is_billed(mock):
    mock.script = frames(piece(content="a"), {"errors": [{"code": 3040, "message": "x"}]})
    async with engine_of(settings_of(mock), key=KEY) as engine:
        answer = await ask(engine)
    assert (answer.text, answer.reasons, answer.error.code) == ("a", [], "server_overloaded")
    assert (answer.produced.usage.completion_tokens, answer.produced.is_estimate) == (1, True)


@pytest.mark.parametrize(
    "errors",
    [
        [{"code": "3036", "message": "x"}],
        [{"code": 3036.0, "message": "x"}],
        ["AiError", {"code": None}, {"code": 3036, "type": 5, "param": ["x"]}],
        [{"code": True}, {"code": 3036, "message": {"deep": []}}],
    ],
)
async def test_a_code_is_found_whatever_stands_around_it(mock, errors):
    async def script(call):
        await call.answer("429 No", {"success": False, "result": None, "errors": errors, "messages": "none"})

    mock.script = script
    async with engine_of(settings_of(mock), key=KEY) as engine:
        assert (await ask(engine)).error.code == "insufficient_quota"


async def test_an_envelope_in_place_of_vectors_is_read_for_its_code(mock):
    async def script(call):
        await call.answer("200 OK", envelope(3040, "x"))

    mock.script = script
    settings = settings_of(mock, embedding_models={"vectors": "@cf/baai/bge-m3"})
    async with engine_of(settings, key=KEY) as engine:
        asked = engine.embed("vectors", ("a",), None, estimated=3)
        with pytest.raises(Exception, match="3040") as caught:
            await asked.vectors()
    assert (caught.value.code, asked.produced.usage.prompt_tokens) == ("server_overloaded", 0)


@pytest.mark.parametrize("before", [(), (Message("system", "s"),), (Message("assistant", "Hello, how can I help?"),)])
async def test_a_conversation_stays_together_from_its_first_question_on(mock, before):
    mock.script = frames(piece(content="a"), END)
    first = (*before, Message("user", "one"))
    later = (*first, Message("assistant", "a"), Message("user", "two"))
    other = (*before, Message("user", "another one"))
    async with engine_of(settings_of(mock), key=KEY) as engine:
        for messages in (first, later, other):
            await ask(engine, request_of(messages=messages))
    sent = [call.headers()["x-session-affinity"] for call in mock.calls]
    assert sent[0] == sent[1] != sent[2]


@pytest.mark.parametrize(
    ("there", "neurons"),
    [("@cf/baai/bge-m3", 1075), ("@cf/baai/bge-large-en-v1.5", 18_582), ("@cf/qwen/qwen3-embedding-0.6b", 1075)],
)
def test_what_it_embeds_with_has_a_built_in_price(there, neurons):
    price = PriceBook(elsewhere={"near": ("workers_ai", there)}, now=lambda: 1_796_000_000.0).find(
        "near", is_local=False
    )
    assert (price.input_picousd, price.output_picousd, price.in_neurons) == (neurons * 11, 0, True)


@pytest.mark.parametrize("account", ["0123…", "a/../b", "a b", "a?x", "@evil", "x" * 65])
def test_an_account_that_would_be_another_address_is_named(account):
    with pytest.raises(ConfigError, match=r"engines\[cf\]\.account_id"):
        addresses(WorkersAISettings(name="cf", account_id=account))
