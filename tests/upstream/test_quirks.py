"""What the real engines were found to do (tests/upstream/test_real.py), kept as cases that need none of them."""

import asyncio
import json

import msgspec
import pytest

from hitsend.core.request import Delta, Message, Tool, ToolChoice
from hitsend.serve.engine.lenient_wire import LenientReader
from hitsend.serve.engine.openai_body import count_body, encode_body
from hitsend.serve.engine.openai_wire import ChunkReader
from hitsend.serve.engine.terms import changes, drops, terms_of
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings
from hitsend.testing import FakeClock
from tests.upstream.asking import ask, engine_of, job_of, request_of

LLAMA = UpstreamSettings(name="l", server="llama_server", base_url="http://127.0.0.1:1/v1", models={"near": "far"})
VLLM = VllmSettings(name="v", base_url="http://127.0.0.1:1", models={"near": "far"}, metrics_poll_s=0.0)
TOOLS = (Tool("look"), Tool("wait"))


def body_of(settings, **fields):
    return json.loads(encode_body(request_of(**fields), 9, terms_of(settings)))


def test_llama_server_is_told_of_the_named_function_only():
    named = {"tools": TOOLS, "tool_choice": ToolChoice("required", ("wait",))}
    body = body_of(LLAMA, **named)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["wait"]
    counted = json.loads(count_body(request_of(**named), terms_of(LLAMA)))
    assert counted["tools"] == body["tools"]
    body = body_of(VLLM, **named)
    assert (body["tool_choice"]["function"]["name"], len(body["tools"])) == ("wait", 2)


def test_budgets_and_ids_go_out_under_their_names():
    assert body_of(LLAMA, thinking_token_budget=5)["reasoning_budget_tokens"] == 5
    assert body_of(VLLM, return_token_ids=True)["return_token_ids"] is True
    assert "return_token_ids" not in body_of(VLLM)


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
def test_vllms_count_knows_that_an_effort_is_a_thought(effort, thinks):
    counted = json.loads(count_body(request_of(reasoning_effort=effort), terms_of(VLLM)))
    assert counted["chat_template_kwargs"]["enable_thinking"] is thinks
    assert "chat_template_kwargs" not in json.loads(count_body(request_of(reasoning_effort=effort), terms_of(LLAMA)))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (VLLM, "reasoning"),
        (msgspec.structs.replace(LLAMA, server="ollama"), "reasoning"),
        (msgspec.structs.replace(LLAMA, server="openrouter"), "reasoning"),
        (LLAMA, "reasoning_content"),
        (msgspec.structs.replace(LLAMA, server="generic"), "reasoning_content"),
        (msgspec.structs.replace(LLAMA, renames={"reasoning_content": "thoughts"}), "thoughts"),
    ],
)
def test_earlier_thoughts_have_the_name_that_is_read_there(settings, name):
    said = Message("assistant", None, {"reasoning_content": "R", "tool_calls": []})
    messages = (Message("user", "q"), said)
    body = body_of(settings, messages=messages)
    assert body["messages"][1] == {"role": "assistant", "content": None, name: "R", "tool_calls": []}
    counted = json.loads(count_body(request_of(messages=messages), terms_of(settings)))
    assert counted["messages"] == body["messages"]
    assert (f"reasoning_content → {name}" in changes(terms_of(settings))) is (name != "reasoning_content")
    assert "reasoning_content" not in drops(terms_of(settings))
    assert "reasoning_content" in drops(terms_of(msgspec.structs.replace(settings, lacks=("reasoning_content",))))


