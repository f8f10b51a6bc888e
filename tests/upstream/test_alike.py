"""The short way through a stream says what the long one says, or nothing."""

import json
import random

import pytest

from hitsend.serve.engine.alike import Alike
from hitsend.serve.engine.openai_wire import ChunkReader


def chunk(text, **more):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None} | more.pop("choice", {})
    return {"id": "c", "choices": [choice]} | more


def read(documents, compact):
    """What a reader finds in all of them, and what fresh readers find in each alone."""
    separators = (",", ":") if compact else None
    events = [f"data: {json.dumps(each, separators=separators, ensure_ascii=False)}\n\n".encode() for each in documents]
    together = ChunkReader(2)
    found = [delta for event in events for delta in together.feed(event)]
    alone = [delta for event in events for delta in ChunkReader(2).feed(event)]
    return found, alone


@pytest.mark.parametrize("compact", [True, False])
def test_a_stream_reads_as_its_events_do_one_by_one(compact):
    documents = [
        chunk(""),
        chunk("a"),
        chunk("b"),
        chunk(""),
        chunk("né"),
        chunk('say "x"'),
        chunk("back\\slash"),
        chunk("line\nbreak"),
        chunk("c", choice={"index": 1}),
        chunk("content"),
        chunk("d", usage={"prompt_tokens": 3, "completion_tokens": 4}),
        chunk("e", note="later"),
        chunk("f", choice={"delta": {"content": "f", "reasoning_content": "r"}}),
        chunk("g", choice={"finish_reason": "stop"}),
    ]
    found, alone = read(documents, compact)
    assert found == alone
    assert len(found) == len(documents) - 2


def pieces(deltas):
    """What choices were told, without where it was cut."""
    return ["".join(delta.text for delta in deltas if delta.index == index) for index in (0, 1)], [
        (delta.index, delta.finish_reason, delta.reasoning)
        for delta in deltas
        if delta.finish_reason or delta.reasoning
    ]


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_events_that_are_read_together_say_what_each_says(seed):
    draw = random.Random(seed)
    odd = ('"', "\\", "\n", "é", "\u2028", "", '"}}]}', "data: ", "\x7f", "[DONE]")
    documents = [
        chunk(
            draw.choice(odd) if draw.random() < 0.15 else f" word{number}",
            choice={"index": 1} if draw.random() < 0.1 else {},
            **({"note": "x"} if draw.random() < 0.1 else {}),
        )
        for number in range(60)
    ]
    documents += [chunk("", choice={"index": index, "finish_reason": "stop"}) for index in (0, 1)]
    raw = b"".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n".encode() for each in documents)
    alone, together = ChunkReader(2), ChunkReader(2, merges=True)
    one_by_one = [delta for event in raw.split(b"\n\n")[:-1] for delta in alone.feed(event + b"\n\n")]
    in_reads, at = [], 0
    while at < len(raw):
        size = draw.choice((1, 30, 300, 3000))
        in_reads += together.feed(raw[at : at + size])
        at += size
    assert pieces(in_reads) == pieces(one_by_one)
    assert (together.counts, together.num_pieces) == (alone.counts, alone.num_pieces)
    assert (together.fault, together.is_finished) == (None, True)


def test_a_character_that_was_cut_between_two_events_is_no_text():
    start = b"".join(b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % each for each in (b"a", b"b"))
    halves = b"".join(
        b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % each for each in (b"\xc3", b"\xa9")
    )
    for merges in (False, True):
        reader = ChunkReader(1, merges=merges)
        reader.feed(start)
        reader.feed(halves)
        assert reader.fault is not None


def test_what_is_not_exactly_alike_is_left_to_the_reader():
    alike = Alike()
    learned = b'{"choices":[{"index":0,"delta":{"content":"a"}}]}'
    assert alike.text(learned) is None
    alike.learn(learned, "a", 0)
    assert alike.text(learned.replace(b'"a"', b'"b c"')) == "b c"
    for other in (
        learned.replace(b'"a"', b'""'),
        learned.replace(b'"a"', b'"a\\n"'),
        learned.replace(b'"a"', b'"\x01"'),
        learned.replace(b'"a"', b'"\xff"'),
        learned.replace(b'"a"', b'"a","content":"b"'),
        learned.replace(b'"index":0', b'"index":1'),
        learned + b" ",
    ):
        assert alike.text(other) is None, other


def test_nothing_is_learned_where_the_text_could_stand_elsewhere():
    alike = Alike()
    alike.learn(b'{"content":"a","choices":[{"index":0,"delta":{"content":"a"}}]}', "a", 0)
    alike.learn(b'{"choices":[{"index":0,"delta":{"conte\\u006et":"a"}}],"content":"a"}', "a", 0)
    assert alike.text(b'{"choices":[{"index":0,"delta":{"content":"a"}}]}') is None


def test_a_choice_that_has_ended_brings_nothing_more():
    reader = ChunkReader(1)
    events = [chunk("a"), chunk("b"), chunk("", choice={"finish_reason": "stop"}), chunk("late")]
    found = [d for each in events for d in reader.feed(f"data: {json.dumps(each)}\n\n".encode())]
    assert [delta.text for delta in found] == ["a", "b", ""]
    assert reader.counts == [2]
