"""`POST /v1/chat/completions`: what goes out.

Enters: the pipeline's `Started`, `Delta`s and `Completed`. Leaves: JSON exactly as OpenAI's, as SSE frames.
Always true for a stream: the first chunk of each choice has the role; exactly one chunk per choice has a finish_reason,
and nothing follows it for that choice; then, where asked for, one usage chunk with `choices: []`; then [DONE]. The last
choice to end gets its finish_reason only when the bill is settled, so the end of a stream is one write, and an error
until then never follows a false stop. `hitsend` (request_id, cost, timings, warnings) is on the last chunk.
Next: `chat_whole.py`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, Request, Started
from hitsend.serve.api.billed import Extension, UsageOut, extension, usage_out
from hitsend.serve.api.chat_calls import CallDeltaOut, call_delta
from hitsend.serve.api.logprobs import LogprobsOut, logprobs_out
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


_encode = msgspec.json.Encoder().encode
_NO_TEXT = b'"content":""'


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
                waiting = stream.roles()
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


class _Stream:
    """Keeps the order of one stream's chunks."""

    def __init__(self, request: Request, started: Started) -> None:
        self._request = request
        self._started = started
        self._unfinished = set(range(request.n))
        self._matched: dict[int, str] = {}
        self._last: ChunkChoice | None = None
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def roles(self) -> bytes:
        first = DeltaOut(role="assistant", content="", refusal=None)
        return b"".join(self._frame(ChunkChoice(index, first)) for index in range(self._request.n))

    def delta(self, delta: Delta) -> bytes:
        if delta.index not in self._unfinished:
            raise IncompleteAnswer(f"choice {delta.index} went on after its end")
        if delta.is_bare_text and not self._request.logprobs:
            return self._text(delta)
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

    def _text(self, delta: Delta) -> bytes:
        """The usual chunk: but for its text it is the same each time, so that much of it is written once."""
        around = self._around.get(delta.index)
        if around is None:
            empty = self._frame(ChunkChoice(delta.index, DeltaOut(content="")))
            before, after = empty.split(_NO_TEXT, 1)  # no text of ours has it inside: there, quotes are escaped
            around = self._around[delta.index] = before + _NO_TEXT[:-2], after
        return around[0] + sse.safe(_encode(delta.text)) + around[1]

    def _frame(
        self,
        *choices: ChunkChoice,
        usage: UsageOut | None = None,
        hitsend: Extension | UnsetType = UNSET,
        prompt_ids: tuple[int, ...] = (),
    ) -> bytes:
        chunk = Chunk(
            id=answer_id(self._request),
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


def answer_id(request: Request) -> str:
    """The answer's own, made of the request's."""
    return f"chatcmpl-{request.request_id}"


def wire_reason(reason: FinishReason) -> FinishReason:
    """The reason, if it is an end that clients know. Raises IncompleteAnswer."""
    if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        raise IncompleteAnswer(f"{reason} is no end of an answer: it should have been raised")
    return reason
