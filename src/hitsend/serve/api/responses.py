"""`/v1/responses`: making responses, and those that were stored.

Enters: authenticated exchanges. Leaves: answers. Always true: text is stored only for a client that wants it (`store`
is OpenAI's default, and the setting `responses.store` may forbid it), for the calling key alone; a response goes on
from another one only if that one was stored and is still there. Next: `messages_request.py`.
"""

from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from hitsend.core.errors import InvalidRequest, NotFound, StorageFailed
from hitsend.serve.api import responses_request
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.chat_completions import serve
from hitsend.serve.api.dialect import Reading
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.responses_request import Asked, ResponsesBody
from hitsend.serve.api.responses_stream import Keep, ResponseEncoder, response_id

WITHOUT_EFFECT = frozenset({"include", "include[]", "include_obfuscation"})
MAX_LISTED = 100


class Kept(msgspec.Struct, frozen=True):
    """What is stored: the response, and the items that led to it, those of earlier responses included."""

    items: tuple[dict[str, Any], ...]
    response: dict[str, Any]


async def create(exchange: Exchange) -> None:
    """Serve one response. Raises what has to become an HTTP status."""
    await serve(exchange, _read)


async def input_tokens(exchange: Exchange) -> None:
    """Answer how many tokens the prompt would have, without running it."""
    body = await read_json_body(exchange.receive, exchange.headers, exchange.services.access)
    wire = responses_request.read_counted(body, exchange.services.access)
    asked = await _build(exchange, wire)
    exchange.check_tokenizer(asked.request.model)
    services = exchange.services
    tokens = await services.text.tokenize_chat(services.suited(asked.request))
    await exchange.answer_json({"object": "response.input_tokens", "input_tokens": len(tokens)})


async def retrieve(exchange: Exchange) -> None:
    """Answer a stored response."""
    _query(exchange, WITHOUT_EFFECT)
    await exchange.answer_json((await _kept(exchange, exchange.param, None)).response)


async def delete(exchange: Exchange) -> None:
    """Forget a stored response. Later ones that went on from it keep their own copy of the conversation."""
    store, key_id = exchange.services.responses, exchange.principal.key_id
    if store is None or not await store.delete(exchange.param, key_id=key_id):
        raise _not_found(exchange, exchange.param, None)
    await exchange.answer_json({"id": exchange.param, "object": "response", "deleted": True})


async def input_items(exchange: Exchange) -> None:
    """Answer the items that led to a stored response, a page at a time."""
    query = _query(exchange, WITHOUT_EFFECT | {"limit", "order", "after"})
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest(f"limit: expected a number from 1 to {MAX_LISTED}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: expected asc or desc", param="order")
    items = list((await _kept(exchange, exchange.param, None)).items)
    if order == "desc":
        items.reverse()
    if "after" in query:
        places = [place for place, item in enumerate(items) if item["id"] == query["after"]]
        if not places:
            raise InvalidRequest("after: no item has that id", param="after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": len(items) > len(page)}
    await exchange.answer_json({"object": "list", "data": page} | ends)


async def _read(exchange: Exchange, body: bytes) -> Reading:
    wire, checks = responses_request.read(body, exchange.services.access)
    asked = await _build(exchange, wire)
    is_kept = wire.store is not False
    if wire.store and exchange.services.responses is None:
        warnings = (*asked.request.warnings, "store: this server stores no responses (responses.store)")
        asked = msgspec.structs.replace(asked, request=msgspec.structs.replace(asked.request, warnings=warnings))
    keep: Keep | None = partial(_keep, exchange, asked) if is_kept and exchange.services.responses else None
    encoder = ResponseEncoder(asked, keep, exchange.services.clock.wall)
    return Reading(asked.request, responses_request.parsed(asked, body, checks), encoder)


async def _build(exchange: Exchange, wire: ResponsesBody) -> Asked:
    before: list[dict[str, Any]] = []
    if wire.previous_response_id is not None:
        kept = await _kept(exchange, wire.previous_response_id, "previous_response_id")
        before = [*kept.items, *kept.response["output"]]
    return responses_request.build(
        wire,
        before,
        exchange.services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model=exchange.default_model,
    )


async def _keep(exchange: Exchange, asked: Asked, response: dict[str, Any]) -> str | None:
    """A storage that fails costs the successor, not the answer that was already made and billed."""
    store = exchange.services.responses
    assert store is not None
    body = msgspec.json.encode(Kept(asked.items, response))
    try:
        await store.put(response_id(exchange.request_id), body, key_id=exchange.principal.key_id)
    except StorageFailed as error:
        return f"store: {error.message}"
    return None


async def _kept(exchange: Exchange, asked_id: str, param: str | None) -> Kept:
    store, key_id = exchange.services.responses, exchange.principal.key_id
    body = await store.get(asked_id, key_id=key_id) if store is not None else None
    if body is None:
        raise _not_found(exchange, asked_id, param)
    return msgspec.json.decode(body, type=Kept)


def _not_found(exchange: Exchange, asked_id: str, param: str | None) -> NotFound:
    """Another key's response looks exactly like one that never was."""
    if exchange.services.responses is None:
        return NotFound("this server stores no responses (responses.store)", param=param)
    return NotFound(f"no stored response {asked_id[:160]!r}: unknown, deleted or too old", param=param)


def _query(exchange: Exchange, known: frozenset[str]) -> dict[str, str]:
    """The query's parameters. Raises InvalidRequest for one that isn't served."""
    raw = exchange.scope.get("query_string", b"").decode("latin-1")
    query = dict(parse_qsl(raw, keep_blank_values=True))
    for name in query:
        if name not in known:
            raise InvalidRequest(f"the query parameter {name[:64]!r} is not supported", param=name[:64])
    return query
