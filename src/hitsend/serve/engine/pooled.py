"""Embedded models that come and go: an engine that is there before its model is, and the one who loads and unloads.

Enters: jobs for models that may not be in memory. Leaves: generations. Always true: a model that isn't there is loaded
by the first job that asks for it, and jobs wait for it in a bounded queue; each model has a child of its own, so that
when one dies, only its own jobs fail; a child is started only when `pool.py` has set memory aside for it, and its
memory counts until the process has ended; what is known of a model beforehand (`sizing.py`) is enough to refuse what
can never fit. Next: `waiting.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import (
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    ServeError,
    ServerOverloaded,
    ShuttingDown,
)
from hitsend.core.events import ModelLoaded, Queued
from hitsend.core.vocabulary import OTHER_FILE
from hitsend.serve.engine.embedded import EmbeddedEngine, check_job
from hitsend.serve.engine.pool import Member, Pool
from hitsend.serve.engine.protocol import EngineState, Generation, Job
from hitsend.serve.engine.waiting import WaitingGeneration
from hitsend.serve.loop.messages import EngineFacts

RETRY_S = 5.0
"""After a model could not be loaded, jobs for it are refused for so long before it is tried again."""

_log = logging.getLogger(__name__)


class PooledModel(msgspec.Struct, frozen=True):
    """One model of the pool. `facts` are predicted; `max_waiting` choices may wait, `max_concurrent` jobs be open."""

    name: str
    facts: EngineFacts
    num_bytes: int
    max_waiting: int
    max_concurrent: int
    idle_s: float | None
    is_loaded_at_start: bool = False
    path: str = ""


class PooledEngine:
    """See `protocol.Engine`. `build` makes the engine that a loaded model is; it is told whom to tell of its rest."""

    takes: Literal["tokens"] = "tokens"
    gives: Literal["tokens"] = "tokens"
    is_local = True

    def __init__(
        self,
        model: PooledModel,
        member: Member,
        clock: Clock,
        *,
        build: Callable[[Callable[[], None]], EmbeddedEngine],
        kick: Callable[[], None],
    ) -> None:
        self.model = model
        self.member = member
        self.num_loads = 0
        self.words = ""
        """Of the process that reads its prompts, once that has begun: a child with others has another file."""
        self._clock = clock
        self._build = build
        self._kick = kick
        self._inner: EmbeddedEngine | None = None
        self._loaded: ModelLoaded | None = None
        self._waiting: dict[str, WaitingGeneration] = {}
        self._failed_at: float | None = None
        self._is_stopped = False

    @property
    def name(self) -> str:
        """Its name in settings, records and rows."""
        return self.model.name

    @property
    def facts(self) -> EngineFacts:
        """What is loaded, or would be."""
        return self.model.facts if self._inner is None else self._inner.facts

    @property
    def is_wanted(self) -> bool:
        """Whether jobs wait for it."""
        return bool(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether jobs are at its child."""
        return self._inner is not None and self._inner.num_open > 0

    def shed(self, tenant: tuple[str, ...], choices: int) -> None:
        """As `EmbeddedEngine.shed`; for a model that isn't there by how many wait for it."""
        if self._is_stopped:
            raise ShuttingDown("The server is shutting down.")
        num_open = len(self._waiting) + (self._inner.num_open if self._inner is not None else 0)
        if num_open >= self.model.max_concurrent:
            raise ServerOverloaded(
                f"{num_open} requests are at {self.name!r}, limit {self.model.max_concurrent} (max_concurrent).",
                retry_after_s=1.0,
            )
        if self._is_open and self._inner is not None:
            self._inner.shed(tenant, choices)
            return
        if self._is_left_alone:
            raise EngineUnavailable("The model could not be loaded; it will be tried again.", retry_after_s=RETRY_S)
        waiting, most = self._num_waiting, self._most
        if waiting + choices > most >= choices:
            raise ServerOverloaded(
                f"{waiting} wait for the model to be loaded, {choices} more, room for {most}.", retry_after_s=1.0
            )

    def admit(self, job: Job) -> None:
        """As `EmbeddedEngine.admit`; for a model that isn't there by what is predicted of it."""
        check_job(job, self.model.facts.cells_per_slot, self._most)
        self.shed(job.tenant, job.n)
        if self._is_open and self._inner is not None:
            self._inner.admit(job)

    @property
    def _most(self) -> int:
        return self.model.max_waiting + self.model.facts.num_slots

    def generate(self, job: Job) -> Generation:
        """Submit the job, or let it wait until its model is there. Raises what `admit` raises."""
        self.admit(job)
        if job.request_id in self._waiting:
            raise InvalidRequest(f"Request id {job.request_id} is running already.")
        now = self.member.used_at = self._clock.now()
        if self._is_open and self._inner is not None:
            return self._inner.generate(job)
        queued = Queued(now, self._num_waiting + job.n, 0)
        waiting = self._waiting[job.request_id] = WaitingGeneration(job, self._clock, queued, self._left)
        self._kick()
        return waiting

    def state(self) -> EngineState:
        """Figures of this moment. Ready also without its model, which it would load."""
        if self._inner is not None:
            now = self._inner.state()
            return msgspec.structs.replace(now, waiting=now.waiting + self._num_waiting)
        return EngineState(
            is_ready=not (self._is_left_alone or self._is_stopped),
            pid=None,
            restarts=0,
            running=0,
            waiting=self._num_waiting,
            cells_total=0,
            cells_used=0,
            slots_total=0,
            slots_used=0,
            preemptions_total=0,
            progress_age_s=0.0,
        )

    async def start(self) -> None:
        """Nothing: `ModelPool` starts and stops what there is."""

    async def stop(self) -> None:
        """Jobs that wait fail; then the child ends. Safe to call twice."""
        self._is_stopped = True
        self.fail_waiting(ShuttingDown("The server is shutting down."))
        await self.unload()

    # What follows is for `ModelPool`.

    async def load(self) -> None:
        """Start a child. Raises ConfigError, EngineUnavailable or OSError, and then there is none."""
        started_at = self._clock.now()
        inner = self._build(self._came_to_rest)
        try:
            await inner.start()
            self._check(inner)
        except BaseException:
            await inner.stop()
            raise
        self._inner, self._failed_at = inner, None
        self.num_loads += 1
        self._loaded = ModelLoaded(started_at, self._clock.now(), self.model.num_bytes)

    def _check(self, inner: EmbeddedEngine) -> None:
        if self.words not in ("", inner.facts.words):
            raise ConfigError(f"engines[{self.name}].model: {OTHER_FILE.format(self.model.path)}")

    async def unload(self) -> None:
        """Return when the child has ended."""
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.stop()

    def let_in(self) -> None:
        """Hand those who wait to the child."""
        if self._inner is None or self._loaded is None:
            return
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.begin(self._inner, self._loaded)

    def fail_waiting(self, error: ServeError) -> None:
        """Nobody waits any more."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.fail(error)

    def failed(self) -> None:
        """It could not be loaded."""
        self._failed_at = self._clock.now()
        self.fail_waiting(EngineUnavailable("The model could not be loaded.", retry_after_s=RETRY_S))

    @property
    def _is_left_alone(self) -> bool:
        """Whether it could not be loaded a moment ago."""
        return self._failed_at is not None and self._clock.now() < self._failed_at + RETRY_S

    @property
    def _is_open(self) -> bool:
        return self.member.stage == "loaded" and not self.member.is_closing and not self._waiting

    @property
    def _num_waiting(self) -> int:
        return sum(each.job.n for each in self._waiting.values())

    def _left(self, generation: WaitingGeneration) -> None:
        self._waiting.pop(generation.job.request_id, None)
        self._kick()

    def _came_to_rest(self) -> None:
        self.member.used_at = self._clock.now()
        self._kick()


class ModelPool:
    """Loads and unloads as the pool says. Fill it, start it, stop it."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self.engines: dict[str, PooledEngine] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._is_stopping = False

    def add(self, model: PooledModel, build: Callable[[Callable[[], None]], EmbeddedEngine]) -> PooledEngine:
        """One more model. Raises ConfigError where it can never fit."""
        member = Member(model.name, model.num_bytes, idle_s=model.idle_s)
        self._pool.add(member)
        engine = PooledEngine(model, member, self._clock, build=build, kick=self.kick)
        self.engines[model.name] = engine
        return engine

    def pin(self, name: str, num_bytes: int) -> None:
        """A model beside them that is always there. Raises ConfigError where that leaves one of them no room."""
        self._pool.add(Member(name, num_bytes, is_pinned=True, stage="loaded"))

    async def start(self) -> None:
        """Load those that shall be there from the start, one after the other. Raises ConfigError, EngineUnavailable."""
        for engine in self.engines.values():
            member = engine.member
            if engine.model.is_loaded_at_start and self._pool.fits(member):
                member.stage, member.used_at = "loading", self._clock.now()
                await engine.load()
                member.stage, member.used_at = "loaded", self._clock.now()
            elif engine.model.is_loaded_at_start:
                raise ConfigError(
                    f"engines[{engine.name}].is_loaded_at_start: it takes {member.num_bytes} bytes, and of "
                    f"engine.memory_budget_bytes {self._pool.budget_bytes} the others have {self._pool.used_bytes}"
                )
        self.kick()

    async def stop(self) -> None:
        """End everything. Safe to call twice."""
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._loads:
            task.cancel()
        under_way = self._loads | self._unloads
        if under_way:
            await asyncio.wait(under_way)
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    def kick(self) -> None:
        """Something has changed: look soon, never from inside of whoever says so."""
        self._look_in(0.0)

    def state(self) -> dict[str, Any]:
        """For `/inspect/state`."""
        return {
            "memory_budget_bytes": self._pool.budget_bytes,
            "memory_used_bytes": self._pool.used_bytes,
            "models": {name: _shown(engine) for name, engine in self.engines.items()},
        }

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_stopping:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.now()
        self._let_in()  # first: a model that has just come must not go again before those who waited for it had it
        for engine in self.engines.values():
            engine.member.is_busy = engine.is_busy
            if engine.is_wanted:
                self._pool.want(engine.name, now)
            else:
                engine.member.wanted_at = None
        while True:
            turn = self._pool.turn(now)
            for name in turn.unload:
                self._begin(self._unload(self.engines[name]), self._unloads)
            if turn.load is None:
                break
            self._begin(self._load(self.engines[turn.load]), self._loads)
        self._let_in()
        seconds = self._pool.next_look(now)
        if seconds is not None and self._timer is None:
            self._look_in(seconds)

    def _let_in(self) -> None:
        for engine in self.engines.values():
            if engine.is_wanted and engine.member.stage == "loaded" and not engine.member.is_closing:
                engine.member.wanted_at = None
                engine.let_in()

    def _begin(self, work: Coroutine[Any, Any, None], among: set["asyncio.Task[None]"]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)

    async def _load(self, engine: PooledEngine) -> None:
        _log.info("loading %s: %d bytes", engine.name, engine.model.num_bytes)
        try:
            await engine.load()
            engine.member.stage, engine.member.used_at = "loaded", self._clock.now()
        except (ConfigError, EngineUnavailable, OSError) as failure:
            _log.error("%s could not be loaded: %s", engine.name, failure)
        finally:
            if engine.member.stage == "loading":
                engine.member.stage = "unloaded"
                if not self._is_stopping:
                    engine.failed()
            self.kick()

    async def _unload(self, engine: PooledEngine) -> None:
        _log.info("unloading %s: %d bytes", engine.name, engine.model.num_bytes)
        await engine.unload()
        engine.member.stage = "unloaded"
        self.kick()


def _shown(engine: PooledEngine) -> dict[str, Any]:
    now, member = engine.state(), engine.member
    return {
        "state": member.stage,
        "is_ready": now.is_ready,
        "pid": now.pid,
        "restarts": now.restarts,
        "running": now.running,
        "waiting": now.waiting,
        "cells_used": now.cells_used,
        "memory_bytes": member.num_bytes,
        "layout": engine.facts.layout,
        "loads_total": engine.num_loads,
        "progress_age_s": now.progress_age_s,
        "check": now.check,
    }
