"""What goes to an upstream, and what is read of its stream, cut at every byte."""

import json

import pytest

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import (
    Message,
    OutputFormat,
    Request,
    SamplingAsked,
    TextLogprob,
    Tool,
    ToolCallDelta,
    ToolChoice,
    Usage,
)
from hitsend.serve.engine.openai_body import asked, encode_body
from hitsend.serve.engine.openai_wire import ChunkReader, Unreadable, UpstreamSaid
from hitsend.serve.engine.profiles import OPENAI_FIELDS
from hitsend.serve.engine.terms import terms_of
from hitsend.serve.engine.upstream_generation import merged
from hitsend.settings_upstreams import UpstreamSettings


def body(**fields):
    request = Request("r", "near", fields.pop("messages", (Message("user", "hé"),)), **fields)
    terms = terms_of(UpstreamSettings(name="there", models={"near": "far"}))
    return json.loads(encode_body(request, 9, terms)), set(asked(request)) - OPENAI_FIELDS


def test_a_plain_request_carries_nothing_that_was_not_asked_for():
    sent, extra = body()
    assert sent == {
        "model": "far",
        "messages": [{"role": "user", "content": "hé"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
    }
    assert extra == set()


def test_what_was_asked_for_goes_out():
    tool = Tool("f", "does", {"type": "object"}, strict=True)
    sent, extra = body(
        sampling=SamplingAsked(temperature=0.0, seed=3),
        stop=("x",),
        n=2,
        logprobs=True,
        top_logprobs=2,
        tools=(tool,),
        tool_choice=ToolChoice("required", ("f",)),
        parallel_tool_calls=False,
        output_format=OutputFormat("json_schema", {"type": "object"}, "s"),
        logit_bias=((5, -100.0),),
        reasoning_effort="low",
    )
    assert (sent["temperature"], sent["seed"], sent["stop"], sent["n"]) == (0.0, 3, ["x"], 2)
    assert sent["tools"][0]["function"] == {
        "name": "f",
        "description": "does",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert sent["parallel_tool_calls"] is False
    assert sent["response_format"]["json_schema"] == {"name": "s", "schema": {"type": "object"}, "strict": True}
    assert (sent["logit_bias"], sent["reasoning_effort"]) == ({"5": -100.0}, "low")
    assert extra == set()


def test_nothing_is_written_out_where_others_parse_it():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    history = Message("assistant", None, {"tool_calls": [call]}), Message("tool", "", {"tool_call_id": "c"})
    sent, _ = body(messages=history, tools=(Tool("f"),))
    assert sent["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert sent["messages"][0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert call["function"]["arguments"] == "", "the history is somebody else's"


def test_extensions_are_named():
    _, extra = body(
        sampling=SamplingAsked(top_k=5, min_p=0.1),
        template_kwargs={"enable_thinking": False},
        output_format=OutputFormat("regex", "a+"),
        stop_token_ids=(1,),
        min_tokens=2,
        ignore_eos=True,
        include_stop=True,
        add_generation_prompt=False,
    )
    assert extra == {
        "top_k",
        "min_p",
        "chat_template_kwargs",
        "structured_outputs.regex",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "include_stop_str_in_output",
        "add_generation_prompt",
    }


def fault_of(data):
    reader = ChunkReader(1)
    assert reader.feed(data) == []
    return reader.fault


def chunk(delta=None, reason=None, index=0, **fields):
    return {"choices": [{"index": index, "delta": delta or {}, "finish_reason": reason, **fields}]}


CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
PIECE = {"index": 0, "id": "c1", "function": {"arguments": "{}"}}
LOGPROB = {"token": "é", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "a", "logprob": -1, "bytes": [97]}]}
STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "é\u2028"}, logprobs={"content": [LOGPROB]}),
    chunk({"tool_calls": [CALL]}),
    chunk({"tool_calls": [PIECE]}),
    chunk(reason="tool_calls"),
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 9}},
    },
]


