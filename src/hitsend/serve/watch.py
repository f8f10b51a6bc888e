"""What can be seen of the server from outside: its state, its health, its metrics.

Enters: every part that has figures. Leaves: the bodies of `/inspect/state`, `/healthz`, `/readyz`, `/metrics`.
Always true: nothing here waits, and nothing of a request's text is in it. Next: `api/inspect.py`.
"""

import os
from typing import Any

import msgspec

from hitsend.serve.api.services import Health
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.pooled import ModelPool, PooledEngine
from hitsend.serve.engine.protocol import Engine
from hitsend.serve.outside import Outside
from hitsend.serve.stages import Stages
from hitsend.serve.stores import Stores
from hitsend.serve.usage.metrics import CONTENT_TYPE, OPENMETRICS_TYPE, Metrics
from hitsend.serve.usage.processes import read_processes
from hitsend.settings import Settings


class Watch:
    """What can be seen of the server from outside."""

    def __init__(
        self,
        settings: Settings,
        stages: Stages,
        *,
        embedded: EmbeddedEngine | None,
        stores: Stores,
        metrics: Metrics,
        pool: ModelPool | None = None,
        outside: Outside,
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._embedded = embedded
        self._stores = stores
        self._pool = pool
        self.outside = outside
        self._adapters = {name: words.adapter for name, words in stages.words.items()}
        self.metrics = metrics

    def _engines(self) -> dict[str, Engine]:
        """By their own names, each once."""
        return {engine.name: engine for engine in self._stages.engines.values()}

    def num_busy(self) -> int:
        """Choices that run or wait, over all engines."""
        return sum(now.running + now.waiting for now in (engine.state() for engine in self._engines().values()))

    def state(self) -> dict[str, Any]:
        """The body of `/inspect/state`: figures of all engines together, then the embedded one, then the upstreams."""
        states = {name: msgspec.to_builtins(engine.state()) for name, engine in self._engines().items()}
        shown: dict[str, Any] = {
            name: sum(state[name] for state in states.values())
            for name in ("running", "waiting", "paused", "cells_total", "cells_used", "slots_total", "slots_used")
        }
        shown["preemptions_total"] = sum(state["preemptions_total"] for state in states.values())
        quota = self._stores.quota
        caches = ("cells_cached", "cache_bytes", "cache_disk_bytes")
        shown |= {name: sum(state[name] for state in states.values()) for name in caches}
        shown |= {"holds_open": self._stages.ledger.holds_open}
        shown |= {"quota_holds_open": quota.num_open, "levels_kept": quota.num_levels}
        shown |= {"writes_waiting": self._stores.writer.backlog, "records_dropped": self._stores.records.num_dropped}
        upstreams = {
            name: {"running": state["running"], "slots_total": state["slots_total"], "is_ready": state["is_ready"]}
            | self._elsewhere(name)
            for name, state in states.items()
            if (self._embedded is None or name != self._embedded.name) and name not in self._pooled
        }
        text = {"pid": self._stages.text.pid}
        pool = {} if self._pool is None else {"pool": self._pool.state()}
        return shown | {"engine": self._embedded_state(), "text": text, "upstreams": upstreams} | pool

    def _elsewhere(self, name: str) -> dict[str, Any]:
        engine = self._engines()[name]
        return engine.shown() if isinstance(engine, OpenAIEngine) else {}

    @property
    def _pooled(self) -> dict[str, PooledEngine]:
        return {} if self._pool is None else self._pool.engines

    def model_state(self, model: str) -> dict[str, Any]:
        """What `/v1/models` adds: how it is with a model that comes and goes, and what an adapter changes."""
        engine = self._stages.engines.get(model)
        shown: dict[str, Any] = {}
        if isinstance(engine, PooledEngine):
            shown = {"engine": engine.name, "state": engine.member.stage, "memory_bytes": engine.member.num_bytes}
        return shown | ({"adapter_of": engine.facts.model} if engine and self._adapters.get(model) else {})

    def _embedded_state(self) -> dict[str, Any]:
        if self._embedded is None:
            return {"is_ready": False, "pid": None, "restarts": 0, "model": None}
        now, facts = msgspec.to_builtins(self._embedded.state()), self._embedded.facts
        engine = {name: now[name] for name in ("is_ready", "pid", "restarts", "progress_age_s", "check")}
        engine |= {"model": facts.model, "library": facts.library, "kv_mode": facts.kv_mode, "layout": facts.layout}
        engine |= {"speculation": facts.speculation, "speculation_reason": facts.speculation_reason}
        engine |= {"unmet": facts.unmet}
        return engine | {"cells_per_slot": facts.cells_per_slot, "num_threads": facts.num_threads}

    def health(self) -> Health:
        """Red when work is due and nothing moves; not ready while engine, text process or database are away.

        Upstreams and models that come and go make no difference to readiness beside an embedded model; without one, at
        least one of them has to be ready.
        """
        database = self._stores.database
        is_healthy, fault = True, database.fault
        if fault is None and database.refusal is not None:
            fault = f"the database takes no writes: {database.refusal}"
        if self._embedded is None:
            if not any(engine.state().is_ready for engine in self._stages.engines.values()):
                fault = "no engine can be asked"
        else:
            now = self._embedded.state()
            is_healthy = now.progress_age_s <= self._settings.engine.progress_timeout_s
            if not (is_healthy and now.is_ready and self._stages.text.pid is not None):
                fault = "the engine or the text process is restarting"
        is_healthy = is_healthy and all(
            engine.state().progress_age_s <= self._settings.engine.progress_timeout_s
            for engine in self._pooled.values()
        )
        return Health(is_healthy=is_healthy, is_ready=fault is None, detail=fault or "")

    def render_metrics(self, is_openmetrics: bool) -> tuple[str, bytes]:  # noqa: FBT001  # as `Services.render_metrics`
        """The body of `/metrics` and its type, with the figures of this moment."""
        for name, engine in self._engines().items():
            self.metrics.set_engine(engine.state(), name)
        for name, pooled in self._pooled.items():
            is_loaded, num_bytes = pooled.member.stage == "loaded", pooled.member.num_bytes
            self.metrics.set_pooled(name, is_loaded=is_loaded, num_loads=pooled.num_loads, num_bytes=num_bytes)
        self.metrics.set_elsewhere(self.outside.now())
        holds_open, stores = self._stages.ledger.holds_open, self._stores
        self.metrics.set_storage(holds_open, stores.writer.backlog, stores.records.num_dropped)
        self.metrics.set_quota(stores.quota.health())
        computing = (("engine", engine.state().pid) for engine in self._engines().values())
        self.metrics.set_processes(read_processes(("edge", os.getpid()), ("text", self._stages.text.pid), *computing))
        return OPENMETRICS_TYPE if is_openmetrics else CONTENT_TYPE, self.metrics.render(is_openmetrics=is_openmetrics)
