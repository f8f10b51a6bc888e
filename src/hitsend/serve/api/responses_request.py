"""`POST /v1/responses`: what comes in.

Enters: the body's bytes, and the items of the response that it goes on from. Leaves: a `Request`, the `Parsed` event,
and what the answer echoes. Always true: each field of OpenAI's API is either served, or refused with a 400 that names
it, or accepted without effect and listed in `warnings`; a field nobody knows is refused. Next: `responses_stream.py`.

Extensions: top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, stop, chat_template_kwargs.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck, Parsed
from hitsend.core.request import OutputFormat, Principal, Request, SamplingAsked, Tool, ToolChoice
from hitsend.serve.api import responses_items, strict_json, wire
from hitsend.serve.api.chat_request import Label, MetadataKey, Penalty, Share, StreamOptions, TokenCount
from hitsend.serve.api.tiers import Priority, read_tier
from hitsend.serve.api.turns import Turns
from hitsend.settings import AccessSettings


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function; built-in tools are refused by name before this is read."""

    type: str
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    defer_loading: bool | None = None
    allowed_callers: Any = None
    output_schema: Any = None


class FormatIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text has to look like."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`verbosity` is accepted without effect."""

    format: FormatIn | None = None
    verbosity: str | None = None


class ReasoningIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only `effort` has an effect: reasoning is returned whole, so nothing is summarised."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class InputTokensBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What decides how long the prompt is: the body of `/v1/responses/input_tokens`."""

    input: str | list[Any] | None = None
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextIn | None = None
    reasoning: ReasoningIn | None = None
    truncation: str | None = None
    conversation: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    personality: Any = None


class ResponsesBody(InputTokensBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The wire's request, field by field; None is "not given" and JSON's null."""

    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[MetadataKey, Label] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    service_tier: str | None = None
    priority: Priority | None = None
    max_tool_calls: int | None = None
    background: bool | None = None
    background_options: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None


HABITS = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "max_tool_calls")
UNSUPPORTED = (
    *("background", "background_options", "conversation", "prompt", "context_management", "moderation", "image"),
    *("access_programs", "personality"),
)
INCLUDES = {
    "message.output_text.logprobs": True,
    "reasoning.encrypted_content": False,
    "file_search_call.results": False,
    "web_search_call.results": False,
    "web_search_call.action.sources": False,
    "message.input_image.image_url": False,
    "computer_call_output.output.image_url": False,
    "code_interpreter_call.outputs": False,
}
"""What may be asked for, and whether that has an effect here."""


class Asked(msgspec.Struct, frozen=True):
    """One request, read. `items` are the conversation so far, as they will be stored; `tools` is the wire's."""

    request: Request
    wire: ResponsesBody
    items: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]


def read(body: bytes, limits: AccessSettings) -> tuple[ResponsesBody, tuple[LimitCheck, ...]]:
    """The body, typed. Raises InvalidRequest."""
    tree, checks = wire.decode(body, limits)
    checks += _check_limits(tree, limits)
    return strict_json.typed(tree, ResponsesBody), checks


def read_counted(body: bytes, limits: AccessSettings) -> ResponsesBody:
    """The body of a question for the prompt's length, as a request without anything else. Raises InvalidRequest."""
    tree, _ = wire.decode(body, limits)
    _check_limits(tree, limits)
    counted = strict_json.typed(tree, InputTokensBody)
    return ResponsesBody(**{field: getattr(counted, field) for field in InputTokensBody.__struct_fields__})


def build(
    body: ResponsesBody,
    before: Sequence[dict[str, Any]],
    limits: AccessSettings,
    *,
    request_id: str,
    principal: Principal,
    default_model: str | None,
) -> Asked:
    """The request in our own words. `before`: the items of the response it goes on from. Raises InvalidRequest."""
    warnings = _check_features(body)
    given = responses_items.read_input(body.input)
    wire.check_counts([("max_messages", "previous_response_id", len(before) + len(given))], limits)
    turns = Turns()
    if body.instructions is not None:
        turns.say("system", body.instructions)
    warnings += responses_items.read_turns(turns, before, given)
    tools = _tools(body.tools or ())
    choice, tools = _choice(body.tool_choice, tools)
    effort = body.reasoning.effort if body.reasoning else None
    switch = wire.thinking_switch(effort, "reasoning.effort")
    request = Request(
        request_id=request_id,
        model=wire.choose_model(body.model, default_model, warnings),
        messages=turns.end(where="input"),
        principal=principal,
        sampling=_sampling(body),
        logprobs="message.output_text.logprobs" in (body.include or ()) or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs or 0,
        stop=wire.read_stops((body.stop,) if isinstance(body.stop, str) else body.stop, "stop"),
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream),
        template_kwargs=switch | (body.chat_template_kwargs or {}),
        reasoning_effort=effort,
        user=body.user,
        metadata=body.metadata or {},
        warnings=tuple(dict.fromkeys(warnings)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output_format=_format(body.text),
        tier=read_tier(body.service_tier, body.priority, principal),
    )
    items = (*before, *responses_items.to_store(given, request_id))
    return Asked(request, body, items, tuple(body.tools or ()))


def parsed(asked: Asked, body: bytes, checks: tuple[LimitCheck, ...]) -> Parsed:
    """The record's event about it."""
    request = asked.request
    return Parsed(len(body), len(request.messages), request.stream, 1, limits=checks, warnings=request.warnings)


