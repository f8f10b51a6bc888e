"""`POST /v1/messages`: what goes out.

Enters: the pipeline's `Started`, `Delta`s and `Completed`. Leaves: a message, whole or as Anthropic's events. Always
true for a stream: message_start, then one block after the other (start, its deltas, stop), then message_delta with the
stop_reason and the whole usage, then message_stop; the end comes when the bill is settled, or else one error event.
`hitsend` (request_id, cost, timings, warnings) is on message_delta, and in the body of an unstreamed answer.
Next: `messages.py`.
"""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from hitsend.core.errors import ServeError
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Request, Started, Usage
from hitsend.serve.api import messages_errors
from hitsend.serve.api.blocks import Block, Blocks, Step, in_order
from hitsend.serve.api.services import Answer
from hitsend.serve.api.tiers import BEST
from hitsend.serve.stream import sse

_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
_encode = msgspec.json.Encoder().encode


class MessageEncoder:
    """Writes one message."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._blocks = Blocks()
        self._warnings: list[str] = list(request.warnings)
        self._message: dict[str, Any] = {
            "id": f"msg_{request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def stream(self, answer: Answer, /) -> AsyncGenerator[bytes, None]:
        """SSE frames. Raises what the pipeline raises; closing it closes the answer."""
        waiting = b""
        async with aclosing(in_order(answer)) as items:
            async for item in items:
                if isinstance(item, Started):
                    waiting = self._begin(item)
                elif isinstance(item, Completed):
                    waiting += self._end(item)
                else:
                    waiting += b"".join(map(_step, self._blocks.feed(item)))
                if waiting and not item.has_more:
                    yield waiting
                    waiting = b""

    async def whole(self, answer: Answer, /) -> bytes:
        """The message. Raises what the pipeline raises."""
        async with aclosing(self.stream(answer)) as frames:
            async for _ in frames:
                pass
        return _encode(self._message | {"content": [_content(block) for block in self._blocks.all]})

    def error_frame(self, error: ServeError, /) -> bytes:
        """The error event."""
        return messages_errors.error_frame(error, self._request.request_id)

    def _begin(self, started: Started) -> bytes:
        self._message["model"] = started.model
        usage = _usage(Usage(prompt_tokens=started.prompt_tokens))
        return _event("message_start", message=self._message | {"usage": usage | self._tier()})

    def _end(self, completed: Completed) -> bytes:
        frames = b"".join(map(_step, self._blocks.end()))
        ending = self._ending()
        warnings = (*self._warnings, *completed.warnings, *self._doubts())
        extension = {
            "request_id": self._request.request_id,
            "cost_microusd": completed.cost_microusd,
            "timings": completed.timings,
            "warnings": list(dict.fromkeys(warnings)),
            "matched_stops": [self._blocks.matched_stop],
        }
        usage = _usage(completed.usage)
        self._message |= ending | {"usage": usage | self._tier(), "hitsend": extension}
        frames += _event("message_delta", delta=ending, usage=usage, hitsend=extension)
        return frames + _event("message_stop")

    def _ending(self) -> dict[str, Any]:
        reason, matched = self._blocks.reason, self._blocks.matched_stop
        if reason is FinishReason.STOP and matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        assert reason is not None
        return {"stop_reason": _REASONS[reason], "stop_sequence": None}

    def _doubts(self) -> list[str]:
        calls = [block for block in self._blocks.all if block.kind == "call"]
        return [
            f"content[{block.index}].input: the model wrote no JSON object; its text is under INVALID_JSON"
            for block in calls
            if "INVALID_JSON" in _input(block)
        ]

    def _tier(self) -> dict[str, str]:
        return {"service_tier": "priority" if self._request.served_tier == BEST else "standard"}


def _step(step: Step) -> bytes:
    block = step.block
    if step.what == "open":
        return _event("content_block_start", index=block.index, content_block=_empty(block))
    if step.what == "close":
        stop = _event("content_block_stop", index=block.index)
        if block.kind != "reasoning":
            return stop
        signed = {"type": "signature_delta", "signature": _signature(block)}
        return _event("content_block_delta", index=block.index, delta=signed) + stop
    if not step.piece:
        return b""
    return _event("content_block_delta", index=block.index, delta=_delta(block, step.piece))


def _delta(block: Block, piece: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": piece}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece}
    return {"type": "text_delta", "text": piece}


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _content(block: Block) -> dict[str, Any]:
    """The block, whole."""
    if block.kind == "call":
        return _empty(block) | {"input": _input(block)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    return _empty(block) | {"text": block.text}


def _input(block: Block) -> dict[str, Any]:
    """A call's arguments. What is no JSON object (cut short, say) stays readable under the name that Anthropic's
    documentation gives such text."""
    if not block.text.strip():
        return {}
    try:
        return msgspec.json.decode(block.text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": block.text}


def _signature(block: Block) -> str:
    """Clients want one and send it back. It is a checksum of the thinking, proves nothing and isn't read."""
    return "sha256:" + hashlib.sha256(block.text.encode("utf-8", "replace")).hexdigest()


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart: the three kinds of input add up to the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(kind, _encode({"type": kind, **fields}))
