"""What the official clients make of reasoning, calls, structured output and broken streams, over a real socket.

The pipeline is scripted: the bundled model neither thinks nor calls.
"""

import anthropic
import openai
import pydantic
import pytest

from hitsend.core.errors import EngineFailed, ServerOverloaded
from hitsend.core.request import Principal
from tests.api.test_responses import RICH
from tests.edge import COMPLETED, STARTED, Edge, end, text
from tests.stream.test_sockets import serving

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

FUNCTION: openai.types.responses.FunctionToolParam = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
}
TOOL: anthropic.types.ToolParam = {"name": "add", "input_schema": {"type": "object"}}
SAID: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]


class Answered(pydantic.BaseModel):
    a: int


def openai_client(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)


def anthropic_client(port: int, key: str = "k") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0)


async def test_openai_s_stream_helper_sees_reasoning_text_and_calls():
    async with serving(Edge(*RICH)) as port, openai_client(port) as client:
        async with client.responses.stream(model="m", input="hi", tools=[FUNCTION]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="m", input="hi", tools=[FUNCTION])
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].parsed_arguments == {"a": 1}
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert snapshots == ['{"a"', '{"a":1}', "{}"]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hmm"
    assert final.output_text == whole.output_text == "Let me see."
    assert whole.usage == final.usage
    assert [item.type for item in whole.output] == [item.type for item in final.output]


async def test_openai_s_loop_of_calls_and_results():
    edge = Edge(*RICH)
    async with serving(edge) as port, openai_client(port) as client:
        first = await client.responses.create(model="m", input="hi", tools=[FUNCTION])
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            for item in first.output
            if item.type == "function_call"
        ]
        await client.responses.create(model="m", input=results, previous_response_id=first.id)
        replayed = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), *results]
        await client.responses.create(model="m", input=replayed, store=False)
    for request in edge.pipeline.requests[1:]:
        assert [turn.role for turn in request.messages] == ["user", "assistant", "tool", "tool"]
        assert [call["id"] for call in request.messages[1].fields["tool_calls"]] == ["call_a", "call_b"]


async def test_openai_s_parse_gets_its_type():
    edge = Edge(STARTED, text('{"a":'), text("3}"), end(), COMPLETED)
    async with serving(edge) as port, openai_client(port) as client:
        answer = await client.responses.parse(model="m", input="hi", text_format=Answered)
    assert answer.output_parsed == Answered(a=3)
    asked = edge.pipeline.requests[0].output_format
    assert asked is not None
    assert (asked.kind, asked.strict) == ("json_schema", True)


async def test_openai_s_client_sees_a_broken_stream_as_failed():
    async with serving(Edge(STARTED, text("a"), EngineFailed("it broke"))) as port, openai_client(port) as client:
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "it broke"


async def test_anthropic_s_stream_helper_sees_thinking_text_and_calls():
    async with serving(Edge(*RICH)) as port, anthropic_client(port) as client:
        async with client.messages.stream(model="m", max_tokens=9, messages=SAID, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        whole = await client.messages.create(model="m", max_tokens=9, messages=SAID, tools=[TOOL])
    assert {"thinking", "text", "input_json", "signature"} <= set(kinds)
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.content[2].input == {"a": 1}
    assert (final.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert (final.usage.output_tokens, final.usage.cache_read_input_tokens) == (9, 3)


async def test_anthropic_s_loop_of_calls_and_results():
    edge = Edge(*RICH)
    async with serving(edge) as port, anthropic_client(port) as client:
        first = await client.messages.create(model="m", max_tokens=9, messages=SAID, tools=[TOOL])
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            for block in first.content
            if block.type == "tool_use"
        ]
        turns = [*SAID, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await client.messages.create(model="m", max_tokens=9, messages=turns, tools=[TOOL])
    messages = edge.pipeline.requests[1].messages
    assert [turn.role for turn in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1].fields["reasoning_content"] == "hmm"


async def test_anthropic_s_client_raises_what_broke_a_stream():
    async with serving(Edge(STARTED, text("a"), EngineFailed("it broke"))) as port, anthropic_client(port) as client:
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            async with client.messages.stream(model="m", max_tokens=9, messages=SAID) as stream:
                await stream.get_final_message()


async def test_anthropic_s_client_shows_its_key_in_its_own_header():
    edge = Edge(keys={"hs_good": Principal(key_id="k", name="n")})
    async with serving(edge) as port:
        async with anthropic_client(port, "hs_good") as client:
            assert (await client.messages.create(model="m", max_tokens=9, messages=SAID)).content[0].text == "hi"
            assert (await client.messages.count_tokens(model="m", messages=SAID)).input_tokens == 2
        async with anthropic_client(port, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=9, messages=SAID)


async def test_anthropic_s_client_knows_a_full_server():
    async with serving(Edge(ServerOverloaded("full", retry_after_s=1))) as port, anthropic_client(port) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(model="m", max_tokens=9, messages=SAID)
    assert (refused.value.status_code, refused.value.body["error"]["type"]) == (503, "overloaded_error")
