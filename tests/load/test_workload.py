"""What is asked, read and drawn: conversations, traces, streams, plots."""

import json
from codecs import BOM_UTF8
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.load.lengths import fixed, read_length
from hitsend.load.plots import bins, sparkline, tokens_over_time
from hitsend.load.sse import MOST_EVENT_BYTES, BadStream, Events, read_piece
from hitsend.load.target import Target, check_url
from hitsend.load.trace import read_trace
from hitsend.load.words import PROBES, WORDS, Vocabulary, calibrated
from hitsend.load.workload import CUSTOMER_SERVICE, Shape, Workload, fitted
from tests.load.virtual import sample


def words(ask):
    return sum(len(message["content"].split()) for message in ask.body["messages"])


@settings(max_examples=30)
@given(st.integers(10, 400), st.integers(0, 300), st.integers(0, 8), st.integers(), st.booleans())
def test_a_prompt_is_as_long_as_was_asked(tokens, system, overhead, seed, has_system):
    vocabulary = Vocabulary(overhead=overhead, is_exact=True)
    shape = Shape(fixed(tokens), fixed(5), system)
    workload = Workload(shape, vocabulary, seed, has_system=has_system).ready()
    for number in range(3):
        ask = workload.conversation("a", number).ask()
        assert words(ask) + overhead == ask.input_tokens == tokens + system
        assert ask == workload.conversation("a", number).ask()


@given(
    st.integers(1, 12), st.integers(0, 8), st.booleans(), st.sampled_from(["chat", "completions"]), st.integers(0, 9)
)
def test_a_prompt_that_cannot_be_so_short_is_not_said_to_be(tokens, overhead, has_system, endpoint, system):
    vocabulary = Vocabulary(overhead=overhead, is_exact=True)
    shape = Shape(fixed(tokens), fixed(5), system)
    ask = Workload(shape, vocabulary, 0, endpoint=endpoint, has_system=has_system).ready().conversation("a", 0).ask()
    sent = len(ask.body["prompt"].split()) if endpoint == "completions" else words(ask)
    assert ask.input_tokens == sent + overhead


def test_a_trace_may_begin_with_a_byte_order_mark():
    (found,) = read_trace("t", [BOM_UTF8 + b'{"prompt": "x"}\r\n'])
    assert found.body == {"prompt": "x"}


def test_stages_and_numbers_never_share_a_text():
    workload = Workload(Shape(fixed(30), fixed(5)), Vocabulary()).ready()
    asks = [workload.conversation(stage, number).ask() for stage in "ab" for number in range(50)]
    assert len({json.dumps(ask.body) for ask in asks}) == 100


def test_as_many_hang_up_as_were_to():
    workload = Workload(Shape(fixed(9), fixed(20)), Vocabulary(), abort=0.25).ready()
    cuts = [workload.conversation("a", number).ask().cut_after for number in range(400)]
    assert sum(cut is not None for cut in cuts) == pytest.approx(100, abs=30)
    assert all(1 <= cut < 20 for cut in cuts if cut is not None)


@given(st.integers(64, 10_000))
def test_the_default_workload_is_scaled_to_the_context(context):
    shape, factor = fitted(CUSTOMER_SERVICE, context)
    total = shape.system + shape.input.a + shape.output.a
    assert total <= max(context, 4)
    assert (factor == 1) == (context * 0.9 >= 1600)
    if factor < 1:
        assert shape.system / total == pytest.approx(700 / 1600, abs=0.03)


def test_words_are_plain_and_each_is_there_once():
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isalpha() and word.islower() for word in WORDS)


@given(st.floats(0.5, 4), st.integers(0, 60))
def test_two_probes_give_slope_and_rest(slope, around):
    small, large = (round(words * slope) + around for words in PROBES)
    found, rest = calibrated(small, large)
    assert found == pytest.approx(slope, abs=0.02)
    assert rest == pytest.approx(around, abs=1.01)


def test_a_trace_has_lengths_or_bodies():
    lines = [b'{"input_tokens": 5, "output_tokens": 7, "at_s": 2}', b"", b'{"prompt": "x", "model": "m", "at_s": 0.5}']
    first, second = read_trace("t", lines)
    assert (first.body, first.at_s) == ({"prompt": "x"}, 0.5)
    assert (second.input_tokens, second.output_tokens, second.at_s) == (5, 7, 2.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "no JSON"),
        (b"[]", "an object"),
        (b"{}", "it needs messages"),
        (b'{"messages": []}', "messages must be a list"),
        (b'{"input_tokens": 0, "output_tokens": 1}', "input_tokens is '0'"),
        (b'{"input_tokens": true, "output_tokens": 1}', "input_tokens is 'True'"),
        (b'{"input_tokens": 1, "output_tokens": 1.5}', "output_tokens is '1.5'"),
        (b'{"prompt": "x", "at_s": -1}', "at_s is '-1'"),
        (b'{"prompt": "x", "at_s": "now"}', "at_s is 'now'"),
        (b'{"prompt": "x", "at_s": 1e999}', "line 2"),
        (b'{"prompt": "x", "at_s": 1}', "at_s stands in 1 of 2"),
    ],
)
def test_a_bad_line_is_named(line, said):
    with pytest.raises(ConfigError) as refused:
        read_trace("file.jsonl", [b'{"prompt": "good"}', line])
    assert said in str(refused.value)
    assert "file.jsonl" in str(refused.value)


def test_an_empty_trace_is_refused():
    with pytest.raises(ConfigError, match="no request"):
        read_trace("t", [b"\n"])


STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data:{"choices":[{"delta":{"reasoning_content":"hm"}}]}\r\n\r\n'
    b'event: x\ndata: {"choices":[{"delta":\ndata: {"content":"H\xc3\xa9"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[{"text":"legacy"}],"usage":{"prompt_tokens":3,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
    b"data: [DONE]\n\n"
)


