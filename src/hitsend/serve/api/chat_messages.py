"""Messages of a chat request: checked turn by turn.

Enters: the wire's messages. Leaves: `Message`s with plain text. Always true: text parts are joined in order, nothing
that a client sent in a message is dropped in silence except what the API itself says to be output only (refusal null,
annotations, audio null) and what the official clients add to an answer that they parse (parsed, parsed_arguments); a
tool result answers a call that an earlier assistant turn made, so that nobody can forge one; an error names the
message's index. Next: `chat_completions.py`.
"""

from typing import Any

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Message


class PartIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One content part. Only text is served; the others are known so that they can be refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class FunctionIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The call inside a tool call; `arguments` is JSON as the model wrote it, so any string."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCallIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call that an assistant turn made."""

    id: str
    function: FunctionIn
    type: str = "function"
    index: int | None = None


class MessageIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message as it comes over the wire."""

    role: str
    content: str | list[PartIn] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    parsed: Any = None


ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_NAME_CHARS = 64
_ONLY_FOR = {
    "tool_calls": "assistant",
    "refusal": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
_UNSUPPORTED = ("function_call", "audio")


def read_messages(messages: list[MessageIn]) -> tuple[Message, ...]:
    """Check every turn and the order of tool turns. Raises InvalidRequest naming the message.

    Each call may be answered once: `calls` says for every id so far whether it still waits for its result.
    """
    if not messages:
        raise InvalidRequest("messages: at least one message is needed", param="messages")
    calls: dict[str, bool] = {}
    return tuple(_read(message, f"messages[{index}]", calls) for index, message in enumerate(messages))


def _read(message: MessageIn, where: str, calls: dict[str, bool]) -> Message:
    _check_fields(message, where)
    content = _content(message, where)
    if message.role == "tool":
        _check_answers(message, where, calls)
    if message.tool_calls:
        _check_calls(message.tool_calls, where, calls)
    if content is None and not message.tool_calls and (message.reasoning_content or message.reasoning):
        content = ""  # as an answer of ours that was cut off inside its thoughts says it
    has_something = content is not None or message.tool_calls or message.refusal is not None
    if not has_something:
        extra = " or tool_calls" if message.role == "assistant" else ""
        raise InvalidRequest(f"{where}.content is missing: {message.role} messages need content{extra}", param=where)
    return Message(role=message.role, content=content, fields=_extras(message))


def _check_fields(message: MessageIn, where: str) -> None:
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"{where}.role is not one of {known}", param=f"{where}.role")
    for field in _UNSUPPORTED:
        if getattr(message, field) is not None:
            raise InvalidRequest(f"{where}.{field} is not supported", param=f"{where}.{field}")
    for field, role in _ONLY_FOR.items():
        if message.role != role and getattr(message, field) not in (None, []):
            raise InvalidRequest(f"{where}.{field} is only for {role} messages", param=f"{where}.{field}")
    if message.name is not None and not 0 < len(message.name) <= _MAX_NAME_CHARS:
        limit = f"{len(message.name)} characters, limit 1..{_MAX_NAME_CHARS}"
        raise InvalidRequest(f"{where}.name: {limit}", param=f"{where}.name")


def _content(message: MessageIn, where: str) -> str | None:
    content = message.content
    if content is None:
        return message.refusal
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{where}.content is an empty array", param=f"{where}.content")
    return "".join(_part(part, message.role, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: PartIn, role: str, where: str) -> str:
    others = [name for name in ("image_url", "input_audio", "file") if getattr(part, name) is not None]
    if part.type == "text" and part.text is not None and part.refusal is None and not others:
        return part.text
    if part.type == "refusal" and role == "assistant" and part.refusal is not None and part.text is None and not others:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise InvalidRequest(f"{where}: a {part.type} part has exactly the fields type and {part.type}", param=where)
    raise InvalidRequest(f"{where}: only text parts are supported, not this type", param=where)


def _check_answers(message: MessageIn, where: str, calls: dict[str, bool]) -> None:
    if not message.tool_call_id:
        raise InvalidRequest(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
    if message.tool_call_id not in calls:
        text = f"{where}.tool_call_id matches no tool call of an earlier assistant message"
        raise InvalidRequest(text, param=f"{where}.tool_call_id")
    if not calls[message.tool_call_id]:
        text = f"{where}.tool_call_id: an earlier message has answered this call"
        raise InvalidRequest(text, param=f"{where}.tool_call_id")
    calls[message.tool_call_id] = False


def _check_calls(tool_calls: list[ToolCallIn], where: str, calls: dict[str, bool]) -> None:
    ids: set[str] = set()
    for index, call in enumerate(tool_calls):
        place = f"{where}.tool_calls[{index}]"
        if call.type != "function":
            raise InvalidRequest(f"{place}.type: only function calls are supported", param=f"{place}.type")
        if not call.id or call.id in ids:
            raise InvalidRequest(f"{place}.id is empty or used twice", param=f"{place}.id")
        ids.add(call.id)
    calls.update(dict.fromkeys(ids, True))


def _extras(message: MessageIn) -> dict[str, Any]:
    """What the template may want beside role and content."""
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls or ()
    ]
    extras = {
        "name": message.name,
        "reasoning_content": reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
    return {name: value for name, value in extras.items() if value is not None}
