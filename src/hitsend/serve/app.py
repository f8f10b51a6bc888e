"""The composition root: settings become objects, objects become one running server.

Enters: `Settings`. Leaves: a server that listens until it is told to stop. Always true: this is the only place that
knows every part and the order in which they start (database, writer, ledger, keys, text, engine) and stop (the other
way round); it listens only when everything can serve. Next: `pipeline.py`.
"""

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import uvloop

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.core.request import Request
from hitsend.serve.api.inspect import load_page
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import BatchServices, GatherFor, ServedModel, Services
from hitsend.serve.aside import Asides
from hitsend.serve.batching.start import batch_runner
from hitsend.serve.candidates import able_request
from hitsend.serve.cascade import Scorers
from hitsend.serve.chat.budget import SEED_BITS, Budget
from hitsend.serve.chat.formats import Formats, resolve_formats, suited
from hitsend.serve.chat.presets import Defaults, resolve_defaults
from hitsend.serve.children import Children, Shared, start_children
from hitsend.serve.embed import EmbeddingStages
from hitsend.serve.embed_elsewhere import embed_anywhere
from hitsend.serve.engine.protocol import EmbeddingModel
from hitsend.serve.engine.targets import Targets
from hitsend.serve.estimate import Rates
from hitsend.serve.explain import DryRuns
from hitsend.serve.flights import Flights, Traces
from hitsend.serve.listener import announce, check_exposure, ended_in_order, listen, server_of, url_of
from hitsend.serve.logs import set_up_logs
from hitsend.serve.output.reader import Markup, markup
from hitsend.serve.outside import Outside
from hitsend.serve.pools import LocalModel
from hitsend.serve.routed import Routing, run_named
from hitsend.serve.stages import Stages, Words
from hitsend.serve.stores import Stores, open_stores
from hitsend.serve.upstreams import OwnText, check_plan
from hitsend.serve.usage.books import Counters, open_books
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.watch import Watch
from hitsend.settings import Settings
from hitsend.settings_source import Loaded

logger = logging.getLogger(__name__)

GC_ALLOCATIONS = 20_000
"""Between two collections of the youngest objects; Python's 700 would be a collection every few requests."""


def serve(loaded: Loaded) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when it can't start."""
    set_up_logs(loaded.settings.log)
    with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(loaded.settings))


async def _serve(settings: Settings) -> None:
    with listen(settings.server.host, settings.server.port) as listening, ended_in_order():
        async with built(settings) as services:
            settle_down()
            check_exposure(services)
            announced = partial(announce, services.models()[0].id, url_of(listening))
            await server_of(Routes(services), settings, announced).serve(sockets=[listening])


