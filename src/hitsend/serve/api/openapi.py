"""`GET /openapi.json` and `/docs`: what this server understands, said by the structs that read it.

Enters: the route table. Leaves: an OpenAPI 3.1 document. Always true: every route and every field of every body is in
it, because it is made from them; a summary is the first line of the handler's docstring. Next: `inspect.py`.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from typing import Any, get_args

import msgspec

import hitsend
from hitsend.serve.api import chat_request, messages_request, responses_request
from hitsend.serve.api.admin_bodies import (
    AppBody,
    KeyBody,
    KeyPatch,
    LimitsBody,
    OrgBody,
    PrincipalPatch,
    RotateBody,
    UserBody,
)
from hitsend.serve.api.admin_books import DEFAULT_ROWS, MAX_ROWS, MAX_SEQ
from hitsend.serve.api.batches import MAX_LISTED as MAX_BATCHES
from hitsend.serve.api.batches import BatchBody
from hitsend.serve.api.chat_request import ChatBody
from hitsend.serve.api.chat_response import Chunk
from hitsend.serve.api.chat_whole import ChatCompletion
from hitsend.serve.api.completion_request import CompletionBody
from hitsend.serve.api.completions import TextCompletion
from hitsend.serve.api.embeddings import EmbeddingList, EmbeddingsBody
from hitsend.serve.api.errors import ErrorBody
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.files import MAX_LISTED as MAX_FILES
from hitsend.serve.api.idempotent import KEYED_ROUTES, MAX_CHARS
from hitsend.serve.api.inspect_search import MAX_MICROUSD, MAX_MS, MAX_WORDS
from hitsend.serve.api.live import MAX_FRAMES
from hitsend.serve.api.messages_errors import MessagesError
from hitsend.serve.api.messages_request import CountTokensBody, MessagesBody
from hitsend.serve.api.plan import PlanBody
from hitsend.serve.api.responses_request import InputTokensBody, ResponsesBody
from hitsend.serve.api.sampling_fields import REFUSED
from hitsend.serve.api.tokens import DetokenizeBody, TokenizeBody
from hitsend.serve.estimate import Estimate
from hitsend.serve.explain import Explanation
from hitsend.serve.usage.statement import By

Table = Mapping[str, Mapping[str, Callable[..., Any]]]

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/batches": BatchBody,
    "/v1/chat/completions": ChatBody,
    "/v1/chat/completions/input_tokens": ChatBody,
    "/v1/chat/completions/render": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/estimate": ChatBody,
    "/v1/routes/explain": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": InputTokensBody,
    "/inspect/plan": PlanBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/keys": KeyBody,
    "/admin/keys/{id}/rotate": RotateBody,
    "/admin/orgs": OrgBody,
    "/admin/apps": AppBody,
    "/admin/users": UserBody,
}
"""What each POST route reads."""

PATCHES: dict[str, type[msgspec.Struct]] = {
    "/admin/keys/{id}": KeyPatch,
    "/admin/orgs/{id}": PrincipalPatch,
    "/admin/apps/{id}": PrincipalPatch,
    "/admin/users/{id}": PrincipalPatch,
    "/admin/limits": LimitsBody,
}
"""What each PATCH route reads."""

ANSWERS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": {"application/json": ChatCompletion, "text/event-stream": Chunk},
    "/v1/completions": {"application/json": TextCompletion, "text/event-stream": TextCompletion},
    "/v1/embeddings": {"application/json": EmbeddingList},
    "/v1/estimate": {"application/json": Estimate},
    "/v1/routes/explain": {"application/json": Explanation},
}
"""What a route answers, by content type, where a struct says so; a stream's struct is one event's data."""


def _said(habits: Iterable[str], unsupported: Iterable[str], refused: Mapping[str, str]) -> dict[str, str]:
    """What is to be said of fields that have no effect, or are known only to be refused."""
    said = dict.fromkeys(habits, "Accepted without effect; the answer's warnings say so.")
    said |= dict.fromkeys(unsupported, "Refused: not supported.")
    return said | {field: f"Refused: {reason}." for field, reason in refused.items()}


_OF_CHAT = _said(chat_request.HABITS, chat_request.UNSUPPORTED, REFUSED)
_OF_RESPONSES = _said(responses_request.HABITS, responses_request.UNSUPPORTED, {})
_OF_MESSAGES = _said(
    messages_request.HABITS, (*messages_request.UNSUPPORTED, *messages_request.UNSUPPORTED_IN_ANSWERS), {}
)
SAID: dict[type[msgspec.Struct], dict[str, str]] = {
    ChatBody: _OF_CHAT,
    CompletionBody: _OF_CHAT,
    ResponsesBody: _OF_RESPONSES,
    InputTokensBody: _OF_RESPONSES,
    MessagesBody: _OF_MESSAGES,
    CountTokensBody: _OF_MESSAGES,
}
"""What a body's fields can't say by their type."""

_DAY = {"type": "string", "format": "date"}
_DAYS = {"from": _DAY, "to": _DAY}
_KEY = {"type": "string", "minLength": 1, "maxLength": MAX_CHARS, "pattern": "^[!-~]+$"}

_WORDS = {"type": "string", "minLength": 1, "maxLength": MAX_WORDS}
_FILTERS: dict[str, dict[str, Any]] = {
    "name": _WORDS,
    "model": _WORDS,
    "finish_reason": _WORDS,
    "min_wall_ms": {"type": "number", "minimum": 0, "maximum": MAX_MS},
    "min_cost_microusd": {"type": "integer", "minimum": 0, "maximum": MAX_MICROUSD},
    "before": {"type": "string", "description": "The `next_before` of the page before."},
}

_ID = {"type": "string"}
UPLOADS: dict[str, dict[str, Any]] = {
    "/v1/files": {
        "type": "object",
        "properties": {
            "purpose": {"type": "string", "enum": ["batch"]},
            "file": {"type": "string", "format": "binary"},
            "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600},
        },
        "required": ["purpose", "file"],
    }
}
"""The forms of routes that read `multipart/form-data`."""

QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/inspect/live": {"frames": {"type": "integer", "minimum": 1, "maximum": MAX_FRAMES}},
    "/inspect/percentiles": _FILTERS,
    "/inspect/requests": {"limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50}, **_FILTERS},
    "/inspect/usage": {"by": {"type": "string", "enum": [*get_args(By)], "default": "day"}, **_DAYS},
    "/v1/files": {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_FILES, "default": MAX_FILES},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "after": _ID,
        "purpose": {"type": "string"},
    },
    "/v1/batches": {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES, "default": 20}, "after": _ID},
    "/admin/usage": {"by": {"type": "string", "enum": [*get_args(By)], "default": "key"}, **_DAYS},
    "/admin/ledger": {
        **_DAYS,
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS, "default": DEFAULT_ROWS},
        "after": {"type": "integer", "minimum": 0, "maximum": MAX_SEQ, "default": 0},
    },
}
"""Fields of a route's query."""

