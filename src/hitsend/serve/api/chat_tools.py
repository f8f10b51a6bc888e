"""Tools of a chat request: what may be called, and what has to be.

Enters: `tools`, `tool_choice` and the reasoning fields as they come over the wire. Leaves: `Tool`s and a `ToolChoice`.
Always true: names are unique and well formed, schemas are objects of bounded size, a choice names a tool that is there.
Next: `chat_messages.py`.
"""

import re
from typing import Any, Literal

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck
from hitsend.core.request import Tool, ToolChoice
from hitsend.settings import AccessSettings

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class FunctionIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool. Only functions are served."""

    type: str
    function: FunctionIn | None = None
    custom: Any = None


class NameIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function of a choice."""

    name: str


class AllowedIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tools that may (auto) or must (required) be called, out of all that are described."""

    mode: Literal["auto", "required"]
    tools: list["ChoiceIn"]


class ChoiceIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice of one function, or of several with `allowed_tools`."""

    type: str
    function: NameIn | None = None
    custom: Any = None
    allowed_tools: AllowedIn | None = None


def read_tools(tools: list[ToolIn] | None) -> tuple[Tool, ...]:
    """Check every tool. Raises InvalidRequest that names it."""
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        read = _tool(tool, f"tools[{index}]")
        if read.name in found:
            where = f"tools[{index}].function.name"
            raise InvalidRequest(f"{where}: an earlier tool has the same name", param=where)
        found[read.name] = read
    return tuple(found.values())


def _tool(tool: ToolIn, where: str) -> Tool:
    if tool.type != "function" or tool.custom is not None:
        raise InvalidRequest(f"{where}.type: only function tools are supported", param=f"{where}.type")
    function = tool.function
    if function is None:
        raise InvalidRequest(f"missing field: {where}.function", param=f"{where}.function")
    if not _NAME.fullmatch(function.name):
        place = f"{where}.function.name"
        raise InvalidRequest(f"{place}: 1 to 64 letters, digits, _ and - are allowed", param=place)
    schema = function.parameters or {}
    if schema.get("type", "object") != "object":
        place = f"{where}.function.parameters"
        raise InvalidRequest(f"{place}: the schema of all arguments must be of type object", param=place)
    return Tool(function.name, function.description, schema, bool(function.strict))


def read_choice(choice: str | ChoiceIn | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """What may or must be called, and the tools that this leaves. Raises InvalidRequest.

    Without tools only `none` and `auto` make sense.
    """
    if isinstance(choice, ChoiceIn) and choice.type == "allowed_tools":
        allowed = _allowed(choice, {tool.name for tool in tools})
        mode = choice.allowed_tools.mode if choice.allowed_tools is not None else "auto"
        return ToolChoice(mode), tuple(tool for tool in tools if tool.name in allowed)
    return _choice(choice, tools), tools


def _allowed(choice: ChoiceIn, names: set[str]) -> set[str]:
    """The allowed functions' names, each of them a tool's. Raises InvalidRequest."""
    where = "tool_choice.allowed_tools"
    if choice.allowed_tools is None or choice.function is not None or choice.custom is not None:
        raise InvalidRequest(f"missing field: {where}, and nothing beside it", param=where)
    if not choice.allowed_tools.tools:
        raise InvalidRequest(f"{where}.tools: an empty array", param=f"{where}.tools")
    allowed: set[str] = set()
    for index, tool in enumerate(choice.allowed_tools.tools):
        place = f"{where}.tools[{index}]"
        if (
            tool.type != "function"
            or tool.function is None
            or tool.custom is not None
            or tool.allowed_tools is not None
        ):
            raise InvalidRequest(f"{place}: only functions are supported, each by its name", param=place)
        if tool.function.name not in names:
            raise InvalidRequest(
                f"{place}: the function {tool.function.name[:64]!r} is not found in tools", param=place
            )
        allowed.add(tool.function.name)
    return allowed


def _choice(choice: str | ChoiceIn | None, tools: tuple[Tool, ...]) -> ToolChoice:
    if isinstance(choice, ChoiceIn):
        if choice.type != "function" or choice.custom is not None or choice.allowed_tools is not None:
            raise InvalidRequest("tool_choice.type: expected function or allowed_tools", param="tool_choice")
        name = choice.function.name if choice.function is not None else ""
        if name not in {tool.name for tool in tools}:
            shown = f" {name[:64]!r}" if name else ""
            raise InvalidRequest(f"tool_choice: the function{shown} is not found in tools", param="tool_choice")
        return ToolChoice("required", (name,))
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: required needs tools", param="tool_choice")
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return ToolChoice("required")
    raise InvalidRequest(
        "tool_choice: expected none, auto, required, allowed_tools or a named function", param="tool_choice"
    )


def template_arguments(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """The template's arguments, which may not contradict the effort. Raises InvalidRequest."""
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(f"reasoning_effort: expected one of {', '.join(EFFORTS)}", param="reasoning_effort")
    arguments = given or {}
    thinks = arguments.get("enable_thinking")
    if effort is not None and isinstance(thinks, bool) and thinks != (effort != "none"):
        text = f"reasoning_effort {effort} contradicts chat_template_kwargs.enable_thinking"
        raise InvalidRequest(text, param="reasoning_effort")
    return arguments


def check_bytes(tools: Any, limits: AccessSettings) -> tuple[LimitCheck, ...]:
    """The size of all tools, before anything is typed. Raises InvalidRequest."""
    if not tools:
        return ()
    size, limit = len(msgspec.json.encode(tools, enc_hook=lambda _: None)), limits.max_tools_bytes
    if size > limit:
        raise InvalidRequest(f"tools: {size} bytes, limit {limit} (access.max_tools_bytes)", param="tools")
    return (LimitCheck("max_tools_bytes", size, limit),)
