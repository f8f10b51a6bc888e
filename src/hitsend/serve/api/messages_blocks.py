"""Content blocks of `/v1/messages`.

Enters: the wire's system text and messages. Leaves: `Message`s. Always true: a block type that isn't served is refused
by its name; consecutive turns of one role are one turn, as the API says; a tool's result answers a call of an earlier
assistant turn; an error names the block's place. Next: `messages_request.py`.
"""

from typing import Any

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api import wire
from hitsend.serve.api.turns import Turns


class BlockIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One block. The last lines are fields of blocks that are refused by their type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list["BlockIn"] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: str | None = None
    source: Any = None
    title: Any = None
    context: Any = None
    file_id: Any = None


class TurnIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn as it comes over the wire."""

    role: str
    content: str | list[BlockIn]


_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_EXTRA = {"text": ("citations",), "tool_use": ("caller",), "tool_result": ("content", "is_error")}
_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def read_system(turns: Turns, system: str | list[BlockIn] | None, warnings: list[str]) -> None:
    """Add the system prompt. Raises InvalidRequest naming the block."""
    if system is None or system == []:
        return
    turns.say("system", _text(system, "system", warnings))


def read_turns(turns: Turns, messages: list[TurnIn], warnings: list[str]) -> bool:
    """Add the messages. Returns whether the answer goes on with the last one, because it is the assistant's.

    Raises InvalidRequest naming the block.
    """
    if not messages:
        raise InvalidRequest("messages: at least one message is needed", param="messages")
    for index, message in enumerate(messages):
        _turn(turns, message, f"messages[{index}]", warnings)
    last = messages[-1]
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(block.type == "tool_use" for block in last.content):
        where = f"messages[{len(messages) - 1}]"
        raise InvalidRequest(f"{where}: ends with a tool_use that has no tool_result", param=where)
    return True


def _turn(turns: Turns, message: TurnIn, where: str, warnings: list[str]) -> None:
    if message.role not in _ROLES:
        raise InvalidRequest(f"{where}.role is not one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = [BlockIn("text", message.content)] if isinstance(message.content, str) else message.content
    if not content and message.role == "assistant":
        content = [BlockIn("text", "")]  # as an answer that ended at once says it
    if not content:
        raise InvalidRequest(f"{where}.content is an empty array", param=f"{where}.content")
    words: list[str] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        _check(block, place, _ROLES[message.role], warnings)
        if message.role == "assistant":
            _assistant(turns, block, place, warnings)
        elif block.type == "text":
            words.append(block.text or "")
        else:
            _say(turns, message.role, words)
            result = _text(block.content or "", f"{place}.content", warnings)
            turns.result(block.tool_use_id or "", result, where=f"{place}.tool_use_id")
    _say(turns, message.role, words)


def _say(turns: Turns, role: str, words: list[str]) -> None:
    if words:
        turns.say(role, "".join(words), joins=True)
        words.clear()


def _assistant(turns: Turns, block: BlockIn, where: str, warnings: list[str]) -> None:
    if block.type == "text":
        turns.answer(block.text or "")
    elif block.type == "thinking":
        turns.think(block.thinking or "")
    elif block.type == "tool_use":
        arguments = msgspec.json.encode(block.input).decode()
        turns.call(block.id or "", block.name or "", arguments, where=f"{where}.id")
    else:
        warnings.append(f"{where}: {block.type} can't be read here, left out")


def _text(content: str | list[BlockIn], where: str, warnings: list[str]) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        _check(block, f"{where}[{index}]", ("text",), warnings)
    return "".join(block.text or "" for block in content)


def _check(block: BlockIn, where: str, types: tuple[str, ...], warnings: list[str]) -> None:
    if block.type not in types:
        known = block.type in _FIELDS
        text = f"only {', '.join(types)} can stand here" if known else f"{block.type[:64]!r} blocks are not supported"
        raise InvalidRequest(f"{where}.type: {text}", param=f"{where}.type")
    for field in _FIELDS[block.type]:
        if getattr(block, field) is None and field != "signature":
            raise InvalidRequest(f"missing field: {where}.{field}", param=f"{where}.{field}")
    known_fields = {"type", "cache_control", *_FIELDS[block.type], *_EXTRA.get(block.type, ())}
    for field in BlockIn.__struct_fields__:
        if field not in known_fields and getattr(block, field) is not None:
            raise InvalidRequest(f"{where}.{field} is not for {block.type} blocks", param=f"{where}.{field}")
    warnings += wire.habits(block, ("cache_control", "is_error"))
