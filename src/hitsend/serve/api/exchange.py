"""One HTTP request and the answer to it, as the route handlers see them.

Enters: the ASGI scope and channels. Leaves: headers by name, an id, and answers that carry it. Always true: every
response has `x-request-id`, whoever sends it; a client's own id is taken over only when it is well-formed and not in
use by another request of late, because ids name flight records and ledger rows. Next: `body.py`.
"""

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from hitsend.core.ids import IDS
from hitsend.core.record import Flight
from hitsend.core.request import Principal
from hitsend.serve.access.rights import check_model
from hitsend.serve.api.keeping import Keeping
from hitsend.serve.api.rates import messages_rate_headers, rate_headers
from hitsend.serve.api.services import Services
from hitsend.serve.stream.deliver import Header, Message, Receive, Send

Scope = dict[str, Any]

OF_BATCHES = "batch_"
"""Ids of batches' lines begin so. Nobody may use one before its line does: that would look like a line done before."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_JSON: Header = (b"content-type", b"application/json")


class RequestIds:
    """Gives every request an id of its own."""

    def __init__(self, remembered: int = 100_000, on_given: Callable[[str], None] = lambda _: None) -> None:
        """`on_given` is told every id that a client chose, so that gateways beside this one can `remember` it."""
        self._remembered = remembered
        self._on_given = on_given
        self._given: OrderedDict[str, None] = OrderedDict()

    def choose(self, asked: list[bytes]) -> str:
        """The client's own id when it sent one good one; else a new one. One that was used (a retry), or could be a
        line's, gets a suffix."""
        if len(asked) != 1 or not _REQUEST_ID.fullmatch(asked[0]):
            return f"req_{IDS.dated(12)}"
        chosen = asked[0].decode()
        if chosen in self._given or chosen.startswith(OF_BATCHES):
            chosen = f"{chosen[:112]}-{secrets.token_hex(6)}"
        self.remember(chosen)
        self._on_given(chosen)
        return chosen

    def remember(self, given: str) -> None:
        """This id is somebody's: nobody gets it again."""
        self._given[given] = None
        if len(self._given) > self._remembered:
            self._given.popitem(last=False)


class Exchange:
    """One request on its way through the routes. `principal` is set once the caller is known, `flight` once there is a
    record, `keeping` where the caller wants the answer kept for its key."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, services: Services, request_ids: RequestIds
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.services = services
        self.headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:  # one that is repeated is a list: nothing may hide behind the last one
            self.headers[name] = self.headers[name] + b", " + value if name in self.headers else value
        self.request_id = request_ids.choose(self.header_values(b"x-request-id"))
        self.principal = Principal()
        self.flight: Flight | None = None
        self.param = ""
        self.route = "unmatched"
        self.status: int | None = None
        self.keeping: Keeping | None = None
        self._send_message = send

    @property
    def method(self) -> str:
        """HTTP's method."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """The path as the server parsed it from the request line; no header has a say in it."""
        return str(self.scope["path"])

    @property
    def speaks_messages(self) -> bool:
        """Whether the caller expects Anthropic's errors and headers."""
        return self.path == "/v1/messages" or self.path.startswith("/v1/messages/")

    @property
    def client_host(self) -> str | None:
        """The peer's address as the socket says it."""
        client = self.scope.get("client")
        return str(client[0]) if client else None

    @property
    def default_model(self) -> str | None:
        """The model of a request that names none: the only one there is."""
        models = self.services.models()
        return models[0].id if len(models) == 1 else None

    def check_tokenizer(self, asked: str | None) -> None:
        """Raises PermissionDenied where the model whose tokenizer would be used isn't this caller's.

        Tokenising reads any name: one that nobody serves means the first model's tokenizer.
        """
        served = [model.id for model in self.services.models()]
        used = asked if asked in served else next(iter(served), None)
        if used is not None:
            check_model(self.principal, used, served)

    def header_values(self, name: bytes) -> list[bytes]:
        """All values of a header, in order."""
        return [value for key, value in self.scope["headers"] if key == name]

    async def send(self, message: Message) -> None:
        """ASGI's send, with the request id, and what is left of the caller's rates, added to what starts a response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if self.speaks_messages:
                headers.append((b"request-id", self.request_id.encode()))
            if self.flight is not None:
                headers += rate_headers(self.flight.windows)
                if self.speaks_messages:
                    headers += messages_rate_headers(self.flight.windows, self.services.clock.wall())
            message = {**message, "headers": headers}
        await self._send_message(message)

    async def answer(self, status: int, body: bytes, headers: list[Header]) -> None:
        """Send a whole response at once."""
        sized = [*headers, (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": sized})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_json(self, value: Any, *, status: int = 200) -> None:
        """Send a JSON document."""
        await self.answer(status, msgspec.json.encode(value), [_JSON])
