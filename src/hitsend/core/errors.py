"""Everything that can end a request badly, as one tree.

    ServeError                      code, status, message, param, retry_after_s
    ├── ClientError                 the caller can fix it
    │   ├── InvalidRequest          400 invalid_request
    │   ├── ContextLengthExceeded   400 context_length_exceeded
    │   ├── InvalidApiKey           401 invalid_api_key
    │   ├── PermissionDenied        403 permission_denied
    │   ├── NotFound                404 not_found
    │   ├── ModelNotFound           404 model_not_found
    │   ├── MethodNotAllowed        405 method_not_allowed
    │   ├── RequestTimeout          408 request_timeout
    │   ├── RequestTooLarge         413 request_too_large
    │   ├── UnsupportedMediaType    415 unsupported_media_type
    │   ├── IdempotencyConflict     409 idempotency_conflict
    │   └── IdempotencyMismatch     422 idempotency_mismatch
    ├── LimitError                  the caller can wait
    │   ├── RateLimitExceeded       429 rate_limit_exceeded
    │   ├── InsufficientQuota       429 insufficient_quota
    │   └── ServerOverloaded        503 server_overloaded
    ├── EngineError                 the engine's fault
    │   ├── EngineFailed            500 engine_failed
    │   ├── EngineUnavailable       502 engine_unavailable
    │   └── EngineTimeout           504 engine_timeout
    ├── StorageFailed               503 storage_failed: what must be written down couldn't be
    └── Ended                       nobody's fault
        ├── ClientGone              499 client_gone (never sent: there is nobody to read it)
        ├── DeadlineExceeded        504 deadline_exceeded
        └── ShuttingDown            503 shutting_down

Caught in two places only: `api/errors.py` before the first byte, `stream/deliver.py` after it. `ConfigError` is apart:
it can only happen at start-up. Data errors are never asserts.
"""

from typing import ClassVar

from hitsend.core.limits import RateWindows


class ServeError(Exception):
    """A request ended badly. `message` is safe to show to the caller: it never holds a secret, a path or prompt
    text."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ClientError(ServeError):
    """The caller sent something that can't be served as it is."""

    code = "invalid_request"
    status = 400


class InvalidRequest(ClientError):
    """A field is missing, malformed, out of range or not supported; `param` names it."""


class ContextLengthExceeded(ClientError):
    """Prompt plus allowed output does not fit the model's context; the message carries both counts."""

    code = "context_length_exceeded"


class InvalidApiKey(ClientError):
    """No key, or one that is unknown, revoked or expired: which of these is never said."""

    code = "invalid_api_key"
    status = 401


class PermissionDenied(ClientError):
    """The key is good, but not for this."""

    code = "permission_denied"
    status = 403


class NotFound(ClientError):
    """No such route or object (or not one the caller may know of)."""

    code = "not_found"
    status = 404


class ModelNotFound(NotFound):
    """No engine serves a model of that name."""

    code = "model_not_found"


class MethodNotAllowed(ClientError):
    """The route exists, but not for this HTTP method."""

    code = "method_not_allowed"
    status = 405


class RequestTimeout(ClientError):
    """The body trickled in too slowly; the message carries the limit."""

    code = "request_timeout"
    status = 408


class RequestTooLarge(ClientError):
    """More bytes than the edge reads; the message carries the limit."""

    code = "request_too_large"
    status = 413


class UnsupportedMediaType(ClientError):
    """A body that isn't plain JSON (compressed bodies included)."""

    code = "unsupported_media_type"
    status = 415


class IdempotencyConflict(ClientError):
    """The first request with this Idempotency-Key is still running."""

    code = "idempotency_conflict"
    status = 409


class IdempotencyMismatch(ClientError):
    """This Idempotency-Key was used with another body."""

    code = "idempotency_mismatch"
    status = 422


class LimitError(ServeError):
    """Refused now; may pass later. `windows`: what is left of the rates, for the headers. `refused_by`: kind of level
    and name of the limit, where it was one."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        windows: RateWindows | None = None,
        refused_by: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.windows = windows
        self.refused_by = refused_by


class RateLimitExceeded(LimitError):
    """A per-minute or parallel limit is used up; `retry_after_s` is enough (of parallel requests: a suggestion)."""


class InsufficientQuota(LimitError):
    """A budget is used up."""

    code = "insufficient_quota"


class ServerOverloaded(LimitError):
    """The waiting queue is full, or a request waited past its deadline."""

    code = "server_overloaded"
    status = 503


class EngineError(ServeError):
    """The engine could not do its part."""

    code = "engine_failed"
    status = 500


class EngineFailed(EngineError):
    """The engine broke while it ran this request."""


class EngineUnavailable(EngineError):
    """The engine is not there (starting, restarting, unreachable)."""

    code = "engine_unavailable"
    status = 502


class EngineTimeout(EngineError):
    """The engine did not answer in time."""

    code = "engine_timeout"
    status = 504


class StorageFailed(ServeError):
    """The database did not take what must be durable before work starts or counts as done; the caller may retry."""

    code = "storage_failed"
    status = 503


class Ended(ServeError):
    """The request was ended from outside."""


class ClientGone(Ended):
    """The client hung up. Recorded and billed for what was computed; never sent."""

    code = "client_gone"
    status = 499


class DeadlineExceeded(Ended):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    status = 504


class ShuttingDown(Ended):
    """The server is draining."""

    code = "shutting_down"
    status = 503


class ConfigError(Exception):
    """The settings can't work. Only at start-up; the message names the setting, its source and what would be right."""


def _codes() -> dict[str, type[ServeError]]:
    found: dict[str, type[ServeError]] = {}
    stack: list[type[ServeError]] = [ServeError]
    while stack:
        kind = stack.pop()
        # a branch shares its code with one leaf: the leaf is what was raised
        if issubclass(kind, found.get(kind.code, ServeError)):
            found[kind.code] = kind
        stack.extend(kind.__subclasses__())
    return found | {ServeError.code: ServeError}


def from_code(code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> ServeError:
    """The error of that code, as it arrives from a child process (unknown codes become `ServeError`)."""
    return _codes().get(code, ServeError)(message, param=param, retry_after_s=retry_after_s)
