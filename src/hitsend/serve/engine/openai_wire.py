"""The stream of OpenAI's chat API as a client reads it.

Enters: bytes of an event stream. Leaves: `Delta`s and usage. Always true: bytes may be cut anywhere; what can't be read
is `Unreadable`, never skipped; a choice that called tools ends with `tool_calls`, also where the upstream calls that
`stop`. Next: `lenient_wire.py`, for upstreams with older shapes.
"""

from typing import Any

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, TextLogprob, ToolCallDelta, Usage
from hitsend.serve.engine.alike import Alike

MAX_EVENT_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]"
_NULL = b"null"
_FINISH = {reason.value: reason for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)} | {
    "content_filter": FinishReason.CONTENT_FILTER,
    "function_call": FinishReason.TOOL_CALLS,
    "eos": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
}


class Unreadable(Exception):
    """The upstream sent something that is no chunk of a chat completion. The message quotes nothing of it."""


class UpstreamSaid(Exception):
    """The upstream ended its stream with an error of its own."""

    def __init__(self) -> None:
        super().__init__("an error inside its answer")


class _In(msgspec.Struct, frozen=True, gc=False):
    """Base of what comes in: unknown fields are nobody's business here."""


class FunctionIn(_In, frozen=True, gc=False):
    """Its name, and JSON text."""

    name: str | None = None
    arguments: str | None = None


class CallIn(_In, frozen=True, gc=False):
    """A piece of a call."""

    index: int = 0
    id: str | None = None
    function: FunctionIn | None = None


class DeltaIn(_In, frozen=True, gc=False):
    """What is new in it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[CallIn, ...] | None = None


class _LogprobIn(_In, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple["_LogprobIn", ...] | None = None


class LogprobsIn(_In, frozen=True, gc=False):
    """Of the tokens in this piece."""

    content: tuple[_LogprobIn, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class ChoiceIn(_In, frozen=True, gc=False):
    """A piece of one choice."""

    index: int = 0
    delta: DeltaIn | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: LogprobsIn | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class _PromptDetailsIn(_In, frozen=True, gc=False):
    cached_tokens: int | None = None


class _CompletionDetailsIn(_In, frozen=True, gc=False):
    reasoning_tokens: int | None = None


class UsageIn(_In, frozen=True, gc=False):
    """What is billed there."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetailsIn | None = None
    completion_tokens_details: _CompletionDetailsIn | None = None


class ChunkIn(_In, frozen=True, gc=False):
    """One event."""

    choices: tuple[ChoiceIn, ...] = ()
    usage: UsageIn | None = None
    error: Any = None
    object: Any = None
    prompt_token_ids: tuple[int, ...] | None = None


_decode = msgspec.json.Decoder(ChunkIn).decode


