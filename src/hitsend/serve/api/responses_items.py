"""Items of `/v1/responses`: a conversation as a flat list.

Enters: the wire's input, text or items, after those of the response that it goes on from. Leaves: `Message`s, and the
items in the form in which they are stored and listed. Always true: an item type that isn't served is refused by its
name; what an assistant said, thought and called in a row becomes one turn; an error names the item's index.
Next: `responses_request.py`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api import strict_json
from hitsend.serve.api.turns import Turns


class PartIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One content part. Only text is served; the others are known so that they can be refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None
    image_url: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


class ItemIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input item: a message, a call, a call's output, or reasoning. `status`, `phase` and the like are the API's
    own notes on items that it once returned."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: str | None = None
    content: str | list[PartIn] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[PartIn] | None = None
    summary: list[PartIn] | None = None
    encrypted_content: str | None = None
    caller: Any = None
    is_async: bool | None = msgspec.field(default=None, name="async")


ROLES = ("user", "assistant", "system", "developer")
_FIELDS = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "namespace", "caller", "is_async"),
    "function_call_output": ("call_id", "output", "name", "namespace", "caller"),
    "reasoning": ("content", "summary", "encrypted_content"),
}
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read_input(given: str | list[Any] | None) -> list[dict[str, Any]]:
    """The input as raw items; a text is one message of the user. Raises InvalidRequest for types not served."""
    if given is None or given == []:
        raise InvalidRequest("input: at least one item is needed", param="input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    for index, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in _FIELDS:
            where = f"input[{index}].type"
            raise InvalidRequest(f"{where}: items of type {kind[:64]!r} are not supported", param=where)
    return [{"type": "message"} | item if isinstance(item, dict) else item for item in given]


def read_turns(turns: Turns, before: Sequence[dict[str, Any]], given: list[dict[str, Any]]) -> list[str]:
    """Add stored items and given ones to the turns. Returns warnings. Raises InvalidRequest naming the item."""
    warnings: list[str] = []
    stored = strict_json.typed({"input": list(before)}, _Items).input
    for item in stored:
        _add(turns, item, "previous_response_id", warnings)
    for index, item in enumerate(strict_json.typed({"input": given}, _Items).input):
        _add(turns, item, f"input[{index}]", warnings)
    return warnings


def to_store(given: list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    """The items as they are listed later: each with an id, content as a list of parts."""
    return [_stored(item, f"{request_id}_in{index}") for index, item in enumerate(given)]


class _Items(msgspec.Struct, frozen=True):
    input: list[ItemIn]


def _add(turns: Turns, item: ItemIn, where: str, warnings: list[str]) -> None:
    _check_fields(item, where)
    if item.type == "function_call":
        turns.call(item.call_id or "", item.name or "", item.arguments or "", where=f"{where}.call_id")
    elif item.type == "function_call_output":
        turns.result(item.call_id or "", _text(item.output, f"{where}.output"), where=f"{where}.call_id")
    elif item.type == "reasoning":
        if item.encrypted_content is not None:
            warnings.append(f"{where}.encrypted_content: can't be read here, left out")
        if text := _text(item.content or item.summary or "", f"{where}.content"):
            turns.think(text)
    elif item.role == "assistant":
        turns.answer(_text(item.content, f"{where}.content"), is_new=True)
    else:
        turns.say(item.role or "", _text(item.content, f"{where}.content"))


def _check_fields(item: ItemIn, where: str) -> None:
    for field in _NEEDED[item.type]:
        if getattr(item, field) is None:
            raise InvalidRequest(f"missing field: {where}.{field}", param=f"{where}.{field}")
    known = {"type", "id", "status", *_FIELDS[item.type]}
    for field in ItemIn.__struct_fields__:
        if field not in known and getattr(item, field) is not None:
            raise InvalidRequest(f"{where}.{field} is not for items of type {item.type}", param=f"{where}.{field}")
    if item.namespace is not None:
        raise InvalidRequest(f"{where}.namespace is not supported", param=f"{where}.namespace")
    if item.type == "message" and item.role not in ROLES:
        raise InvalidRequest(f"{where}.role is not one of {', '.join(ROLES)}", param=f"{where}.role")


def _text(content: str | list[PartIn] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content or ()))


def _part(part: PartIn, where: str) -> str:
    if part.type in _TEXTS and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in (*_TEXTS, "refusal"):
        raise InvalidRequest(f"{where}: its text is missing", param=where)
    raise InvalidRequest(f"{where}: only text parts are supported, not this type", param=where)


def _stored(item: dict[str, Any], default_id: str) -> dict[str, Any]:
    prefix = {"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")
    kept = item | {"id": item.get("id") or f"{prefix}_{default_id}"}
    if item["type"] == "message":
        kept["status"] = item.get("status") or "completed"
        if isinstance(item.get("content"), str):
            kept["content"] = [_part_out(item["content"], item["role"])]
    if item["type"] == "reasoning":
        kept["summary"] = item.get("summary") or []
    return kept


def _part_out(text: str, role: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}
