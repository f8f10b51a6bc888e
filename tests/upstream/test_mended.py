"""Chunks with fields of odd types: put right where one thing can be meant, never at the price of a text."""

import pytest

from hitsend.core.lifecycle import FinishReason
from hitsend.serve.engine.mended import mended_chunk
from hitsend.serve.engine.openai_wire import ChunkReader, Unreadable
from tests.upstream.strangers import USED, call, chunk, read, wire

LOGPROB = {"content": [{"token": "abc", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}


def of_choice(**fields):
    plain = {"index": 0, "delta": {"content": "abc"}, "finish_reason": None}
    return {"choices": [plain | fields], "usage": None}


@pytest.mark.parametrize(
    "event",
    [
        of_choice(index="0"),
        of_choice(index=0.0),
        of_choice(logprobs=-0.5),
        of_choice(logprobs=[]),
        of_choice(logprobs={"content": [{"token": None, "logprob": "x"}]}),
        of_choice(token_ids="7"),
        of_choice(message=""),
        of_choice(delta={"content": {"type": "text", "text": "abc"}}),
        of_choice(delta={"content": ["ab", {"type": "text", "text": "c"}]}),
        of_choice(delta={"content": [{"type": "text", "text": "abc"}, {"type": "reference", "reference_ids": [1]}]}),
        of_choice(delta={"content": "abc", "refusal": False}),
        of_choice(delta={"content": "abc", "tool_calls": {}}),
        of_choice(delta={"content": "abc", "tool_calls": [None]}),
        of_choice(delta=[], text="abc"),
        of_choice(delta="", text="abc"),
        [of_choice()],
        wire(of_choice()).replace(b'"usage": null', b'"usage": NaN'),
    ],
)
def test_an_answer_is_not_lost_by_a_field_of_another_type(event):
    text, calls, reasons, reader = read(event, {"choices": {}, "usage": USED}, chunk(reason={"type": "stop"}))
    assert (text, calls, reasons, reader.fault) == ("abc", [], [FinishReason.STOP], None)
    assert reader.counts == [1]


@pytest.mark.parametrize("given", [{"text": "hm"}, ["h", {"text": "m"}], [{"type": "text", "text": "hm"}]])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_in_other_shapes_are_thoughts(name, given):
    deltas = ChunkReader(1).feed(wire(chunk({name: given}), chunk({"content": "a"})))
    assert [(delta.reasoning, delta.text) for delta in deltas] == [("hm", ""), ("", "a")]


def test_numbers_as_text_are_shown_as_they_were_written():
    assert read(*(chunk({"content": one}) for one in (1, 2.5, True)), chunk(reason="stop"))[0] == "12.5true"


def test_log_probabilities_that_are_no_numbers_are_as_low_as_can_be():
    event = wire(of_choice(logprobs=LOGPROB)).replace(b"-0.5", b"-Infinity")
    (delta,) = ChunkReader(1).feed(event)
    assert (delta.text, delta.logprobs[0].logprob) == ("abc", -9999.0)


@pytest.mark.parametrize(
    ("piece", "found"),
    [
        (call("f", '{"a":1}', "c1", index="0"), ("c1", "f", '{"a":1}')),
        (call("f", '{"a":1}', 7, index=0), ("7", "f", '{"a":1}')),
        (call("f", [], "c1", index=0), ("c1", "f", "{}")),
        ({"index": 0, "id": "c1", "function": "f", "arguments": '{"a":1}'}, ("c1", "f", '{"a":1}')),
    ],
)
def test_calls_in_other_shapes_are_calls(piece, found):
    for given in ([piece], piece):
        assert read(chunk({"tool_calls": given}), chunk(reason="stop"))[1:3] == ([found], [FinishReason.TOOL_CALLS])


def test_halves_of_a_character_find_each_other():
    halves = [wire(chunk({"content": "?"})).replace(b"?", half) for half in (b"a\\ud83d", b"\\ude00b")]
    for events in (halves, [halves[0] + halves[1]]):
        text, _, _, reader = read(*events, chunk(reason="stop"))
        assert (text, reader.fault) == ("a\U0001f600b", None)
    text = b'"{\\"a\\":\\"\\ud83d"', b'"\\ude00\\"}"'
    pieces = [wire(chunk({"tool_calls": [call("f", "?", "c1", index=0)]})).replace(b'"?"', half) for half in text]
    assert read(*pieces, chunk(reason="stop"))[1] == [("c1", "f", '{"a":"\U0001f600"}')]


@pytest.mark.parametrize(
    "event",
    [
        b"{",
        b"[]",
        b"[1]",
        b'"x"',
        b"{}x",
        b'{"choices":[1]}',
        b'{"choices":7}',
        b'{"choices":[{"index":"a"}]}',
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"delta":{"content":[7]}}]}',
        b'{"choices":[{"delta":{"content":{"type":"image"}}}]}',
        b'{"choices":[{"delta":{"reasoning":[{"type":"image"}]}}]}',
        b'{"choices":[{"delta":{"tool_calls":7}}]}',
        b'{"choices":[{"delta":{"tool_calls":[7]}}]}',
        b'{"choices":[{"finish_reason":7}]}',
        b"[" * 50_000,
    ],
)
def test_what_cannot_be_meant_is_still_a_fault(event):
    reader = ChunkReader(1)
    assert (reader.feed(b"data: " + event + b"\n\n"), type(reader.fault)) == ([], Unreadable)
    assert mended_chunk(event) is None