class ChunkReader:
    """Reads one stream. `usage` is the upstream's last word on it; `is_done`: it said [DONE].

    `fault` is why nothing more can be read: what stood before it was given out. `num_pieces` came; where nobody reads
    along, it `merges` them: every piece only costs. With `skips_null` an event of null says nothing.
    """

    def __init__(self, n: int, *, merges: bool = False, skips_null: bool = False) -> None:
        self._rest = b""
        self._merges = merges
        self._skips_null = skips_null
        self._open = set(range(n))
        self._calling: set[int] = set()
        self._alike = Alike()
        self.counts = [0] * n
        self.num_pieces = 0
        self.usage: Usage | None = None
        self.is_done = False
        self.fault: Unreadable | UpstreamSaid | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._open

    def feed(self, data: bytes) -> list[Delta]:
        """Take bytes, return what they bring. Look at `fault` afterwards."""
        deltas: list[Delta] = []
        try:
            self._feed(data, deltas)
        except (Unreadable, UpstreamSaid) as fault:
            self.fault = fault
        return deltas

    def _feed(self, data: bytes, deltas: list[Delta]) -> None:
        events = self._rest + data
        if b"\r" in events:
            events = events.replace(b"\r\n", b"\n")
        if self._merges and self._alike.index in self._open:
            events = self._run(events, deltas)
        *whole, self._rest = events.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Unreadable(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for number, event in enumerate(whole, 1):
            was_learned = self._alike.is_learned
            document = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _document(event)
            if document == _DONE:
                self.is_done = True
            elif document and not (self._skips_null and document == _NULL):
                self._event(document, deltas)
            if self._merges and self._alike.is_learned and not was_learned:
                self._rest = b"\n\n".join((*whole[number:], self._rest))
                self._feed(b"", deltas)  # the others, now that it is known how they look
                return

    def _run(self, events: bytes, deltas: list[Delta]) -> bytes:
        """The usual read of a stream: a row of texts. Returns what comes after it."""
        text, number, rest = self._alike.run(events)
        if number:
            self.counts[self._alike.index] += number
            self.num_pieces += number
            deltas.append(Delta(self._alike.index, text))
        return rest

    def _event(self, document: bytes, deltas: list[Delta]) -> None:
        text = self._alike.text(document)
        if text is not None and self._alike.index in self._open:
            self.counts[self._alike.index] += 1
            self.num_pieces += 1
            deltas.append(Delta(self._alike.index, text))
            return
        chunk = self._read(document)
        before = len(deltas)
        self._take(chunk, deltas)
        self.num_pieces += len(deltas) - before
        if len(chunk.choices) == 1 and chunk.usage is None and (plain := _plain(chunk.choices[0])):
            self._alike.learn(document, plain, chunk.choices[0].index)

    def _read(self, document: bytes) -> ChunkIn:
        try:
            return _decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unreadable("an event that is no chat completion chunk") from error

    def _take(self, chunk: ChunkIn, deltas: list[Delta]) -> None:
        if chunk.error is not None or chunk.object == "error":
            raise UpstreamSaid
        if chunk.usage is not None:
            self.usage = _usage(chunk.usage) or self.usage
        for choice in chunk.choices:
            if not 0 <= choice.index < len(self.counts):
                raise Unreadable("a choice that was not asked for")
            ids = choice.prompt_token_ids or (chunk.prompt_token_ids if choice.index == 0 else None)
            if ids:
                deltas.append(Delta(choice.index, prompt_ids=ids))
            if choice.index in self._open:
                self._choice(choice, deltas)

    def _choice(self, choice: ChoiceIn, deltas: list[Delta]) -> None:
        delta = choice.delta or _NOTHING
        text, reasoning = (
            delta.content or delta.refusal or choice.text or "",
            delta.reasoning_content or delta.reasoning or "",
        )
        calls = () if not delta.tool_calls else tuple(_call(call) for call in delta.tool_calls)
        logprobs = () if choice.logprobs is None else _logprobs(choice.logprobs)
        if calls:
            self._calling.add(choice.index)
        ids = choice.token_ids or ()
        if text or reasoning or calls or logprobs or ids:
            self.counts[choice.index] += max(1, len(logprobs), len(ids))
        elif choice.finish_reason is None:
            return
        reason = None
        if choice.finish_reason is not None:
            reason = _FINISH.get(choice.finish_reason)
            if reason is None:
                raise Unreadable("a finish_reason that nobody knows")
            if reason is FinishReason.STOP and choice.index in self._calling:
                reason = FinishReason.TOOL_CALLS
            self._open.discard(choice.index)
        deltas.append(
            Delta(
                choice.index,
                text,
                logprobs=logprobs,
                finish_reason=reason,
                reasoning=reasoning,
                tool_calls=calls,
                token_ids=ids,
            )
        )


_NOTHING = DeltaIn()


def _plain(choice: ChoiceIn) -> str | None:
    """Its text, where it brings that and nothing else."""
    delta = choice.delta
    if delta is None or choice.finish_reason is not None or choice.logprobs is not None or choice.token_ids:
        return None
    others = delta.refusal, delta.reasoning_content, delta.reasoning, delta.tool_calls
    return delta.content if not any(others) else None


def _document(event: bytes) -> bytes:
    """What an event's data lines hold; comments and other fields are no data."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def _call(call: CallIn) -> ToolCallDelta:
    function = call.function
    name = function.name or None if function is not None else None
    # the first piece of a call has its name; some upstreams repeat the id on every piece
    call_id = call.id if name else None
    return ToolCallDelta(call.index, call_id, name, (function.arguments or "") if function is not None else "")


def _logprobs(given: LogprobsIn) -> tuple[TextLogprob, ...]:
    """In the shape of chats, or of completions: columns beside each other."""
    if given.content is not None or given.tokens is None:
        return tuple(_logprob(one) for one in given.content or ())
    tops = given.top_logprobs or (None,) * len(given.tokens)
    columns = zip(given.tokens, given.token_logprobs or (), tops, strict=False)
    return tuple(_spelled(token, value or 0.0, top or {}) for token, value, top in columns)


def _spelled(token: str, value: float, top: dict[str, float]) -> TextLogprob:
    ranked = sorted(top.items(), key=lambda one: -one[1])
    return TextLogprob(token, value, _bytes(token), tuple(TextLogprob(one, at, _bytes(one)) for one, at in ranked))


def _bytes(token: str) -> tuple[int, ...]:
    return tuple(token.encode("utf-8", "replace"))


def _logprob(one: _LogprobIn) -> TextLogprob:
    spelled = _bytes(one.token) if one.bytes is None else one.bytes
    return TextLogprob(one.token, one.logprob, spelled, tuple(_logprob(top) for top in one.top_logprobs or ()))


def _usage(given: UsageIn) -> Usage | None:
    """None where it can't be meant: negative counts. Subsets are never larger than what they are part of."""
    if given.prompt_tokens < 0 or given.completion_tokens < 0:
        return None
    cached = given.prompt_tokens_details.cached_tokens if given.prompt_tokens_details is not None else 0
    details = given.completion_tokens_details
    reasoning = details.reasoning_tokens if details is not None else 0
    return Usage(
        given.prompt_tokens,
        given.completion_tokens,
        max(0, min(cached or 0, given.prompt_tokens)),
        max(0, min(reasoning or 0, given.completion_tokens)),
    )