@pytest.mark.parametrize("new", [lambda: ChunkReader(1), lambda: LenientReader(1, 9)])
@pytest.mark.parametrize(
    ("told", "reason", "stop"),
    [
        ({"stop_reason": "END"}, "stop", "END"),  # vLLM
        ({"stop_reason": 151645}, "stop", None),
        ({"stop_reason": None}, "stop", None),
        ({"stop_reason": "END"}, "length", None),
    ],
)
def test_the_stop_that_ended_it_is_told_on(new, told, reason, stop):
    event = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": reason, **told}]}
    deltas = new().feed(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
    assert ("".join(delta.text for delta in deltas), deltas[-1].finish_reason) == ("a", reason)
    assert deltas[-1].matched_stop == stop


def test_sglang_has_another_name_for_it():
    for told, stop in (("END", "END"), (128009, None), (None, None)):
        event = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": told}]}
        (delta,) = ChunkReader(1).feed(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
        assert delta.matched_stop == stop


def test_an_event_that_is_null_says_nothing():
    reader = ChunkReader(1, skips_null=True)
    assert reader.feed(b"data: null\n\n") == []
    assert reader.fault is None


def test_ids_come_beside_texts_and_are_never_guessed_from_an_earlier_event():
    reader = ChunkReader(1)
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2, 3]}
    pieces = [("a", [5]), ("b", [5]), ("", [6]), ("c", [7, 8])]
    events = [
        first,
        *({"choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids}]} for text, ids in pieces),
    ]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": None}]})
    deltas = reader.feed("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())
    assert deltas[0].prompt_ids == (1, 2, 3)
    assert [delta.token_ids for delta in deltas[1:]] == [(5,), (5,), (6,), (7, 8), ()]
    assert reader.counts == [5]


def chunk(index, text, **more):
    return {"choices": [{"index": index, "delta": {"content": text}, **more}]}


async def test_a_usage_of_one_choice_is_no_bill_for_two(mock):
    async def script(call):
        await call.start()
        for text in ("a", "b", "c"):
            for index in (0, 1):
                await call.event(chunk(index, text))
        for index in (0, 1):
            await call.event(chunk(index, "", finish_reason="length"))
        await call.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
        await call.event("[DONE]")

    mock.script = script
    one = UpstreamSettings(
        name="l", server="llama_server", base_url=mock.url, models={"near": "far"}, metrics_poll_s=0.0
    )
    async with engine_of(one) as engine:
        found = await ask(engine, request_of(n=2))
    assert (found.error, found.produced.output_tokens, found.produced.is_estimate) == (None, (3, 3), True)
    assert found.produced.usage.completion_tokens == 6


@pytest.mark.parametrize(("is_told", "is_estimate"), [(True, False), (False, True)])
async def test_who_leaves_when_the_end_has_come_with_its_bill_leaves_no_estimate(mock, is_told, is_estimate):
    async def script(call):
        await call.start()
        await call.say("Hel", "lo")
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        await call.event(end | ({"usage": {"prompt_tokens": 77, "completion_tokens": 2}} if is_told else {}))
        await call.has_left.wait()

    mock.script = script
    settings = UpstreamSettings(name="there", base_url=mock.url, models={"near": "far"})
    async with engine_of(settings) as engine:
        generation = engine.generate(job_of())
        async for event in generation:
            if isinstance(event, Delta) and event.finish_reason:
                break
        await generation.aclose()
    assert generation.produced.is_estimate is is_estimate
    assert generation.produced.usage.prompt_tokens == (77 if is_told else 5)


@pytest.mark.parametrize(
    ("usage", "is_beside", "billed"),
    [
        ({"prompt_tokens": 77, "completion_tokens": 2}, False, (77, 2, False)),
        (None, False, (5, 2, True)),
        ({"prompt_tokens": 77, "completion_tokens": 2}, True, (77, 2, False)),
    ],
)
async def test_an_answer_that_has_ended_is_not_lost_by_an_upstream_that_never_says_so(mock, usage, is_beside, billed):
    async def script(call):
        await call.start()
        await call.say("Hel")
        await call.say("lo", finish_reason="stop" if is_beside else None)
        end = {"choices": [] if is_beside else [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        await call.event(end | {"usage": usage})
        await call.has_left.wait()

    mock.script = script
    waits_s = 30.0 if usage and not is_beside else 0.3
    settings = UpstreamSettings(name="there", base_url=mock.url, models={"near": "far"}, stall_timeout_s=waits_s)
    async with engine_of(settings) as engine, asyncio.timeout(10):
        found = await ask(engine)
        assert (found.error, found.text, found.reasons) == (None, "Hello", ["stop"])
        assert engine.replicas.all[0].running == 0
    made = found.produced
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.is_estimate) == billed


async def test_who_hangs_when_asked_to_count_is_left_alone_for_a_while(mock):
    async def script(call):
        if len(mock.calls) == 1:
            await call.has_left.wait()
        await call.answer("200 OK", {"count": 42})

    mock.script = script
    clock = FakeClock()
    fields = {"connect_timeout_s": 0.2, "metrics_poll_s": 0.0}
    settings = VllmSettings(name="v", base_url=mock.url.removesuffix("/v1"), models={"near": "far"}, **fields)
    async with engine_of(settings, clock=clock) as engine:
        assert [await engine.count_prompt(request_of()) for _ in range(3)] == [None, None, None]
        assert len(mock.calls) == 1, "one that hangs holds up one request"
        clock.advance(31.0)
        assert await engine.count_prompt(request_of()) == 42
