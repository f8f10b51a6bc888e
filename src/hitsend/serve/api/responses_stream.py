"""`POST /v1/responses`: what goes out.

Enters: the pipeline's `Started`, `Delta`s and `Completed`. Leaves: a response object, whole or as OpenAI's events.
Always true for a stream: created, in_progress, then one item after the other (added, its parts, its deltas, done), then
completed or incomplete, which come when the bill is settled and the response is stored; or failed, at any place.
`sequence_number` counts from 0 without a gap. A whole answer is what its stream would have ended with, because it is
made by the same code. `hitsend` (request_id, cost, timings, warnings) is on the last response object.
Next: `responses.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from hitsend.core.errors import LimitError, ServeError, ServerOverloaded
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Started, TextLogprob, Usage
from hitsend.serve.api.blocks import Block, Blocks, Step, in_order
from hitsend.serve.api.responses_request import Asked
from hitsend.serve.api.services import Answer
from hitsend.serve.api.tiers import tier_name
from hitsend.serve.stream import sse

Status = Literal["in_progress", "completed", "incomplete"]
Keep = Callable[[dict[str, Any]], Awaitable[str | None]]
"""Stores a finished response; returns why it could not, or None."""

_LOWEST_LOGPROB = -9999.0
_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}
_IDS = {"reasoning": "rs", "text": "msg", "call": "fc"}

_encode = msgspec.json.Encoder().encode


def response_id(request_id: str) -> str:
    """The id of the response that a request makes."""
    return f"resp_{request_id}"


class ResponseEncoder:
    """Writes one response. `keep` is None where it isn't stored; `wall` tells the time."""

    def __init__(self, asked: Asked, keep: Keep | None, wall: Callable[[], float]) -> None:
        self._asked = asked
        self._keep = keep
        self._wall = wall
        self._blocks = Blocks()
        self._next_number = 0
        self._response = _echo(asked) | {"store": keep is not None}

    async def stream(self, answer: Answer, /) -> AsyncGenerator[bytes, None]:
        """SSE frames. Raises what the pipeline raises; closing it closes the answer."""
        waiting = b""
        async with aclosing(in_order(answer)) as items:
            async for item in items:
                if isinstance(item, Started):
                    waiting = self._begin(item)
                elif isinstance(item, Completed):
                    waiting += await self._end(item)
                else:
                    waiting += self._steps(self._blocks.feed(item), "completed")
                if waiting and not item.has_more:
                    yield waiting
                    waiting = b""

    async def whole(self, answer: Answer, /) -> bytes:
        """The response object. Raises what the pipeline raises."""
        async with aclosing(self.stream(answer)) as frames:
            async for _ in frames:
                pass
        return _encode(self._response)

    def error_frame(self, error: ServeError, /) -> bytes:
        """`response.failed`, with the items as far as they came."""
        is_limit = isinstance(error, LimitError) and not isinstance(error, ServerOverloaded)
        code = "rate_limit_exceeded" if is_limit else "server_error"
        failure = {"code": code, "message": error.message, "param": error.param, "type": error.code}
        output = [_item(self._asked, block, "incomplete") for block in self._blocks.all]
        self._response |= {"status": "failed", "error": failure, "output": output}
        return self._event("response.failed", response=self._response)

    def _begin(self, started: Started) -> bytes:
        self._response |= {"created_at": started.created, "model": started.model}
        snapshot = self._response
        return self._event("response.created", response=snapshot) + self._event(
            "response.in_progress", response=snapshot
        )

    async def _end(self, completed: Completed) -> bytes:
        why = _INCOMPLETE.get(self._blocks.reason) if self._blocks.reason is not None else None
        status: Status = "incomplete" if why else "completed"
        frames = self._steps(self._blocks.end(wants_text=True), status)
        last = len(self._blocks.all) - 1
        output = [
            _item(self._asked, block, status if block.index == last else "completed") for block in self._blocks.all
        ]
        self._response |= {
            "status": status,
            "completed_at": int(self._wall()) if status == "completed" else None,
            "incomplete_details": {"reason": why} if why else None,
            "output": output,
            "usage": _usage(completed.usage),
            "hitsend": self._extension(completed),
        }
        await self._store()
        return frames + self._event(f"response.{status}", response=self._response)

    async def _store(self) -> None:
        problem = await self._keep(self._response) if self._keep is not None else None
        if problem is not None:
            self._response["store"] = False
            self._response["hitsend"]["warnings"].append(problem)

    def _extension(self, completed: Completed) -> dict[str, Any]:
        request = self._asked.request
        return {
            "request_id": request.request_id,
            "cost_microusd": completed.cost_microusd,
            "timings": completed.timings,
            "warnings": list(dict.fromkeys((*request.warnings, *completed.warnings))),
            "matched_stops": [self._blocks.matched_stop],
        }

    def _steps(self, steps: list[Step], status: Status) -> bytes:
        return b"".join(self._step(step, status) for step in steps)

    def _step(self, step: Step, status: Status) -> bytes:
        if step.what == "open":
            return self._opened(step.block)
        if step.what == "close":
            return self._closed(step.block, status)
        at = self._at(step.block)
        if step.block.kind == "call":
            return self._event("response.function_call_arguments.delta", **at, delta=step.piece)
        if step.block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **at, content_index=0, delta=step.piece)
        logprobs = _logprobs(step.logprobs) if self._asked.request.logprobs else []
        return self._event("response.output_text.delta", **at, content_index=0, delta=step.piece, logprobs=logprobs)

    def _opened(self, block: Block) -> bytes:
        # by now the block may hold its first piece, which has an event of its own
        item = _item(self._asked, msgspec.structs.replace(block, pieces=[], logprobs=[]), "in_progress")
        if block.kind == "call":
            return self._event("response.output_item.added", output_index=block.index, item=item)
        part = item["content"][0]
        return self._event(
            "response.output_item.added", output_index=block.index, item=item | {"content": []}
        ) + self._event("response.content_part.added", **self._at(block), content_index=0, part=part)

    def _closed(self, block: Block, status: Status) -> bytes:
        item, at = _item(self._asked, block, status), self._at(block)
        if block.kind == "call":
            frames = self._event("response.function_call_arguments.done", **at, arguments=block.text, name=block.name)
        else:
            part = item["content"][0]
            frames = self._text_done(block, part)
            frames += self._event("response.content_part.done", **at, content_index=0, part=part)
        return frames + self._event("response.output_item.done", output_index=block.index, item=item)

    def _text_done(self, block: Block, part: dict[str, Any]) -> bytes:
        at = self._at(block)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.done", **at, content_index=0, text=part["text"])
        logprobs = part["logprobs"]
        return self._event("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=logprobs)

    def _at(self, block: Block) -> dict[str, Any]:
        return {"item_id": _item_id(self._asked, block), "output_index": block.index}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return sse.event(kind, _encode({"type": kind, "sequence_number": number, **fields}))


def _item_id(asked: Asked, block: Block) -> str:
    return f"{_IDS[block.kind]}_{asked.request.request_id}_{block.index}"


def _item(asked: Asked, block: Block, status: Status) -> dict[str, Any]:
    """The block as an output item."""
    common = {"id": _item_id(asked, block), "status": status}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", **common, **call}
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}]
        return {"type": "reasoning", **common, "summary": [], "content": content, "encrypted_content": None}
    logprobs = _logprobs(tuple(block.logprobs)) if asked.request.logprobs else []
    part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
    return {"type": "message", **common, "role": "assistant", "content": [part]}


def _logprobs(entries: tuple[TextLogprob, ...]) -> list[dict[str, Any]]:
    return [_logprob(entry) | {"top_logprobs": [_logprob(other) for other in entry.top]} for entry in entries]


def _logprob(entry: TextLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": max(_LOWEST_LOGPROB, entry.logprob), "bytes": list(entry.bytes)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _echo(asked: Asked) -> dict[str, Any]:
    """The response before anything happened: what was asked for. A null is the model's own default."""
    wire, request = asked.wire, asked.request
    asked_format = msgspec.to_builtins(wire.text.format) if wire.text and wire.text.format else {"type": "text"}
    text = {"format": {name: value for name, value in asked_format.items() if value is not None}}
    effort = wire.reasoning.effort if wire.reasoning else None
    return {
        "id": response_id(request.request_id),
        "object": "response",
        "created_at": 0,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": wire.safety_identifier,
        "service_tier": tier_name(request),
        "temperature": wire.temperature,
        "text": text,
        "tool_choice": wire.tool_choice if wire.tool_choice is not None else "auto",
        "tools": list(asked.tools),
        "top_logprobs": request.top_logprobs,
        "top_p": wire.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": wire.user,
    }
