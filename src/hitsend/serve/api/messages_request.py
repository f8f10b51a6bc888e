"""`POST /v1/messages` and `/v1/messages/count_tokens`: what comes in.

Enters: the body's bytes. Leaves: a `Request` and the `Parsed` event. Always true: each field of Anthropic's API is
either served, or refused with a 400 that names it, or accepted without effect and listed in `warnings`; a field nobody
knows is refused; a last turn of the assistant is gone on with. Next: `messages_stream.py`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck, Parsed
from hitsend.core.request import OutputFormat, Principal, Request, SamplingAsked, Tool, ToolChoice
from hitsend.serve.api import messages_blocks, strict_json, wire
from hitsend.serve.api.chat_request import Label, TokenCount
from hitsend.serve.api.messages_blocks import BlockIn, TurnIn
from hitsend.serve.api.tiers import Priority, read_messages_tier
from hitsend.serve.api.turns import Turns
from hitsend.settings import AccessSettings


class ToolIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the client's own; Anthropic's tools are refused by name before this is read."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None
    defer_loading: bool | None = None
    allowed_callers: Any = None


class ToolChoiceIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """auto, any, tool (with a name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """enabled (with a budget), adaptive or disabled."""

    type: str
    budget_tokens: TokenCount | None = None
    display: str | None = None


class FormatIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema that the answer has to match."""

    type: str
    schema: dict[str, Any]


class OutputConfigIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hard to think, and the answer's form."""

    effort: str | None = None
    format: FormatIn | None = None


class MetadataIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is behind the request, in the caller's own words."""

    user_id: Label | None = None


class CountTokensBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What decides how long the prompt is: the body of `count_tokens`."""

    messages: list[TurnIn]
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    system: str | list[BlockIn] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoiceIn | None = None
    thinking: ThinkingIn | None = None
    output_config: OutputConfigIn | None = None
    cache_control: Any = None
    speed: str | None = None
    user_profile_id: Any = None
    workspace_id: Any = None
    context_management: Any = None
    mcp_servers: Any = None


class MessagesBody(CountTokensBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The wire's request, field by field; None is "not given" and JSON's null."""

    max_tokens: TokenCount
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: MetadataIn | None = None
    service_tier: str | None = None
    priority: Priority | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


HABITS = ("cache_control", "diagnostics")
UNSUPPORTED = ("context_management", "mcp_servers", "user_profile_id", "workspace_id")
UNSUPPORTED_IN_ANSWERS = ("container", "inference_geo")
_USUAL_EFFORT = "medium"
"""Of who wants thinking and doesn't say how much, for engines that know efforts only: OpenAI's default."""
_CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def read(
    body: bytes, limits: AccessSettings, *, request_id: str, principal: Principal, default_model: str | None
) -> tuple[Request, Parsed]:
    """The request in our own words. Raises InvalidRequest."""
    tree, checks = wire.decode(body, limits)
    checks += _check_limits(tree, limits)
    asked = strict_json.typed(tree, MessagesBody)
    warnings = _check_features(asked)
    warnings += wire.habits(asked, ("diagnostics",))
    wire.refuse(asked, UNSUPPORTED_IN_ANSWERS)
    request = _prompt(asked, warnings, request_id=request_id, principal=principal, default_model=default_model)
    if request.thinking_token_budget is not None and request.thinking_token_budget >= asked.max_tokens:
        text = f"thinking.budget_tokens: {request.thinking_token_budget} is not below max_tokens, {asked.max_tokens}"
        raise InvalidRequest(text, param="thinking.budget_tokens")
    # a nucleus of nothing is the likeliest token alone
    sampling = SamplingAsked(
        temperature=0.0 if asked.top_p == 0 else asked.temperature, top_p=asked.top_p or None, top_k=asked.top_k
    )
    request = msgspec.structs.replace(
        request,
        sampling=sampling,
        stop=wire.read_stops(asked.stop_sequences, "stop_sequences"),
        max_tokens=asked.max_tokens,
        stream=bool(asked.stream),
        user=asked.metadata.user_id if asked.metadata else None,
        tier=read_messages_tier(asked.service_tier, asked.priority, principal),
    )
    parsed = Parsed(len(body), len(request.messages), request.stream, 1, limits=checks, warnings=request.warnings)
    return request, parsed


def read_counted(
    body: bytes, limits: AccessSettings, *, request_id: str, principal: Principal, default_model: str | None
) -> Request:
    """A request of which only the prompt matters. Raises InvalidRequest."""
    tree, _ = wire.decode(body, limits)
    _check_limits(tree, limits)
    asked = strict_json.typed(tree, CountTokensBody)
    warnings = _check_features(asked)
    return _prompt(asked, warnings, request_id=request_id, principal=principal, default_model=default_model)


def _prompt(
    asked: CountTokensBody, warnings: list[str], *, request_id: str, principal: Principal, default_model: str | None
) -> Request:
    turns = Turns()
    messages_blocks.read_system(turns, asked.system, warnings)
    continues = messages_blocks.read_turns(turns, asked.messages, warnings)
    tools = _tools(asked.tools or [], warnings)
    effort = asked.output_config.effort if asked.output_config else None
    switch = wire.thinking_switch(effort, "output_config.effort")
    is_thinking, budget = _thinking(asked.thinking, warnings)
    if is_thinking is not None:
        switch["enable_thinking"] = is_thinking
        effort = (effort or _USUAL_EFFORT) if is_thinking else "none"
    return Request(
        request_id=request_id,
        model=wire.choose_model(asked.model, default_model, warnings),
        messages=turns.end(where="messages"),
        principal=principal,
        template_kwargs=switch,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        warnings=tuple(dict.fromkeys(warnings)),
        tools=tools,
        tool_choice=_choice(asked.tool_choice, tools),
        parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
        output_format=_format(asked.output_config),
        thinking_token_budget=budget,
        reasoning_effort=effort,
    )


def _check_features(asked: CountTokensBody) -> list[str]:
    wire.refuse(asked, UNSUPPORTED)
    if asked.speed not in (None, "standard"):
        raise InvalidRequest("speed: only standard is supported", param="speed")
    return wire.habits(asked, ("cache_control",))


def _thinking(thinking: ThinkingIn | None, warnings: list[str]) -> tuple[bool | None, int | None]:
    """Whether to think (None: as the model does by itself), and how many tokens of it."""
    if thinking is None:
        return None, None
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequest("thinking.type: only enabled, adaptive and disabled are supported", param="thinking.type")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise InvalidRequest("missing field: thinking.budget_tokens", param="thinking.budget_tokens")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise InvalidRequest("thinking.budget_tokens is only for type enabled", param="thinking.budget_tokens")
    if thinking.display not in (None, "summarized"):
        raise InvalidRequest("thinking.display: only summarized is supported", param="thinking.display")
    if thinking.display is not None:
        warnings.append("thinking.display: thinking is shown whole")
    return thinking.type != "disabled", thinking.budget_tokens


class _Tools(msgspec.Struct, frozen=True):
    tools: list[ToolIn]


def _tools(tools: list[Any], warnings: list[str]) -> tuple[Tool, ...]:
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            where = f"tools[{index}].type"
            raise InvalidRequest(f"{where}: tools of type {kind[:64]!r} are not supported", param=where)
    typed = strict_json.typed({"tools": tools}, _Tools).tools
    wire.check_names([tool.name for tool in typed])
    for index, tool in enumerate(typed):
        if tool.defer_loading or tool.allowed_callers not in (None, [], ["direct"]):
            field = "defer_loading" if tool.defer_loading else "allowed_callers"
            raise InvalidRequest(f"tools[{index}].{field} is not supported", param=f"tools[{index}].{field}")
        warnings += wire.habits(tool, ("cache_control", "eager_input_streaming", "input_examples"))
    return tuple(Tool(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict)) for tool in typed)


