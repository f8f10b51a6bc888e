"""What the routes need from the rest of the server, as one struct that `app.py` fills.

Enters: nothing. Leaves: types. Always true: the edge knows stages only by what it asks of them, so a test can drive
every route with a few lines of fakes. Next: `routes.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal, Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.embedding import Embedded, EmbeddingRequest
from hitsend.core.events import LimitCheck
from hitsend.core.limits import Level
from hitsend.core.record import Flight
from hitsend.core.request import Completed, Delta, Principal, Request, Started
from hitsend.core.seen import Seen
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.store import KeyStore
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.estimate import Estimate
from hitsend.serve.explain import Explanation
from hitsend.serve.usage.batches import BatchStore
from hitsend.serve.usage.books import Books
from hitsend.serve.usage.elsewhere import Elsewhere
from hitsend.serve.usage.files import FileStore
from hitsend.serve.usage.idempotency import IdempotencyStore
from hitsend.serve.usage.record_search import EVERY, Percentiles, RecordFilter
from hitsend.settings import AccessSettings, ServerSettings, StreamSettings

GatherFor = Literal["state", "metrics", "openmetrics"]
Answer = AsyncGenerator[Started | Delta | Completed, None]


class Authenticator(Protocol):
    """Who is calling; `access/auth.py`."""

    @property
    def are_keys_required(self) -> bool:
        """Whether nobody is anonymous any more."""
        ...

    def authenticate(self, authorization: str | None, client_host: str | None) -> Principal:
        """Raises InvalidApiKey."""
        ...


class Flights(Protocol):
    """The flight records that are being written."""

    def open(self, request_id: str, principal: Principal, traceparent: str | None = None) -> Flight:
        """Begin one. Its id is this request's alone; `traceparent` is what its client sent, good or not."""
        ...

    def close(self, flight: Flight) -> None:
        """Nothing more will happen to it: stop its clock, count it, hand it to the store. Never waits, never fails."""
        ...


class RecordSummary(Protocol):
    """One line of the list of requests; `usage/records.py`."""

    @property
    def request_id(self) -> str: ...  # noqa: D102  # the names are explained where RecordSummary is defined
    @property
    def received_at(self) -> float: ...  # noqa: D102  # as in the record
    @property
    def state(self) -> str: ...  # noqa: D102
    @property
    def finish_reason(self) -> str | None: ...  # noqa: D102
    @property
    def error_code(self) -> str | None: ...  # noqa: D102
    @property
    def model(self) -> str | None: ...  # noqa: D102
    @property
    def key_name(self) -> str: ...  # noqa: D102
    @property
    def wall_ms(self) -> float: ...  # noqa: D102
    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def completion_tokens(self) -> int: ...  # noqa: D102
    @property
    def cost_microusd(self) -> int: ...  # noqa: D102
    @property
    def ttft_ms(self) -> float | None: ...  # noqa: D102


class Records(Protocol):
    """Flight records to show: open ones as they stand, closed ones from the store."""

    async def get(self, request_id: str) -> bytes | None:
        """A record's JSON; it holds `principal.key_id`."""
        ...

    async def list(
        self, limit: int, *, key_id: str | None = None, wanted: RecordFilter = EVERY
    ) -> tuple[RecordSummary, ...]:
        """The newest that are wanted, newest first; only that key's, if given."""
        ...

    async def percentiles(self, *, key_id: str | None = None, wanted: RecordFilter = EVERY) -> Percentiles:
        """Of those that have ended and are wanted. Raises StorageFailed."""
        ...

    def under_way(self, key_id: str | None = None) -> tuple[Flight, ...]:
        """Those that are open in this process; only that key's, if given."""
        ...


class StoredResponses(Protocol):
    """Answers that clients asked to be kept, each for the key that made it alone; `usage/responses.py`."""

    async def get(self, response_id: str, *, key_id: str | None) -> bytes | None:
        """What was kept. Raises StorageFailed."""
        ...

    async def put(self, response_id: str, body: bytes, *, key_id: str | None) -> None:
        """Keep it, durably. Raises StorageFailed."""
        ...

    async def delete(self, response_id: str, *, key_id: str | None) -> bool:
        """Whether there was something to forget. Raises StorageFailed."""
        ...


