"""LiteLLM's SDK against a running server: python litellm_sdk.py URL MODEL EMBEDDING_MODEL.

With LITELLM_LOCAL_MODEL_COST_MAP=True it reads its list of prices from its own file, not from the network.
"""

import asyncio
import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel
from scripted import Target, main

litellm.suppress_debug_info = True

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Lima"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "cloudy", "rain"]
    windy: bool


def _asked(target: Target, **fields: Any) -> dict[str, Any]:
    common = {"model": f"openai/{target.model}", "api_base": target.base, "api_key": "none", "messages": MESSAGES}
    return common | {"max_tokens": 60, "temperature": 0, "num_retries": 0} | fields


def completion(target: Target) -> None:
    """completion and acompletion: text, usage, finish_reason"""
    whole = litellm.completion(**_asked(target))
    assert whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")
    again = asyncio.run(litellm.acompletion(**_asked(target)))
    assert again.choices[0].message.content == whole.choices[0].message.content


def stream(target: Target) -> None:
    """stream, stream_chunk_builder: same text and usage"""
    whole = litellm.completion(**_asked(target))
    chunks = list(litellm.completion(**_asked(target, stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def tools(target: Target) -> None:
    """tools: forced (named and required), whole and streamed, result sent back"""
    for choice in (FORCED, "required"):
        asked = _asked(target, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        message = litellm.completion(**asked).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["get_weather"]
        arguments = message.tool_calls[0].function.arguments
        assert json.loads(arguments).keys() == {"city", "celsius"}
        chunks = list(litellm.completion(**asked, stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert built.choices[0].message.tool_calls[0].function.arguments == arguments
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        history = [*MESSAGES, message, result]
        after = litellm.completion(**_asked(target, messages=history, tools=[TOOL], tool_choice="none"))
        assert after.choices[0].message.content


def formats(target: Target) -> None:
    """response_format: pydantic model, json_schema, json_object"""
    answer = litellm.completion(**_asked(target, response_format=Weather))
    assert Weather.model_validate_json(answer.choices[0].message.content)
    named = {"name": "weather", "strict": True, "schema": TOOL["function"]["parameters"]}
    schema = {"type": "json_schema", "json_schema": named}
    answer = litellm.completion(**_asked(target, response_format=schema))
    assert json.loads(answer.choices[0].message.content).keys() == {"city", "celsius"}
    answer = litellm.completion(**_asked(target, response_format={"type": "json_object"}))
    assert answer.choices[0].message.content.lstrip().startswith("{")


def responses(target: Target) -> None:
    """responses: whole, streamed, previous_response_id"""
    asked = {"model": f"openai/{target.model}", "api_base": target.base, "api_key": "none", "temperature": 0}
    asked["max_output_tokens"] = 20
    first = litellm.responses(**asked, input="My name is Ada.")
    assert first.output[0].content[0].text
    events = list(litellm.responses(**asked, input="My name is Ada.", stream=True))
    assert events[0].type == "response.created"
    assert events[-1].response.status == first.status  # the type of an incomplete one is completed, by this client
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == first.output[0].content[0].text
    second = litellm.responses(**asked, input="And yours?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens


def text_completion(target: Target) -> None:
    """text_completion (/v1/completions)"""
    asked = _asked(target) | {"model": f"text-completion-openai/{target.model}", "prompt": "One, two, three,"}
    del asked["messages"]
    assert litellm.text_completion(**asked).choices[0].text


def embedding(target: Target) -> None:
    """embedding: single, batch, dimensions, base64"""
    asked = {"model": f"openai/{target.embedding}", "api_base": target.base, "api_key": "none"}
    texts = ["The cat sits outside", "A feline is outdoors", "A man is playing guitar"]
    vectors = [one["embedding"] for one in litellm.embedding(**asked, input=texts).data]
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert near > 0.5 > far
    assert len(litellm.embedding(**asked, input=texts[0]).data[0]["embedding"]) == len(vectors[0])
    short = litellm.embedding(**asked, input=texts[0], dimensions=64, allowed_openai_params=["dimensions"])
    assert len(short.data[0]["embedding"]) == 64
    assert litellm.embedding(**asked, input=texts[0], encoding_format="base64").data[0]["embedding"]


def errors(target: Target) -> None:
    """errors: NotFoundError, BadRequestError, ContextWindowExceededError"""
    wanted = (
        (litellm.NotFoundError, {"model": "openai/nope"}),
        (litellm.BadRequestError, {"temperature": 9}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    )
    for kind, fields in wanted:
        try:
            litellm.completion(**_asked(target, **fields))
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    main("litellm", completion, stream, tools, formats, responses, text_completion, embedding, errors)
