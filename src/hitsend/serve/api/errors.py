"""Errors as clients see them: status, OpenAI's error body, headers.

Enters: a `ServeError`, or an exception nobody expected. Leaves: bytes and headers. Always true: what wasn't foreseen
becomes "internal error" with nothing of its text (which may quote a prompt or a path), and goes to the log with its
stack; this is the catch site before the first byte, `stream/deliver.py` is the one after it and gets `error_frame` from
here, so both say the same. Next: `../chat/`.
"""

import logging
import traceback

import msgspec

from hitsend.core.errors import (
    ClientError,
    InsufficientQuota,
    InvalidApiKey,
    LimitError,
    RequestTimeout,
    ServeError,
    ServerOverloaded,
)
from hitsend.serve.api.rates import retry_headers
from hitsend.serve.stream import sse

_log = logging.getLogger("hitsend.api")

Header = tuple[bytes, bytes]


class ErrorDetail(msgspec.Struct, frozen=True):
    """`param` names the field, where there is one to name."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    error: ErrorDetail


def public(error: Exception, request_id: str) -> ServeError:
    """The error that may be shown. One that isn't a ServeError is logged, by type and stack, and replaced."""
    if isinstance(error, ServeError):
        return error
    stack = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s: unexpected %s\n%s", request_id, type(error).__name__, stack)
    return ServeError(f"internal error; the server's log has more under request id {request_id}")


def error_body(error: ServeError) -> bytes:
    """OpenAI's `{"error": {message, type, param, code}}`."""
    detail = ErrorDetail(message=error.message, type=_type(error), param=error.param, code=error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_headers(error: ServeError) -> list[Header]:
    """Headers that belong to the error: when to come back, and how to identify oneself."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers += retry_headers(error.retry_after_s)
    if isinstance(error, RequestTimeout):
        headers.append((b"connection", b"close"))  # else it would go on sending to nobody
    if isinstance(error, InvalidApiKey):
        # a line each: browsers don't look behind a comma, and would never ask a person for the key
        headers.append((b"www-authenticate", b'Basic realm="hitsend"'))
        headers.append((b"www-authenticate", b'Bearer realm="hitsend"'))
    return headers


def error_frame(error: Exception, request_id: str) -> bytes:
    """The one frame with which a stream ends that broke after its first byte."""
    return sse.frame(error_body(public(error, request_id)))


def _type(error: ServeError) -> str:
    if isinstance(error, InsufficientQuota):
        return "insufficient_quota"
    if isinstance(error, ClientError):
        return "invalid_request_error"
    if isinstance(error, LimitError) and not isinstance(error, ServerOverloaded):
        return "rate_limit_error"
    return "server_error"
