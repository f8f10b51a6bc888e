"""What several gateway processes have once: the engine's child, the counters of the limits, the metrics.

Enters: frames from gateways. Leaves: frames to them. Always true: a gateway's frames are handled in the order in which
it sent them, so totals that are asked for hold everything that happened before; a gateway that speaks nonsense is
killed; when one is gone, what it had is aborted and given back, and nobody else notices. Next: `supervisor.py`.
"""

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import msgspec

from hitsend.core.clock import SystemClock
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.shared import QuotaDesk
from hitsend.serve.child import Child, ChildGone
from hitsend.serve.children import engine_settings, say_unmet
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.embedder import Embedder
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.shared import SharedEngine
from hitsend.serve.engine.shared_embedder import EmbedderDesk
from hitsend.serve.hub_words import (
    EMBEDDER,
    ENGINE,
    HOUSE,
    QUOTA,
    Answered,
    AskFigures,
    AskRecord,
    AskSeen,
    AskTotals,
    Brought,
    Ended,
    Failed,
    Figures,
    FromGateway,
    Record,
    Remember,
    Reply,
    SeenThere,
    Serving,
    ToGateway,
    Totals,
    encode,
    from_gateway,
    upstreams_of,
)
from hitsend.serve.pools import adapters_of
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.processes import read_processes
from hitsend.serve.usage.report import Spending
from hitsend.settings import Settings

ANSWER_S = 2.0
"""How long a gateway may take to tell its figures; one that doesn't is left out of that answer."""

logger = logging.getLogger(__name__)


class Hub:
    """All gateways, by number. `on_word` is told what concerns a gateway's own life."""

    def __init__(
        self,
        engine: EmbeddedEngine | None,
        shared: SharedEngine | None,
        quota: MemoryQuota,
        embedding: EmbedderDesk | None,
        *,
        metrics: Metrics,
        on_word: Callable[[int, Serving | Failed], None],
    ) -> None:
        self.engine = engine
        self._shared = shared
        self._quota = quota
        self._embedding = embedding
        self._desk = QuotaDesk(quota)
        self._metrics = metrics
        self._on_word = on_word
        self._children: dict[int, Child] = {}
        self._numbers = count()
        self._asked: dict[tuple[int, int], asyncio.Future[Reply | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped: dict[int, int] = {}

    def join(self, gateway: int, child: Child) -> None:
        """A gateway process that was just started."""
        self._children[gateway] = child
        if self._shared is not None:
            self._shared.join(gateway, partial(self._send, gateway, ENGINE))
        self._desk.join(gateway, partial(self._send, gateway, QUOTA))
        if self._embedding is not None:
            self._embedding.join(gateway, partial(self._send, gateway, EMBEDDER))

    def leave(self, gateway: int) -> None:
        """Its process is gone."""
        self._children.pop(gateway, None)
        if self._shared is not None:
            self._shared.leave(gateway)
        self._desk.leave(gateway)
        if self._embedding is not None:
            self._embedding.leave(gateway)
        for (_, asked), future in self._asked.items():
            if asked == gateway and not future.done():
                future.set_result(None)

    def receive(self, gateway: int, body: bytes) -> None:
        """One frame of a gateway's."""
        channel, rest = body[:1], body[1:]
        try:
            if channel == ENGINE and self._shared is not None:
                self._shared.receive(gateway, rest)
            elif channel == QUOTA:
                self._desk.receive(gateway, rest)
            elif channel == EMBEDDER and self._embedding is not None:
                self._embedding.receive(gateway, rest)
            else:
                self._heard(gateway, from_gateway.decode(rest))
        except (msgspec.ValidationError, msgspec.DecodeError, struct.error):
            logger.exception("gateway %d sent something that is no message", gateway)
            if gateway in self._children:
                self._children[gateway].kill()

    async def start(self) -> None:
        """Load the models. Raises ConfigError or EngineUnavailable."""
        await asyncio.gather(*(one.start() for one in (self.engine, self._embedding) if one is not None))
        if self.engine is not None:
            say_unmet(self.engine.facts.unmet)

    @property
    def embedding_model(self) -> str | None:
        """Its served name, if there is one."""
        return self._embedding.embedder.model if self._embedding is not None else None

    def tell(self, gateway: int, word: ToGateway) -> None:
        """Say something to one of them."""
        self._send(gateway, HOUSE, encode(word))

    async def stop(self) -> None:
        """End what is being answered. Safe to call twice."""
        await self._desk.stop()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _send(self, gateway: int, channel: bytes, body: bytes) -> None:
        child = self._children.get(gateway)
        if child is not None:
            with contextlib.suppress(ChildGone):  # its exit is on the way
                child.send(channel + body)

    def _heard(self, gateway: int, word: FromGateway) -> None:
        if isinstance(word, Ended):
            self._metrics.observe_request(word.figures)
        elif isinstance(word, Answered):
            self._metrics.observe_http(word.route, word.status, word.seconds)
        elif isinstance(word, Brought):
            self._metrics.observe_upstream(word.engine, word.num_tokens)
        elif isinstance(word, Reply):
            future = self._asked.get((word.number, gateway))
            if future is not None and not future.done():
                future.set_result(word)
        elif isinstance(word, Remember):
            for other in tuple(self._children):
                if other != gateway:
                    self.tell(other, word)
        elif isinstance(word, AskTotals | AskRecord | AskSeen):
            task = asyncio.get_running_loop().create_task(self._answer(gateway, word))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._on_word(gateway, word)

    async def _answer(self, gateway: int, asked: AskTotals | AskRecord | AskSeen) -> None:
        if isinstance(asked, AskTotals):
            await self._totals(gateway, asked)
        elif isinstance(asked, AskRecord):
            await self._record(gateway, asked)
        else:
            found = await self._ask(self._others(gateway), partial(AskSeen, key_id=asked.key_id))
            seen = tuple(one for each in found if isinstance(each, SeenThere) for one in each.seen)
            self.tell(gateway, SeenThere(asked.number, seen))

    def _others(self, gateway: int) -> tuple[int, ...]:
        return tuple(other for other in self._children if other != gateway)

    async def _totals(self, gateway: int, asked: AskTotals) -> None:
        found = await self._ask(tuple(self._children), AskFigures)
        figures = tuple(each for each in found if isinstance(each, Figures))
        body = self._render(figures, asked) if asked.metrics is not None else None
        self.tell(
            gateway,
            Totals(
                number=asked.number,
                engine=self.engine.state() if self.engine is not None else None,
                gateways=figures,
                quota_holds_open=self._quota.num_open,
                levels_kept=self._quota.num_levels,
                embedder=self._embedding.embedder.state() if self._embedding is not None else None,
                metrics=body,
            ),
        )

    def _render(self, figures: tuple[Figures, ...], asked: AskTotals) -> bytes:
        engine = self.engine.state() if self.engine is not None else None
        if engine is not None:
            self._metrics.set_engine(engine)
        for name, state in upstreams_of(figures).items():
            self._metrics.set_engine(state, name)
        for each in figures:
            self._dropped[each.pid] = each.records_dropped  # of ended ones too: a counter never falls
        holds, backlog = sum(each.holds_open for each in figures), sum(each.backlog for each in figures)
        self._metrics.set_storage(holds, backlog, sum(self._dropped.values()))
        self._metrics.set_elsewhere(*(each.elsewhere for each in figures))
        self._metrics.set_quota(self._quota.health())
        own = read_processes(("supervisor", os.getpid()), ("engine", engine.pid if engine is not None else None))
        self._metrics.set_processes((*own, *(process for each in figures for process in each.processes)))
        return self._metrics.render(is_openmetrics=asked.metrics == "openmetrics")

    async def _record(self, gateway: int, asked: AskRecord) -> None:
        found = await self._ask(self._others(gateway), partial(AskRecord, request_id=asked.request_id))
        bodies = [each.body for each in found if isinstance(each, Record) and each.body is not None]
        self.tell(gateway, Record(asked.number, bodies[0] if bodies else None))

    async def _ask(self, gateways: tuple[int, ...], question: Callable[[int], ToGateway]) -> list[Reply | None]:
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Reply | None]] = []
        for gateway in gateways:
            futures.append(loop.create_future())
            self._asked[number, gateway] = futures[-1]
            self.tell(gateway, question(number))
        try:
            done = (await asyncio.wait(futures, timeout=ANSWER_S))[0] if futures else set()
            return [future.result() for future in futures if future in done]
        finally:
            for gateway in gateways:
                del self._asked[number, gateway]