class Text(Protocol):
    """Tokenising outside of a chat."""

    def vocabulary_of(self, model: str) -> Vocabulary | None:
        """What that model's ids say; None for one that runs elsewhere."""
        ...

    async def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False, model: str | None = None
    ) -> tuple[int, ...]:
        """Ids of a text; control spellings stay text unless asked for. Raises InvalidRequest."""
        ...

    async def prepare(self, request: Request, *, wants_text: bool = False) -> Prompt:
        """The request's prompt. Raises InvalidRequest."""
        ...

    async def tokenize_chat(self, request: Request) -> tuple[int, ...]:
        """Ids of the request's rendered messages. Raises InvalidRequest."""
        ...

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str | None = None) -> str:
        """The text of ids. Raises InvalidRequest for an id outside the vocabulary."""
        ...


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of `GET /v1/models`. `context` is tokens per sequence."""

    id: str
    created: int
    context: int
    owned_by: str = "hitsend"


class Administration(msgspec.Struct, frozen=True):
    """What `/admin` changes, and how this server is told that it was."""

    keys: KeyStore
    principals: PrincipalStore
    refresh: Callable[[], Awaitable[None]]


class BatchServices(msgspec.Struct, frozen=True):
    """Files and batches; `wake` tells this process that there is something to do."""

    files: FileStore
    batches: BatchStore
    wake: Callable[[], None]


class Health(msgspec.Struct, frozen=True):
    """`is_healthy`: the engine makes progress or has nothing to do. `is_ready`: a request sent now would be served."""

    is_healthy: bool
    is_ready: bool
    detail: str = ""


class PageFile(msgspec.Struct, frozen=True):
    """One file of the inspector's page."""

    content_type: str
    body: bytes


async def _nothing_to_gather(_what: GatherFor) -> None:
    """One process knows everything by itself."""


async def _nothing_to_shed(_levels: tuple[Level, ...]) -> None:
    """No limits are counted."""


async def _nothing_elsewhere(_key_id: str | None) -> tuple[Seen, ...]:
    """One process has all requests."""
    return ()


async def _nothing_to_explain(request: Request) -> Explanation:
    """There are no routes."""
    return Explanation(request.model, None, None, "", request.model, "")


class Services(msgspec.Struct, frozen=True):
    """Everything behind the routes. `observe_http(route, status, seconds)`: route is a template, never a raw path.

    `responses` is None where the server keeps none, `admin` where keys aren't administered over HTTP, `books`
    where no ledger is to be seen, `idempotency` where no answers are kept for keys, `batches` where no files are.
    `suited`: the request as this model's template gets it. `shed` raises RateLimitExceeded when these levels have no
    room for any request; it only looks, and costs nothing where there is room. `gather` is awaited before `state` and
    `render_metrics` are asked: it brings in what other processes have of their figures. `model_state` is what
    `/v1/models` adds to a model that comes and goes. `elsewhere`: how it is with this process's upstreams and routes.
    `seen_elsewhere`: open requests of other processes, that key's alone if one is given.
    `stopping` is set when the server begins to stop: what lasts as long as somebody looks ends then.
    """

    clock: Clock
    server: ServerSettings
    access: AccessSettings
    stream: StreamSettings
    auth: Authenticator
    flights: Flights
    pipeline: Callable[[Request, Flight], Answer]
    text: Text
    records: Records
    models: Callable[[], tuple[ServedModel, ...]]
    state: Callable[[], dict[str, Any]]
    health: Callable[[], Health]
    render_metrics: Callable[[bool], tuple[str, bytes]]
    observe_http: Callable[[str, int, float], None]
    page: dict[str, PageFile]
    embed: Callable[[EmbeddingRequest, Flight], Awaitable[Embedded]]
    embedding_model: ServedModel | None
    estimate: Callable[[Request, tuple[LimitCheck, ...]], Awaitable[Estimate]]
    suited: Callable[[Request], Request]
    responses: StoredResponses | None
    admin: Administration | None = None
    shed: Callable[[tuple[Level, ...]], Awaitable[None]] = _nothing_to_shed
    books: Books | None = None
    idempotency: IdempotencyStore | None = None
    gather: Callable[[GatherFor], Awaitable[None]] = _nothing_to_gather
    seen_elsewhere: Callable[[str | None], Awaitable[tuple[Seen, ...]]] = _nothing_elsewhere
    elsewhere: Callable[[], Elsewhere] = Elsewhere
    stopping: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    model_state: Callable[[str], dict[str, Any]] = lambda _: {}
    explain: Callable[[Request], Awaitable[Explanation]] = _nothing_to_explain
    embedding_models_elsewhere: tuple[ServedModel, ...] = ()
    batches: BatchServices | None = None
