"""`POST /v1/chat/completions`: what comes in.

Enters: the body's bytes. Leaves: a `Request` and the `Parsed` event with every limit that was tested. Always true: each
field of OpenAI's API (and of the extensions below) is either served, or refused with a 400 that names it, or accepted
without effect and listed in `warnings`; a field nobody knows is refused; ranges are checked here, once, so that no
number that libllama could choke on gets past this file. Next: `chat_limits.py`.

Accepted without effect, because clients send them by habit: `HABITS`. Refused until they are built: `UNSUPPORTED`.
Extensions: top_k, min_p, repetition_penalty, thinking_token_budget, chat_template_kwargs, add_generation_prompt,
continue_final_message, structured_outputs, priority, and those of `sampling_fields.py`.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck, Parsed
from hitsend.core.request import Principal, Request, SamplingAsked
from hitsend.serve.api import strict_json
from hitsend.serve.api.chat_limits import check_limits
from hitsend.serve.api.chat_messages import MessageIn, read_messages
from hitsend.serve.api.chat_tools import ChoiceIn, ToolIn, read_choice, read_tools, template_arguments
from hitsend.serve.api.output_format import read_output_format
from hitsend.serve.api.sampling_fields import SamplingIn, check_sampling, with_extensions
from hitsend.serve.api.tiers import Priority, read_tier
from hitsend.serve.api.wire import choose_model, read_stops
from hitsend.settings import AccessSettings

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
TokenCount = Annotated[int, Meta(ge=1)]
Label = Annotated[str, Meta(max_length=512)]
MetadataKey = Annotated[str, Meta(max_length=64)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` is accepted without effect: nothing is padded here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatBody(SamplingIn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wire's request, field by field; None is "not given" and JSON's null."""

    messages: list[MessageIn]
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    seed: int | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    stop: str | list[str] | None = None
    n: TokenCount | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    metadata: dict[MetadataKey, Label] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    store: bool | None = None
    service_tier: str | None = None
    priority: Priority | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    cache_salt: Label | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    tools: list[ToolIn] | None = None
    tool_choice: str | ChoiceIn | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None


HABITS = (
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "verbosity",
)
UNSUPPORTED = ("functions", "function_call", "audio", "prediction", "web_search_options", "moderation")

MAX_LOGIT_BIAS = 1024
"""Entries; each costs the sampler a write per token, and nobody's list of banned words is longer."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def parse(
    body: bytes, limits: AccessSettings, *, request_id: str, principal: Principal, default_model: str | None
) -> tuple[Request, Parsed]:
    """The request in our own words. `default_model` serves a body without `model`. Raises InvalidRequest."""
    tree, depth = strict_json.decode(body, limits.max_json_depth)
    checks = (
        LimitCheck("max_body_bytes", len(body), limits.max_body_bytes),
        LimitCheck("max_json_depth", depth, limits.max_json_depth),
        *check_limits(tree, limits),
    )
    wire = strict_json.typed(tree, ChatBody)
    warnings = [*_check_features(wire)]
    model = choose_model(wire.model, default_model, warnings)
    request = _request(wire, request_id, principal, model, tuple(warnings))
    parsed = Parsed(
        body_bytes=len(body),
        num_messages=len(request.messages),
        stream=request.stream,
        n=request.n,
        limits=checks,
        warnings=request.warnings,
    )
    return request, parsed


def _request(wire: ChatBody, request_id: str, principal: Principal, model: str, warnings: tuple[str, ...]) -> Request:
    options = wire.stream_options or StreamOptions()
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if wire.prompt_logprobs is not None and wire.stream:
        raise InvalidRequest("prompt_logprobs is only for stream: false", param="prompt_logprobs")
    opens_turn, continues_turn = _turns(wire)
    max_tokens = _max_tokens(wire)
    check_sampling(wire, max_tokens)
    choice, tools = read_choice(wire.tool_choice, read_tools(wire.tools))
    return Request(
        request_id=request_id,
        model=model,
        messages=read_messages(wire.messages),
        principal=principal,
        sampling=_sampling(wire),
        logit_bias=_logit_bias(wire.logit_bias or {}),
        logprobs=bool(wire.logprobs),
        top_logprobs=wire.top_logprobs or 0,
        prompt_logprobs=wire.prompt_logprobs,
        stop=read_stops((wire.stop,) if isinstance(wire.stop, str) else wire.stop, "stop"),
        include_stop=bool(wire.include_stop_str_in_output),
        stop_token_ids=tuple(dict.fromkeys(wire.stop_token_ids or ())),
        min_tokens=wire.min_tokens or 0,
        ignore_eos=bool(wire.ignore_eos),
        n=wire.n or 1,
        max_tokens=max_tokens,
        stream=bool(wire.stream),
        include_usage=bool(options.include_usage),
        template_kwargs=template_arguments(_template_kwargs(wire.chat_template_kwargs), wire.reasoning_effort),
        add_generation_prompt=opens_turn,
        continue_final_message=continues_turn,
        user=wire.user,
        cache_salt=wire.cache_salt,
        metadata=wire.metadata or {},
        warnings=warnings,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        thinking_token_budget=wire.thinking_token_budget,
        reasoning_effort=wire.reasoning_effort,
        output_format=read_output_format(wire.response_format, wire.structured_outputs),
        tier=read_tier(wire.service_tier, wire.priority, principal),
        names_tier=wire.service_tier is not None,
        return_token_ids=bool(wire.return_token_ids),
    )


def _template_kwargs(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Any template takes "false" for true."""
    if not isinstance((given or {}).get("enable_thinking", False), bool):
        text = "chat_template_kwargs.enable_thinking: expected true or false"
        raise InvalidRequest(text, param="chat_template_kwargs.enable_thinking")
    return given