@asynccontextmanager
async def hub_of(
    settings: Settings,
    found: ModelFile | None,
    embedder: Embedder | None,
    on_word: Callable[[int, Serving | Failed], None],
) -> AsyncGenerator[Hub]:
    """A hub, with an engine where there is a model for it, not started yet; stopped at the end of the block. Raises
    ConfigError."""
    clock, metrics = SystemClock(), Metrics()
    # Opened before the gateways do: of several processes, one brings the schema up to date.
    database = await Database.open(database_url(settings.usage.url, settings.server.data_dir))
    shared, engine = (None, None) if found is None else _engine_of(settings, found, clock, metrics)
    embedding = EmbedderDesk(embedder) if embedder is not None else None
    hub = Hub(engine, shared, MemoryQuota(clock, Spending(database)), embedding, metrics=metrics, on_word=on_word)
    try:
        yield hub
    finally:
        await hub.stop()
        if engine is not None:
            await engine.stop()
        if embedding is not None:
            await embedding.stop()
        await database.close()


def _engine_of(
    settings: Settings, found: ModelFile, clock: SystemClock, metrics: Metrics
) -> tuple[SharedEngine, EmbeddedEngine]:
    adapters = adapters_of(settings, (found.name,), is_default=True)
    shared = SharedEngine(
        engine_settings(settings, found), found.weights_path, clock, model=found.name, adapters=adapters
    )
    engine = EmbeddedEngine(
        settings.engine,
        found.weights_path,
        clock,
        model=found.name,
        pause_tokens=settings.stream.pause_tokens,
        on_step=metrics.observe_step,
        line=shared,
    )
    return shared, engine
