"""`POST /v1/completions`: what comes in.

Enters: the body's bytes. Leaves: a `Request` with `prompts`, whether to echo them, and the `Parsed` event. Always
true: what both routes know (sampling, stop, stream, limits, warnings) is read by the chat request's own rules, so it
can't differ; a field that only makes sense for a chat is refused by name, as are `suffix` and more than the one answer
that `best_of` would compare; the number of prompts is bounded before any of them is looked at. Next: `completions.py`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck, Parsed
from hitsend.core.request import Principal, Request
from hitsend.serve.api import chat_request, strict_json
from hitsend.settings import AccessSettings

DEFAULT_MAX_TOKENS = 16
"""What OpenAI's legacy route gives a body without max_tokens."""

CHAT_ONLY = frozenset(
    {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "response_format",
        "modalities",
        "audio",
        "prediction",
        "web_search_options",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "reasoning_effort",
        "thinking_token_budget",
        "verbosity",
    }
)
_OF_THE_STAND_IN = ("max_body_bytes", "max_json_depth", "max_messages", "max_content_parts")

Prompt = str | tuple[int, ...]


class OwnFields(msgspec.Struct, frozen=True):
    """What only this route knows. `logprobs` is the number of alternatives."""

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


CompletionBody: type[msgspec.Struct] = msgspec.defstruct(
    "CompletionBody",
    [(field.name, field.type) for field in msgspec.structs.fields(OwnFields) if field.required]
    + [(field.name, field.type, None) for field in msgspec.structs.fields(OwnFields) if not field.required]
    + [
        (field.name, field.type, None)
        for field in msgspec.structs.fields(chat_request.ChatBody)
        if field.name not in CHAT_ONLY and field.name not in OwnFields.__struct_fields__
    ],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)
"""All fields of the wire, as `/openapi.json` tells them."""


class CompletionRequest(msgspec.Struct, frozen=True):
    """`echo`: each choice's text begins with its prompt. `prompt_logprobs` is the wire's; the request's own is also set
    where `echo` and `logprobs` come together."""

    request: Request
    echo: bool
    prompt_logprobs: int | None
    parsed: Parsed


def parse(
    body: bytes, limits: AccessSettings, *, request_id: str, principal: Principal, default_model: str | None
) -> CompletionRequest:
    """The request in our own words. `default_model` serves a body without `model`. Raises InvalidRequest."""
    tree, depth = strict_json.decode(body, limits.max_json_depth)
    own = strict_json.typed(tree, OwnFields)
    _check(own, tree)
    prompts = read_texts(own.prompt, "prompt", limits.max_prompts, "access.max_prompts")
    request, parsed = chat_request.parse(
        _as_chat(tree, own),
        limits,
        request_id=request_id,
        principal=principal,
        default_model=default_model,
    )
    request = msgspec.structs.replace(
        request, messages=(), prompts=prompts, max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS
    )
    asked = request.prompt_logprobs
    if own.echo and own.logprobs is not None:
        request = msgspec.structs.replace(request, prompt_logprobs=max(own.logprobs, asked or 0))
    checks = (
        LimitCheck("max_body_bytes", len(body), limits.max_body_bytes),
        LimitCheck("max_json_depth", depth, limits.max_json_depth),
        LimitCheck("max_prompts", len(prompts), limits.max_prompts),
        *(check for check in parsed.limits if check.name not in _OF_THE_STAND_IN),
    )
    parsed = msgspec.structs.replace(parsed, body_bytes=len(body), num_messages=0, limits=checks)
    return CompletionRequest(request, echo=bool(own.echo), prompt_logprobs=asked, parsed=parsed)


def read_texts(value: Any, field: str, limit: int, limit_name: str) -> tuple[Prompt, ...]:
    """A string, token ids, or an array of either: OpenAI's four shapes. Raises InvalidRequest naming the element."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}: expected string, array of strings, token ids or arrays of them", param=field)
    if not value:
        raise InvalidRequest(f"{field}: an empty array", param=field)
    if isinstance(value[0], int):
        return (_ids(value, field),)
    if len(value) > limit:
        raise InvalidRequest(f"{field}: {len(value)} elements, limit {limit} ({limit_name})", param=field)
    if isinstance(value[0], str):
        for index, text in enumerate(value):
            if not isinstance(text, str):
                raise InvalidRequest(f"{field}[{index}]: expected string as before it", param=f"{field}[{index}]")
        return tuple(value)
    return tuple(_ids(ids, f"{field}[{index}]") for index, ids in enumerate(value))


def _ids(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{field}: expected a non-empty array of token ids", param=field)
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(f"{field}[{index}]: expected a token id", param=f"{field}[{index}]")
    return tuple(value)


def _check(own: OwnFields, tree: dict[str, Any]) -> None:
    for field, value in tree.items():
        if field in CHAT_ONLY and value is not None:
            raise InvalidRequest(f"{field} is not for /v1/completions: it has no messages, only prompt", param=field)
    if own.suffix:
        raise InvalidRequest("suffix is not supported: no text is filled in between", param="suffix")
    if own.best_of not in (None, 1):
        raise InvalidRequest(f"best_of: {own.best_of}, only 1 is supported: use n and choose yourself", param="best_of")


def _as_chat(tree: dict[str, Any], own: OwnFields) -> bytes:
    """The fields that both routes know, around a message that stands in for the prompt."""
    shared = {name: value for name, value in tree.items() if name not in OwnFields.__struct_fields__}
    shared["messages"] = [{"role": "user", "content": "prompt"}]
    if own.logprobs is not None:
        shared |= {"logprobs": True, "top_logprobs": own.logprobs}
    return msgspec.json.encode(shared)
