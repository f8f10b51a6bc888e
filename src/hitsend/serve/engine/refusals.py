"""An upstream that doesn't answer as asked, in hitsend's own errors.

Enters: a failed line, or an answer with another status than 200. Leaves: a `Refusal`, whose error can be shown. Always
true: an error code that the upstream's profile knows goes before the status (three kinds of 429 want three reactions);
what the upstream wrote goes no further than its error code and field name, because its words may quote a prompt; how
long to wait is its own Retry-After, a number or a date, and an hour at most. Next: `openai.py`, whose table tells which
is which.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from hitsend.core.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    RateLimitExceeded,
    RequestTooLarge,
    ServeError,
    from_code,
)
from hitsend.serve.engine.breaker import Outcome
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.loose_json import LooseJson
from hitsend.serve.engine.profiles import GENERIC, Profile, Reaction
from hitsend.serve.engine.upstream import UpstreamAnswer

_log = logging.getLogger(__name__)

_CODE = re.compile(r"[a-z][a-z0-9_.-]{1,63}")
_LONGEST_WAIT_S = 3600.0
_DAY_S = 86_400.0
_TOO_LONG = frozenset(
    (
        ContextLengthExceeded.code,
        "exceed_context_size_error",
        "context_window_exceeded",
        "model_context_window_exceeded",
        "model_max_prompt_tokens_exceeded",
    )
)
"""Codes and types that say that prompt and answer don't fit."""
_TOO_LONG_WORDS = re.compile(
    rb"maximum context length|model'?s context length|maximum model length"  # OpenAI, DeepSeek, Mistral, SGLang, vLLM
    rb"|`max_new_tokens` must be <=|`inputs` must have less than"  # TGI
    rb"|context window limit|context window exceeds|exceeds? the context window"  # Workers AI, MiniMax, OpenAI
    rb"|(?:prompt|input) is too long|all messages is too long"  # Anthropic, Bedrock, Perplexity
    rb"|token count[ of()0-9]{0,24}exceeds the"  # Gemini, Copilot
    rb"|maximum prompt length is|prompt exceeds max"  # xAI, Zhipu
    rb"|exceed the configured limit of|exceeded model token limit|range of input length"  # Azure, Moonshot, DashScope
    rb"|(?:exceeds the|greater than the) context length|context length of only"  # Ollama, LM Studio
    rb"|tokens in the prompt cannot exceed|should not exceed max_num_tokens",  # Cohere, TensorRT-LLM
    re.IGNORECASE,
)
"""Of those who say so in words alone, 2026-11."""
_NO_CREDIT = frozenset(
    ("insufficient_quota", "exceeded_current_quota_error", "billing_hard_limit_reached", "insufficient_balance")
)
"""Codes and types of 429s that no waiting helps: OpenAI, Moonshot and others."""
_LACKS_MODEL = frozenset({"model_not_found", "invalid_model", "unknown_model", "model_not_supported"})
"""Codes of those who say with a 400 that they haven't it."""
_MISFITS = {
    b"stream_options": 'doesn\'t take stream_options: set lacks = ["stream_options"]',
    b"'max_completion_tokens' instead": 'wants another name: set max_tokens_field = "max_completion_tokens"',
}
"""What a 400 or 422 says of fields that no client has sent, and what to do about it."""
_STATUSES = {
    word: status
    for status, words in (
        (
            400,
            "invalid_request_error invalid_request badrequesterror context_length_exceeded exceed_context_size_error",
        ),
        (401, "authentication_error invalid_api_key"),
        (403, "permission_error permission_denied"),
        (404, "model_not_found not_found_error notfounderror"),
        (413, "request_too_large"),
        (422, "validation template_error tool_error missing_template_variable"),
        (429, "rate_limit_exceeded rate_limit_error insufficient_quota overloaded"),
    )
    for word in words.split()
}
"""What an error's code or type stands for where no status says it: words of OpenAI, vLLM, Anthropic, llama-server, TGI
and hitsend, 2026-11. All others are failures."""
_WAITED = frozenset({"insufficient_quota", "server_overloaded", "rate_limit_exceeded", "engine_unavailable"})


class _ErrorIn(msgspec.Struct, frozen=True):
    code: str | int | None = None
    type: str | None = None
    param: str | None = None