def wire(end="\n\n", prefix="data: "):
    events = [": ping", *(prefix + json.dumps(one, ensure_ascii=False) for one in STREAM), "data: [DONE]"]
    return "".join(event + end for event in events).encode()


@pytest.mark.parametrize(
    ("end", "prefix"),
    [
        ("\n\n", "data: "),
        ("\r\n\r\n", "data:"),
        ("\n\n", "event: x\ndata: "),
        ("\r\r", "data: "),
        ("\r\n\r", "event: x\rdata: "),
        ("\n\r", "event: x\r\ndata: "),
    ],
)
def test_a_stream_reads_the_same_cut_anywhere(end, prefix):
    data = wire(end, prefix)
    for cut in range(len(data)):
        reader = ChunkReader(1)
        deltas = reader.feed(data[:cut]) + reader.feed(data[cut:])
        assert reader.is_done
        assert reader.is_finished
        assert reader.usage == Usage(5, 4, 5)
        assert "".join(delta.text for delta in deltas) == "é\u2028"
        assert "".join(delta.reasoning for delta in deltas) == "hm"
        assert [call for delta in deltas for call in delta.tool_calls] == [
            ToolCallDelta(0, "c1", "f"),
            ToolCallDelta(0, None, None, "{}"),
        ]
        logprobs = [one for delta in deltas for one in delta.logprobs]
        assert logprobs == [TextLogprob("é", -0.5, (0xC3, 0xA9), (TextLogprob("a", -1.0, (97,)),))]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.TOOL_CALLS]
        assert reader.counts == [4]


@pytest.mark.parametrize(
    "event",
    [b"{", b"[]", b'{"choices":[{"delta":{"content":"\xff"}}]}', b'{"choices":[{"index":1}]}', b'"x"', b"null"],
)
def test_what_cannot_be_read_is_never_skipped(event):
    assert isinstance(fault_of(b"data: " + event + b"\n\n"), Unreadable)


def test_an_unknown_finish_reason_is_not_taken_for_stop():
    assert isinstance(fault_of(b"data: " + json.dumps(chunk(reason="weird")).encode() + b"\n\n"), Unreadable)


def test_an_error_inside_the_stream_is_one():
    assert isinstance(fault_of(b'data: {"error":{"message":"no"}}\n\n'), UpstreamSaid)


def test_nothing_follows_the_end_of_a_choice():
    reader = ChunkReader(1)
    events = [chunk({"content": "a"}), chunk(reason="stop"), chunk({"content": "b"}), chunk(reason="stop")]
    deltas = reader.feed(b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events))
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a", None), ("", FinishReason.STOP)]
    assert reader.close() == []


def test_usage_of_zero_is_usage_and_a_negative_one_is_none():
    reader = ChunkReader(1)
    reader.feed(b'data: {"usage":{"prompt_tokens":0,"completion_tokens":0}}\n\n')
    assert reader.usage == Usage()
    reader = ChunkReader(1)
    reader.feed(b'data: {"usage":{"prompt_tokens":-1}}\n\n')
    assert reader.usage is None


def test_an_endless_event_ends():
    reader = ChunkReader(1)
    for _ in range(100):
        reader.feed(b"x" * 100_000)
    assert isinstance(reader.fault, Unreadable)


def test_merging_loses_nothing():
    reader = ChunkReader(2)
    events = [chunk({"content": "a"}), chunk({"content": "b"}), chunk({"content": "c"}, index=1)]
    events += [
        chunk({"reasoning": "r"}),
        chunk({"content": "d"}),
        chunk({"content": "e"}),
        chunk({"content": "f"}, "stop"),
    ]
    deltas = reader.feed(
        b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in [*events, chunk(reason="stop", index=1)])
    )
    deltas += reader.close()
    assert [(one.index, one.text, one.reasoning, one.finish_reason) for one in merged(deltas)] == [
        (0, "ab", "", None),
        (1, "c", "", None),
        (0, "", "r", None),
        (0, "def", "", None),
        (1, "", "", FinishReason.STOP),
        (0, "", "", FinishReason.STOP),
    ]
