"""Streams in older shapes, read as if they were OpenAI's: what Workers AI has been seen to send.

Enters: bytes of an event stream, or an answer that came whole although a stream was asked for. Leaves: as
`openai_wire.py`. Always true: text that came as a bare number is shown as it was written; a second stop or [DONE]
changes nothing; a stream of `response` frames has no finish reason, so [DONE] ends it, and only [DONE] does: one that
breaks off before is an error here as everywhere. Next: `openai.py`.

    {"response": "…", "usage": {…}}                      a frame, or the whole answer
    {"response": {"a": 1}}                               an answer to a response_format, already read (its JSON mode)
    {"response": "", "finish_reason": "length"}          an end that is told after all
    {"response": null, "tool_calls": [{"name", "arguments": {…}}]}
    {"choices": [{"delta": {"content": 42}}]}            a number that should have been a string
    {"result": {…}, "success": true, "errors": []}       the envelope around a whole answer
"""

from typing import Any

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta
from hitsend.serve.engine.openai_wire import ChunkReader, Unreadable
from hitsend.serve.engine.upstream_calls import CallIn, FunctionIn
from hitsend.serve.engine.upstream_chunks import ChoiceIn, ChunkIn, DeltaIn, PartIn
from hitsend.serve.engine.upstream_logprobs import LogprobsIn

_NULL = msgspec.Raw(b"null")


class _In(msgspec.Struct, frozen=True):
    """Base of what comes in; unknown fields are nobody's business here."""


class _FunctionIn(_In, frozen=True):
    name: str | None = None
    arguments: Any = None


class _CallIn(_In, frozen=True):
    index: int | None = None
    id: str | None = None
    function: _FunctionIn | None = None
    name: str | None = None
    arguments: Any = None


class _DeltaIn(_In, frozen=True):
    content: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    tool_calls: tuple[_CallIn, ...] | None = None
    function_call: _FunctionIn | None = None


class _ChoiceIn(_In, frozen=True):
    index: int | None = 0
    delta: _DeltaIn | None = None
    message: _DeltaIn | None = None
    text: msgspec.Raw = _NULL
    finish_reason: str | None = None
    logprobs: LogprobsIn | None = None
    usage: Any = None
    stop_reason: Any = None


class _ChunkIn(_In, frozen=True):
    choices: tuple[_ChoiceIn, ...] | None = None
    response: msgspec.Raw = _NULL
    tool_calls: tuple[_CallIn, ...] | None = None
    finish_reason: str | None = None
    usage: Any = None
    error: Any = None
    errors: Any = None
    result: msgspec.Raw = _NULL
    object: Any = None


_decode = msgspec.json.Decoder(_ChunkIn).decode


class LenientReader(ChunkReader):
    """As `ChunkReader`. `most_tokens` is what was asked for: so many without a finish reason were cut by it."""

    def __init__(self, n: int, most_tokens: int) -> None:
        super().__init__(n)
        self._most_tokens = most_tokens
        self._is_legacy = False
        self._num_calls = 0

    def feed(self, data: bytes) -> list[Delta]:
        """As `ChunkReader.feed`."""
        deltas = super().feed(data)
        if self.is_done and self.fault is None:
            self._close(deltas)
        return deltas

    def feed_whole(self, body: bytes) -> list[Delta]:
        """An answer that is no stream. Look at `fault` afterwards."""
        deltas: list[Delta] = []
        body = self._loose.mended(body) or body
        try:
            found = _parsed(body)
            inner = bytes(found.result)
            self._take(self._read(body if inner == b"null" else inner), deltas)
        except Unreadable as fault:
            self.fault = fault
            return deltas
        self.is_done = True
        self._close(deltas)
        return deltas + self.close(is_sure=True)

    def _close(self, deltas: list[Delta]) -> None:
        """[DONE] after frames that have no finish reason is their end."""
        if not (self._is_legacy and self._open):
            return
        used = self.usage.completion_tokens if self.usage is not None else 0
        reason = "length" if used >= self._most_tokens else FinishReason.STOP.value
        self._choice(0, ChoiceIn(0, finish_reason=reason), deltas)
        deltas += self.close(is_sure=True)

    def _read(self, document: bytes) -> ChunkIn:
        found = _parsed(document)
        choices = tuple(self._choice_of(choice) for choice in found.choices or ())
        legacy = self._legacy_of(found)
        return ChunkIn((*choices, *legacy), found.usage, found.error or found.errors or None, found.object)

    def _mended(self, _document: bytes) -> None:
        """Its own shapes are read already."""

    def _choice_of(self, choice: _ChoiceIn) -> ChoiceIn:
        delta, message = (None if one is None else self._delta_of(one) for one in (choice.delta, choice.message))
        return ChoiceIn(
            choice.index,
            delta,
            message,
            _text(choice.text),
            choice.finish_reason,
            choice.logprobs,
            usage=choice.usage,
            stop_reason=choice.stop_reason,
        )

    def _delta_of(self, given: _DeltaIn) -> DeltaIn:
        return DeltaIn(
            content=_content(given.content),
            reasoning_content=_text(given.reasoning_content),
            reasoning=_text(given.reasoning),
            refusal=_text(given.refusal),
            tool_calls=None if given.tool_calls is None else tuple(self._call_of(call) for call in given.tool_calls),
            function_call=None if given.function_call is None else _function_of(given.function_call),
        )

    def _legacy_of(self, found: _ChunkIn) -> tuple[ChoiceIn, ...]:
        text, calls = _text(found.response, takes_json=True), found.tool_calls
        if found.choices or (text is None and not calls and not found.finish_reason):
            return ()
        self._is_legacy = True
        delta = DeltaIn(content=text, tool_calls=tuple(self._call_of(call) for call in calls or ()) or None)
        return (ChoiceIn(0, delta, finish_reason=found.finish_reason),)

    def _call_of(self, call: _CallIn) -> CallIn:
        """Older calls have their name outside, arguments as an object, and neither id nor number."""
        function = _function_of(call.function or _FunctionIn(call.name, call.arguments))
        if call.index is not None and call.function is not None:
            return CallIn(call.index, call.id, function)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return CallIn(number, call.id or f"call_{number}", function)


def _function_of(given: _FunctionIn) -> FunctionIn:
    arguments = given.arguments
    if arguments is not None and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return FunctionIn(given.name, arguments)


def _parsed(document: bytes) -> _ChunkIn:
    try:
        return _decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable("an event that is no chat completion chunk") from error


def _content(raw: msgspec.Raw) -> str | tuple[PartIn, ...] | None:
    """A text, or the parts that some send in its place."""
    if bytes(raw)[:1] != b"[":
        return _text(raw)
    try:
        return msgspec.json.decode(raw, type=tuple[PartIn, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable("text that is no text") from error


def _text(raw: msgspec.Raw, *, takes_json: bool = False) -> str | None:
    """A string as it is, a number or truth value as it was written; so is JSON, where that is what was asked for."""
    written = bytes(raw)
    if written == b"null":
        return None
    if written[:1] in (b"{", b"[") and not takes_json:
        raise Unreadable("text that is no text")
    try:
        return msgspec.json.decode(written, type=str) if written[:1] == b'"' else written.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable("an event that is no chat completion chunk") from error
