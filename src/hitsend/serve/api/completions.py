"""`POST /v1/completions`: text that goes on where a prompt ends, without a template.

Enters: an authenticated exchange. Leaves: `text_completion` objects and chunks, exactly OpenAI's, and a closed flight
record. Always true: the same pipeline, hold and single bill as a chat request, however many prompts and choices; choice
i belongs to prompt i // n; an echoed prompt comes before everything else of its choice; the last choice to end gets its
finish_reason only when the bill is settled. Next: `../chat/completion.py`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hitsend.core.errors import InvalidRequest
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, PromptToken, Request, Started
from hitsend.serve.api import completion_request
from hitsend.serve.api.billed import Extension, UsageOut, extension, usage_out
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.chat_response import (
    IncompleteAnswer,
    Item,
    wire_reason,
)
from hitsend.serve.api.completion_logprobs import LegacyLogprobs, LogprobsOut
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.prompt_logprobs import PromptLogprobs, prompt_logprobs_out
from hitsend.serve.api.recorded import deliver, recorded
from hitsend.serve.api.services import Text
from hitsend.serve.stream import sse


class ChoiceOut(msgspec.Struct, frozen=True):
    """A choice, whole or in a chunk. `prompt_logprobs` and the ids (vLLM's) only where asked for."""

    text: str
    index: int
    logprobs: LogprobsOut | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True):
    """The whole answer, or one chunk: OpenAI gives both the same shape. `usage` is null on chunks before the usage
    chunk where usage was asked for, else absent from them.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: tuple[ChoiceOut, ...]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageOut | UnsetType | None = UNSET
    hitsend: Extension | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


async def completions(exchange: Exchange) -> None:
    """Serve one request. Raises what has to become an HTTP status."""
    services = exchange.services
    async with recorded(exchange) as flight:
        body = await read_json_body(exchange.receive, exchange.headers, services.access)
        asked = completion_request.parse(
            body,
            services.access,
            request_id=exchange.request_id,
            principal=exchange.principal,
            default_model=exchange.default_model,
        )
        flight.record(asked.parsed)
        request = asked.request
        echoes = await _echoes(request, services.text) if asked.echo else ()
        answer = services.pipeline(request, flight)
        if request.stream:
            await deliver(exchange, flight, frames=encode_stream(request, answer, echoes))
        else:
            top = asked.prompt_logprobs
            await deliver(exchange, flight, body=lambda: encode_whole(request, answer, echoes, prompt_logprobs=top))


async def _echoes(request: Request, text: Text) -> tuple[str, ...]:
    """The prompts as texts."""
    found = []
    for index, prompt in enumerate(request.prompts):
        try:
            found.append(prompt if isinstance(prompt, str) else await text.detokenize(prompt, model=request.model))
        except InvalidRequest as error:
            where = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
            raise InvalidRequest(error.message.replace("tokens:", f"{where}:"), param=where) from None
    return tuple(found)


async def encode_stream(
    request: Request, items: AsyncGenerator[Item, None], echoes: tuple[str, ...] = ()
) -> AsyncGenerator[bytes, None]:
    """SSE frames, one or more whole ones at a time. Raises what the pipeline raises; closing it closes `items`."""
    answer: _Answer | None = None
    ending: bytes | None = None
    waiting = b""
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Started):
                answer = _Answer(request, item, echoes)
                waiting = answer.echoes() or (b"" if item.has_more else sse.PING)
            elif answer is None:
                raise IncompleteAnswer("the pipeline's first word was not Started")
            elif isinstance(item, Completed):
                ending = answer.end(item)
            else:
                waiting += answer.prompt(item) if item.prompt else answer.delta(item)
            if waiting and not item.has_more:
                yield waiting
                waiting = b""
    if ending is None:
        raise IncompleteAnswer("the pipeline ended without Completed")
    yield ending


async def encode_whole(
    request: Request,
    items: AsyncGenerator[Item, None],
    echoes: tuple[str, ...] = (),
    *,
    prompt_logprobs: int | None = None,
) -> bytes:
    """The body of an unstreamed answer. Raises what the pipeline raises; `items` is closed at the end."""
    answer: _Answer | None = None
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Started):
                answer = _Answer(request, item, echoes)
            elif answer is None:
                raise IncompleteAnswer("the pipeline's first word was not Started")
            elif isinstance(item, Completed):
                return answer.whole(item, prompt_logprobs)
            elif item.prompt:
                answer.prompt(item)
            else:
                answer.keep(item)
    raise IncompleteAnswer("the pipeline ended without Completed")


class _Answer:
    """One answer on its way out, chunk by chunk or until it is whole."""

    def __init__(self, request: Request, started: Started, echoes: tuple[str, ...]) -> None:
        self._request = request
        self._echoes = echoes
        self._prompts: dict[int, tuple[PromptToken, ...]] = {}
        self._started = started
        self._num_choices = request.n * len(request.prompts)
        self._unfinished = set(range(self._num_choices))
        self._matched: dict[int, str] = {}
        self._logprobs = [LegacyLogprobs() for _ in range(self._num_choices)]
        self._kept: list[list[ChoiceOut]] = [[] for _ in range(self._num_choices)]
        self._last: ChoiceOut | None = None

    def echoes(self) -> bytes:
        """What a stream begins with; with logprobs, each prompt is echoed when its own are there."""
        if not self._echoes or self._request.logprobs:
            return b""
        return b"".join(
            self.frame(ChoiceOut(self._echoes[index // self._request.n], index)) for index in range(self._num_choices)
        )

    def prompt(self, delta: Delta) -> bytes:
        """The tokens of a prompt: kept, and for a stream each of its choices' echo."""
        number, n = delta.index // self._request.n, self._request.n
        self._prompts[number] = delta.prompt
        frames = []
        for index in range(number * n, number * n + n) if self._echoes and self._request.logprobs else ():
            echo = self._echoes[number]
            shown = self._logprobs[index].echo(delta.prompt, echo, self._request.top_logprobs)
            frames.append(self.frame(ChoiceOut(echo, index, shown)))
        return b"".join(frames)

    def keep(self, delta: Delta) -> None:
        """A piece of an answer that goes out whole."""
        self._kept[delta.index].append(self._choice(delta))

    def delta(self, delta: Delta) -> bytes:
        """A piece of a streamed answer."""
        choice = self._choice(delta)
        if choice.finish_reason is None:
            is_bare = choice.logprobs is None and choice.token_ids is UNSET and choice.prompt_token_ids is UNSET
            return b"" if is_bare and not choice.text else self.frame(choice)
        if self._unfinished:
            return self.frame(choice)
        self._last = choice
        return b""

    def end(self, completed: Completed) -> bytes:
        """The end of a stream: the last choice's end, usage where asked for, [DONE]."""
        if self._last is None:
            raise IncompleteAnswer(f"{len(self._unfinished)} choices have no end")
        more = self._extension(completed)
        if not self._request.include_usage:
            return self.frame(self._last, hitsend=more) + sse.DONE
        return self.frame(self._last) + self.frame(usage=usage_out(completed.usage), hitsend=more) + sse.DONE

    def whole(self, completed: Completed, prompt_logprobs: int | None) -> bytes:
        """The whole body."""
        if self._unfinished:
            raise IncompleteAnswer(f"{len(self._unfinished)} choices have no end")
        choices = []
        for index, pieces in enumerate(self._kept):
            number = index // self._request.n
            echo = self._echoes[number] if self._echoes else ""
            text = echo + "".join(piece.text for piece in pieces)
            logprobs = self._logprobs[index].all if self._request.logprobs else None
            told = prompt_logprobs
            prompt = UNSET if told is None else prompt_logprobs_out(self._prompts.get(number, ()), told)
            ids, of_prompt = self._ids(index)
            choices.append(ChoiceOut(text, index, logprobs, pieces[-1].finish_reason, prompt, ids, of_prompt))
        return _encode(self._object(tuple(choices), usage_out(completed.usage), self._extension(completed)))

    def _ids(self, index: int) -> tuple[tuple[int, ...] | UnsetType, tuple[int, ...] | UnsetType]:
        """Of a whole choice, and of its prompt, which the first one of a prompt has for all of them."""
        if not self._request.return_token_ids:
            return UNSET, UNSET
        pieces, first = self._kept[index], self._kept[index - index % self._request.n]
        ids = tuple(token for piece in pieces for token in piece.token_ids or ())
        return ids, next((piece.prompt_token_ids for piece in (*pieces, *first) if piece.prompt_token_ids), UNSET)

    def frame(
        self, *choices: ChoiceOut, usage: UsageOut | None = None, hitsend: Extension | UnsetType = UNSET
    ) -> bytes:
        """One chunk as an SSE frame."""
        shown = usage if self._request.include_usage else UNSET
        return sse.frame(_encode(self._object(choices, shown, hitsend)))

    def _choice(self, delta: Delta) -> ChoiceOut:
        if delta.index not in self._unfinished:
            raise IncompleteAnswer(f"choice {delta.index} went on after its end")
        logprobs = None
        if self._request.logprobs and delta.logprobs:
            logprobs = self._logprobs[delta.index].add(delta.logprobs)
        reason = delta.finish_reason
        if reason is not None:
            reason = wire_reason(reason)
            self._unfinished.remove(delta.index)
            if delta.matched_stop is not None:
                self._matched[delta.index] = delta.matched_stop
        ids, of_prompt = delta.token_ids or UNSET, delta.prompt_ids or UNSET
        return ChoiceOut(delta.text, delta.index, logprobs, reason, token_ids=ids, prompt_token_ids=of_prompt)

    def _extension(self, completed: Completed) -> Extension:
        matched = tuple(self._matched.get(index) for index in range(self._num_choices))
        return extension(self._request, completed, matched)

    def _object(
        self, choices: tuple[ChoiceOut, ...], usage: UsageOut | UnsetType | None, hitsend: Extension | UnsetType
    ) -> TextCompletion:
        return TextCompletion(
            id=f"cmpl-{self._request.request_id}",
            created=self._started.created,
            model=self._started.model,
            system_fingerprint=self._started.system_fingerprint,
            choices=choices,
            usage=usage,
            hitsend=hitsend,
        )
