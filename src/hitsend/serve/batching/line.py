"""One line as the request that it is: the route's own handler, without a socket.

Enters: a line, its request id, who asks. Leaves: status and body, as a client would have got them. Always true: the
request passes everything that one from a socket passes after its key was looked at; its tier is the lowest there is, so
that whoever waits beside it goes first. Next: `runner.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from hitsend.core.errors import InvalidApiKey, InvalidRequest, ServeError
from hitsend.core.request import IDLE_TIER, Principal
from hitsend.serve.api import chat_completions, completions, embeddings, responses
from hitsend.serve.api.errors import error_body, public
from hitsend.serve.api.exchange import Exchange, RequestIds
from hitsend.serve.api.policy import check_rights
from hitsend.serve.api.services import Services
from hitsend.serve.batching.input import Line, wants
from hitsend.serve.stream.deliver import Message

HANDLERS: Mapping[str, Callable[[Exchange], Awaitable[None]]] = {
    "/v1/chat/completions": chat_completions.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/embeddings": embeddings.embeddings,
    "/v1/responses": responses.create,
}


class Answered(msgspec.Struct, frozen=True):
    """How it went. `error` where it ended by one."""

    status: int
    body: bytes
    error: ServeError | None = None


class Paid(msgspec.Struct, frozen=True):
    """What a line that a crash cut off was billed for: `is_answer`, all of it; `drafts`, those of these engines."""

    is_answer: bool = False
    drafts: frozenset[str] = frozenset()


class LineRunner:
    """Runs lines, for money or (where that was paid before) for nothing."""

    def __init__(self, services: Callable[[Paid], Services], standing: Callable[[Principal], Principal | None]) -> None:
        """`standing`: what a caller who was known before may do now, None: nothing any more."""
        self._services = services
        self._standing = standing

    def is_known(self, caller: Principal) -> bool:
        """Whether this caller may still do anything."""
        return self._standing(caller) is not None

    async def run(self, line: Line, request_id: str, caller: Principal, paid: Paid) -> Answered:
        """To its end. Cancelling it cancels the request."""
        sent: list[Message] = []
        try:
            await self._serve(line, request_id, self._principal(caller), sent, self._services(paid))
        except Exception as error:  # noqa: BLE001  # as in `routes.py`: shown, and logged where nobody expected it
            shown = public(error, request_id)
            return Answered(shown.status, error_body(shown), shown)
        status = next(message["status"] for message in sent if message["type"] == "http.response.start")
        return Answered(status, b"".join(message.get("body", b"") for message in sent))

    async def _serve(
        self, line: Line, request_id: str, caller: Principal, sent: list[Message], services: Services
    ) -> None:
        if wants(line).stream not in (None, False):
            raise InvalidRequest("stream: a line of a batch is answered whole", param="stream")
        body: list[Message] = [{"type": "http.request", "body": bytes(line.body), "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # this client stays
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": line.url, "headers": [], "query_string": b""}
        exchange = Exchange(scope, receive, send, services=services, request_ids=_Given(request_id))
        exchange.principal, exchange.route = caller, line.url
        check_rights(caller, line.url)
        await HANDLERS[line.url](exchange)

    def _principal(self, caller: Principal) -> Principal:
        now = self._standing(caller)
        if now is None:
            raise InvalidApiKey("the key that made this batch is not good any more")
        return msgspec.structs.replace(now, tier=IDLE_TIER, max_tier=IDLE_TIER)


class _Given(RequestIds):
    """The line's own id."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id

    def choose(self, asked: list[bytes]) -> str:  # noqa: ARG002  # as the one that it stands in for
        return self._request_id