def settle_down() -> None:
    """What was built stays for good, so the garbage collector need not look at it; and it looks seldom, because what a
    request leaves goes by its reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)


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


@asynccontextmanager
async def built(
    settings: Settings,
    children: Callable[[Settings, SystemClock, Metrics, AsyncExitStack], Awaitable[Children]] = start_children,
    *,
    shared: Shared | None = None,
) -> AsyncGenerator[Services]:
    """Every part, started; stopped in the reverse order at the end of the block. Raises ConfigError.

    `children`: who computes; the crash drills put a script in their place. With `shared`, this is one of several
    gateway processes.
    """
    clock = SystemClock()
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        stores = await open_stores(settings, clock, stack)
        started = await (children(settings, clock, metrics, stack) if shared is None else shared.start(settings, stack))
        stages = _stages(settings, clock, started, stores, shared)
        rates = Rates()
        observer = shared.observer if shared is not None else metrics
        flights = Flights(
            stores.records,
            observer,
            clock,
            settings.record,
            rates.observe,
            objectives=settings.slo,
            traces=_traces(settings, stack),
        )
        routing = _routing(settings, stages, flights, started)
        stack.push_async_callback(routing.asides.stop)
        watch = _watch(settings, stages, started, stores, metrics=metrics, targets=routing.targets)
        counters = Counters(stores.ledger, metrics, started.steps, watch.num_busy, lambda: flights.num_open)
        embedding = EmbeddingStages(
            clock, started.embedder, stages.prices, stages.ledger, stages.quota, started.upstreams.embedders
        )
        services = _services(
            settings,
            stages,
            stores,
            flights=flights,
            watch=watch,
            embedding=embedding,
            dry_runs=DryRuns(routing, rates, settings.engine.reserve_tokens),
            counters=counters if shared is None else None,
        )
        runner = batch_runner(settings, services, routing, embedding, stores, is_shared=shared is not None)
        runner.start()
        stack.push_async_callback(runner.stop)
        kept = BatchServices(stores.files, stores.batches, runner.wake)
        yield msgspec.structs.replace(services, batches=kept)


def _stages(settings: Settings, clock: SystemClock, started: Children, stores: Stores, shared: Shared | None) -> Stages:
    """What the pipeline calls. Raises ConfigError for a served model without a price."""
    every = [(model, _words(settings, model)) for model in started.local]
    first = every[0][1] if every else Words(started.text, _budget(settings), Formats(), Markup())
    stages = Stages(
        clock=clock,
        text=first.text,
        budget=first.budget,
        engines=started.engines,
        prices=PriceBook((*started.upstreams.prices, *settings.prices), clock.wall, elsewhere=started.upstreams.names),
        ledger=stores.ledger,
        quota=shared.quota if shared is not None and settings.access.quota_url is None else stores.quota,
        wait_timeout_s=settings.engine.wait_timeout_s,
        formats=first.formats,
        markup=first.markup,
        handovers=started.upstreams.handovers,
        words={
            name: replace(words, adapter=adapter)
            for model, words in every
            for name, adapter in model.by_name.items()
            if words is not first or adapter is not None
        },
    )
    for name, served in stages.engines.items():
        price = stages.prices.find(name, is_local=served.is_local)  # a missing price stops the start
        check_plan(settings, served.name, name, price)
    for name, upstream in started.upstreams.embedders.items():
        check_plan(settings, upstream.name, name, stages.prices.find(name, is_local=False))
    return stages


def _routing(settings: Settings, stages: Stages, flights: Flights, started: Children) -> Routing:
    """Raises ConfigError for a route that can't work."""
    targets = Targets(settings.routes, stages.engines)
    scorers = {
        name: Scorers(route, None if route.cascade.judge is None else targets.models[name][route.cascade.judge])
        for name, route in targets.routes.items()
        if route.strategy == "cascade"
    }
    for name in (one for one, rule in scorers.items() if rule.wants_logprobs):
        for engine in targets.routes[name].engines[:-1]:
            terms = stages.handovers.get(targets.models[name][engine])
            if terms is not None and "logprobs" not in terms.takes:
                raise ConfigError(f"routes[{name}].cascade.min_logprob: {engine} gives no logprobs to judge it by")
    asides = Asides(stages, flights, targets.routes, longest_s=settings.stream.request_timeout_s)
    for upstream in started.upstreams.engines:
        upstream.on_lost = asides.lost
    return Routing(stages, targets, asides, scorers)


def _watch(
    settings: Settings, stages: Stages, started: Children, stores: Stores, *, metrics: Metrics, targets: Targets
) -> Watch:
    engines = (*stages.engines.values(), *started.upstreams.embedders.values())
    outside = Outside(engines, targets, stores.database, stages.clock)
    return Watch(
        settings,
        stages,
        embedded=started.engine,
        stores=stores,
        metrics=metrics,
        pool=started.pool,
        outside=outside,
    )


def _traces(settings: Settings, stack: AsyncExitStack) -> Traces | None:
    """Spans for a collector, where one is set."""
    url = settings.tracing.otlp_url
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError("tracing.otlp_url: expected http://… or https://…")
    try:
        from hitsend.serve.usage import tracing  # noqa: PLC0415  # its libraries are an extra
    except ImportError as error:
        raise ConfigError("tracing.otlp_url: needs OpenTelemetry: pip install 'hitsend[otel]'") from error
    traces = tracing.Traces(settings.tracing, url)
    stack.push_async_callback(asyncio.to_thread, traces.stop)
    return traces


