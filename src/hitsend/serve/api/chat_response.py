"""`POST /v1/chat/completions`: what goes out.

Enters: the pipeline's `Started`, `Delta`s and `Completed`. Leaves: JSON exactly as OpenAI's, whole or as SSE frames.
Always true for a stream: the first chunk of each choice has the role; exactly one chunk per choice has a finish_reason,
and nothing follows it for that choice; then, where asked for, one usage chunk with `choices: []`; then [DONE]. The last
choice to end gets its finish_reason only when the bill is settled, so the end of a stream is one write, and an error
until then never follows a false stop. `hitsend` (request_id, cost, timings, warnings) is on the last chunk of all, and
in the body of an unstreamed answer. Next: `errors.py`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, PromptToken, Request, Started, TextLogprob, ToolCallDelta
from hitsend.serve.api.billed import Extension, UsageOut, extension, usage_out
from hitsend.serve.api.chat_calls import CallDeltaOut, CallOut, call_delta, whole_calls
from hitsend.serve.api.logprobs import LogprobsOut, logprobs_out
from hitsend.serve.api.prompt_logprobs import PromptLogprobs, prompt_logprobs_out
from hitsend.serve.api.tiers import tier_name
from hitsend.serve.stream import sse

Item = Started | Delta | Completed


class DeltaOut(msgspec.Struct, frozen=True):
    """A chunk's delta: empty on the finishing chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[CallDeltaOut, ...] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice in a chunk."""

    index: int
    delta: DeltaOut
    logprobs: LogprobsOut | None = None
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True):
    """One SSE event. `usage` is null on all chunks but the usage chunk where usage was asked for, else absent."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: tuple[ChunkChoice, ...]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    service_tier: str | UnsetType = UNSET
    usage: UsageOut | UnsetType | None = UNSET
    hitsend: Extension | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


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


class IncompleteAnswer(Exception):
    """The pipeline ended without the words that every answer ends with: a bug in hitsend."""


async def encode_stream(request: Request, items: AsyncGenerator[Item, None]) -> AsyncGenerator[bytes, None]:
    """SSE frames, one or more whole ones at a time. Raises what the pipeline raises; closing it closes `items`."""
    stream: _Stream | None = None
    ending: bytes | None = None
    waiting = b""
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Started):
                stream = _Stream(request, item)
                yield stream.roles()
            elif stream is None:
                raise IncompleteAnswer("the pipeline's first word was not Started")
            elif isinstance(item, Completed):
                ending = stream.end(item)
            else:
                waiting += stream.delta(item)
                if waiting and not item.has_more:
                    yield waiting
                    waiting = b""
    if ending is None:
        raise IncompleteAnswer("the pipeline ended without Completed")
    yield ending


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


class _Stream:
    """Keeps the order of one stream's chunks."""

    def __init__(self, request: Request, started: Started) -> None:
        self._request = request
        self._started = started
        self._unfinished = set(range(request.n))
        self._matched: dict[int, str] = {}
        self._last: ChunkChoice | None = None

    def roles(self) -> bytes:
        first = DeltaOut(role="assistant", content="", refusal=None)
        return b"".join(self._frame(ChunkChoice(index, first)) for index in range(self._request.n))

    def delta(self, delta: Delta) -> bytes:
        if delta.index not in self._unfinished:
            raise IncompleteAnswer(f"choice {delta.index} went on after its end")
        frames = b""
        for choice in _chunks(delta, has_logprobs=self._request.logprobs):
            frames += self._frame(choice, prompt_ids=() if frames else delta.prompt_ids)
        if delta.finish_reason is None:
            return frames
        self._unfinished.remove(delta.index)
        if delta.matched_stop is not None:
            self._matched[delta.index] = delta.matched_stop
        ending = ChunkChoice(delta.index, DeltaOut(), finish_reason=wire_reason(delta.finish_reason))
        if self._unfinished:
            return frames + self._frame(ending)
        self._last = ending
        return frames

    def end(self, completed: Completed) -> bytes:
        if self._last is None:
            raise IncompleteAnswer(f"{len(self._unfinished)} choices have no end")
        matched = tuple(self._matched.get(index) for index in range(self._request.n))
        more = extension(self._request, completed, matched)
        if not self._request.include_usage:
            return self._frame(self._last, hitsend=more) + sse.DONE
        return self._frame(self._last) + self._frame(usage=usage_out(completed.usage), hitsend=more) + sse.DONE

    def _frame(
        self,
        *choices: ChunkChoice,
        usage: UsageOut | None = None,
        hitsend: Extension | UnsetType = UNSET,
        prompt_ids: tuple[int, ...] = (),
    ) -> bytes:
        chunk = Chunk(
            id=_id(self._request),
            created=self._started.created,
            model=self._started.model,
            system_fingerprint=self._started.system_fingerprint,
            choices=choices,
            usage=usage if self._request.include_usage else UNSET,
            hitsend=hitsend,
            service_tier=tier_name(self._request) if self._request.names_tier else UNSET,
            prompt_token_ids=prompt_ids or UNSET,
        )
        return sse.frame(_encode(chunk))


def _chunks(delta: Delta, *, has_logprobs: bool) -> list[ChunkChoice]:
    """Thoughts, text and calls in chunks of their own: clients exist that look for one kind only per chunk."""
    parts: list[DeltaOut] = []
    if delta.reasoning:
        parts.append(DeltaOut(reasoning_content=delta.reasoning, reasoning=delta.reasoning))
    is_bare = not (delta.reasoning or delta.tool_calls) and (delta.logprobs or delta.token_ids or delta.prompt_ids)
    if delta.text or is_bare:
        parts.append(DeltaOut(content=delta.text))
    if delta.tool_calls:
        parts.append(DeltaOut(tool_calls=tuple(call_delta(call) for call in delta.tool_calls)))
    found = [ChunkChoice(delta.index, part) for part in parts]
    if found and (has_logprobs or delta.token_ids):
        logprobs = logprobs_out(delta.logprobs) if has_logprobs else None
        found[0] = ChunkChoice(delta.index, parts[0], logprobs, token_ids=delta.token_ids or UNSET)
    return found


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
        id=_id(request),
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


def _id(request: Request) -> str:
    return f"chatcmpl-{request.request_id}"


def wire_reason(reason: FinishReason) -> FinishReason:
    """The reason, if it is an end that clients know. Raises IncompleteAnswer."""
    if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        raise IncompleteAnswer(f"{reason} is no end of an answer: it should have been raised")
    return reason
