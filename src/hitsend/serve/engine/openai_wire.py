"""OpenAI's chat API as a client speaks it: one body out, one stream of chunks in.

Enters: a `Request`, or bytes of an event stream. Leaves: a body, or `Delta`s and usage. Always true: a stream is always
asked for, with usage, because only a stream can be left early and billed for what it brought; fields of the caller go
out as they were asked or not at all (`chat/handover.py` has refused what this upstream doesn't take); bytes may be cut
anywhere; what can't be read is `Unreadable`, never skipped. Next: `openai.py`.
"""

from typing import Any

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, Message, OutputFormat, Request, TextLogprob, ToolCallDelta, Usage
from hitsend.serve.engine.alike import Alike

MAX_EVENT_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]"
_PLAIN = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
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


def encode_body(request: Request, model: str, max_tokens: int, max_tokens_field: str) -> bytes:
    """The body to post, asking for `model` by the upstream's own name."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        max_tokens_field: max_tokens,
    }
    body |= _own_fields(request)
    body |= _asked(request)
    body |= _beyond(request)
    return msgspec.json.encode(body)


def extensions(request: Request) -> set[str]:
    """Fields of the body that are not OpenAI's own: an upstream has to know them."""
    return (_asked(request).keys() | _beyond(request).keys()) - _PLAIN


def _asked(request: Request) -> dict[str, Any]:
    """Sampling as the client sent it: what is None is left out."""
    asked: dict[str, Any] = msgspec.to_builtins(request.sampling)
    return asked


def _own_fields(request: Request) -> dict[str, Any]:
    """OpenAI's, as far as they say anything."""
    fields: dict[str, Any] = {
        "n": request.n if request.n > 1 else None,
        "stop": request.stop,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias},
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning_effort,
    }
    if request.tools:
        fields |= {"tools": _tools(request), "tool_choice": _choice(request)}
    if request.output_format is not None:
        fields["response_format"] = _format(request.output_format)
    found = {name: value for name, value in fields.items() if value}
    if request.tools and not request.parallel_tool_calls:
        found["parallel_tool_calls"] = False
    return found


def _beyond(request: Request) -> dict[str, Any]:
    """Extensions, as far as they say anything."""
    form = request.output_format
    fields: dict[str, Any] = {
        "include_stop_str_in_output": request.include_stop,
        "stop_token_ids": request.stop_token_ids,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "chat_template_kwargs": request.template_kwargs,
        "continue_final_message": request.continue_final_message,
        "thinking_token_budget": request.thinking_token_budget,
    }
    if form is not None and _format(form) is None:
        fields["structured_outputs"] = {form.kind: form.value}
    found = {name: value for name, value in fields.items() if value}
    if not request.add_generation_prompt:
        found["add_generation_prompt"] = False
    return found


def _message(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content, **message.fields}


def _tools(request: Request) -> list[dict[str, Any]]:
    found = []
    for tool in request.tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def _choice(request: Request) -> Any:
    choice = request.tool_choice
    if choice.mode == "auto":
        return None
    if len(choice.names) == 1:
        return {"type": "function", "function": {"name": choice.names[0]}}
    return choice.mode


def _format(form: OutputFormat) -> dict[str, Any] | None:
    """None for what OpenAI's API has no field for."""
    if form.kind == "json_object":
        return {"type": "json_object"}
    if form.kind != "json_schema":
        return None
    named = {"name": form.name or "answer", "schema": form.value, "strict": form.strict}
    return {"type": "json_schema", "json_schema": named}


class _In(msgspec.Struct, frozen=True, gc=False):
    """Base of what comes in: unknown fields are nobody's business here."""


class _FunctionIn(_In, frozen=True, gc=False):
    name: str | None = None
    arguments: str | None = None


class _CallIn(_In, frozen=True, gc=False):
    index: int = 0
    id: str | None = None
    function: _FunctionIn | None = None


class _DeltaIn(_In, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_CallIn, ...] | None = None


