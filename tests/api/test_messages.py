import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings

from hitsend.core.errors import ContextLengthExceeded, EngineFailed, RateLimitExceeded, ServeError, ServerOverloaded
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, Principal, SamplingAsked, Tool, ToolCallDelta, ToolChoice, Usage
from hitsend.settings import AccessSettings
from hitsend.testing import check_messages_stream
from tests.api.test_responses import RICH, deltas, script_of
from tests.edge import COMPLETED, STARTED, Answer, Call, Edge, Wait, end, text

TOOL = {"name": "add", "input_schema": {"type": "object"}}
SAID = [{"role": "user", "content": "hi"}]
ANSWERED = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "text", "text": "calling"},
    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}, "caller": {"type": "direct"}},
    {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}], "is_error": False},
    {"type": "tool_result", "tool_use_id": "c1"},
    {"type": "text", "text": "go on"},
]


async def ask(edge: Edge, *headers: tuple[bytes, bytes], **fields: Any) -> Answer:
    return await edge.ask("/v1/messages", {"model": "m", "messages": SAID, "max_tokens": 99} | fields, *headers)


def built(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a stream builds it up, in the form of a whole one."""
    content = []
    for block in message["content"]:
        arguments = block.pop("partial_json", "")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments) if arguments else {}
        content.append(block)
    return message | {"content": content}


def plain(message: dict[str, Any]) -> str:
    usage = {name: value for name, value in message["usage"].items() if name != "service_tier"}
    return repr(sorted((message | {"usage": usage}).items())).replace(message["id"].removeprefix("msg_"), "ID")


async def test_a_whole_message():
    answer = await ask(Edge(*RICH), tools=[TOOL])
    found = answer.json()
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "m")
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["content"][0]["thinking"] == "hmm"
    assert found["content"][0]["signature"].startswith("sha256:")
    assert found["content"][1]["text"] == "Let me see."
    assert found["content"][2] == {"type": "tool_use", "id": "call_a", "name": "add", "input": {"a": 1}}
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    assert found["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 2},
        "service_tier": "standard",
    }
    assert found["hitsend"]["cost_microusd"] == 12
    assert answer.headers[b"request-id"] == answer.headers[b"x-request-id"]


async def test_a_stream_has_the_events_of_anthropic_in_their_order_and_ends_as_the_whole_message():
    seen = check_messages_stream((await ask(Edge(*RICH), tools=[TOOL], stream=True)).body)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert seen.names == [
        "message_start",
        *("content_block_start", *["content_block_delta"] * 3, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *block,
        "message_delta",
        "message_stop",
    ]
    assert plain(built(seen.last)) == plain((await ask(Edge(*RICH), tools=[TOOL])).json())


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        (end(), "end_turn", None),
        (end(reason=FinishReason.LENGTH), "max_tokens", None),
        (end(matched="\n\nHuman:"), "stop_sequence", "\n\nHuman:"),
        (end(reason=FinishReason.CONTENT_FILTER), "refusal", None),
    ],
)
async def test_why_it_stopped(ending: Delta, reason: str, sequence: str | None):
    script = (STARTED, text("a"), ending, COMPLETED)
    whole = (await ask(Edge(*script))).json()
    streamed = check_messages_stream((await ask(Edge(*script), stream=True)).body).last
    for found in (whole, streamed):
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


async def test_arguments_that_are_no_object_are_kept_and_told():
    call = Delta(0, tool_calls=(ToolCallDelta(0, "c", "add", '{"a": 1'),))
    found = (await ask(Edge(STARTED, call, end(reason=FinishReason.LENGTH), COMPLETED))).json()
    assert found["content"][0]["input"] == {"INVALID_JSON": '{"a": 1'}
    assert found["hitsend"]["warnings"][-1].startswith("content[0].input")


async def test_every_kind_of_block_becomes_a_turn():
    edge = Edge()
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": ANSWERED},
        {"role": "user", "content": RESULTS},
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    answer = await ask(edge, messages=messages, system=system)
    asked = edge.pipeline.requests[0]
    assert [(turn.role, turn.content) for turn in asked.messages] == [
        *(
            ("system", "st"),
            ("user", "a\n\nb"),
            ("assistant", "calling"),
            ("tool", "4"),
            ("tool", ""),
            ("user", "go on"),
        ),
    ]
    assert asked.messages[2].fields["reasoning_content"] == "t"
    assert asked.messages[2].fields["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert asked.messages[4].fields == {"tool_call_id": "c1"}
    assert asked.add_generation_prompt
    warnings = answer.json()["hitsend"]["warnings"]
    assert "cache_control: accepted without effect" in warnings
    assert "is_error: accepted without effect" in warnings


async def test_a_last_turn_of_the_assistant_is_gone_on_with():
    edge = Edge()
    await ask(edge, messages=[*SAID, {"role": "assistant", "content": "The answer is ("}])
    asked = edge.pipeline.requests[0]
    assert (asked.add_generation_prompt, asked.continue_final_message) == (False, True)
    assert asked.messages[-1].content == "The answer is ("


async def test_what_is_asked_for_reaches_the_pipeline():
    edge = Edge()
    await ask(
        edge,
        tools=[TOOL | {"type": "custom", "description": "d", "strict": True}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 9},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        stop_sequences=["x", "x"],
        temperature=0.5,
        top_p=0.5,
        top_k=4,
        service_tier="auto",
    )
    asked = edge.pipeline.requests[0]
    assert asked.tools == (Tool("add", "d", {"type": "object"}, strict=True),)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (ToolChoice("required", ("add",)), False)
    assert (asked.thinking_token_budget, asked.template_kwargs) == (9, {"enable_thinking": True})
    assert asked.output_format is not None
    assert (asked.user, asked.stop, asked.max_tokens) == ("u", ("x",), 99)
    assert asked.sampling == SamplingAsked(temperature=0.5, top_p=0.5, top_k=4)
    for choice, mode in (("auto", "auto"), ("any", "required"), ("none", "none")):
        await ask(edge, tools=[TOOL], tool_choice={"type": choice})
        assert edge.pipeline.requests[-1].tool_choice == ToolChoice(mode)
    await ask(edge, thinking={"type": "disabled"})
    assert edge.pipeline.requests[-1].template_kwargs == {"enable_thinking": False}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "id": "i"}]}]}, "content[0].id"),
        ({"messages": [{"role": "user", "content": RESULTS}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*SAID, {"role": "assistant", "content": ANSWERED}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "all"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"x": 1}}, "metadata.x"),
        ({"seed": 1}, "seed"),
        ({"n": 1}, "n"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], names: str):
    edge = Edge()
    answer = await ask(edge, **fields)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert names in answer.error["message"]
    assert edge.pipeline.requests == []


async def test_an_answer_of_nothing_can_be_sent_back_as_it_came():
    edge = Edge()
    empty = {"role": "assistant", "content": []}
    for turns in ([*SAID, empty, *SAID], [*SAID, empty]):
        assert (await ask(edge, messages=turns)).status == 200
        assert [(turn.role, turn.content) for turn in edge.pipeline.requests[-1].messages][1] == ("assistant", "")


async def test_limits_are_counted_before_anything_is_read():
    edge = Edge(access=AccessSettings(max_messages=2, max_content_parts=1, max_tools=0, max_tokens=9))
    for fields, field in (
        ({"messages": [{}, {}, {}]}, "messages"),
        ({"messages": [{"content": [{}, {}]}]}, "messages"),
        ({"messages": [{"content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"tools": [1], "max_tokens": 1}, "tools"),
        ({"max_tokens": 10}, "max_tokens"),
        ({"stop_sequences": ["a"] * 5, "max_tokens": 1}, "stop_sequences"),
    ):
        message = (await ask(edge, **fields)).error["message"]
        assert message.startswith(field)
        assert "limit" in message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextLengthExceeded("too long"), 400, "invalid_request_error"),
        (RateLimitExceeded("slow down", retry_after_s=3), 429, "rate_limit_error"),
        (ServerOverloaded("full"), 503, "overloaded_error"),
        (EngineFailed("it broke"), 500, "api_error"),
        (ValueError("PRIVATE"), 500, "api_error"),
    ],
)
async def test_an_error_has_a_status_before_the_first_byte_and_is_an_event_after_it(
    error: Exception, status: int, kind: str
):
    answer = await ask(Edge(error), stream=True)
    assert (answer.status, answer.error["type"]) == (status, kind)
    seen = check_messages_stream((await ask(Edge(STARTED, text("a"), error), stream=True)).body)
    assert seen.error is not None
    assert seen.error["type"] == kind
    assert isinstance(error, ServeError) or "PRIVATE" not in seen.error["message"]


async def test_keys_come_in_anthropic_s_header_too_on_every_route():
    edge = Edge(keys={"hs_good": Principal(key_id="k", name="n"), "hs_other": Principal(key_id="o", name="o")})
    mine, bearer = (b"x-api-key", b"hs_good"), (b"authorization", b"Bearer hs_good")
    assert (await ask(edge, mine, (b"anthropic-version", b"2023-06-01"))).status == 200
    assert (await edge.ask("/v1/models", None, mine)).status == 200
    for headers in ((), ((b"x-api-key", b"wrong"),), (mine, bearer), (mine, mine)):
        answer = await ask(edge, *headers)
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
    assert (await edge.ask("/v1/messages", None, bearer)).error["type"] == "invalid_request_error"
    assert (await edge.ask("/v1/messages", None, mine)).headers[b"allow"] == b"POST"


async def test_tokens_are_counted_without_running():
    edge = Edge()
    body = {"model": "m", "messages": SAID, "system": "abc", "thinking": {"type": "adaptive"}}
    assert (await edge.ask("/v1/messages/count_tokens", body)).json() == {"input_tokens": 5}
    assert edge.pipeline.requests == []
    refused = await edge.ask("/v1/messages/count_tokens", body | {"max_tokens": 4})
    assert "max_tokens" in refused.error["message"]


async def test_a_client_that_leaves_ends_the_work():
    wait = Wait()
    edge = Edge(STARTED, text("a"), wait, end(), COMPLETED)
    body = {"model": "m", "messages": SAID, "max_tokens": 9, "stream": True}
    call = Call(edge.app, "/v1/messages", body, (), None)
    running = asyncio.create_task(call.run())
    await wait.reached.wait()
    call.leave()
    await running
    check_messages_stream(call.answer.body, is_cut=True)
    assert edge.pipeline.endings in (["cancelled"], ["closed"])
    assert edge.flights.num_open == 0


@given(deltas)
@settings(max_examples=80, deadline=None)
def test_any_row_of_deltas_is_a_good_stream_and_the_same_whole(pieces: list[tuple[str, str]]):
    script = [STARTED, *script_of(pieces), end(), Completed(Usage(1, 2), 3, {})]
    seen = check_messages_stream(asyncio.run(ask(Edge(*script), stream=True)).body)
    whole = asyncio.run(ask(Edge(*script))).json()
    kinds = [block["type"] for block in whole["content"]]
    assert [block["type"] for block in seen.last["content"]] == kinds
    for streamed, block in zip(seen.last["content"], whole["content"], strict=True):
        for field in ("text", "thinking", "signature", "id"):
            assert streamed.get(field) == block.get(field)
        if block["type"] == "tool_use" and "INVALID_JSON" in block["input"]:
            assert streamed["partial_json"] == block["input"]["INVALID_JSON"]
    assert "".join(b["text"] for b in whole["content"] if b["type"] == "text") == "".join(
        piece for kind, piece in pieces if kind == "text"
    )