def _choice(choice: ToolChoiceIn | None, tools: tuple[Tool, ...]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type not in _CHOICES:
        raise InvalidRequest(f"tool_choice.type is not one of {', '.join(_CHOICES)}", param="tool_choice.type")
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name belongs to type tool, and to it alone", param="tool_choice.name")
    names = (choice.name,) if choice.name is not None else ()
    return wire.check_choice(ToolChoice(_CHOICES[choice.type], names), [tool.name for tool in tools])


def _format(config: OutputConfigIn | None) -> OutputFormat | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        field = "output_config.format.type"
        raise InvalidRequest(f"{field}: only json_schema is supported", param=field)
    return OutputFormat("json_schema", config.format.schema)


def _check_limits(tree: dict[str, Any], limits: AccessSettings) -> tuple[LimitCheck, ...]:
    messages = wire.listed(tree.get("messages"))
    parts = [
        (f"messages[{index}].content[{place}]", block)
        for index, message in enumerate(messages)
        if isinstance(message, dict)
        for place, outer in enumerate(wire.listed(message.get("content")))
        for block in (outer, *(wire.listed(outer.get("content")) if isinstance(outer, dict) else ()))
    ]
    images = [where for where, block in parts if isinstance(block, dict) and block.get("type") == "image"]
    stops = wire.listed(tree.get("stop_sequences"))
    counted = (
        ("max_messages", "messages", len(messages)),
        ("max_content_parts", "messages", len(parts) + len(wire.listed(tree.get("system")))),
        ("max_images", images[0] if images else "messages", len(images)),
        ("max_tools", "tools", len(wire.listed(tree.get("tools")))),
        ("max_stop", "stop_sequences", len(stops)),
        ("max_stop_chars", "stop_sequences", wire.longest(stops)),
        ("max_tokens", "max_tokens", wire.number(tree.get("max_tokens"))),
    )
    return wire.check_counts(counted, limits)