class _LogprobIn(_In, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple["_LogprobIn", ...] | None = None


class _LogprobsIn(_In, frozen=True, gc=False):
    content: tuple[_LogprobIn, ...] | None = None


class _ChoiceIn(_In, frozen=True, gc=False):
    index: int = 0
    delta: _DeltaIn | None = None
    finish_reason: str | None = None
    logprobs: _LogprobsIn | None = None


class _PromptDetailsIn(_In, frozen=True, gc=False):
    cached_tokens: int | None = None


class _CompletionDetailsIn(_In, frozen=True, gc=False):
    reasoning_tokens: int | None = None


class _UsageIn(_In, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetailsIn | None = None
    completion_tokens_details: _CompletionDetailsIn | None = None


class _ChunkIn(_In, frozen=True, gc=False):
    choices: tuple[_ChoiceIn, ...] = ()
    usage: _UsageIn | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_ChunkIn).decode


class ChunkReader:
    """Reads one stream. `usage` is the upstream's last word on it; `is_done`: it said [DONE].

    `fault` is why nothing more can be read: what stood before it was given out.
    """

    def __init__(self, n: int) -> None:
        self._rest = b""
        self._open = set(range(n))
        self._alike = Alike()
        self.counts = [0] * n
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
        *whole, self._rest = events.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Unreadable(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for event in whole:
            document = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _document(event)
            if document == _DONE:
                self.is_done = True
            elif document:
                self._read(document, deltas)

    def _read(self, document: bytes, deltas: list[Delta]) -> None:
        text = self._alike.text(document)
        if text is not None and self._alike.index in self._open:
            self.counts[self._alike.index] += 1
            deltas.append(Delta(self._alike.index, text))
            return
        try:
            chunk = _decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unreadable("an event that is no chat completion chunk") from error
        if chunk.error is not None:
            raise UpstreamSaid
        if chunk.usage is not None:
            self.usage = _usage(chunk.usage) or self.usage
        for choice in chunk.choices:
            if not 0 <= choice.index < len(self.counts):
                raise Unreadable("a choice that was not asked for")
            if choice.index in self._open:
                self._choice(choice, deltas)
        if len(chunk.choices) == 1 and chunk.usage is None and (plain := _plain(chunk.choices[0])):
            self._alike.learn(document, plain, chunk.choices[0].index)

    def _choice(self, choice: _ChoiceIn, deltas: list[Delta]) -> None:
        delta = choice.delta or _NOTHING
        text, reasoning = delta.content or delta.refusal or "", delta.reasoning_content or delta.reasoning or ""
        calls = () if not delta.tool_calls else tuple(_call(call) for call in delta.tool_calls)
        logprobs = () if choice.logprobs is None else tuple(_logprob(one) for one in choice.logprobs.content or ())
        if text or reasoning or calls or logprobs:
            self.counts[choice.index] += max(1, len(logprobs))
        elif choice.finish_reason is None:
            return
        reason = None
        if choice.finish_reason is not None:
            reason = _FINISH.get(choice.finish_reason)
            if reason is None:
                raise Unreadable("a finish_reason that nobody knows")
            self._open.discard(choice.index)
        deltas.append(
            Delta(choice.index, text, logprobs=logprobs, finish_reason=reason, reasoning=reasoning, tool_calls=calls)
        )


_NOTHING = _DeltaIn()


def _plain(choice: _ChoiceIn) -> str | None:
    """Its text, where it brings that and nothing else."""
    delta = choice.delta
    if delta is None or choice.finish_reason is not None or choice.logprobs is not None:
        return None
    others = delta.refusal, delta.reasoning_content, delta.reasoning, delta.tool_calls
    return delta.content if not any(others) else None


def _document(event: bytes) -> bytes:
    """What an event's data lines hold; comments and other fields are no data."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def _call(call: _CallIn) -> ToolCallDelta:
    function = call.function
    name = function.name or None if function is not None else None
    # the first piece of a call has its name; some upstreams repeat the id on every piece
    call_id = call.id if name else None
    return ToolCallDelta(call.index, call_id, name, (function.arguments or "") if function is not None else "")


def _logprob(one: _LogprobIn) -> TextLogprob:
    spelled = tuple(one.token.encode("utf-8", "replace")) if one.bytes is None else one.bytes
    return TextLogprob(one.token, one.logprob, spelled, tuple(_logprob(top) for top in one.top_logprobs or ()))


def _usage(given: _UsageIn) -> Usage | None:
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
