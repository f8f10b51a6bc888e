"""What servers that call themselves compatible were seen to send, read without losing an answer or making one up."""

import asyncio

import pytest

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Usage
from hitsend.serve.engine.lenient_wire import LenientReader
from hitsend.serve.engine.openai_wire import ChunkReader, Unreadable, UpstreamSaid
from hitsend.serve.engine.profiles import GENERIC
from hitsend.serve.engine.refusals import instead
from hitsend.serve.engine.upstream_usage import MOST_TOKENS, usage_of
from hitsend.settings_upstreams import UpstreamSettings
from tests.upstream.asking import ask, engine_of
from tests.upstream.conftest import gateway
from tests.upstream.strangers import TEXTS, USED, call, called, chunk, read, wire


def test_who_called_nothing_ends_with_stop():
    assert read(*TEXTS, chunk(reason="tool_calls"))[:3] == ("abc", [], [FinishReason.STOP])


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("eos_token", "stop"),
        ("stop_sequence", "stop"),
        ("STOP", "stop"),
        ("model_length", "length"),
        ("MAX_TOKENS", "length"),
        ("model_context_window_exceeded", "length"),
        ("repetition", "length"),
        ("SAFETY", "content_filter"),
        ("sensitive", "content_filter"),
        ("content-filter", "content_filter"),
        ("refusal", "content_filter"),
    ],
)
def test_other_words_for_an_end(said, meant):
    assert read(*TEXTS, chunk(reason=said))[2] == [FinishReason(meant)]


@pytest.mark.parametrize(
    "said", ["error", "abort", "insufficient_system_resource", "network_error", "MALFORMED_FUNCTION_CALL"]
)
def test_an_end_that_is_none(said):
    assert isinstance(read(*TEXTS, chunk(reason=said))[3].fault, UpstreamSaid)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("nothing", ["", None, "null"])
def test_an_empty_reason_is_no_end(nothing, merges):
    events = [chunk({"content": text}, nothing) for text in "abc"]
    text, _, reasons, reader = read(*events, chunk(reason="stop"), reader=ChunkReader(1, merges=merges))
    assert (text, reasons, reader.counts) == ("abc", [FinishReason.STOP], [3])


EACH = [chunk({"content": text}, "stop") for text in "abc"]
CALLED = [called(call(name, '{"a":1}', name, index=number)) for number, name in enumerate("fg")]


@pytest.mark.parametrize("merges", [False, True])
def test_a_reason_beside_every_piece_ends_nothing(merges):
    for events in ([*EACH, chunk(reason="length")], [*EACH[:2], *TEXTS[2:], chunk(reason="length")]):
        text, _, reasons, reader = read(*events, b"data: [DONE]\n\n", reader=ChunkReader(1, merges=merges))
        assert (text, reasons, reader.counts, reader.is_finished) == ("abc", [FinishReason.LENGTH], [3], True)
    first = chunk({"role": "assistant", "content": ""}, "stop")
    assert read(first, *EACH, b"data: [DONE]\n\n")[:3] == ("abc", [], [FinishReason.STOP])


def test_calls_with_an_end_beside_each_are_all_told():
    pieces = [one | {"choices": [one["choices"][0] | {"finish_reason": "tool_calls"}]} for one in CALLED]
    _, calls, reasons, _ = read(*pieces, b"data: [DONE]\n\n")
    assert calls == [("f", "f", '{"a":1}'), ("g", "g", '{"a":1}')]
    assert reasons == [FinishReason.TOOL_CALLS]
    halves = [called(call("f", '{"a"', "c1", index=0)), called(call(None, ":1}", index=0))]
    halves = [one | {"choices": [one["choices"][0] | {"finish_reason": "stop"}]} for one in halves]
    assert read(*halves, b"data: [DONE]\n\n")[1:3] == ([("c1", "f", '{"a":1}')], [FinishReason.TOOL_CALLS])


def test_an_end_that_is_told_twice_is_the_first_one():
    for events in (
        [*TEXTS, chunk(reason="length"), chunk(reason="stop")],
        [*TEXTS[:2], chunk({"content": "c"}, "length"), chunk(reason="stop")],
    ):
        assert read(*events)[:3] == ("abc", [], [FinishReason.LENGTH])


