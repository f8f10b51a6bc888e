"""Calls that a llama-server is made to give by a schema, as they go out and as they are read back."""

import json

import pytest

from hitsend.core.request import OutputFormat, Tool, ToolChoice
from hitsend.serve.engine.openai_body import encode_body
from hitsend.serve.engine.openai_wire import MAX_EVENT_BYTES
from hitsend.serve.engine.schema_calls import CallsReader, calls_in
from hitsend.serve.engine.terms import terms_of
from hitsend.settings_upstreams import UpstreamSettings
from tests.upstream.asking import request_of

TREE = {"properties": {"left": {"$ref": "#"}, "at": {"$ref": "#/$defs/at"}}, "$defs": {"at": {"type": "string"}}}
TOOLS = (Tool("look", parameters=TREE), Tool("wait"))
ONE = '[ {"name": "lo\\"ok", "arguments": {"at": "},東京", "n": [1]} } ]'
TWO = '[\n{"name":"look","arguments":{}\n},{"name": "wait", "arguments": {"s": 1}}]'


def body_of(server="llama_server", *, choice="required", parallel=True, **fields):
    settings = UpstreamSettings("l", "http://127.0.0.1:1/v1", {"near": "far"}, server=server, **fields)
    request = request_of(
        tools=TOOLS,
        tool_choice=ToolChoice(choice),
        parallel_tool_calls=parallel,
        output_format=OutputFormat("json_object"),
    )
    return json.loads(encode_body(request, 9, terms_of(settings)))


def read(text, reason="stop", *, size=None):
    """Its deltas, fed in pieces of so many bytes."""
    events = [{"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]}]
    events += [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in (text[:3], text[3:])]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    reader, size = CallsReader(1), size or len(data)
    deltas = [delta for at in range(0, len(data), size) for delta in reader.feed(data[at : at + size])]
    assert reader.fault is None
    assert (reader.is_finished, reader.counts) == (True, [1 + bool(text[:3]) + bool(text[3:])])
    return deltas


def test_the_schema_leaves_nothing_but_calls_of_what_was_offered():
    body = body_of()
    assert (body["tool_choice"], len(body["tools"])) == ("none", 2)
    schema = body["response_format"]["json_schema"]["schema"]
    calls = [one["properties"] for one in schema["items"]["anyOf"]]
    assert [(one["name"]["const"], one["arguments"]["$ref"]) for one in calls] == [
        ("look", "#/$defs/arguments0"),
        ("wait", "#/$defs/arguments1"),
    ]
    moved = schema["$defs"]["arguments0"]["properties"]
    assert (moved["left"]["$ref"], moved["at"]["$ref"]) == ("#/$defs/arguments0", "#/$defs/arguments0/$defs/at")
    assert (schema["minItems"], "maxItems" in schema) == (1, False)
    assert body_of(parallel=False)["response_format"]["json_schema"]["schema"]["maxItems"] == 1
    assert TREE["properties"]["left"] == {"$ref": "#"}, "the caller's own stays"


@pytest.mark.parametrize(
    "fields",
    [{"choice": "auto"}, {"choice": "none"}, {"server": "sglang"}, {"lacks": ("response_format",)}],
    ids=["auto", "none", "sglang", "lacks"],
)
def test_whatever_else_goes_out_as_it_came(fields):
    assert body_of(**fields).get("response_format") in (None, {"type": "json_object"})


@pytest.mark.parametrize("size", [1, 7, None])
def test_texts_come_back_as_calls_wherever_they_are_cut(size):
    thought, end = read(ONE, size=size)
    assert (thought.reasoning, thought.text) == ("Hm.", "")
    (call,) = end.tool_calls
    assert (str(end.finish_reason), end.text, call.index, call.name) == ("tool_calls", "", 0, 'lo"ok')
    assert json.loads(call.arguments) == {"at": "},東京", "n": [1]}
    assert call.id.startswith("call_")
    first, second = read(TWO, size=size)[-1].tool_calls
    assert (first.index, first.name, second.index, second.name) == (0, "look", 1, "wait")
    assert first.id != second.id


def test_a_call_that_was_cut_is_given_as_far_as_it_came():
    whole = [(call.name, call.arguments) for call in read(TWO)[-1].tool_calls]
    heads = [TWO.index("{}"), TWO.index(' {"s"')]
    for length in range(len(TWO)):
        *_, end = read(TWO[:length], "length")
        assert (str(end.finish_reason), end.text) == ("length", ""), length
        assert len(end.tool_calls) == sum(length >= head for head in heads), length
        for call, (name, arguments) in zip(end.tool_calls, whole, strict=False):
            assert call.name == name
            assert call.arguments.startswith(arguments) or arguments.startswith(call.arguments)


def test_a_server_that_kept_to_no_schema_is_passed_on():
    *_, end = read("I'd rather not.")
    assert (str(end.finish_reason), end.text, end.tool_calls) == ("stop", "I'd rather not.", ())
    assert calls_in("") == calls_in('["name"]') == calls_in('{"name": "x", "arguments": {}}') == []


def test_calls_without_end_are_a_fault():
    reader = CallsReader(1)
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 1_000_000}}]}).encode()
    for _ in range(MAX_EVENT_BYTES // 1_000_000 + 1):
        reader.feed(b"data: " + event + b"\n\n")
    assert reader.fault is not None
