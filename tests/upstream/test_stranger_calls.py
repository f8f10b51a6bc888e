"""Calls as servers that call themselves compatible stream them: kept apart, in order, and whole."""

import json

import pytest

from hitsend.core.lifecycle import FinishReason
from hitsend.serve.engine.openai_wire import ChunkReader
from tests.upstream.strangers import TEXTS, call, called, chunk, read, wire

F, G = ("c1", "f", '{"a":1}'), ("c2", "g", '{"b":2}')
TWO = {
    "no index, one event": [called(call("f", '{"a":1}', "c1"), call("g", '{"b":2}', "c2"))],
    "no index": [called(call("f", '{"a":1}', "c1")), called(call("g", '{"b":2}', "c2"))],
    "index null": [called(call("f", '{"a":1}', "c1", index=None)), called(call("g", '{"b":2}', "c2", index=None))],
    "no index, in pieces": [
        called(call("f", '{"a"', "c1")),
        called(call(None, ":1}")),
        called(call("g", "", "c2")),
        called(call(None, '{"b":2}')),
    ],
    "all 0": [called(call("f", '{"a":1}', "c1", index=0), call("g", '{"b":2}', "c2", index=0))],
    "all 0, in pieces": [
        called(call("f", "", "c1", index=0)),
        called(call(None, '{"a":1', index=0), call(None, "}", index=0)),
        called(call("g", '{"b"', "c2", index=0)),
        called(call(None, ":2}", index=0)),
    ],
    "from 1": [called(call("f", '{"a":1}', "c1", index=1)), called(call("g", '{"b":2}', "c2", index=2))],
    "odd numbers": [called(call("f", '{"a":1}', "c1", index=-1)), called(call("g", '{"b":2}', "c2", index=10**9))],
    "name and id on every piece": [
        called(call("f", '{"a"', "c1", index=0), call("g", '{"b"', "c2", index=1)),
        called(call("f", ":1}", "c1", index=0), call("g", ":2}", "c2", index=1)),
    ],
    "by turns": [
        called(call("f", '{"a"', "c1", index=0)),
        called(call("g", '{"b"', "c2", index=1)),
        called(call(None, ":1}", index=0)),
        called(call(None, ":2}", index=1)),
    ],
    "name behind arguments": [
        called(call(None, '{"a":1}', "c1", index=0)),
        called(call("f", None, "c1", index=0), call("g", '{"b":2}', "c2", index=1)),
    ],
    "objects": [called(call("f", {"a": 1}, "c1", index=0), call("g", {"b": 2}, "c2", index=1))],
}


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "tool_use"])
@pytest.mark.parametrize("name", TWO)
def test_two_calls_stay_two(name, reason):
    text, calls, reasons, _ = read(*TWO[name], chunk(reason=reason))
    assert (text, calls, reasons) == ("", [F, G], [FinishReason.TOOL_CALLS])


def test_calls_whose_arguments_come_later_keep_their_order():
    heads = [called(call("f", "", "c1", index=0)), called(call("g", "", "c2", index=1))]
    for late in (
        [],
        [called(call(None, "{}", index=1))],
        [called(call(None, "{}", index=1), call(None, "{}", index=0))],
        [called(call(None, "{", index=1)), called(call(None, "{}", index=0)), called(call(None, "}", index=1))],
    ):
        assert read(*heads, *late, chunk(reason="stop"))[1] == [("c1", "f", "{}"), ("c2", "g", "{}")]


@pytest.mark.parametrize("words", ["content", "reasoning_content"])
def test_words_inside_of_a_call_come_after_it(words):
    events = [
        called(call("f", '{"a"', "c1", index=0)),
        chunk({words: "b"}),
        chunk({words: "c"}),
        called(call(None, ":1}", index=0)),
    ]
    before = [chunk({"content": "a"}), chunk({"content": "a"})]
    for events_after in ([chunk({"content": "d"})], []):
        stream = [*before, *events, *events_after, chunk(reason="stop")]
        text, calls, reasons, reader = read(*stream)
        rest = "".join(event["choices"][0]["delta"].get("content", "") for event in stream)
        assert (text, calls, reasons, reader.fault) == (rest, [F], [FinishReason.TOOL_CALLS], None)
    assert read(*before, *events[:3], chunk(reason="stop"))[2:3] == ([FinishReason.LENGTH],)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([called(call("f", "{}", "c1", index=0)), *TEXTS, called(call(None, "}", index=0))], "after its end"),
        ([called(call(None, "{}", "c1", index=0))], "without a name"),
    ],
)
def test_what_belongs_to_no_call_is_a_fault(events, fault):
    _, _, reasons, reader = read(*events, chunk(reason="stop"))
    assert (reasons, fault in str(reader.fault), reader.is_finished) == ([], True, False)
    blank = [called(call("f", "{}", "c1", index=0)), *TEXTS, called(call(None, "\n", index=0)), called({"index": 3})]
    assert read(*blank, chunk(reason="stop"))[3].fault is None