@given(
    st.lists(st.integers(0, len(STREAM)), max_size=20),
    st.sampled_from([b": ping\n\n", BOM_UTF8]),
    st.sampled_from([b"\n", b"\r"]),
)
def test_a_stream_is_read_the_same_however_it_was_cut(cuts, opening, end):
    stream = opening + (STREAM if end == b"\n" else STREAM.replace(b"\r\n", b"\n").replace(b"\n", end))
    edges = [0, *sorted(cuts), len(stream)]
    events = Events()
    found = [data for a, b in pairwise(edges) for data in events.feed(stream[a:b])]
    assert found[-1] == b"[DONE]"
    pieces = [read_piece(data) for data in found[:-1]]
    assert [piece.text for piece in pieces] == ["", "hm", "Hé", "legacy"]
    assert [piece.content for piece in pieces] == ["", "", "Hé", "legacy"]
    assert pieces[2].finish_reason == "stop"
    assert pieces[3].usage.cached_tokens == 1


def test_calls_are_text_too_and_errors_have_a_code():
    call = b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}}]}'
    assert (read_piece(call).text, read_piece(call).content) == ("f{}", "")
    assert read_piece(b'{"error":{"code":"engine_failed"}}').error == "engine_failed"
    assert read_piece(b'{"error":"boom"}').error == "error"


ERRORS = (
    b'data: {"object":"error","message":"boom","type":"BadRequestError","code":500}',  # vLLM's, before 2025
    b'data: {"type":"error","error":{"type":"overloaded_error"}}',
    b'data: {"detail":"Internal Server Error"}',
    b'event: error\ndata: {"message":"boom"}',
    b"event: error\ndata: boom",
    b'data: {"error":"boom"}',
)


@pytest.mark.parametrize("sent", ERRORS)
def test_an_error_is_one_however_it_is_told(sent):
    (data,) = Events().feed(sent + b"\n\n")
    try:
        assert read_piece(data).error is not None
    except BadStream:
        assert sent.endswith(b"data: boom")


def test_only_the_event_that_is_named_so_is_an_error():
    answer = b'data: {"choices":[{"delta":{"content":"fine"}}]}\n\n'
    ping, *rest = Events().feed(b"event: error\n\n" + b"event: x\n" + answer + answer)
    assert [read_piece(data).text for data in (ping, *rest)] == ["fine", "fine"]
    (data,) = Events().feed(b'event: error\ndata: {"error":{"code":"gone"}}\n\n')
    assert read_piece(data).error == "gone"


def test_shapes_of_servers_that_are_not_openai_are_read():
    parts = b'[{"type":"thinking","thinking":[{"type":"text","text":"hm"}]},{"type":"text","text":"yes"}]'
    piece = read_piece(b'{"choices":[{"delta":{"content":%b}}]}' % parts)
    assert (piece.content, piece.text) == ("yes", "yeshm")
    assert read_piece(b'{"choices":null,"usage":{"completion_tokens":3}}').usage.completion_tokens == 3
    call = b'{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]}}]}'
    assert read_piece(call).text == 'f{"a":1}'
    assert Events().feed(b"data: [DONE] \n\n") == [b"[DONE]"]


def test_a_count_that_cannot_be_is_none():
    counts = ["-1", "1e30", "10000001", '"7"', "2.5", "true", "[]", "null", "7.0"]
    texts = [b'{"usage": {"completion_tokens": %s, "prompt_tokens_details": 5}}' % text.encode() for text in counts]
    assert [read_piece(text).usage.completion_tokens for text in texts] == [None] * 8 + [7]
    assert read_piece(b'{"usage": 3}').usage is None
    assert read_piece(b'{"choices": [{"delta": {"content": 0}}]}').text == "0"


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices":3}', b"[" * 5000, b"\xff"])
def test_what_is_no_chunk_is_refused(data):
    with pytest.raises(BadStream):
        read_piece(data)


def test_an_event_without_end_is_refused():
    events = Events()
    events.feed(b"x" * MOST_EVENT_BYTES)
    with pytest.raises(BadStream):
        events.feed(b"x")
    events = Events()
    half = b"data: " + b"x" * (MOST_EVENT_BYTES // 2) + b"\n"
    events.feed(half)
    with pytest.raises(BadStream):
        events.feed(half)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_or_may_not_end_in_v1(url):
    target = Target("a", check_url("--url", url))
    assert (target.root(), target.api("models")) == ("http://h:1", "http://h:1/v1/models")


def test_another_version_stays():
    assert Target("a", "https://h/api/v4").api("chat/completions") == "https://h/api/v4/chat/completions"


@pytest.mark.parametrize(
    "url", ["h:1", "ftp://h", "http://", "http://u:p@h", "http://h/?q", "http://h/#f", "http://a b"]
)
def test_an_address_that_is_none_names_its_flag(url):
    with pytest.raises(ConfigError, match="flag --target="):
        check_url("--target", url)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.integers(1, 60))
def test_bins_hold_every_value_once(values, number):
    found = bins(values, number)
    assert (len(found.counts), sum(found.counts)) == (number, len(values))
    assert found.low == min(values)
    line = sparkline(found.counts)
    assert [char == " " for char in line] == [count == 0 for count in found.counts]


def test_tokens_over_time_add_up():
    samples = [sample(arrivals=(0.5, 1.5, 9.9), claimed_output=6), sample(arrivals=(5.0,))]
    rates = tokens_over_time(samples, 10.0, 10)
    assert rates == [2, 2, 0, 0, 0, 1, 0, 0, 0, 2]
    assert bins([], 5) is None
    assert sparkline([0, 0]) == ""
    assert read_length("-", "5").draw(None) == 5