def _sampling(body: ResponsesBody) -> SamplingAsked:
    return SamplingAsked(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
    )


def _check_features(body: ResponsesBody) -> list[str]:
    wire.refuse(body, UNSUPPORTED)
    if body.truncation not in (None, "disabled"):
        raise InvalidRequest("truncation: only disabled is supported: nothing is cut to fit", param="truncation")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise InvalidRequest("unrecognized field: stream_options.include_usage", param="stream_options.include_usage")
    return wire.habits(body, HABITS) + _effectless(body)


def _effectless(body: ResponsesBody) -> list[str]:
    """Warnings about inner fields that change nothing. Raises InvalidRequest for an `include` that nobody knows."""
    warnings = []
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDES:
            raise InvalidRequest(f"include[{index}] is not one of {', '.join(INCLUDES)}", param=f"include[{index}]")
        if not INCLUDES[name]:
            warnings.append(f"include: {name}: accepted without effect")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        warnings.append("stream_options.include_obfuscation: accepted without effect")
    if body.text is not None and body.text.verbosity is not None:
        warnings.append("text.verbosity: accepted without effect")
    if body.reasoning is not None:
        fields = ("summary", "generate_summary", "context", "mode")
        warnings += [f"reasoning.{warning}" for warning in wire.habits(body.reasoning, fields)]
    return warnings


class _Tools(msgspec.Struct, frozen=True):
    tools: list[FunctionTool]


def _tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            where = f"tools[{index}].type"
            raise InvalidRequest(f"{where}: tools of type {kind[:64]!r} are not supported", param=where)
    typed = strict_json.typed({"tools": list(tools)}, _Tools).tools
    wire.check_names([tool.name for tool in typed])
    for index, tool in enumerate(typed):
        if tool.defer_loading or tool.allowed_callers not in (None, [], ["direct"]):
            field = "defer_loading" if tool.defer_loading else "allowed_callers"
            raise InvalidRequest(f"tools[{index}].{field} is not supported", param=f"tools[{index}].{field}")
    return tuple(Tool(tool.name, tool.description, tool.parameters or {}, strict=bool(tool.strict)) for tool in typed)


def _choice(choice: Any, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that it leaves. Raises InvalidRequest."""
    names = [tool.name for tool in tools]
    if choice is None:
        return ToolChoice(), tools
    if choice in ("none", "auto", "required"):
        return wire.check_choice(ToolChoice(choice), names), tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function" and isinstance(choice.get("name"), str):
        return wire.check_choice(ToolChoice("required", (choice["name"],)), names), tools
    if kind == "allowed_tools":
        allowed = _allowed(choice)
        wire.check_choice(ToolChoice("auto", allowed), names)
        left = tuple(tool for tool in tools if tool.name in allowed)
        return wire.check_choice(ToolChoice(choice["mode"]), [tool.name for tool in left]), left
    text = "tool_choice: expected none, auto, required, allowed_tools or a named function"
    raise InvalidRequest(text, param="tool_choice")


def _allowed(choice: dict[str, Any]) -> tuple[str, ...]:
    tools = wire.listed(choice.get("tools"))
    functions = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
    names = tuple(tool["name"] for tool in functions if isinstance(tool.get("name"), str))
    if choice.get("mode") not in ("auto", "required") or not tools or len(names) != len(tools):
        text = "tool_choice: allowed_tools needs mode auto or required, and tools that are named functions"
        raise InvalidRequest(text, param="tool_choice")
    return names


def _format(text: TextIn | None) -> OutputFormat | None:
    asked = text.format if text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return OutputFormat("json_object")
    if asked.type != "json_schema":
        raise InvalidRequest("text.format.type: expected text, json_object or json_schema", param="text.format.type")
    if asked.schema is None or asked.name is None:
        field = "text.format.schema" if asked.schema is None else "text.format.name"
        raise InvalidRequest(f"missing field: {field}", param=field)
    return OutputFormat("json_schema", asked.schema, name=asked.name, strict=bool(asked.strict))


def _check_limits(tree: dict[str, Any], limits: AccessSettings) -> tuple[LimitCheck, ...]:
    items = wire.listed(tree.get("input"))
    parts = [
        (f"input[{index}].{field}[{place}]", part)
        for index, item in enumerate(items)
        if isinstance(item, dict)
        for field in ("content", "output", "summary")
        for place, part in enumerate(wire.listed(item.get(field)))
    ]
    images = [where for where, part in parts if isinstance(part, dict) and part.get("type") == "input_image"]
    stops = [tree["stop"]] if isinstance(tree.get("stop"), str) else wire.listed(tree.get("stop"))
    counted = (
        ("max_messages", "input", len(items)),
        ("max_content_parts", "input", len(parts)),
        ("max_images", images[0] if images else "input", len(images)),
        ("max_tools", "tools", len(wire.listed(tree.get("tools")))),
        ("max_stop", "stop", len(stops)),
        ("max_stop_chars", "stop", wire.longest(stops)),
        ("max_tokens", "max_output_tokens", wire.number(tree.get("max_output_tokens"))),
        ("max_metadata", "metadata", len(tree["metadata"]) if isinstance(tree.get("metadata"), dict) else 0),
    )
    return wire.check_counts(counted, limits)
