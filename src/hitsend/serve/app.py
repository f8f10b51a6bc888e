"""The composition root: settings become objects, objects become one running server.

Enters: `Settings`. Leaves: a server that listens until it is told to stop. Always true: this is the only place that
knows every part and the order in which they start (database, writer, ledger, keys, text, engine) and stop (the other
way round); it listens only when everything can serve. Next: `pipeline.py`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from hitsend.core.clock import SystemClock
from hitsend.serve.access.auth import Authenticator
from hitsend.serve.access.issuers import tokens_of
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.quota import Quota
from hitsend.serve.access.store import KeyStore
from hitsend.serve.api.inspect import load_page
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import Administration, Health, ServedModel, Services
from hitsend.serve.chat.budget import SEED_BITS, Budget
from hitsend.serve.chat.formats import resolve_formats, suited
from hitsend.serve.chat.presets import resolve_defaults
from hitsend.serve.chat.text import TextChild
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.writer import Writer
from hitsend.serve.embed import EmbeddingStages, embed, find_embedder
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.keeper import EngineLine
from hitsend.serve.engine.models import ModelFile, resolve
from hitsend.serve.engine.protocol import EmbeddingModel
from hitsend.serve.estimate import Rates, estimate
from hitsend.serve.flights import Flights
from hitsend.serve.listener import announce, check_exposure, listen, server_of, url_of
from hitsend.serve.logs import set_up_logs
from hitsend.serve.output.reader import markup
from hitsend.serve.pipeline import Stages, run
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.metrics import CONTENT_TYPE, Metrics, Observer
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.usage.records import RecordStore
from hitsend.serve.usage.report import Spending
from hitsend.serve.usage.responses import ResponseStore
from hitsend.settings import Loaded, Settings

logger = logging.getLogger(__name__)


def serve(loaded: Loaded) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when it can't start."""
    set_up_logs(loaded.settings.log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded.settings))


async def _serve(settings: Settings) -> None:
    with listen(settings.server.host, settings.server.port) as listening:
        async with built(settings) as services:
            check_exposure(services)
            announced = partial(announce, services.models()[0].id, url_of(listening))
            await server_of(Routes(services), settings, announced).serve(sockets=[listening])


class Running(msgspec.Struct, frozen=True):
    """A server inside this process."""

    base_url: str


@asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[Running]:
    """A server in this process, on a free loopback port, for the length of the block. Leaves signals alone."""
    with listen("127.0.0.1", 0) as listening:
        async with built(settings) as services:
            started = asyncio.Event()
            server = server_of(Routes(services), settings, started.set, takes_signals=False)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                await started.wait()
                yield Running(url_of(listening))
            finally:
                server.should_exit = True
                await serving


class Shared(msgspec.Struct, frozen=True):
    """What a gateway process doesn't have for itself, but from the process above it."""

    line: EngineLine
    quota: Quota
    observer: Observer
    embedder: EmbeddingModel | None


@asynccontextmanager
async def built(settings: Settings, shared: Shared | None = None) -> AsyncGenerator[Services]:
    """Every part, started; stopped in the reverse order at the end of the block. Raises ConfigError.

    With `shared`, this is one of several gateway processes.
    """
    clock = SystemClock()
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        stores = await _open_stores(settings, clock, stack)
        found = await asyncio.to_thread(find_model, settings)
        text = TextChild(found.path, settings.chat, libllama=settings.engine.libllama)
        stack.push_async_callback(text.stop)
        engine = EmbeddedEngine(
            settings.engine,
            found.path,
            clock,
            model=found.name,
            pause_tokens=settings.stream.pause_tokens,
            on_step=metrics.observe_step if shared is None else lambda _: None,
            line=shared.line if shared is not None else None,
        )
        stack.push_async_callback(engine.stop)
        embedder = await asyncio.to_thread(_embedder, settings, shared)
        if embedder is not None:
            stack.push_async_callback(embedder.stop)
        await asyncio.gather(text.start(), engine.start(), *([embedder.start()] if embedder is not None else []))
        stages = Stages(
            clock=clock,
            text=text,
            budget=_budget(settings, found, text, engine),
            engines={found.name: engine},
            prices=PriceBook(settings.prices),
            ledger=stores.ledger,
            quota=shared.quota if shared is not None else stores.quota,
            wait_timeout_s=settings.engine.wait_timeout_s,
            formats=(formats := resolve_formats(_names(found, text, engine), text.facts, settings.models)),
            markup=markup(text.vocabulary, formats.tool, formats.reasoning),
        )
        rates = Rates()
        observer = shared.observer if shared is not None else metrics
        flights = Flights(stores.records, observer, clock, settings.record, rates.observe)
        watch = _Watch(settings, stages, engine=engine, stores=stores, metrics=metrics)
        embedding = EmbeddingStages(clock, embedder, stages.prices, stages.ledger, stages.quota)
        yield _services(settings, stages, stores, flights=flights, watch=watch, embedding=embedding, rates=rates)


@dataclass(frozen=True)
class _Stores:
    """What is kept on disk."""

    writer: Writer
    records: RecordStore
    ledger: Ledger
    auth: Authenticator
    responses: ResponseStore
    admin: Administration
    quota: MemoryQuota


async def _open_stores(settings: Settings, clock: SystemClock, stack: AsyncExitStack) -> _Stores:
    database = await Database.open(database_url(settings.usage.url, settings.server.data_dir))
    stack.push_async_callback(database.close)
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
    admin = Administration(keys, PrincipalStore(database, clock), auth.refresh)
    return _Stores(writer, records, ledger, auth, responses, admin, MemoryQuota(clock, Spending(database)))


def find_model(settings: Settings) -> ModelFile:
    """The file to load, under the name by which it is served."""
    found = resolve(settings.engine.model, models_dir(settings))
    return msgspec.structs.replace(found, name=settings.engine.alias or found.name)


def _embedder(settings: Settings, shared: Shared | None) -> EmbeddingModel | None:
    return shared.embedder if shared is not None else find_embedder(settings.engine, models_dir(settings))


def models_dir(settings: Settings) -> Path:
    """Where model files are looked for and put."""
    return Path(settings.engine.models_dir or Path(settings.server.data_dir) / "models")


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
        shown |= {"writes_waiting": self._stores.writer.backlog, "records_dropped": self._stores.records.num_dropped}
        return shown | {"levels_kept": quota.num_levels, "engine": engine}

    def health(self) -> Health:
        """Red when work is due and nothing moves; not ready while the engine or the text process is away."""
        now = self._engine.state()
        is_healthy = now.progress_age_s <= self._settings.engine.progress_timeout_s
        is_ready = is_healthy and now.is_ready and self._stages.text.pid is not None
        if is_ready:
            return Health(is_healthy=True, is_ready=True)
        return Health(is_healthy=is_healthy, is_ready=False, detail="the engine or the text process is restarting")

    def render_metrics(self) -> tuple[str, bytes]:
        """The body of `/metrics`, with the figures of this moment."""
        self.metrics.set_engine(self._engine.state())
        holds_open, stores = self._stages.ledger.holds_open, self._stores
        self.metrics.set_storage(holds_open, stores.writer.backlog, stores.records.num_dropped)
        return CONTENT_TYPE, self.metrics.render()
