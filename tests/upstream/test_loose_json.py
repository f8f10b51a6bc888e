"""What JavaScript and Python write and JSON doesn't know costs nobody an answer."""

import pytest

from hitsend.core.lifecycle import FinishReason
from hitsend.serve.engine.lenient_wire import LenientReader
from hitsend.serve.engine.loose_json import LooseJson
from hitsend.serve.engine.openai_wire import ChunkReader, Unreadable
from hitsend.serve.engine.profiles import WORKERS_AI
from hitsend.serve.engine.refusals import known
from tests.upstream.strangers import called, chunk, read, wire

READERS = [lambda: ChunkReader(1), lambda: ChunkReader(1, merges=True), lambda: LenientReader(1, 99)]


@pytest.mark.parametrize("new", READERS)
@pytest.mark.parametrize(
    ("texts", "read_as"),
    [
        (["a \ud83d", "\ude00 b"], "a \U0001f600 b"),
        (["plain", "a", "\ud83d", "\ude00", "\ud83d\ude00", "end"], "plaina\U0001f600\U0001f600end"),
        (["\ud83d", "\ude00\ud83d", "\ude01"], "\U0001f600\U0001f601"),
        (["a\ud83db", "c"], "a\ufffdbc"),
        (["a", "\ude00b"], "a\ufffdb"),
        (["a\\ud83d \ud83d"], "a\\ud83d "),
        (["never ended \ud83d"], "never ended "),
    ],
)
def test_a_character_that_was_cut_in_two_is_one_again(new, texts, read_as):
    text, _, reasons, reader = read(*(chunk({"content": text}) for text in texts), chunk(reason="stop"), reader=new())
    assert (text, reasons, reader.fault) == (read_as, [FinishReason.STOP], None)


@pytest.mark.parametrize("new", READERS)
def test_thoughts_and_arguments_too(new):
    pieces = [
        called({"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a":"\ud83d'}}),
        called({"index": 0, "function": {"arguments": '\ude00"}'}}),
    ]
    assert read(*pieces, chunk(reason="stop"), reader=new())[1] == [("c", "f", '{"a":"\U0001f600"}')]
    deltas = new().feed(wire(chunk({"reasoning_content": "\ud83d"}), chunk({"reasoning_content": "\ude00"})))
    assert "".join(delta.reasoning for delta in deltas) == "\U0001f600"


@pytest.mark.parametrize("new", READERS)
def test_whole_answers_too(new):
    reader = new()
    body = (
        rb'{"choices":[{"message":{"content":"a\ud83d NaN"},"finish_reason":"stop",'
        rb'"logprobs":{"content":[{"token":"a","logprob":-Infinity}]}}]}'
    )
    deltas = reader.feed_whole(body)
    assert (reader.fault, "".join(delta.text for delta in deltas)) == (None, "a\ufffd NaN")
    assert deltas[0].logprobs[0].logprob == -9999.0


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "Infinity"])
def test_a_number_that_is_none_is_null(value):
    event = chunk({"content": "say NaN"})
    event["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": "?"}]}
    deltas = ChunkReader(1).feed(wire(event).replace(b'"?"', value.encode()))
    assert (deltas[0].text, deltas[0].logprobs[0].logprob) == ("say NaN", -9999.0)


def test_an_errors_code_is_read_beside_half_a_character():
    body = rb'{"error":{"message":"how \ud83d","code":3036}}'
    refusal = known(body, "w", WORKERS_AI, wall=0.0)
    assert refusal is not None
    assert refusal.error.code == "insufficient_quota"


def test_what_is_missing_in_a_completions_columns_is_not_certain():
    columns = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"b": -1.0, "c": None}]}
    event = {"choices": [{"index": 0, "text": "ab", "logprobs": columns}]}
    first, second = ChunkReader(1).feed(wire(event))[0].logprobs
    assert (first.logprob, [one.logprob for one in second.top]) == (-9999.0, [-1.0, -9999.0])


def test_what_is_broken_otherwise_stays_unreadable():
    assert LooseJson().mended(b'{"choices":[{"delta":{"content":"a\\u00e9') is None
    for event in (rb'{"choices":[{"delta":{"content":"a\ud83d', b'{"choices":NaN,', rb'{"x":"\u12'):
        reader = ChunkReader(1)
        assert reader.feed(b"data: " + event + b"\n\n") == []
        assert isinstance(reader.fault, Unreadable)


@pytest.mark.parametrize("piece", [rb"\ud83d", rb"\"", rb"\\", b'"', b"NaN"])
def test_a_text_that_never_ends_is_looked_at_once(piece):
    assert (LooseJson().mended(b'{"content":"' + piece * 300_000 + rb"\ud83d") or b"").startswith(b'{"content":"')


@pytest.mark.parametrize("new", READERS)
@pytest.mark.parametrize("first", [{"name": "f", "arguments": '{"a"'}, {"name": "f"}])
def test_who_knows_one_call_only_has_no_list_of_them(new, first):
    rest = '{"a":1}'.removeprefix(first.get("arguments", ""))
    events = [chunk({"function_call": first, "content": None}), chunk({"function_call": {"arguments": rest}})]
    _, calls, reasons, _ = read(*events, chunk(reason="function_call"), reader=new())
    assert ([call[1:] for call in calls], reasons) == ([("f", '{"a":1}')], [FinishReason.TOOL_CALLS])


@pytest.mark.parametrize("nothing", [None, {}, {"name": None, "arguments": ""}])
def test_no_call_is_none(nothing):
    text, calls, reasons, _ = read(chunk({"content": "a", "function_call": nothing}), chunk(reason="stop"))
    assert (text, calls, reasons) == ("a", [], [FinishReason.STOP])
