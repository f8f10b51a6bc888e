"""The composition root: settings become objects, objects become one running server.

Enters: `Settings`. Leaves: a server that listens until it is told to stop. Always true: this is the only place that
knows every part and the order in which they start (database, writer, ledger, keys, text, engine) and stop (the other
way round); it listens only when everything can serve. Next: `pipeline.py`.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import uvloop

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.access.auth import Authenticator, is_loopback
from hitsend.serve.access.issuers import tokens_of
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.store import KeyStore
from hitsend.serve.api.inspect import load_page
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import Administration, Health, ServedModel, Services
from hitsend.serve.chat.budget import SEED_BITS, Budget
from hitsend.serve.chat.formats import resolve_formats, suited
from hitsend.serve.chat.presets import resolve_defaults
from hitsend.serve.chat.text import TextChild
from hitsend.serve.children import Children, start_children
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.watch import DatabaseWatch
from hitsend.serve.database.writer import Writer
from hitsend.serve.embed import EmbeddingStages, embed
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.estimate import Rates, estimate
from hitsend.serve.flights import Flights
from hitsend.serve.logs import set_up_logs
from hitsend.serve.output.reader import markup
from hitsend.serve.pipeline import Stages, run
from hitsend.serve.stream.connection import Connection
from hitsend.serve.usage.books import Counters, open_books
from hitsend.serve.usage.idempotency import IdempotencyStore
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.metrics import CONTENT_TYPE, Metrics
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.usage.records import RecordStore
from hitsend.serve.usage.report import Spending
from hitsend.serve.usage.responses import ResponseStore
from hitsend.settings import Loaded, Settings

if TYPE_CHECKING:
    from hitsend.serve.access.valkey import ValkeyQuota

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
"""How long requests that were cut off by a stop may take to let go of the engine and to be settled."""


def serve(loaded: Loaded) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when it can't start."""
    set_up_logs(loaded.settings.log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded.settings))


async def _serve(settings: Settings) -> None:
    with _listen(settings.server.host, settings.server.port) as listening:
        async with built(settings) as services:
            _check_exposure(services)
            server = _Announcing(_uvicorn_config(Routes(services), settings), partial(_announce, services, listening))
            await server.serve(sockets=[listening])


class Running(msgspec.Struct, frozen=True):
    """A server inside this process."""

    base_url: str


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[Running]:
    """A server in this process, on a free loopback port, for the length of the block. Leaves signals alone."""
    with _listen("127.0.0.1", 0) as listening:
        async with built(settings) as services:
            started = asyncio.Event()
            server = _Announcing(_uvicorn_config(Routes(services), settings), started.set, takes_signals=False)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                await started.wait()
                yield Running(_url(listening))
            finally:
                server.should_exit = True
                await serving


@asynccontextmanager
async def built(
    settings: Settings,
    children: Callable[[Settings, SystemClock, Metrics, AsyncExitStack], Awaitable[Children]] = start_children,
) -> AsyncGenerator[Services]:
    """Every part, started; stopped in the reverse order at the end of the block. Raises ConfigError.

    `children`: who computes; the crash drills put a script in their place.
    """
    clock = SystemClock()
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        stores = await _open_stores(settings, clock, stack)
        started = await children(settings, clock, metrics, stack)
        found, text, engine = started.found, started.text, started.engine
        stages = Stages(
            clock=clock,
            text=text,
            budget=_budget(settings, found, text, engine),
            engines={found.name: engine},
            prices=PriceBook(settings.prices, clock.wall),
            ledger=stores.ledger,
            quota=stores.quota,
            wait_timeout_s=settings.engine.wait_timeout_s,
            formats=(formats := resolve_formats(_names(found, text, engine), text.facts, settings.models)),
            markup=markup(text.vocabulary, formats.tool, formats.reasoning),
        )
        rates = Rates()
        flights = Flights(stores.records, metrics, clock, settings.record, rates.observe)
        watch = _Watch(settings, stages, engine=engine, stores=stores, metrics=metrics)
        counters = Counters(stores.ledger, metrics, started.steps, engine.state, lambda: flights.num_open)
        embedding = EmbeddingStages(clock, started.embedder, stages.prices, stages.ledger, stages.quota)
        yield _services(
            settings, stages, stores, flights=flights, watch=watch, embedding=embedding, rates=rates, counters=counters
        )


