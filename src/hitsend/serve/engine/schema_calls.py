"""Calls that have to be made, at an upstream whose `tool_choice` doesn't make sure of them: asked for as JSON.

Enters: a request with a forced call, and the text that came. Leaves: a `response_format` that leaves nothing but calls,
and those calls as `Delta`s have them. Always true: what its schema lets through is read as calls and never shown as
text; what a server says that didn't keep to it is passed on; a call that was cut is given as far as it came, once its
name is known. Next: `upstream_generation.py`.

    [{"name": "look", "arguments": {"at": "it"}}, …]
"""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, Request, ToolCallDelta
from hitsend.serve.engine.openai_wire import MAX_EVENT_BYTES, ChunkReader, Unreadable
from hitsend.serve.engine.terms import Terms

_HEAD = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(r"\s*\}")
_NEEDED = frozenset({"tools", "tool_choice", "response_format"})
_decode = json.JSONDecoder().raw_decode


def is_forced(request: Request, terms: Terms) -> bool:
    """Whether this request's calls are asked for in this way."""
    is_wanted = bool(request.tools) and request.tool_choice.mode == "required"
    return is_wanted and terms.profile.calls_by_schema and terms.takes >= _NEEDED


def calls_format(tools: Sequence[dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """The `response_format`: one call of these tools, or several."""
    functions = [tool["function"] for tool in tools]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/arguments{at}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, function in enumerate(functions)
    ]
    schema = {
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        "$defs": {
            f"arguments{at}": _moved(function["parameters"] or {"type": "object"}, f"#/$defs/arguments{at}")
            for at, function in enumerate(functions)
        },
    }
    if not is_parallel:
        schema["maxItems"] = 1
    return {"type": "json_schema", "json_schema": {"name": "calls", "schema": schema, "strict": True}}


def _moved(schema: Any, where: str) -> Any:
    """A schema whose references to itself still hold, now that it stands inside another one."""
    if isinstance(schema, list):
        return [_moved(one, where) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _moved(value, where) for name, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = where + reference[1:]
    return found


def calls_in(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each call, the last one as far as it came."""
    found: list[tuple[str, str]] = []
    at = 0
    while (head := _HEAD.match(text, at)) is not None:
        try:
            _, end = _decode(text, head.end())
        except (ValueError, RecursionError):
            end = len(text)
        found.append((json.loads(head[1]), text[head.end() : end]))
        tail = _TAIL.match(text, end)
        at = len(text) if tail is None else tail.end()
    return found


class CallsReader(ChunkReader):
    """Reads a stream whose texts are calls."""

    def __init__(self, n: int, *, skips_null: bool = False) -> None:
        super().__init__(n, skips_null=skips_null)
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._size = 0

    def feed(self, data: bytes) -> list[Delta]:
        """As `ChunkReader.feed`; each choice's calls come with its end."""
        return [turned for delta in super().feed(data) for turned in self._turned(delta)]

    def close(self, *, is_sure: bool = False) -> list[Delta]:
        """As `ChunkReader.close`."""
        return [turned for delta in super().close(is_sure=is_sure) for turned in self._turned(delta)]

    def _turned(self, delta: Delta) -> Iterator[Delta]:
        self._texts[delta.index].append(delta.text)
        self._size += len(delta.text)
        if self._size > MAX_EVENT_BYTES:
            self.fault = Unreadable(f"calls of more than {MAX_EVENT_BYTES} characters")
        if delta.finish_reason is None:
            rest = msgspec.structs.replace(delta, text="")
            if rest != Delta(delta.index):
                yield rest
            return
        text = "".join(self._texts[delta.index])
        calls = tuple(
            ToolCallDelta(index, f"call_{secrets.token_hex(12)}", name, arguments)
            for index, (name, arguments) in enumerate(calls_in(text))
        )
        reason = delta.finish_reason
        if calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        is_ours = bool(calls) or (reason is FinishReason.LENGTH and text.lstrip().startswith("["))
        yield msgspec.structs.replace(
            delta, text="" if is_ours else text, tool_calls=delta.tool_calls or calls, finish_reason=reason
        )
