"""What computes: the processes of the embedded model and the lines to upstreams, found, started, and stopped again.

Enters: settings. Leaves: text, perhaps an engine and an embedder over their models' files, and the upstreams. Always
true: all of them are started when `start_children` returns, and the stack that it was given stops them; no two serve
the same name. Next: `embed.py`.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from hitsend.core.clock import Clock, SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.access.quota import Quota
from hitsend.serve.chat.text import TextChild
from hitsend.serve.embed import find_embedder
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.keeper import EngineLine
from hitsend.serve.engine.models import NO_MODEL, ModelFile, resolve
from hitsend.serve.engine.protocol import EmbeddingModel, Engine, StepFigures
from hitsend.serve.upstreams import NO_UPSTREAMS, Upstreams, build_upstreams
from hitsend.serve.usage.figures import Observer
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.reconcile import EngineCounts
from hitsend.settings import EngineSettings, Settings


@dataclass(frozen=True)
class Children:
    """What computes, started, and the file that `text` and `engine` loaded; without a model, `text` has no process."""

    found: ModelFile | None
    text: TextChild
    engine: EmbeddedEngine | None
    embedder: EmbeddingModel | None
    upstreams: Upstreams = NO_UPSTREAMS
    steps: EngineCounts = field(default_factory=lambda: EngineCounts("embedded"))

    @property
    def engines(self) -> dict[str, Engine]:
        """By the names of the models that they serve."""
        own: dict[str, Engine] = {self.found.name: self.engine} if self.found and self.engine else {}
        return own | self.upstreams.by_model

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that the embedded model is called."""
        if self.found is None or self.engine is None:
            return ()
        own = self.text.metadata.get("general.name", "")
        return (self.found.name, Path(self.found.path).stem, own, self.engine.facts.architecture)


@dataclass(frozen=True)
class Shared:
    """What a gateway process doesn't have for itself, but from the process above it."""

    line: EngineLine
    quota: Quota
    observer: Observer
    embedder: EmbeddingModel | None

    async def start(self, settings: Settings, stack: AsyncExitStack) -> Children:
        """A text process of its own, and its side of what all share; `stack` stops them."""
        found = await asyncio.to_thread(find_model, settings)
        text = TextChild(found.path, settings.chat, libllama=settings.engine.libllama)
        stack.push_async_callback(text.stop)
        engine = EmbeddedEngine(
            settings.engine,
            found.path,
            SystemClock(),
            model=found.name,
            pause_tokens=settings.stream.pause_tokens,
            line=self.line,
        )
        upstreams = build_upstreams(settings, SystemClock(), lambda _engine, _tokens: None)
        starting = [part for part in (*upstreams.engines, engine, self.embedder) if part is not None]
        for part in starting:
            stack.push_async_callback(part.stop)
        await asyncio.gather(text.start(), *(part.start() for part in starting))
        return Children(found, text, engine, self.embedder, upstreams)


async def start_children(settings: Settings, clock: Clock, metrics: Metrics, stack: AsyncExitStack) -> Children:
    """Start them; `stack` stops them. Raises ConfigError."""
    found = None if settings.engine.model == NO_MODEL else await asyncio.to_thread(find_model, settings)
    text = TextChild(found.path if found is not None else None, settings.chat, libllama=settings.engine.libllama)
    stack.push_async_callback(text.stop)
    upstreams = build_upstreams(settings, clock, metrics.observe_upstream)
    if found is not None and found.name in upstreams.by_model:
        raise ConfigError(f"engines: {found.name!r} is the embedded model's name (engine.alias gives it another)")
    steps = EngineCounts("embedded")
    engine = None if found is None else _embedded(settings, found, clock, partial(_on_step, metrics, steps))
    embedder = await asyncio.to_thread(find_embedder, settings.engine, models_dir(settings))
    starting = [part for part in (*upstreams.engines, engine, embedder) if part is not None]
    for part in starting:
        stack.push_async_callback(part.stop)
    await asyncio.gather(text.start(), *(part.start() for part in starting))
    return Children(found, text, engine, embedder, upstreams, steps)


def _embedded(
    settings: Settings, found: ModelFile, clock: Clock, on_step: Callable[[StepFigures], None]
) -> EmbeddedEngine:
    return EmbeddedEngine(
        engine_settings(settings),
        found.path,
        clock,
        model=found.name,
        pause_tokens=settings.stream.pause_tokens,
        on_step=on_step,
    )


def _on_step(metrics: Metrics, counts: EngineCounts, figures: StepFigures) -> None:
    """Two counts of the same steps, so that `hitsend reconcile` has something to compare."""
    metrics.observe_step(figures)
    counts.observe_step(figures)


def find_model(settings: Settings) -> ModelFile:
    """The file to load, under the name by which it is served."""
    found = resolve(settings.engine.model, models_dir(settings))
    return msgspec.structs.replace(found, name=settings.engine.alias or found.name)


def engine_settings(settings: Settings) -> EngineSettings:
    """The engine's section, with the draft model's file found. Raises ConfigError."""
    draft = settings.engine.draft_model
    if draft is None:
        return settings.engine
    return msgspec.structs.replace(settings.engine, draft_model=resolve(draft, models_dir(settings)).path)


def models_dir(settings: Settings) -> Path:
    """Where model files are looked for and put."""
    return Path(settings.engine.models_dir or Path(settings.server.data_dir) / "models")