@dataclass(frozen=True)
class _Stores:
    """What is kept on disk."""

    database: Database
    writer: Writer
    records: RecordStore
    ledger: Ledger
    auth: Authenticator
    responses: ResponseStore
    admin: Administration
    quota: "MemoryQuota | ValkeyQuota"
    idempotency: IdempotencyStore


async def _open_stores(settings: Settings, clock: SystemClock, stack: AsyncExitStack) -> _Stores:
    database = await Database.open(database_url(settings.usage.url, settings.server.data_dir), settings.usage)
    stack.push_async_callback(database.close)
    watch = DatabaseWatch(database)
    watch.start()
    stack.push_async_callback(watch.stop)
    writer = Writer(database)
    writer.start()
    stack.push_async_callback(writer.stop)
    ledger = Ledger(database, writer, clock, settings.usage)
    await ledger.start()
    stack.push_async_callback(ledger.stop)
    records = RecordStore(database, writer, clock, settings.record)
    records.start()
    stack.push_async_callback(records.stop)
    auth = Authenticator(keys := KeyStore(database, clock), tokens_of(settings.oidc))
    await auth.start()
    stack.push_async_callback(auth.stop)
    responses = ResponseStore(database, writer, clock, settings.responses)
    responses.start()
    stack.push_async_callback(responses.stop)
    idempotency = IdempotencyStore(writer, clock, settings.usage, ledger.owner)
    idempotency.start()
    stack.push_async_callback(idempotency.stop)
    return _Stores(
        database,
        writer,
        records,
        ledger,
        auth,
        responses,
        Administration(keys, PrincipalStore(database, clock), auth.refresh),
        quota=await _open_quota(settings, clock, Spending(database), stack),
        idempotency=idempotency,
    )


async def _open_quota(
    settings: Settings, clock: SystemClock, spending: Spending, stack: AsyncExitStack
) -> "MemoryQuota | ValkeyQuota":
    if settings.access.quota_url is None:
        return MemoryQuota(clock, spending)
    try:
        from hitsend.serve.access.valkey import open_quota  # noqa: PLC0415  # its library is an extra
    except ImportError as error:
        raise ConfigError("access.quota_url: needs the client library: pip install 'hitsend[valkey]'") from error
    quota = await open_quota(settings.access, clock, spending)
    stack.push_async_callback(quota.stop)
    return quota


def _budget(settings: Settings, found: ModelFile, text: TextChild, engine: EmbeddedEngine) -> Budget:
    defaults = resolve_defaults(
        _names(found, text, engine),
        text.metadata,
        settings=settings.models,
        generation_config=found.generation_config,
        thinking_default=text.facts.thinking_default,
    )
    return Budget(
        defaults=defaults,
        draw=partial(secrets.randbits, SEED_BITS),
        ceiling=settings.access.max_tokens,
        max_prompt_logprobs=settings.access.max_prompt_logprobs,
    )


def _names(found: ModelFile, text: TextChild, engine: EmbeddedEngine) -> tuple[str, ...]:
    """Everything that the model is called."""
    return (found.name, Path(found.path).stem, text.metadata.get("general.name", ""), engine.facts.architecture)


def _services(
    settings: Settings,
    stages: Stages,
    stores: _Stores,
    *,
    flights: Flights,
    watch: "_Watch",
    embedding: EmbeddingStages,
    rates: Rates,
    counters: Counters,
) -> Services:
    created = int(time.time())
    served = tuple(ServedModel(name, created, engine.facts.cells_per_slot) for name, engine in stages.engines.items())
    embedder = embedding.embedder
    embeds = None if embedder is None else ServedModel(embedder.model, created, embedder.facts.max_tokens)
    return Services(
        clock=stages.clock,
        server=settings.server,
        access=settings.access,
        stream=settings.stream,
        auth=stores.auth,
        flights=flights,
        pipeline=lambda request, flight: run(request, flight, stages),
        text=stages.text,
        records=flights,
        models=lambda: served,
        state=lambda: watch.state() | ({"embedder": embedder.state()} if embedder is not None else {}),
        health=watch.health,
        render_metrics=watch.render_metrics,
        observe_http=watch.metrics.observe_http,
        page=load_page(),
        embed=lambda request, flight: embed(request, flight, embedding),
        embedding_model=embeds,
        suited=lambda request: suited(request, stages.text.facts, stages.formats),
        responses=stores.responses if settings.responses.store else None,
        admin=stores.admin,
        shed=stores.quota.shed,
        idempotency=stores.idempotency,
        books=open_books(stores.database, stages.clock, counters),
        estimate=partial(estimate, stages=stages, rates=rates, reserve_tokens=settings.engine.reserve_tokens),
    )


