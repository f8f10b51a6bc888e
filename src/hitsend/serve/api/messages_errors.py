"""Errors as Anthropic's clients see them.

Enters: a `ServeError`. Leaves: bytes. Always true: the same words as in `errors.py`, with the same status, in the shape
`{"type": "error", "error": {type, message}, request_id}`; `type` follows from the error's class alone.
Next: `messages_request.py`.
"""

import msgspec

from hitsend.core.errors import (
    ClientError,
    DeadlineExceeded,
    EngineTimeout,
    InvalidApiKey,
    LimitError,
    NotFound,
    PermissionDenied,
    RequestTooLarge,
    ServeError,
    ServerOverloaded,
    ShuttingDown,
)
from hitsend.serve.stream import sse

_TYPES: tuple[tuple[type[ServeError], str], ...] = (
    (InvalidApiKey, "authentication_error"),
    (PermissionDenied, "permission_error"),
    (NotFound, "not_found_error"),
    (RequestTooLarge, "request_too_large"),
    (ClientError, "invalid_request_error"),
    (ServerOverloaded, "overloaded_error"),
    (ShuttingDown, "overloaded_error"),
    (LimitError, "rate_limit_error"),
    (DeadlineExceeded, "timeout_error"),
    (EngineTimeout, "timeout_error"),
)
"""The first class that fits decides."""


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """`type` is one of Anthropic's names."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True):
    """Anthropic's error object."""

    type: str
    error: MessagesErrorDetail
    request_id: str


def error_body(error: ServeError, request_id: str) -> bytes:
    """The body of a response that went wrong before its first byte."""
    kind = next((name for cls, name in _TYPES if isinstance(error, cls)), "api_error")
    return msgspec.json.encode(MessagesError("error", MessagesErrorDetail(kind, error.message), request_id))


def error_frame(error: ServeError, request_id: str) -> bytes:
    """The one event with which a stream ends that broke after its first byte."""
    return sse.event("error", error_body(error, request_id))