def test_endless_calls_and_endless_words_inside_of_one_end():
    for piece in (called(call(None, "x" * 100_000, index=0)), chunk({"content": "x" * 100_000})):
        reader = ChunkReader(1)
        reader.feed(wire(called(call("f", '{"a":"', "c1", index=0)), *[piece] * 50))
        assert "4194304" in str(reader.fault)


def test_the_same_function_twice_under_one_number_is_two_calls():
    pieces = [called(call("f", '{"a":1}', index=0)), called(call("f", '{"a":2}', index=0))]
    _, calls, _, _ = read(*pieces, chunk(reason="stop"))
    assert [arguments for _, _, arguments in calls] == ['{"a":1}', '{"a":2}']
    assert len({call_id for call_id, _, _ in calls}) == 2


@pytest.mark.parametrize("same", ["f", "c1"])
@pytest.mark.parametrize("names", ["ff", "fg"])
def test_calls_with_one_id_stay_apart_and_get_ids_of_their_own(names, same):
    whole = [call(name, '{"a":1}', same, index=number) for number, name in enumerate(names)]
    heads = [call(name, "", same, index=number) for number, name in enumerate(names)]
    rest = [call(None, '{"a":1}', same, index=number) for number in (0, 1)]
    for events in ([called(*whole)], [called(one) for one in whole], [called(*heads), called(*rest)]):
        _, calls, reasons, _ = read(*events, chunk(reason="tool_calls"))
        assert [(name, arguments) for _, name, arguments in calls] == [(name, '{"a":1}') for name in names]
        assert (calls[0][0], len({call_id for call_id, _, _ in calls})) == (same, 2)
        assert reasons == [FinishReason.TOOL_CALLS]


@pytest.mark.parametrize("call_id", [None, ""])
def test_a_call_without_an_id_gets_one(call_id):
    _, calls, _, _ = read(called(call("f", '{"a":1}', call_id, index=0)), chunk(reason="stop"))
    ((found, name, arguments),) = calls
    assert found.startswith("call_")
    assert (name, arguments) == ("f", '{"a":1}')


def test_an_id_on_each_piece_makes_no_new_calls():
    pieces = [called(call("f", "", "c1", index=0)), *(called(call(None, one, one, index=0)) for one in ('{"a"', ":1}"))]
    assert read(*pieces, chunk(reason="stop"))[1] == [F]


@pytest.mark.parametrize("arguments", [None, "", " "])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    _, calls, _, _ = read(called(call("f", arguments, "c1", index=0)), chunk(reason="tool_calls"))
    assert json.loads(calls[0][2]) == {}


@pytest.mark.parametrize("arguments", ['{"a":', '{"a":"b', '{"a":[1,2', '{"a":tru', '{"a":"\\u00'])
def test_a_call_that_breaks_off_was_cut_whatever_is_said_of_it(arguments):
    _, calls, reasons, _ = read(called(call("f", arguments, "c1", index=0)), chunk(reason="tool_calls"))
    assert (calls, reasons) == ([("c1", "f", arguments)], [FinishReason.LENGTH])


@pytest.mark.parametrize("arguments", ['{"a":1}', '{"a":1}}', "no JSON", '{"a":"\\ud83d"}', "[" * 20_000])
def test_other_arguments_are_the_models_own(arguments):
    _, calls, reasons, _ = read(called(call("f", arguments, "c1", index=0)), chunk(reason="stop"))
    assert (calls, reasons) == ([("c1", "f", arguments)], [FinishReason.TOOL_CALLS])
