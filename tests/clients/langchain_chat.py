"""LangChain's ChatOpenAI and OpenAIEmbeddings against a running server: langchain_chat.py URL MODEL EMBEDDING."""

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from scripted import Target, main

MESSAGES = [SystemMessage("You answer in one short sentence."), HumanMessage("What is the capital of France?")]


class Weather(BaseModel, extra="forbid"):
    """What the weather is like; forbids more, since a weak model adds properties until its tokens are used up."""

    sky: Literal["clear", "cloudy", "rain"]
    degrees: int = Field(ge=-40, le=50)
    windy: bool


@tool
def get_weather(city: Literal["Paris", "Lima"], celsius: bool) -> str:
    """The weather in a city."""
    return f"sunny in {city}, {'20 C' if celsius else '68 F'}"


def _chat(target: Target, **fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=target.base, api_key="none", model=target.model, temperature=0, max_retries=0, max_tokens=120, **fields
    )


def invoke(target: Target) -> None:
    """invoke, usage_metadata, finish_reason"""
    answer = _chat(target).invoke(MESSAGES)
    assert answer.content
    usage = answer.usage_metadata
    assert usage["input_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def stream(target: Target) -> None:
    """stream and astream: same text and usage as invoke"""
    chat = _chat(target, stream_usage=True)
    whole = chat.invoke(MESSAGES)
    parts = list(chat.stream(MESSAGES))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    assert len(parts) > 2
    assert joined.content == whole.content
    for name in ("input_tokens", "output_tokens"):
        assert joined.usage_metadata[name] == whole.usage_metadata[name]

    async def text() -> str:
        return "".join([part.content async for part in chat.astream(MESSAGES)])

    assert asyncio.run(text()) == whole.content


def batch(target: Target) -> None:
    """batch: three at once"""
    answers = _chat(target).batch([MESSAGES] * 3)
    assert len({answer.content for answer in answers}) == 1


def tools(target: Target) -> None:
    """bind_tools, forced (named and any), the call run, its result sent back"""
    for choice in ("get_weather", "any"):
        bound = _chat(target).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(MESSAGES)
        assert [call["name"] for call in answer.tool_calls] == ["get_weather"], answer
        result = get_weather.invoke(answer.tool_calls[0])
        assert isinstance(result, ToolMessage)
        assert _chat(target).bind_tools([get_weather], tool_choice="none").invoke([*MESSAGES, answer, result]).content


def streamed_tools(target: Target) -> None:
    """bind_tools, streamed: tool_call_chunks add up to the same call; strict"""
    bound = _chat(target).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    whole = bound.invoke(MESSAGES)
    joined = None
    for part in bound.stream(MESSAGES):
        joined = part if joined is None else joined + part
    assert joined.tool_calls[0]["args"] == whole.tool_calls[0]["args"]
    assert joined.tool_calls[0]["args"].keys() == {"city", "celsius"}


def structured(target: Target) -> None:
    """with_structured_output: json_schema, function_calling; strict, include_raw, streamed"""
    for method in ("json_schema", "function_calling"):
        made = _chat(target).with_structured_output(Weather, method=method)
        assert isinstance(made.invoke("Weather in Paris?"), Weather), method
        assert isinstance(list(made.stream("Weather in Paris?"))[-1], Weather), method
    strict = _chat(target).with_structured_output(Weather, method="json_schema", strict=True, include_raw=True)
    found = strict.invoke("Weather in Paris?")
    assert isinstance(found["raw"], AIMessage)
    assert isinstance(found["parsed"], Weather)
    assert found["parsing_error"] is None


def responses(target: Target) -> None:
    """use_responses_api: invoke, stream, previous_response_id, forced tool, structured output"""
    chat = _chat(target, use_responses_api=True)
    answer = chat.invoke(MESSAGES)
    assert answer.text
    assert "".join(part.text for part in chat.stream(MESSAGES)) == answer.text
    assert chat.invoke("And of Peru?", previous_response_id=answer.response_metadata["id"]).text
    called = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(MESSAGES)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke("Weather?"), Weather)


def errors(target: Target) -> None:
    """errors: unknown model, context length"""
    try:
        _chat(target).with_config().bind(model="nope").invoke("x")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")
    try:
        _chat(target).invoke("word " * 5000)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("a prompt over the context was served")


def embeddings(target: Target) -> None:
    """OpenAIEmbeddings with check_embedding_ctx_length=False: query, documents, dimensions"""
    made = OpenAIEmbeddings(
        base_url=target.base, api_key="none", model=target.embedding, check_embedding_ctx_length=False
    )
    texts = ["The cat sits outside", "A feline is outdoors", "A man is playing guitar"]
    vectors = made.embed_documents(texts)
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert near > 0.5 > far
    alone = made.embed_query(texts[0])
    assert sum(a * b for a, b in zip(vectors[0], alone, strict=True)) > 0.9999
    short = made.model_copy(update={"dimensions": 64}).embed_query(texts[0])
    assert len(short) == 64


def embeddings_as_ids(target: Target) -> None:
    """OpenAIEmbeddings with check_embedding_ctx_length=True: sends ids of OpenAI's vocabulary; one outside is a 400"""
    litellm = find_spec("litellm")  # it ships the vocabulary that tiktoken would download
    assert litellm is not None
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(litellm.origin).parent / "litellm_core_utils" / "tokenizers")
    made = OpenAIEmbeddings(base_url=target.base, api_key="none", model=target.embedding)
    plain = made.model_copy(update={"check_embedding_ctx_length": False})
    text = "The cat sits outside"
    likeness = sum(a * b for a, b in zip(made.embed_query(text), plain.embed_query(text), strict=True))
    assert likeness < 0.9  # they are other words in this model's vocabulary: nobody can tell that by the ids
    try:
        made.embed_query("naïve Zürich café: antidisestablishmentarianism")
    except openai.BadRequestError as error:
        assert error.param == "input"
    else:
        raise AssertionError("ids outside the vocabulary were taken")


if __name__ == "__main__":
    main(
        "langchain-openai",
        *(invoke, stream, batch, tools, streamed_tools, structured, responses, errors, embeddings, embeddings_as_ids),
    )
