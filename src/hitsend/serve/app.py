"""The composition root: settings become objects, objects become one running server.

Enters: `Settings`. Leaves: a server that listens until it is told to stop. Always true: this is the only place that
knows every part and the order in which they start (database, writer, ledger, keys, text, engine) and stop (the other
way round); it listens only when everything can serve. Next: `pipeline.py`.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import uvicorn
import uvloop

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.core.request import Request
from hitsend.serve.access.auth import is_loopback
from hitsend.serve.api.inspect import load_page
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import ServedModel, Services
from hitsend.serve.chat.budget import SEED_BITS, Budget
from hitsend.serve.chat.formats import Formats, resolve_formats, suited
from hitsend.serve.chat.presets import Defaults, resolve_defaults
from hitsend.serve.children import Children, start_children
from hitsend.serve.embed import EmbeddingStages, embed
from hitsend.serve.estimate import Rates, estimate
from hitsend.serve.flights import Flights
from hitsend.serve.logs import set_up_logs
from hitsend.serve.output.reader import Markup, markup
from hitsend.serve.pipeline import Stages, run
from hitsend.serve.stores import Stores, open_stores
from hitsend.serve.stream.connection import Connection
from hitsend.serve.upstreams import OwnText
from hitsend.serve.usage.books import Counters, open_books
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.watch import Watch
from hitsend.settings import Settings
from hitsend.settings_source import Loaded

logger = logging.getLogger(__name__)

GC_ALLOCATIONS = 20_000
"""Between two collections of the youngest objects; Python's 700 would be a collection every few requests."""

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
            # what was built stays for good, so the collector need not look at it; and it looks seldom, because what a
            # request leaves goes by its reference counts
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_ALLOCATIONS, 20, 50)
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
        stores = await open_stores(settings, clock, stack)
        started = await children(settings, clock, metrics, stack)
        text, names, upstreams = started.text, started.names, started.upstreams
        formats = resolve_formats(names, text.facts, settings.models) if names else Formats()
        stages = Stages(
            clock=clock,
            text=text,
            budget=_budget(settings, started),
            engines=started.engines,
            prices=PriceBook((*upstreams.prices, *settings.prices), clock.wall),
            ledger=stores.ledger,
            quota=stores.quota,
            wait_timeout_s=settings.engine.wait_timeout_s,
            formats=formats,
            markup=markup(text.vocabulary, formats.tool, formats.reasoning) if names else Markup(),
            handovers=upstreams.handovers,
        )
        for model, served in stages.engines.items():
            stages.prices.find(model, is_local=served.is_local)  # a missing price stops the start
        rates = Rates()
        flights = Flights(stores.records, metrics, clock, settings.record, rates.observe)
        watch = Watch(settings, stages, embedded=started.engine, stores=stores, metrics=metrics)
        counters = Counters(stores.ledger, metrics, started.steps, watch.num_busy, lambda: flights.num_open)
        embedding = EmbeddingStages(clock, started.embedder, stages.prices, stages.ledger, stages.quota)
        yield _services(
            settings, stages, stores, flights=flights, watch=watch, embedding=embedding, rates=rates, counters=counters
        )


def _budget(settings: Settings, started: Children) -> Budget:
    defaults = Defaults()
    if started.found is not None:
        defaults = resolve_defaults(
            started.names,
            started.text.metadata,
            settings=settings.models,
            generation_config=started.found.generation_config,
            thinking_default=started.text.facts.thinking_default,
        )
    return Budget(
        defaults=defaults,
        draw=partial(secrets.randbits, SEED_BITS),
        ceiling=settings.access.max_tokens,
        max_prompt_logprobs=settings.access.max_prompt_logprobs,
    )


def _services(
    settings: Settings,
    stages: Stages,
    stores: Stores,
    *,
    flights: Flights,
    watch: Watch,
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
        text=OwnText(stages.text, stages.handovers),
        records=flights,
        models=lambda: served,
        state=lambda: watch.state() | ({"embedder": embedder.state()} if embedder is not None else {}),
        health=watch.health,
        render_metrics=watch.render_metrics,
        observe_http=watch.metrics.observe_http,
        page=load_page(),
        embed=lambda request, flight: embed(request, flight, embedding),
        embedding_model=embeds,
        suited=partial(_suited, stages),
        responses=stores.responses if settings.responses.store else None,
        admin=stores.admin,
        shed=stores.quota.shed,
        idempotency=stores.idempotency,
        books=open_books(stores.database, stages.clock, counters),
        estimate=partial(estimate, stages=stages, rates=rates, reserve_tokens=settings.engine.reserve_tokens),
    )


def _suited(stages: Stages, request: Request) -> Request:
    is_foreign = request.model in stages.handovers
    return request if is_foreign else suited(request, stages.text.facts, stages.formats)


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