def _words(settings: Settings, model: LocalModel) -> Words:
    text, names = model.text, model.names
    formats = resolve_formats(names, text.facts, settings.models)
    defaults = resolve_defaults(
        names,
        text.metadata,
        settings=settings.models,
        generation_config=model.found.generation_config,
        thinking_default=text.facts.thinking_default,
    )
    marks = markup(text.vocabulary, formats.tool, formats.reasoning)
    return Words(text, _budget(settings, defaults), formats, marks)


def _budget(settings: Settings, defaults: Defaults | None = None) -> Budget:
    return Budget(
        defaults=defaults or Defaults(),
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
    dry_runs: DryRuns,
    counters: Counters | None,
) -> Services:
    created, routing = int(time.time()), dry_runs.routing
    served = _served(stages, routing, created)
    embedder = embedding.embedder
    embeds = None if embedder is None else ServedModel(embedder.model, created, embedder.facts.max_tokens)
    return Services(
        clock=stages.clock,
        server=settings.server,
        access=settings.access,
        stream=settings.stream,
        auth=stores.auth,
        flights=flights,
        pipeline=partial(run_named, routing),
        text=_own_text(stages, routing),
        records=flights,
        models=lambda: served,
        model_state=lambda name: watch.model_state(name) | routing.targets.shown(name),
        state=partial(_state, watch, routing, embedder),
        health=watch.health,
        render_metrics=watch.render_metrics,
        observe_http=watch.metrics.observe_http,
        page=load_page(),
        embed=partial(embed_anywhere, embedding),
        embedding_model=embeds,
        embedding_models_elsewhere=_embed_elsewhere(embedding, created),
        suited=partial(_suited, routing),
        responses=stores.responses if settings.responses.store else None,
        admin=stores.admin,
        shed=stages.quota.shed,
        idempotency=stores.idempotency,
        books=open_books(stores.database, stages.clock, counters),
        estimate=dry_runs.estimate,
        explain=dry_runs.explain,
        gather=partial(_gathered, watch.outside),
        elsewhere=watch.outside.now,
    )


async def _gathered(outside: Outside, what: GatherFor) -> None:
    """What a scrape has to wait for."""
    if what != "state":
        await outside.look()


def _served(stages: Stages, routing: Routing, created: int) -> tuple[ServedModel, ...]:
    """Models that chat, and routes, which hold as much as the largest of their engines."""
    contexts = {name: one.facts.cells_per_slot for name, one in stages.engines.items()}
    for name, route in routing.targets.routes.items():
        contexts[name] = max(contexts[routing.model_of(name, one)] for one in route.engines)
    return tuple(ServedModel(name, created, context) for name, context in contexts.items())


def _state(watch: Watch, routing: Routing, embedder: EmbeddingModel | None) -> dict[str, Any]:
    shown = watch.state() | ({"embedder": embedder.state()} if embedder is not None else {})
    return shown | ({"routes": routing.targets.state()} if routing.targets.routes else {})


def _own_text(stages: Stages, routing: Routing) -> OwnText:
    """A route's name is rendered and counted as the first of its engines does it."""
    texts, handovers = {name: words.text for name, words in stages.words.items()}, dict(stages.handovers)
    for name, route in routing.targets.routes.items():
        first = routing.model_of(name, route.engines[0])
        texts |= {name: texts[first]} if first in texts else {}
        handovers |= {name: handovers[first]} if first in handovers else {}
    return OwnText(stages.text, handovers, texts)


def _embed_elsewhere(embedding: EmbeddingStages, created: int) -> tuple[ServedModel, ...]:
    return tuple(ServedModel(name, created, one.settings.context) for name, one in embedding.elsewhere.items())


def _suited(routing: Routing, request: Request) -> Request:
    """As the template would get it; of a route, that of the first of its engines, with the route's will."""
    stages, route = routing.stages, routing.targets.routes.get(request.model)
    model = request.model if route is None else routing.model_of(route.model, route.engines[0])
    asked = request if route is None else able_request(request, route, model, stages)
    if model in stages.engines and model not in stages.handovers:
        stages = stages.of(model)
        asked = suited(asked, stages.text.facts, stages.formats)
    return msgspec.structs.replace(asked, model=request.model)