@pytest.mark.parametrize(("is_framed", "is_whole"), [(True, True), (False, False)])
async def test_where_every_piece_says_that_it_is_the_last_a_cut_is_still_an_error(is_framed, is_whole):
    body = wire(*EACH)
    server, url = await raw(b"" if is_framed else None, body)
    async with server, engine_of(UpstreamSettings(**SETTINGS, base_url=url)) as engine:
        answer = await ask(engine)
    assert (answer.text, answer.reasons) == ("abc", ["stop"] if is_whole else [])
    assert (answer.error is None) is is_whole


@pytest.mark.parametrize("nothing", [None, False, {}, "", []])
def test_an_error_of_nothing_is_none(nothing):
    events = [event | {"error": nothing} for event in [*TEXTS, chunk(reason="stop")]]
    text, _, reasons, reader = read(*events)
    assert (text, reasons, reader.fault) == ("abc", [FinishReason.STOP], None)


def test_a_byte_order_mark_hides_no_event():
    data = b"\xef\xbb\xbf" + wire(*TEXTS, chunk(reason="stop"))
    for cut in range(8):
        assert read(data[:cut], data[cut:])[0] == "abc"


def test_a_message_where_a_delta_should_be_is_read_once():
    whole = {"choices": [{"index": 0, "message": {"content": "abc"}, "finish_reason": "stop"}]}
    assert read(whole)[0] == "abc"
    beside = [event | {"choices": [event["choices"][0] | {"message": {"content": "abc"}}]} for event in TEXTS]
    assert read(*beside, whole)[0] == "abc"


def test_parts_in_place_of_a_text_are_thoughts_and_text():
    thoughts = [{"type": "thinking", "thinking": [{"type": "text", "text": one}]} for one in ("h", "m")]
    parts = [{"content": [one]} for one in thoughts] + [{"content": [{"type": "text", "text": "a"}]}, {"content": "bc"}]
    deltas = ChunkReader(1).feed(wire(*map(chunk, parts), chunk(reason="stop")))
    assert ["".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "text")] == ["hm", "abc"]
    assert isinstance(read(chunk({"content": [{"type": "image"}]}))[3].fault, Unreadable)


def test_nulls_where_something_should_be():
    event = {"choices": [{"index": None, "delta": {"content": "abc"}, "finish_reason": "stop"}]}
    text, _, _, reader = read(event, {"choices": None, "usage": USED})
    assert (text, reader.usage, reader.fault) == ("abc", Usage(7, 3), None)
    logprobs = {"content": [{"token": "a", "logprob": None, "top_logprobs": [{"token": "b", "logprob": None}]}]}
    deltas = ChunkReader(1).feed(wire({"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": logprobs}]}))
    assert deltas[0].logprobs[0].logprob == deltas[0].logprobs[0].top[0].logprob == -9999.0


@pytest.mark.parametrize("reader", [ChunkReader(1), LenientReader(1, 9)])
def test_an_event_that_is_too_deep_is_a_fault_and_no_crash(reader):
    reader.feed(b'data: {"error":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n\n")
    assert isinstance(reader.fault, Unreadable)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"message":"x","code":429}}', "rate_limit_exceeded"),
        (b'{"error":{"message":"x","type":"invalid_request_error"}}', "invalid_request"),
        (b'{"object":"error","message":"maximum context length is 5","code":400}', "context_length_exceeded"),
        (b'{"error":"out of memory"}', "engine_unavailable"),
        (b'{"error":null,"data":[]}', None),
        (b'{"data":[]}', None),
        (b"[", None),
    ],
)
def test_an_error_in_place_of_vectors_is_what_its_status_would_have_been(body, code):
    refusal = instead(body, "e", GENERIC, wall=0.0)
    assert (None if refusal is None else refusal.error.code) == code