class _Watch:
    """What can be seen of the server from outside."""

    def __init__(
        self, settings: Settings, stages: Stages, *, engine: EmbeddedEngine, stores: "_Stores", metrics: Metrics
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._engine = engine
        self._stores = stores
        self.metrics = metrics

    def state(self) -> dict[str, Any]:
        """The body of `/inspect/state`."""
        now = self._engine.state()
        facts = self._engine.facts
        shown: dict[str, Any] = msgspec.to_builtins(now)
        engine = {name: shown.pop(name) for name in ("is_ready", "pid", "restarts", "progress_age_s", "check")}
        engine |= {"model": facts.model, "library": facts.library, "kv_mode": facts.kv_mode}
        engine |= {"cells_per_slot": facts.cells_per_slot, "num_threads": facts.num_threads}
        quota = self._stores.quota
        shown |= {"cells_cached": 0, "holds_open": self._stages.ledger.holds_open, "quota_holds_open": quota.num_open}
        return shown | {"levels_kept": quota.num_levels, "engine": engine}

    def health(self) -> Health:
        """Red when work is due and nothing moves; not ready while engine, text process or database are away."""
        now = self._engine.state()
        is_healthy = now.progress_age_s <= self._settings.engine.progress_timeout_s
        fault = self._stores.database.fault
        if not (is_healthy and now.is_ready and self._stages.text.pid is not None):
            fault = "the engine or the text process is restarting"
        return Health(is_healthy=is_healthy, is_ready=fault is None, detail=fault or "")

    def render_metrics(self) -> tuple[str, bytes]:
        """The body of `/metrics`, with the figures of this moment."""
        self.metrics.set_engine(self._engine.state())
        holds_open, stores = self._stages.ledger.holds_open, self._stores
        self.metrics.set_storage(holds_open, stores.writer.backlog, stores.records.num_dropped)
        self.metrics.set_quota(stores.quota.health())
        return CONTENT_TYPE, self.metrics.render()


def _check_exposure(services: Services) -> None:
    host = services.server.host
    if not services.auth.are_keys_required and not (is_loopback(host) or host == "localhost"):
        raise ConfigError(
            f"server.host is {host}, but no API key exists: without keys only this machine may be served "
            "(127.0.0.1); make one with `hitsend keys create --name NAME`"
        )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything slow starts, so that a taken port is known at once."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(f"server.host, server.port: can't listen on {host}:{port} ({error.strerror})") from error
    return listening


def _uvicorn_config(routes: Routes, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        routes,
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, int(settings.server.drain_s)),
    )


class _Announcing(uvicorn.Server):
    """uvicorn's server, which says when it listens, and leaves signals alone where it is a guest."""

    def __init__(self, config: uvicorn.Config, on_started: Any, *, takes_signals: bool = True) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._takes_signals = takes_signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end for `drain_s`, cancel the others, and wait until those are settled too."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=SETTLE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """SIGINT and SIGTERM end a server of its own process only.

        uvicorn raises a captured signal again when it is done, which would end the process before anything is stopped.
        """
        if not self._takes_signals:
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(services: Services, listening: socket.socket) -> None:
    url = _url(listening)
    model = services.models()[0].id
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Say hello."}}]}}'
    lines = (
        f"hitsend is ready: {model} at {url}",
        f"  try:  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        f"  page: {url}/",
    )
    print(*lines, sep="\n", flush=True)  # noqa: T201  # what `hitsend serve` says to the person who started it