class LacksModel(InvalidRequest):
    """The upstream knows nothing under that name or path: to a client a refusal, to a route a reason to go on."""


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no answer, and what it says of the upstream. `closed_s`: nobody shall be asked for so long."""

    error: ServeError
    may_repeat: bool = False
    outcome: Outcome = "failed"
    closed_s: float | None = None


def broken(failure: LineFailed, name: str) -> ServeError:
    """What the caller is told of a line that failed."""
    text = f"{failure} ({name})."
    if failure.is_timeout and not failure.is_unanswered:
        return EngineTimeout(text)
    return EngineUnavailable(text, retry_after_s=1.0) if failure.is_unanswered else EngineFailed(text)


async def refusal_of(
    answer: UpstreamAnswer, name: str, profile: Profile = GENERIC, *, wall: float = 0.0, wants_json: bool = False
) -> Refusal | None:
    """None for an answer that can be read. What the upstream wrote goes no further than its code.

    `wall`: seconds since the epoch, for what lasts until a day ends. `wants_json`: no stream was asked for.
    """
    status = answer.status
    if status == 200:
        encoding = answer.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            answer.close()
            text = f"The upstream {name} packed its answer (content-encoding), which it was asked not to."
            return Refusal(EngineFailed(text))
        is_page = "html" in answer.content_type  # somebody's login
        if not (is_page or (wants_json and answer.content_type == "text/event-stream")):
            return None  # some give an answer whole, whatever they are asked for, or call it what it isn't
        answer.close()
        return Refusal(EngineFailed(f"The upstream {name} answered without JSON.")) if wants_json else streamless(name)
    body = await answer.read_refusal()
    answer.close()
    wait_s = _wait_s(answer.headers, wall)
    return known(body, name, profile, wall=wall, wait_s=wait_s) or _by_status(status, body, name, profile, wait_s)


def streamless(name: str) -> Refusal:
    """Of an answer that is neither a stream nor a whole one."""
    return Refusal(EngineFailed(f"The upstream {name} answered without an event stream."))


def known(body: bytes, name: str, profile: Profile, *, wall: float, wait_s: float | None = None) -> Refusal | None:
    """What the profile says of the code in a body; None where it knows none of them."""
    return meant(_decoded(body), name, profile, wall=wall, wait_s=wait_s)


def instead(body: bytes, name: str, profile: Profile, *, wall: float) -> Refusal | None:
    """What a 200's whole body means that is an error in place of an answer; None where it is none."""
    document = _decoded(body)
    if isinstance(document, dict) and (document.get("error") or document.get("object") == "error"):
        error = document.get("error")
        return said(error if isinstance(error, dict) else document, name, profile, wall=wall)
    return meant(document, name, profile, wall=wall)


def meant(said: Any, name: str, profile: Profile, *, wall: float, wait_s: float | None = None) -> Refusal | None:
    """The same of what was decoded already: an answer, its `error` or its `errors`."""
    for error in _errors(said):
        reaction = profile.errors.get(error.code) if isinstance(error.code, int) else None
        if reaction is not None:
            return _reacted(reaction, f"{name} {reaction.why} (code {error.code}).", wall, wait_s)
    return None


def said(error: Any, name: str, profile: Profile, *, wall: float) -> Refusal:
    """What an error in place of an answer's first word means, although a 200 stood above it."""
    refusal = meant(error, name, profile, wall=wall)
    if refusal is not None:
        return refusal
    found = next(_errors(error), _ErrorIn())
    status = found.code if isinstance(found.code, int) and 400 <= found.code < 600 else None
    words = [word.lower() for word in (found.code, found.type) if isinstance(word, str)]
    status = status or next((_STATUSES[word] for word in words if word in _STATUSES), 500)
    return _by_status(status, msgspec.json.encode(error), name, profile, None, how="in its answer")


def _reacted(reaction: Reaction, text: str, wall: float, wait_s: float | None) -> Refusal:
    closed_s = _DAY_S - wall % _DAY_S if reaction.closes == "utc_midnight" else None
    wait_s = closed_s or wait_s or 1.0
    param = "model" if reaction.code in ("model_not_found", "permission_denied") else None
    error = from_code(
        reaction.code,
        f"The upstream {text}",
        param=param,
        retry_after_s=wait_s if reaction.code in _WAITED else None,
    )
    if reaction.outcome == "failed":
        _log.warning("the upstream %s", text)
    return Refusal(error, reaction.may_repeat, reaction.outcome, closed_s)