def _sampling(wire: ChatBody) -> SamplingAsked:
    if wire.seed is not None and not -(2**63) <= wire.seed < 2**63:
        raise InvalidRequest("seed: beyond 64 bits", param="seed")
    asked = SamplingAsked(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=0 if wire.top_k == -1 else wire.top_k,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        seed=wire.seed,
    )
    return with_extensions(asked, wire)


def _max_tokens(wire: ChatBody) -> int | None:
    new, old = wire.max_completion_tokens, wire.max_tokens
    if new is not None and old is not None and new != old:
        text = f"max_completion_tokens is {new} and max_tokens is {old}: give one of them"
        raise InvalidRequest(text, param="max_tokens")
    return new if new is not None else old


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias: {len(bias)} entries, limit {MAX_LOGIT_BIAS}", param="logit_bias")
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is no token id (0, 1, 2, …)", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def _turns(wire: ChatBody) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message): the answer opens a turn of its own, or goes on with the last."""
    continues = bool(wire.continue_final_message)
    opens = (not continues) if wire.add_generation_prompt is None else wire.add_generation_prompt
    if continues and opens:
        text = "continue_final_message and add_generation_prompt exclude each other"
        raise InvalidRequest(text, param="continue_final_message")
    if continues and (not wire.messages or wire.messages[-1].role != "assistant" or wire.messages[-1].tool_calls):
        text = "continue_final_message needs a last message of role assistant without tool_calls"
        raise InvalidRequest(text, param="continue_final_message")
    return opens, continues


def _check_features(wire: ChatBody) -> list[str]:
    """Refuse what isn't built; return a warning for each field that has no effect."""
    for field in UNSUPPORTED:
        if getattr(wire, field) not in (None, [], "none"):
            raise InvalidRequest(f"{field} is not supported", param=field)
    if wire.modalities not in (None, ["text"]):
        raise InvalidRequest('modalities: only ["text"] is supported', param="modalities")
    warnings = [f"{field}: accepted without effect" for field in HABITS if getattr(wire, field) is not None]
    if wire.parallel_tool_calls is not None and not wire.tools:
        warnings.append("parallel_tool_calls: accepted without effect")
    if wire.stream_options is not None and wire.stream_options.include_obfuscation:
        warnings.append("stream_options.include_obfuscation: accepted without effect")
    return warnings
