"""An upstream that doesn't answer as asked, in hitsend's own errors.

Enters: a failed line, or an answer with another status than 200. Leaves: a `Refusal`, whose error can be shown. Always
true: what the upstream wrote goes no further than its error code and field name, because its words may quote a prompt;
how long to wait is its own Retry-After, where it is a number. Next: `openai.py`, whose table tells which is which.
"""

import logging
import re

import msgspec

from hitsend.core.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    RateLimitExceeded,
    ServeError,
)
from hitsend.serve.engine.breaker import Outcome
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.upstream import UpstreamAnswer

_log = logging.getLogger(__name__)

_CODE = re.compile(r"[a-z][a-z0-9_.-]{1,63}")
_LONGEST_WAIT_S = 3600.0


class _ErrorIn(msgspec.Struct, frozen=True):
    code: str | int | None = None
    type: str | None = None
    param: str | None = None


class _RefusalIn(msgspec.Struct, frozen=True):
    error: _ErrorIn | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no answer, and what it says of the upstream."""

    error: ServeError
    may_repeat: bool = False
    outcome: Outcome = "failed"


def broken(failure: LineFailed, name: str) -> ServeError:
    """What the caller is told of a line that failed."""
    text = f"{failure} ({name})."
    if failure.is_timeout and not failure.is_unanswered:
        return EngineTimeout(text)
    return EngineUnavailable(text, retry_after_s=1.0) if failure.is_unanswered else EngineFailed(text)


async def refusal_of(answer: UpstreamAnswer, name: str) -> Refusal | None:
    """None for an answer that can be read. What the upstream wrote goes no further than its code."""
    status = answer.status
    if status == 200:
        if answer.content_type == "text/event-stream":
            return None
        answer.close()
        return Refusal(EngineFailed(f"The upstream {name} answered without an event stream."))
    body = await answer.read_refusal()
    answer.close()
    wait_s = _retry_after_s(answer.headers.get("retry-after"))
    if status == 429:
        text = f"The upstream {name} limits its requests (HTTP 429)."
        return Refusal(RateLimitExceeded(text, retry_after_s=wait_s or 1.0), outcome="left")
    if status in (400, 404, 413, 422):
        return Refusal(_refused(status, body, name), outcome="ok")
    if status >= 500:
        text = f"The upstream {name} failed (HTTP {status})."
        return Refusal(EngineUnavailable(text, retry_after_s=wait_s or 1.0), may_repeat=True)
    if status in (401, 403):
        _log.error("the upstream %s refuses this server's key (HTTP %d)", name, status)
    why = "redirected, which is not followed" if 300 <= status < 400 else "refused this server"
    return Refusal(EngineUnavailable(f"The upstream {name} {why} (HTTP {status})."))


def _refused(status: int, body: bytes, name: str) -> ServeError:
    try:
        error = msgspec.json.decode(body, type=_RefusalIn).error or _ErrorIn()
    except msgspec.DecodeError:
        error = _ErrorIn()
    named = [word for word in (error.code, error.type) if isinstance(word, str) and _CODE.fullmatch(word)]
    text = f"The upstream {name} refused the request ({', '.join([*named[:1], f'HTTP {status}'])})."
    param = error.param if error.param and re.fullmatch(r"[a-z_][A-Za-z0-9_.\[\]]{0,127}", error.param) else None
    kind = ContextLengthExceeded if ContextLengthExceeded.code in named else InvalidRequest
    return kind(text, param=param)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds, where the header has a number."""
    if value is None or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return None
    return min(float(value), _LONGEST_WAIT_S)