@pytest.mark.parametrize(
    ("given", "usage"),
    [
        (USED, Usage(7, 3)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, Usage()),
        ({"prompt_tokens": 7.0, "completion_tokens": 3.0}, Usage(7, 3)),
        ({"prompt_tokens": 7, "total_tokens": 10}, Usage(7, 3)),
        (USED | {"prompt_tokens_details": [], "completion_tokens_details": None}, Usage(7, 3)),
        (USED | {"prompt_tokens_details": {"cached_tokens": 99}}, Usage(7, 3, 7)),
        (USED | {"prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 3}, Usage(7, 3, 4)),
        (USED | {"cached_tokens": 4}, Usage(7, 3, 4)),
        (USED | {"prompt_tokens_details": {"cached_tokens": 2}, "cached_tokens": 4}, Usage(7, 3, 2)),
        (USED | {"total_tokens": 15, "completion_tokens_details": {"reasoning_tokens": 5}}, Usage(7, 8, 0, 5)),
        (USED | {"total_tokens": 10, "completion_tokens_details": {"reasoning_tokens": 2}}, Usage(7, 3, 0, 2)),
        (USED | {"total_tokens": 623}, Usage(7, 616, 0, 613)),
        (USED | {"completion_tokens": 0, "total_tokens": 12}, Usage(7, 5, 0, 5)),
        (USED | {"total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 5}}, Usage(12, 3, 5)),
        (USED | {"total_tokens": 4}, Usage(7, 3)),
        ({}, None),
        ([], None),
        ("7", None),
        ({"total_tokens": 10}, None),
        ({"prompt_tokens": 7, "total_tokens": 3}, None),
        ({"prompt_tokens": None, "completion_tokens": None}, None),
        ({"prompt_tokens": "7", "completion_tokens": "3"}, None),
        ({"prompt_tokens": True, "completion_tokens": True}, None),
        ({"prompt_tokens": 7, "completion_tokens": 3.5}, None),
        ({"prompt_tokens": 7, "completion_tokens": -1}, None),
        ({"prompt_tokens": 7, "completion_tokens": MOST_TOKENS + 1}, None),
        ({"prompt_tokens": 10**19, "completion_tokens": 10**30}, None),
    ],
)
def test_what_cannot_be_meant_is_no_usage(given, usage):
    assert usage_of(given) == usage
    _, _, reasons, reader = read(*TEXTS, chunk(reason="stop", usage=given))
    assert (reasons, reader.usage, reader.fault) == ([FinishReason.STOP], usage, None)


def test_without_an_output_the_total_is_the_prompt():
    for given in ({"prompt_tokens": 3}, {"total_tokens": 3}, {"prompt_tokens": 3, "total_tokens": 9}):
        assert usage_of(given, has_output=False) == Usage(3)
    assert usage_of({"prompt_tokens": 10**19}, has_output=False) is None


SETTINGS = {"name": "s", "models": {"near": "far"}}


def produced(answer):
    found = answer.produced
    return found.usage.prompt_tokens, found.usage.completion_tokens, found.is_estimate


@pytest.mark.parametrize(
    ("events", "billed"),
    [
        ([chunk(usage=USED | {"completion_tokens": 0}), *TEXTS, chunk(reason="stop")], (7, 3, True)),
        ([chunk(usage={"prompt_tokens": 2, "completion_tokens": 0}), *TEXTS, chunk(reason="stop")], (2, 3, True)),
        ([*TEXTS, chunk(reason="stop", usage=USED)], (7, 3, False)),
        ([*(one | {"usage": USED} for one in TEXTS), chunk(reason="stop")], (7, 3, False)),
        ([*TEXTS, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USED}]}], (7, 3, False)),
        ([*TEXTS, chunk(reason="stop", usage={})], (5, 3, True)),
        ([*TEXTS, chunk(reason="stop", usage={"prompt_tokens": 0, "completion_tokens": 9})], (5, 9, True)),
        ([*TEXTS, chunk(reason="stop", usage={"prompt_tokens": 7, "completion_tokens": 0})], (7, 3, True)),
        ([*TEXTS, chunk(reason="stop", usage={"prompt_tokens": 0, "completion_tokens": 0})], (0, 0, False)),
        ([*TEXTS, chunk(reason="stop", usage={"prompt_tokens": 10**19, "completion_tokens": 3})], (5, 3, True)),
    ],
)
async def test_a_count_from_before_the_answer_is_not_its_bill(mock, events, billed):
    async def script(call):
        await call.start()
        for event in [*events, "[DONE]"]:
            await call.event(event)

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        answer = await ask(engine)
    assert (answer.text, answer.reasons, answer.error) == ("abc", ["stop"], None)
    assert produced(answer) == billed


async def raw(head, body):
    """A server that answers everything with these bytes; without a head their length isn't said."""
    more = b"\r\n" if head is None else head + b"content-length: %d\r\n\r\n" % len(body)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n" + more + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.mark.parametrize("end", [b"\n", b"", b"\r\n"])
async def test_the_last_event_counts_without_an_empty_line_behind_it(end):
    body = wire(*TEXTS, chunk(reason="stop", usage=USED)).removesuffix(b"\n\n") + end
    server, url = await raw(b"", body)
    async with server, engine_of(UpstreamSettings(**SETTINGS, base_url=url)) as engine:
        answer = await ask(engine)
    assert (answer.text, answer.error) == ("abc", None)
    assert produced(answer) == (7, 3, False)


async def test_who_knows_no_stream_options_is_told_apart_and_asked_without(mock):
    loc = {"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}

    async def script(call):
        if "stream_options" in call.body:
            await call.answer("422 Unprocessable Entity", {"object": "error", "message": {"detail": [loc]}})
            return
        await call.start()
        for event in [*TEXTS, chunk(reason="stop", usage=USED), "[DONE]"]:
            await call.event(event)

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        error = (await ask(engine)).error
        assert engine.replicas.is_ready
    assert (error.code, 'lacks = ["stream_options"]' in error.message) == ("engine_unavailable", True)
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url, lacks=("stream_options",))) as engine:
        answer = await ask(engine)
    assert (answer.text, produced(answer)) == ("abc", (7, 3, False))


