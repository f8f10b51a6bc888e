import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import EngineFailed, ServerOverloaded
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, TextLogprob, Tool, ToolCallDelta, ToolChoice, Usage
from hitsend.settings import AccessSettings
from hitsend.testing import check_responses_stream
from tests.edge import COMPLETED, STARTED, Answer, Call, Edge, Wait, end, text

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
RICH = (
    STARTED,
    Delta(0, reasoning="hm"),
    Delta(0, reasoning="m"),
    Delta(0, text="Let me "),
    Delta(0, text="see."),
    Delta(0, tool_calls=(ToolCallDelta(0, "call_a", "add", '{"a"'),)),
    Delta(0, tool_calls=(ToolCallDelta(0, arguments=":1}"), ToolCallDelta(1, "call_b", "add", "{}"))),
    end(reason=FinishReason.TOOL_CALLS),
    Completed(Usage(7, 9, 3, 2), 12, {"wall_ms": 5.0}, ("w",)),
)


async def ask(edge: Edge, *headers: tuple[bytes, bytes], **fields: Any) -> Answer:
    return await edge.ask("/v1/responses", {"model": "m", "input": "hi"} | fields, *headers)


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two requests for the same."""
    ids = response["id"].removeprefix("resp_")
    told = repr({key: value for key, value in response.items() if key != "completed_at"}).replace(ids, "ID")
    return {"told": told}


async def test_a_whole_response():
    answer = await ask(Edge(*RICH), tools=[TOOL], instructions="Be brief.", metadata={"k": "v"})
    found = answer.json()
    assert answer.status == 200
    assert (found["object"], found["status"], found["model"]) == ("response", "completed", "m")
    assert found["id"] == "resp_" + answer.headers[b"x-request-id"].decode()
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert found["output"][1]["content"][0]["text"] == "Let me see."
    assert [item["arguments"] for item in found["output"][2:]] == ['{"a":1}', "{}"]
    assert found["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }
    assert found["hitsend"]["cost_microusd"] == 12
    assert found["hitsend"]["warnings"] == ["w"]
    assert (found["instructions"], found["metadata"], found["store"]) == ("Be brief.", {"k": "v"}, True)


async def test_a_stream_has_the_events_of_openai_in_their_order_and_ends_as_the_whole_answer():
    answer = await ask(Edge(*RICH), tools=[TOOL], stream=True)
    seen = check_responses_stream(answer.body)
    assert seen.names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert plain(seen.last) == plain((await ask(Edge(*RICH), tools=[TOOL])).json())


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_cut_answer_is_incomplete_and_says_why(is_stream: bool):
    edge = Edge(STARTED, text("a"), end(reason=FinishReason.LENGTH), COMPLETED)
    answer = await ask(edge, stream=is_stream)
    found = check_responses_stream(answer.body).last if is_stream else answer.json()
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"


async def test_an_answer_of_nothing_is_one_empty_message():
    found = (await ask(Edge(STARTED, end(), COMPLETED))).json()
    assert [item["content"][0]["text"] for item in found["output"]] == [""]


async def test_an_error_has_a_status_before_the_first_byte_and_is_an_event_after_it():
    refused = await ask(Edge(ServerOverloaded("full", retry_after_s=2)), stream=True)
    assert (refused.status, refused.error["code"]) == (503, "server_overloaded")
    broken = await ask(Edge(STARTED, text("a"), EngineFailed("it broke")), stream=True)
    seen = check_responses_stream(broken.body)
    assert seen.error == {"code": "server_error", "message": "it broke", "param": None, "type": "engine_failed"}
    assert seen.last["output"][0]["content"][0]["text"] == "a"
    hidden = check_responses_stream((await ask(Edge(STARTED, ValueError("PRIVATE")), stream=True)).body)
    assert hidden.error is not None
    assert "PRIVATE" not in hidden.error["message"]


async def test_logprobs_stand_beside_their_text():
    one, other = TextLogprob("a", -0.5, (97,), (TextLogprob("b", -1.0, (98,)),)), TextLogprob("c", -0.1, (99,))
    script = (
        STARTED,
        Delta(0, logprobs=(one,)),
        Delta(0, text="ac", logprobs=(other,)),
        Delta(0, logprobs=(one,), finish_reason=FinishReason.STOP, matched_stop="x"),
        COMPLETED,
    )
    edge = Edge(*script)
    found = (await ask(edge, top_logprobs=1)).json()
    entries = found["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "c", "a"]
    assert entries[0]["top_logprobs"] == [{"token": "b", "logprob": -1.0, "bytes": [98]}]
    assert (edge.pipeline.requests[0].logprobs, edge.pipeline.requests[0].top_logprobs) == (True, 1)
    streamed = check_responses_stream(
        (await ask(Edge(*script), stream=True, include=["message.output_text.logprobs"])).body
    )
    assert streamed.last["output"][0]["content"][0]["logprobs"] == entries
    assert (await ask(Edge(*script))).json()["output"][0]["content"][0]["logprobs"] == []


async def test_every_kind_of_item_becomes_a_turn():
    edge = Edge()
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "calling", "annotations": [], "logprobs": []}
        ]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]  # fmt: skip
    assert (await ask(edge, input=items, instructions="i")).status == 200
    turns = [(turn.role, turn.content) for turn in edge.pipeline.requests[0].messages]
    assert turns == [
        *(("system", "i"), ("developer", "d"), ("user", "ab"), ("assistant", "calling")),
        *(("tool", "4"), ("tool", "3"), ("assistant", "x"), ("assistant", "y")),
    ]
    fields = edge.pipeline.requests[0].messages[3].fields
    assert fields["reasoning_content"] == "t"
    assert [call["id"] for call in fields["tool_calls"]] == ["c1", "c2"]
    assert edge.pipeline.requests[0].messages[4].fields == {"tool_call_id": "c2"}


async def test_what_is_asked_for_reaches_the_pipeline():
    edge = Edge()
    schema = {"type": "object"}
    answer = await ask(
        edge,
        tools=[TOOL, TOOL | {"name": "sub", "strict": None}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "none"},
        max_output_tokens=5,
        temperature=0,
        top_p=0.5,
        seed=3,
        stop="x",
        user="u",
    )
    asked = edge.pipeline.requests[0]
    assert asked.tools == (Tool("sub", None, {"type": "object"}),)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (ToolChoice("required"), False)
    assert asked.output_format is not None
    assert (asked.output_format.kind, asked.output_format.value, asked.output_format.strict) == (
        "json_schema",
        schema,
        True,
    )
    assert asked.template_kwargs == {"enable_thinking": False}
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (5, 0, 0.5)
    assert (asked.sampling.seed, asked.stop, asked.user) == (3, ("x",), "u")
    echoed = answer.json()
    assert echoed["text"]["format"]["schema"] == schema
    assert len(echoed["tools"]) == 2
    for choice, want in (
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "add"}, ToolChoice("required", ("add",))),
    ):
        await ask(edge, tools=[TOOL], tool_choice=choice)
        assert edge.pipeline.requests[-1].tool_choice == want


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input"),
        ({"messages": []}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call_output", "output": {}}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "name": "n"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input[0].y"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [CALLED, RETURNED, RETURNED]}, "input[2].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"x": 1}]}, "tools[0].x"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"include": ["x"]}, "include[0]"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"stop": ""}, "stop"),
        ({"n": 1}, "n"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str):
    edge = Edge()
    answer = await ask(edge, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert edge.pipeline.requests == []


async def test_limits_are_counted_before_anything_is_read():
    edge = Edge(access=AccessSettings(max_messages=2, max_content_parts=1, max_tools=0, max_tokens=9))
    part = {"type": "input_text", "text": "x"}
    for fields, param in (
        ({"input": [{}, {}, {}]}, "input"),
        ({"input": [{"role": "user", "content": [part, part]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [1]}, "tools"),
        ({"max_output_tokens": 10}, "max_output_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
    ):
        answer = await ask(edge, **fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "limit" in answer.error["message"]


async def test_habits_are_told_as_warnings():
    found = (await ask(Edge(), prompt_cache_key="k", include=["reasoning.encrypted_content"], max_tool_calls=3)).json()
    text = " ".join(found["hitsend"]["warnings"])
    for field in ("prompt_cache_key", "reasoning.encrypted_content", "max_tool_calls"):
        assert f"{field}: accepted without effect" in text


async def test_a_client_that_leaves_ends_the_work_and_nothing_is_stored():
    wait = Wait()
    edge = Edge(STARTED, text("a"), wait, end(), COMPLETED)
    body = {"model": "m", "input": "hi", "stream": True}
    call = Call(edge.app, "/v1/responses", body, (), None)
    running = asyncio.create_task(call.run())
    await wait.reached.wait()
    call.leave()
    await running
    check_responses_stream(call.answer.body, is_cut=True)
    assert edge.pipeline.endings in (["cancelled"], ["closed"])
    assert edge.responses.rows == {}
    assert edge.flights.num_open == 0


deltas = st.lists(
    st.one_of(
        st.builds(lambda piece: ("reasoning", piece), st.text(max_size=4)),
        st.builds(lambda piece: ("text", piece), st.text(max_size=4)),
        st.just(("call", "")),
        st.builds(lambda piece: ("arguments", piece), st.text(max_size=4)),
    ),
    max_size=14,
)


def script_of(pieces: list[tuple[str, str]]) -> list[Delta]:
    found: list[Delta] = []
    calls = 0
    for kind, piece in pieces:
        if kind == "call":
            found.append(Delta(0, tool_calls=(ToolCallDelta(calls, f"c{calls}", "f"),)))
            calls += 1
        elif kind == "arguments":
            if found and found[-1].tool_calls:
                found.append(Delta(0, tool_calls=(ToolCallDelta(calls - 1, arguments=piece),)))
        else:
            found.append(Delta(0, **{kind: piece}))
    return found


@given(deltas, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.booleans(), st.integers(0, 20))
@settings(max_examples=80, deadline=None)
def test_any_row_of_deltas_is_a_good_stream_and_the_same_whole(
    pieces: list[tuple[str, str]], reason: FinishReason, breaks: bool, place: int
):
    script: list[Any] = [STARTED, *script_of(pieces), end(reason=reason), COMPLETED]
    if breaks:
        script.insert(1 + place % len(script), EngineFailed("broken"))
    seen = check_responses_stream(asyncio.run(ask(Edge(*script), stream=True)).body)
    assert (seen.error is not None) == breaks
    if not breaks:
        whole = asyncio.run(ask(Edge(*script))).json()
        assert plain(seen.last) == plain(whole)
        said = "".join(piece for kind, piece in pieces if kind == "text")
        texts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
        assert "".join(texts) == said
