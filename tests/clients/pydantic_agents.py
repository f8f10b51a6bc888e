"""pydantic-ai against a running server: python pydantic_agents.py URL MODEL EMBEDDING_MODEL."""

import asyncio
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, Embedder, NativeOutput, RunContext, Tool, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from scripted import Target, main

SETTINGS: Any = {"temperature": 0, "max_tokens": 120}


class Weather(BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "cloudy", "rain"]
    degrees: int = Field(ge=-40, le=50)
    windy: bool


def _models(target: Target) -> list[Model]:
    provider = OpenAIProvider(base_url=target.base, api_key="none")
    return [OpenAIChatModel(target.model, provider=provider), OpenAIResponsesModel(target.model, provider=provider)]


def text(target: Target) -> None:
    """text and usage, run and run_stream (chat and responses)"""
    for model in _models(target):
        agent = Agent(model, instructions="You answer in one short sentence.", model_settings=SETTINGS)
        whole = agent.run_sync("What is the capital of France?")
        assert whole.output
        assert whole.usage.input_tokens > 0

        async def streamed(agent: Agent[Any, str] = agent) -> str:
            async with agent.run_stream("What is the capital of France?") as run:
                return await run.get_output()

        assert asyncio.run(streamed()) == whole.output


def history(target: Target) -> None:
    """message_history (chat and responses)"""
    for model in _models(target):
        agent = Agent(model, model_settings=SETTINGS)
        first = agent.run_sync("My name is Ada.")
        second = agent.run_sync("What is my name?", message_history=first.all_messages())
        assert second.usage.input_tokens > first.usage.input_tokens


def structured(target: Target) -> None:
    """output_type: ToolOutput and NativeOutput, run and run_stream (chat and responses)"""
    for model in _models(target):
        for wanted in (ToolOutput(Weather), ToolOutput(Weather, strict=True), NativeOutput(Weather)):
            agent = Agent(model, output_type=wanted, model_settings=SETTINGS)
            assert isinstance(agent.run_sync("The weather in Paris?").output, Weather)

            async def streamed(agent: Agent[Any, Weather] = agent) -> Weather:
                async with agent.run_stream("The weather in Paris?") as run:
                    return await run.get_output()

            assert isinstance(asyncio.run(streamed()), Weather)


def tools(target: Target) -> None:
    """a tool is called, run, its result sent back, then a structured output (chat and responses)"""
    asked: list[str] = []

    def get_weather(city: Literal["Paris", "Lima"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "20 degrees, no wind"

    async def first_only(ctx: RunContext[Any], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if ctx.run_step == 1 else []

    async def later_only(ctx: RunContext[Any], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if ctx.run_step > 1 else []

    for model in _models(target):
        asked.clear()
        agent = Agent(
            model,
            output_type=ToolOutput(Weather),
            tools=[Tool(get_weather)],
            model_settings=SETTINGS | {"parallel_tool_calls": False},
            capabilities=[PrepareTools(first_only), PrepareOutputTools(later_only)],
        )
        ran = agent.run_sync("The weather in Paris?")
        assert len(asked) == 1
        assert isinstance(ran.output, Weather)
        results = [part for message in ran.all_messages() for part in message.parts if isinstance(part, ToolReturnPart)]
        assert results[0].content == "20 degrees, no wind"


def embeddings(target: Target) -> None:
    """Embedder: query, documents"""
    provider = OpenAIProvider(base_url=target.base, api_key="none")
    embedder = Embedder(OpenAIEmbeddingModel(target.embedding, provider=provider))
    result = embedder.embed_documents_sync(["The cat sits outside", "A feline is outdoors", "A man is playing guitar"])
    near, far = (
        sum(a * b for a, b in zip(result.embeddings[0], other, strict=True)) for other in result.embeddings[1:]
    )
    assert near > 0.5 > far
    assert len(embedder.embed_query_sync("cats").embeddings[0]) == 384


def errors(target: Target) -> None:
    """errors: unknown model"""
    provider = OpenAIProvider(base_url=target.base, api_key="none")
    try:
        Agent(OpenAIChatModel("nope", provider=provider)).run_sync("x")
    except ModelHTTPError as error:
        assert error.status_code == 404
        assert error.body["code"] == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")


if __name__ == "__main__":
    main("pydantic-ai-slim", text, history, structured, tools, embeddings, errors)