async def test_a_packed_answer_is_refused_as_such():
    server, url = await raw(b"content-encoding: gzip\r\n", b"\x1f\x8b")
    async with server, engine_of(UpstreamSettings(**SETTINGS, base_url=url)) as engine:
        answer = await ask(engine)
    assert "packed" in answer.error.message
    assert (answer.error.status, produced(answer)) == (500, (0, 0, False))


HI = {"model": "near", "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}]}
DIALECTS = [
    ("/v1/responses", {"model": "near", "input": "hi", "store": False, "reasoning": {"effort": "low"}}, "low"),
    ("/v1/responses", {"model": "near", "input": "hi", "store": False, "reasoning": {"effort": "none"}}, "none"),
    ("/v1/messages", HI | {"thinking": {"type": "disabled"}}, "none"),
    ("/v1/messages", HI | {"thinking": {"type": "adaptive"}}, "medium"),
    ("/v1/messages", HI | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
    ("/v1/messages", HI | {"output_config": {"effort": "low"}}, "low"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("server", "role"), [("generic", "system"), ("openai", "developer"), ("hitsend", "developer")])
async def test_developers_are_told_to_those_who_know_the_role(tmp_path, mock, server, role):
    turns = [{"role": "developer", "content": "d"}, *HI["messages"]]
    bodies = [("chat/completions", HI | {"messages": turns}), ("responses", {"model": "near", "input": turns})]
    async with gateway(tmp_path, mock, server=server) as gate:
        for path, body in bodies:
            async with gate.session.post(f"{gate.url}/v1/{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
            assert [turn["role"] for turn in mock.calls[-1].body["messages"]] == [role, "user"]


@pytest.mark.slow
@pytest.mark.parametrize(("lacks", "fields"), [((), {"reasoning_content": "R"}), (("reasoning_content",), {})])
async def test_earlier_thoughts_stay_here_where_they_are_refused(tmp_path, mock, lacks, fields):
    said = {"role": "assistant", "content": "a", "reasoning_content": "R"}
    async with gateway(tmp_path, mock, lacks=lacks) as gate:
        status, answer, _ = await gate.answer(messages=[*HI["messages"], said, *HI["messages"]])
    assert status == 200
    assert mock.calls[-1].body["messages"][1] == {"role": "assistant", "content": "a"} | fields
    assert any("reasoning_content" in one for one in answer["hitsend"]["warnings"]) is not bool(fields)


@pytest.mark.slow
async def test_every_dialect_says_how_much_to_think_in_openais_words(gate):
    for path, body, effort in DIALECTS:
        async with gate.session.post(gate.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
        assert gate.mock.calls[-1].body["reasoning_effort"] == effort
        assert "chat_template_kwargs" not in gate.mock.calls[-1].body
    begun = HI | {"messages": [*HI["messages"], {"role": "assistant", "content": "He"}]}
    async with gate.session.post(gate.url + "/v1/messages", json=begun) as answer:
        text = (await answer.json())["error"]["message"]
    assert "a last message of the assistant" in text
    budget = HI | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with gate.session.post(gate.url + "/v1/messages", json=budget) as answer:
        assert "thinking.budget_tokens" in (await answer.json())["error"]["message"]
