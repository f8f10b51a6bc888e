"""The official Python client's helpers against a real server: parse() with pydantic, tools, the async one."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.served import Served

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
FORCED = {"type": "function", "function": {"name": "GetWeather"}}
LIMITS: dict[str, Any] = {"max_tokens": 100, "temperature": 0}


class Weather(pydantic.BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "cloudy", "rain"]
    windy: bool


class GetWeather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Lima"]
    celsius: bool


TOOL: Any = openai.pydantic_function_tool(GetWeather)
RESPONSES_TOOL: Any = openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_an_answer_is_parsed_whole_and_streamed(client: openai.OpenAI, served: Served) -> None:
    asked = {"model": served.model, "messages": QUESTION, "response_format": Weather} | LIMITS
    whole = client.chat.completions.parse(**asked)
    assert isinstance(whole.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    done = [event for event in events if event.type == "content.done"]
    assert [event.parsed for event in done] == [whole.choices[0].message.parsed]


def test_an_answer_that_was_cut_is_the_client_s_own_error(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=served.model, messages=QUESTION, response_format=Weather, max_tokens=2)


def test_a_named_tool_is_called_once_whole_and_streamed_and_its_result_is_understood(
    client: openai.OpenAI, served: Served
) -> None:
    asked = {"model": served.model, "messages": QUESTION, "tools": [TOOL], "tool_choice": FORCED} | LIMITS
    whole = client.chat.completions.parse(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(deltas) > 1
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == call.function.arguments
    assert done.parsed_arguments == call.function.parsed_arguments
    history = [*QUESTION, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "clear, no wind"}]
    after = client.chat.completions.create(
        model=served.model, messages=history, tools=[TOOL], tool_choice="none", **LIMITS
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def test_responses_are_parsed_and_call_tools(client: openai.OpenAI, served: Served) -> None:
    asked: dict[str, Any] = {
        "model": served.model,
        "input": "What is the weather in Paris?",
        "max_output_tokens": 100,
        "temperature": 0,
    }
    parsed = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**asked, text_format=Weather) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    forced: Any = {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "GetWeather"}}
    called = client.responses.create(**asked, **forced)
    (item,) = called.output
    assert item.type == "function_call"
    arguments = GetWeather.model_validate_json(item.arguments)
    events = list(client.responses.create(**asked, **forced, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert GetWeather.model_validate_json("".join(deltas)) == arguments
    result: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "clear"}]
    after = client.responses.create(
        model=served.model, input=result, previous_response_id=called.id, max_output_tokens=20, temperature=0
    )
    assert after.output_text


async def test_the_asynchronous_client_streams_the_same(client: openai.OpenAI, served: Served) -> None:
    asked: Any = {"model": served.model, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        stream = await made.chat.completions.create(**asked, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == client.chat.completions.create(**asked).choices[0].message.content
