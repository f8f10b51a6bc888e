"""`GET /openapi.json` and `/docs`: what this server understands, said by the structs that read it.

Enters: the route table. Leaves: an OpenAPI 3.1 document. Always true: every route and every field of every body is in
it, because it is made from them; a summary is the first line of the handler's docstring. Next: `inspect.py`.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import msgspec

import hitsend
from hitsend.serve.api.chat_request import HABITS, UNSUPPORTED, ChatBody
from hitsend.serve.api.chat_response import ChatCompletion, Chunk
from hitsend.serve.api.errors import ErrorBody
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.sampling_fields import REFUSED
from hitsend.serve.api.tokens import DetokenizeBody, TokenizeBody

Table = Mapping[str, Mapping[str, Callable[..., Any]]]

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""What each POST route reads."""

ANSWERS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": {"application/json": ChatCompletion, "text/event-stream": Chunk},
}
"""What a route answers, by content type, where a struct says so; a stream's struct is one event's data."""

PAGES: dict[str, str] = {
    "/": "text/html",
    "/docs": "text/html",
    "/inspect": "text/html",
    "/inspect/web/{id}": "*/*",
    "/metrics": "text/plain",
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
    structs = [*BODIES.values(), *(kind for kinds in ANSWERS.values() for kind in kinds.values()), ErrorBody]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_PLACE)
    _annotate(schemas["ChatBody"]["properties"])
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
    if path in BODIES and method == "POST":
        content = {"application/json": {"schema": {"$ref": _PLACE.format(name=BODIES[path].__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    if path == "/inspect/requests":
        schema = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50}
        operation["parameters"] = [{"name": "limit", "in": "query", "schema": schema}]
    if path in OPEN:
        operation["security"] = []
    return operation


def _responses(path: str) -> dict[str, Any]:
    if path in ANSWERS:
        content = {
            kind: {"schema": {"$ref": _PLACE.format(name=struct.__name__)}} for kind, struct in ANSWERS[path].items()
        }
    elif path in PAGES:
        content = {PAGES[path]: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": {"type": "object"}}}
    error = {"application/json": {"schema": {"$ref": _PLACE.format(name=ErrorBody.__name__)}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    if path in ("/healthz", "/readyz"):
        responses["503"] = {"description": "Not now.", "content": {"application/json": {"schema": {"type": "object"}}}}
    responses["default"] = {"description": "Refused, or failed.", "content": error}
    return responses


def _annotate(properties: dict[str, Any]) -> None:
    """Say of fields what their type can't: that they have no effect, or are known only to be refused."""
    said = dict.fromkeys(HABITS, "Accepted without effect; the answer's warnings say so.")
    said |= dict.fromkeys(UNSUPPORTED, "Refused: not supported.")
    said |= {field: f"Refused: {reason}." for field, reason in REFUSED.items()}
    for field, words in said.items():
        if field in properties:
            properties[field]["description"] = words
