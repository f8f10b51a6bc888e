"""`Idempotency-Key`: the same request twice is worked on and billed once.

Enters: an exchange whose caller sent the header on a route that lets models work. Leaves: the handler's answer, kept;
or the one that was kept, with `idempotent-replayed: true`. Always true: a key is its caller's own; what makes two
requests the same are the route and every byte of the body; nothing is claimed before the body is there, and nothing is
worked on before the claim is durable; a request without the header never comes here. Next: `keeping.py`.
"""

import hashlib
from collections.abc import Awaitable, Callable

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.keeping import Keeping
from hitsend.serve.stream import sse
from hitsend.serve.stream.deliver import Header, Message, Receive
from hitsend.serve.usage.idempotency import Asked, IdempotencyStore, Kept

NAME = b"idempotency-key"
MAX_CHARS = 255

KEYED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"})
"""Routes that cost something. Elsewhere the header means nothing: those may be asked again as they are."""

_REPLAYED: Header = (b"idempotent-replayed", b"true")


async def once(exchange: Exchange, store: IdempotencyStore | None, work: Callable[[Exchange], Awaitable[None]]) -> None:
    """Work, or replay; without a store the key is only looked at.

    Raises InvalidRequest, IdempotencyConflict, IdempotencyMismatch, what reading a body raises, and what the work
    raises.
    """
    key = _key(exchange.header_values(NAME))
    if store is None:
        await work(exchange)
        return
    body = await read_json_body(exchange.receive, exchange.headers, exchange.services.access)
    exchange.receive = _again(body, exchange.receive)
    digest = hashlib.sha256(exchange.route.encode() + b"\0" + body).hexdigest()
    scope = exchange.principal.key_id or ""
    claim = await store.claim(Asked(scope, key, digest, exchange.request_id))
    if isinstance(claim, Kept):
        await _replay(exchange, claim)
        return
    await _work(exchange, Keeping(store, claim), work)


async def _work(exchange: Exchange, keeping: Keeping, work: Callable[[Exchange], Awaitable[None]]) -> None:
    exchange.keeping = keeping
    try:
        await work(exchange)
    finally:
        keeping.end()


async def _replay(exchange: Exchange, kept: Kept) -> None:
    content_type = kept.content_type.encode()
    if content_type == sse.CONTENT_TYPE:
        await exchange.answer(kept.status, kept.body, [*sse.HEADERS, _REPLAYED])
    else:
        await exchange.answer(kept.status, kept.body, [(b"content-type", content_type), _REPLAYED])


def _key(values: list[bytes]) -> str:
    """The one key. Raises InvalidRequest: a key that isn't understood must not be passed over."""
    if len(values) != 1:
        raise InvalidRequest(f"idempotency-key: {len(values)} of them, expected one", param="idempotency-key")
    value = values[0]
    if not 1 <= len(value) <= MAX_CHARS:
        raise InvalidRequest(
            f"idempotency-key: {len(value)} characters, limit 1 to {MAX_CHARS}", param="idempotency-key"
        )
    if not all(0x21 <= byte <= 0x7E for byte in value):
        raise InvalidRequest("idempotency-key: only printable ASCII without spaces", param="idempotency-key")
    return value.decode("ascii")


def _again(body: bytes, receive: Receive) -> Receive:
    """A channel on which the body, read already, comes once more."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return unread.pop() if unread else await receive()

    return channel
