"""Upstreams that answer whole, whatever they are asked for."""

import json

import pytest

from hitsend.settings_upstreams import UpstreamSettings
from tests.upstream.asking import ask, engine_of

pytestmark = pytest.mark.slow  # a server each


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_comes_whole_is_one(gate, stream):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "hi\n\nthere", "reasoning": "hm", "tool_calls": [call]}
    usage = {"prompt_tokens": 30, "completion_tokens": 4}

    async def script(call):
        whole = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": usage}
        await call.answer("200 OK", json.dumps(whole, indent=2).encode())

    gate.mock.script = script
    status, body, answer = await gate.answer(stream=stream, tools=[{"type": "function", "function": {"name": "look"}}])
    assert status == 200
    if stream:
        assert "hi\\n\\nthere" in body
        assert body.count("[DONE]") == 1
    else:
        got = body["choices"][0]["message"]
        assert (got["content"], got["reasoning"]) == ("hi\n\nthere", "hm")
        assert got["tool_calls"][0]["function"]["name"] == "look"
    row = (await gate.record(answer.headers["x-request-id"]))["ledger"]
    assert (row["prompt_tokens"], row["completion_tokens"], row["is_estimate"]) == (30, 4, False)


CHUNKS = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("he", "llo")]
CHUNKS.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 30}})
STREAM = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in CHUNKS) + b"data: [DONE]\n\n"
WHOLE = json.dumps({"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}).encode()
KINDS = ["", "text/plain; charset=utf-8", "application/json", "application/octet-stream", "text/event-stream"]


async def asked(mock, head, *pieces):
    async def script(call):
        await call.raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + head + b"\r\n")
        for piece in pieces:
            await call.raw(piece)

    mock.script = script
    async with engine_of(UpstreamSettings(name="s", base_url=mock.url, models={"near": "far"})) as engine:
        return await ask(engine)


BODIES = [STREAM, b": ping\n\n" + STREAM, WHOLE, b"\n \n" + WHOLE, b"\xef\xbb\xbf" + WHOLE]
CALLED = [(kind, body) for kind in KINDS[:-1] for body in BODIES] + [(KINDS[-1], body) for body in BODIES[:3]]


@pytest.mark.parametrize(("kind", "body"), CALLED)
async def test_what_an_answer_is_called_is_not_what_it_is(mock, kind, body):
    head = f"content-type: {kind}\r\n".encode() if kind else b""
    for pieces in ([body], [body[:3], body[3:7], body[7:]]):
        answer = await asked(mock, head, *pieces)
        assert (answer.error, answer.text, answer.reasons) == (None, "hello", ["stop"])


async def test_an_error_that_is_called_a_stream_is_the_status_that_it_stands_for(mock):
    body = json.dumps({"error": {"message": "SECRET", "code": 429}}).encode()
    answer = await asked(mock, b"content-type: text/event-stream\r\n", body)
    assert (answer.error.code, answer.produced.usage.total_tokens) == ("rate_limit_exceeded", 0)


async def test_a_transfer_encoding_that_says_no_length_ends_with_the_connection(mock):
    answer = await asked(mock, b"content-type: application/json\r\ntransfer-encoding: identity\r\n", WHOLE)
    assert (answer.error, answer.text) == (None, "hello")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "application/json"),
        ({"choices": []}, "application/json"),
        ({"choices": [{}]}, "text/html"),
        ([1], "application/json"),
        ("hello", "application/json"),
    ],
)
async def test_an_answer_that_is_none_is_an_error_and_costs_nothing(gate, body, kind):
    async def script(call):
        raw = json.dumps(body).encode()
        await call.start(kind=kind, content_length=str(len(raw)))
        await call.raw(raw)

    gate.mock.script = script
    status, body, answer = await gate.answer()
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert (await gate.record(answer.headers["x-request-id"]))["ledger"]["cost_microusd"] == 0


async def test_one_that_is_cut_at_any_byte_is_an_error(mock):
    whole = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    raw = json.dumps(whole).encode()
    for length in (len(raw), None):
        for size in range(len(raw) + 1):

            async def script(call, length=length, size=size):
                framed = {} if length is None else {"content_length": str(length)}
                await call.start(kind="application/json", **framed)
                await call.raw(raw[:size])

            mock.script = script
            async with engine_of(UpstreamSettings(name="t", base_url=mock.url, models={"near": "far"})) as engine:
                answer = await ask(engine)
            is_whole = size == len(raw)
            assert (answer.error is None, answer.reasons) == (is_whole, ["stop"] if is_whole else []), (length, size)