PAGES: dict[str, str] = {
    "/": "text/html",
    "/docs": "text/html",
    "/inspect": "text/html",
    "/inspect/live": "text/event-stream",
    "/inspect/web/{id}": "*/*",
    "/metrics": "text/plain",
    "/v1/files/{id}/content": "application/octet-stream",
}
"""Routes that don't answer JSON."""

OPEN = ("/healthz",)
_PLACE = "#/components/schemas/{name}"


def telling(routes: Table) -> Callable[[Exchange], Awaitable[None]]:
    """The handler that answers with the document; `routes` may grow until it is first asked."""
    encoded = cache(lambda: msgspec.json.encode(document(routes)))

    async def openapi(exchange: Exchange) -> None:
        """This document, in OpenAPI 3.1."""
        await exchange.answer(200, encoded(), [(b"content-type", b"application/json")])

    return openapi


def document(routes: Table) -> dict[str, Any]:
    """The whole document, as JSON values."""
    structs = [*BODIES.values(), *PATCHES.values(), *(kind for kinds in ANSWERS.values() for kind in kinds.values())]
    structs += [ErrorBody, MessagesError]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_PLACE)
    for struct, said in SAID.items():
        _annotate(schemas[struct.__name__]["properties"], said)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hitsend",
            "version": hitsend.__version__,
            "description": inspect.cleandoc(
                """OpenAI's chat API, with the life of every request on record. Field by field: docs/fields.md. A body
                is read strictly: a field that isn't in it, a wrong type or a value out of range is a 400 that names the
                field."""
            ),
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}, {}],
        "paths": {path: _path(path, handlers) for path, handlers in routes.items()},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed on every route but /healthz as soon as one key exists.",
                }
            },
        },
    }


def _path(path: str, handlers: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    item: dict[str, Any] = {method.lower(): _operation(path, method, handlers[method]) for method in handlers}
    if "{id}" in path:
        item["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return item


def _operation(path: str, method: str, handler: Callable[..., Any]) -> dict[str, Any]:
    words = inspect.getdoc(handler) or ""
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        "summary": re.sub(r" Raises .*", "", words.partition("\n")[0]),
        "responses": _responses(path),
    }
    body = {"POST": BODIES, "PATCH": PATCHES}.get(method, {}).get(path)
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _PLACE.format(name=body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    if method == "POST" and path in UPLOADS:
        form = {"multipart/form-data": {"schema": UPLOADS[path]}}
        operation["requestBody"] = {"required": True, "content": form}
    asked = {} if method == "POST" else QUERIES.get(path, {})
    parameters = [{"name": name, "in": "query", "schema": kind} for name, kind in asked.items()]
    if path in KEYED_ROUTES:
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": _KEY})
    if parameters:
        operation["parameters"] = parameters
    if path in OPEN:
        operation["security"] = []
    return operation


def _responses(path: str) -> dict[str, Any]:
    if path in ANSWERS:
        content = {
            kind: {"schema": {"$ref": _PLACE.format(name=struct.__name__)}} for kind, struct in ANSWERS[path].items()
        }
    elif path in PAGES:
        is_stream = PAGES[path] == "text/event-stream"  # readers take each event as an object
        content = {PAGES[path]: {"schema": {} if is_stream else {"type": "string"}}}
    else:
        content = {"application/json": {"schema": {"type": "object"}}}
    shape = MessagesError if path.startswith("/v1/messages") else ErrorBody
    error = {"application/json": {"schema": {"$ref": _PLACE.format(name=shape.__name__)}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    if path in ("/healthz", "/readyz"):
        responses["503"] = {"description": "Not now.", "content": {"application/json": {"schema": {"type": "object"}}}}
    responses["default"] = {"description": "Refused, or failed.", "content": error}
    return responses


def _annotate(properties: dict[str, Any], said: Mapping[str, str]) -> None:
    """Say of fields what their type can't."""
    for field, words in said.items():
        if field in properties:
            properties[field]["description"] = words
