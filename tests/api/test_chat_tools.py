import json
from typing import Any

import pytest

from hitsend.core.errors import InvalidRequest
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, Principal, Request, Tool, ToolCallDelta, ToolChoice
from hitsend.serve.api import chat_request
from hitsend.settings import AccessSettings
from hitsend.testing import check_stream
from tests.edge import COMPLETED, STARTED, Edge, end

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "strict": False}},
]
CALLS = (
    STARTED,
    Delta(0, reasoning="hm"),
    Delta(0, text="Let me see."),
    Delta(0, tool_calls=(ToolCallDelta(0, "call_0", "f", '{"x":'),)),
    Delta(0, tool_calls=(ToolCallDelta(0, arguments="1}"), ToolCallDelta(1, "call_1", "g", "{}"))),
    end(0, FinishReason.TOOL_CALLS),
    COMPLETED,
)


def parse(limits: AccessSettings | None = None, **fields: Any) -> Request:
    body = json.dumps({"messages": [{"role": "user", "content": "q"}]} | fields).encode()
    request, _ = chat_request.parse(
        body, limits or AccessSettings(), request_id="r", principal=Principal(), default_model="m"
    )
    return request


def test_tools_become_our_own_words():
    request = parse(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert request.tools == (Tool("f", "d", SCHEMA), Tool("g"))
    assert request.tool_choice == ToolChoice()
    assert not request.parallel_tool_calls
    assert not any("parallel" in warning for warning in request.warnings)
    assert parse(tools=TOOLS, tool_choice="none").tool_choice == ToolChoice("none")


def test_strictness_is_taken_over():
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert parse(tools=strict).tools[0].strict
    assert not parse(tools=TOOLS).tools[0].strict


def test_the_size_of_all_tools_is_limited_and_told():
    with pytest.raises(InvalidRequest, match=r"tools: \d+ bytes, limit 100 \(access.max_tools_bytes\)"):
        parse(AccessSettings(max_tools_bytes=100), tools=TOOLS)


def test_an_effort_is_kept_for_the_template():
    request = parse(reasoning_effort="low")
    assert (request.reasoning_effort, request.template_kwargs) == ("low", {})
    parse(reasoning_effort="none", chat_template_kwargs={"enable_thinking": False})


async def test_calls_and_thoughts_are_streamed_in_chunks_of_their_own():
    answer = await Edge(*CALLS).chat(stream=True)
    seen = check_stream(answer.body)
    assert seen.texts == {0: "Let me see."}
    assert seen.reasoning == {0: "hm"}
    assert seen.finish_reasons == {0: "tool_calls"}
    assert seen.tool_calls == {0: [("call_0", "f", '{"x":1}'), ("call_1", "g", "{}")]}
    assert b'"delta":{"reasoning_content":"hm","reasoning":"hm"}' in answer.body
    assert b'{"index":0,"function":{"arguments":"{\\"x\\":","name":"f"},"id":"call_0","type":"function"}' in answer.body


async def test_a_whole_answer_says_the_same():
    choice = (await Edge(*CALLS).chat()).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    silent = (STARTED, Delta(0, reasoning="hm"), end(0, FinishReason.LENGTH), COMPLETED)
    assert (await Edge(*silent).chat()).json()["choices"][0]["message"]["content"] is None


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_are_left(mode: Any):
    request = parse(tools=TOOLS, tool_choice=allowed(mode, "g"))
    assert request.tools == (Tool("g"),)
    assert request.tool_choice == ToolChoice(mode)
    every = parse(tools=TOOLS, tool_choice=allowed(mode, "g", "f", "g"))
    assert [tool.name for tool in every.tools] == ["f", "g"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", "nobody"), "tool_choice.allowed_tools.tools[0]"),
        (allowed("auto", "f", "nobody"), "tool_choice.allowed_tools.tools[1]"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("none", "f"), "tool_choice.allowed_tools.mode"),
        (allowed(None, "f"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed("auto", "f") | {"function": {"name": "f"}}, "tool_choice.allowed_tools"),
        (
            {"type": "function", "function": {"name": "f"}} | {"allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [allowed("auto", "f")]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice.allowed_tools.tools[0].name",
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.mode"),
    ],
)
def test_a_bad_set_of_allowed_tools_is_named(choice: Any, param: str):
    with pytest.raises(InvalidRequest) as refused:
        parse(tools=TOOLS, tool_choice=choice)
    assert refused.value.param == param
