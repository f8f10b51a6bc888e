"""`POST /v1/chat/completions`: the answer that goes out whole.

Enters: the pipeline's `Started`, `Delta`s and `Completed`. Leaves: JSON exactly as OpenAI's. Always true: `hitsend`
(request_id, cost, timings, warnings) is in the body; what only vLLM has is there only where asked for.
Next: `chat_response.py`, for streams.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, PromptToken, Request, Started, TextLogprob, ToolCallDelta
from hitsend.serve.api.billed import Extension, UsageOut, extension, usage_out
from hitsend.serve.api.chat_calls import CallOut, whole_calls
from hitsend.serve.api.chat_response import IncompleteAnswer, Item, answer_id, wire_reason
from hitsend.serve.api.logprobs import LogprobsOut, logprobs_out
from hitsend.serve.api.prompt_logprobs import PromptLogprobs, prompt_logprobs_out
from hitsend.serve.api.tiers import tier_name


class MessageOut(msgspec.Struct, frozen=True):
    """The answer's message. `content` is null only beside calls or thoughts."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: tuple[()] = ()
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[CallOut, ...] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """One finished choice."""

    index: int
    message: MessageOut
    logprobs: LogprobsOut | None
    finish_reason: FinishReason
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The whole answer. `prompt_logprobs`, `prompt_token_ids` and `token_ids` (vLLM's) only where asked for."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: tuple[Choice, ...]
    usage: UsageOut
    hitsend: Extension
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


async def encode_whole(request: Request, items: AsyncGenerator[Item, None]) -> bytes:
    """The body of an unstreamed answer. Raises what the pipeline raises; `items` is closed at the end."""
    started: Started | None = None
    completed: Completed | None = None
    choices = [_Collected() for _ in range(request.n)]
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Started):
                started = item
            elif isinstance(item, Completed):
                completed = item
            else:
                choices[item.index].add(item)
    if started is None or completed is None:
        raise IncompleteAnswer("the pipeline ended without Started and Completed")
    return _encode(_completion(request, started, choices, completed))


class _Collected:
    """One choice of an unstreamed answer, until it is whole."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCallDelta] = []
        self.logprobs: list[TextLogprob] = []
        self.prompt: tuple[PromptToken, ...] = ()
        self.prompt_ids: tuple[int, ...] = ()
        self.ids: list[int] = []
        self.reason: FinishReason | None = None
        self.matched: str | None = None

    def add(self, delta: Delta) -> None:
        if self.reason is not None:
            raise IncompleteAnswer(f"choice {delta.index} went on after its end")
        self.texts.append(delta.text)
        self.thoughts.append(delta.reasoning)
        self.calls += delta.tool_calls
        self.prompt = self.prompt or delta.prompt
        self.prompt_ids = self.prompt_ids or delta.prompt_ids
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.reason = delta.finish_reason
        self.matched = delta.matched_stop

    def message(self) -> MessageOut:
        content, thoughts = "".join(self.texts), "".join(self.thoughts)
        calls = whole_calls(self.calls)
        return MessageOut(
            content=None if not content and (calls or thoughts) else content,
            reasoning_content=thoughts or UNSET,
            reasoning=thoughts or UNSET,
            tool_calls=calls or UNSET,
        )


def _completion(
    request: Request, started: Started, collected: list[_Collected], completed: Completed
) -> ChatCompletion:
    choices = []
    for index, choice in enumerate(collected):
        if choice.reason is None:
            raise IncompleteAnswer(f"choice {index} has no end")
        logprobs = logprobs_out(choice.logprobs) if request.logprobs else None
        ids = tuple(choice.ids) if request.return_token_ids else UNSET
        choices.append(Choice(index, choice.message(), logprobs, wire_reason(choice.reason), ids))
    return ChatCompletion(
        id=answer_id(request),
        created=started.created,
        model=started.model,
        system_fingerprint=started.system_fingerprint,
        choices=tuple(choices),
        usage=usage_out(completed.usage),
        hitsend=extension(request, completed, tuple(choice.matched for choice in collected)),
        prompt_logprobs=UNSET
        if request.prompt_logprobs is None
        else prompt_logprobs_out(collected[0].prompt, request.prompt_logprobs),
        service_tier=tier_name(request) if request.names_tier else UNSET,
        prompt_token_ids=collected[0].prompt_ids or UNSET,
    )