def _by_status(
    status: int, body: bytes, name: str, profile: Profile, wait_s: float | None, *, how: str | None = None
) -> Refusal:
    """`how` it was said, if not by the status itself."""
    how = how or f"HTTP {status}"
    if status == 402 or (status == 429 and not _NO_CREDIT.isdisjoint(_words(body))):
        text = f"The upstream {name} has no credit left for this server ({how})."
        _log.error("the upstream %s has no credit left for this server (%s)", name, how)
        return Refusal(EngineUnavailable(text, retry_after_s=wait_s))
    if status == 429:
        text = f"The upstream {name} limits its requests ({how})."
        return Refusal(RateLimitExceeded(text, retry_after_s=wait_s or 1.0), outcome="left")
    if (why := _misfit(status, body, profile)) is not None:
        _log.error("the upstream %s %s", name, why)
        return Refusal(EngineUnavailable(f"The upstream {name} {why}."), outcome="ok")
    if status in (400, 404, 413, 422) or (status in (500, 503) and _is_too_long(body, profile)):
        return Refusal(_refused(status, body, name, profile, how), outcome="ok")
    if status >= 500 or status == 408:
        text = f"The upstream {name} failed ({how})."
        return Refusal(EngineUnavailable(text, retry_after_s=wait_s or 1.0), may_repeat=True)
    if status in (401, 403):
        _log.error("the upstream %s refuses this server's key (HTTP %d)", name, status)
    why = "redirected, which is not followed" if 300 <= status < 400 else "refused this server"
    return Refusal(EngineUnavailable(f"The upstream {name} {why} ({how})."))


def _misfit(status: int, body: bytes, profile: Profile) -> str | None:
    """What the settings have to say, so that it understands what is always sent."""
    if profile.priority_words is not None and profile.priority_words.encode() in body:
        return "has no priority scheduling: start it with --scheduling-policy priority, or set sends_priority = false"
    found = (why for words, why in _MISFITS.items() if words in body)
    return next(found, None) if status in (400, 422) else None


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(LooseJson().mended(body) or body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _errors(said: Any) -> Iterator[_ErrorIn]:
    """Of the shapes there are: `error`, Cloudflare's `errors`, a list, or code and type with nothing around them. What
    is of no type that can be meant is passed over, and hides nothing of the rest."""
    if isinstance(said, list):
        yield from (_error(one) for one in said if isinstance(one, dict))
    elif isinstance(said, dict):
        own = said.get("error")
        yield from (_error(own),) if isinstance(own, dict) else ()
        yield from _errors(said["errors"]) if isinstance(said.get("errors"), list) else ()
        yield _error(said)


def _error(said: dict[str, Any]) -> _ErrorIn:
    code, kind, param = (said.get(name) for name in ("code", "type", "param"))
    if isinstance(code, str) and re.fullmatch(r"[0-9]{1,9}", code):
        code = int(code)
    if isinstance(code, float) and code.is_integer():
        code = int(code)
    is_one = isinstance(code, str | int) and not isinstance(code, bool)
    kind, param = (one if isinstance(one, str) else None for one in (kind, param))
    return _ErrorIn(code if is_one else None, kind, param)


def _is_too_long(body: bytes, profile: Profile) -> bool:
    is_named = profile.context_words is not None and profile.context_words.encode() in body
    return is_named or _TOO_LONG_WORDS.search(body) is not None


def _words(body: bytes) -> list[str]:
    """Code and type of its error, as far as they are words that may be shown."""
    error = next(_errors(_decoded(body)), _ErrorIn())
    return [word for word in (error.code, error.type) if isinstance(word, str) and _CODE.fullmatch(word)]


def _refused(status: int, body: bytes, name: str, profile: Profile, how: str) -> ServeError:
    error = next(_errors(_decoded(body)), _ErrorIn())
    named = _words(body)
    told = f"({', '.join([*named[:1], how])})"
    param = error.param if error.param and re.fullmatch(r"[a-z_][A-Za-z0-9_.\[\]]{0,127}", error.param) else None
    if not _TOO_LONG.isdisjoint(named) or _is_too_long(body, profile):
        return ContextLengthExceeded(f"The prompt is too long for the upstream {name} {told}.", param=param)
    if status == 404 or not _LACKS_MODEL.isdisjoint(named):
        return LacksModel(f"The upstream {name} has no such model, or nothing where it was asked {told}.", param=param)
    if status == 413:
        return RequestTooLarge(f"The request is too large for the upstream {name} {told}.", param=param)
    return InvalidRequest(f"The upstream {name} refused the request {told}.", param=param)


def _wait_s(headers: Mapping[str, str], wall: float) -> float | None:
    """What it says of when to come back, in the header that all know or in that of OpenAI and Azure."""
    said = _retry_after_s(headers.get("retry-after"), wall)
    finer = _retry_after_s(headers.get("retry-after-ms"), math.inf)
    return said if said is not None or finer is None else finer / 1000


def _retry_after_s(value: str | None, wall: float) -> float | None:
    """Seconds from now; None where the header has neither a number of them nor a date that is to come."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return min(float(value), _LONGEST_WAIT_S)
    try:
        left = parsedate_to_datetime(value).timestamp() - wall
    except (ValueError, TypeError, OverflowError):
        return None
    return min(left, _LONGEST_WAIT_S) if left > 0 else None
