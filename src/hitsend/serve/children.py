"""What computes: the processes of the embedded model and the lines to upstreams, found, started, and stopped again.

Enters: settings. Leaves: text, perhaps an engine and an embedder over their models' files, and the upstreams. Always
true: all of them are started when `start_children` returns, and the stack that it was given stops them; no two serve
the same name. Next: `embed.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from hitsend.core.clock import Clock, SystemClock
from hitsend.core.errors import ConfigError
from hitsend.core.vocabulary import OTHER_FILE
from hitsend.serve.access.quota import Quota
from hitsend.serve.chat.text import TextChild
from hitsend.serve.embed import find_embedder
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.keeper import EngineLine
from hitsend.serve.engine.models import NO_MODEL, ModelFile, resolve
from hitsend.serve.engine.pooled import ModelPool, PooledEngine
from hitsend.serve.engine.protocol import EmbeddingModel, Engine, StepFigures
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.unmet import check_settings, uncounted, without_model
from hitsend.serve.engine.weights import laid_out
from hitsend.serve.pools import LocalModel, Pools, adapters_of, build_pools, check_names, hold_layouts
from hitsend.serve.upstreams import NO_UPSTREAMS, Upstreams, build_upstreams
from hitsend.serve.usage.figures import Observer
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.reconcile import EngineCounts
from hitsend.settings import AdapterSettings, EngineSettings, Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Children:
    """What computes, started, and the file that `text` and `engine` loaded; without a model, `text` has no process.

    `adapters` are those over it; `pools` are the models beside it.
    """

    found: ModelFile | None
    text: TextChild
    engine: EmbeddedEngine | None
    embedder: EmbeddingModel | None
    upstreams: Upstreams = NO_UPSTREAMS
    steps: EngineCounts = field(default_factory=lambda: EngineCounts("embedded"))
    adapters: tuple[AdapterSettings, ...] = ()
    pools: Pools | None = None

    @property
    def local(self) -> tuple[LocalModel, ...]:
        """All embedded models, the one that is always there first."""
        own: tuple[LocalModel, ...] = ()
        if self.found is not None and self.engine is not None:
            own = (LocalModel(self.found, (self.found.name,), self.text, self.engine, self.adapters),)
        return (*own, *(self.pools.models if self.pools is not None else ()))

    @property
    def pool(self) -> ModelPool | None:
        """Those of them that come and go."""
        return None if self.pools is None else self.pools.pool

    @property
    def engines(self) -> dict[str, Engine]:
        """By the names of the models that they serve."""
        own = {name: model.engine for model in self.local for name in model.by_name}
        return own | self.upstreams.by_model

    def check(self) -> None:
        """Raises ConfigError where two models have one name."""
        check_names([*(name for model in self.local for name in model.every_name), *self.upstreams.names])

    def check_words(self) -> None:
        """Once they are started: who reads prompts and who computes have the same file. Raises ConfigError."""
        for model in self.local:
            words, loaded = model.text.facts.words, model.engine.facts.words
            if isinstance(model.engine, PooledEngine):
                model.engine.words = words
            if loaded not in ("", words):
                raise ConfigError(f"engine.model: {OTHER_FILE.format(model.found.path)}")


@dataclass(frozen=True)
class Shared:
    """What a gateway process doesn't have for itself, but from the process above it. `line`: to the embedded engine."""

    line: EngineLine | None
    quota: Quota
    observer: Observer
    embedder: EmbeddingModel | None
    on_tokens: Callable[[str, int], None]

    async def start(self, settings: Settings, stack: AsyncExitStack) -> Children:
        """A text process of its own, and its side of what all share; `stack` stops them."""
        found = None if self.line is None else await asyncio.to_thread(find_model, settings)
        text = TextChild(found.path if found is not None else None, settings.chat, libllama=settings.engine.libllama)
        stack.push_async_callback(text.stop)
        engine: EmbeddedEngine | None = None
        adapters: tuple[AdapterSettings, ...] = ()
        if found is not None:
            engine = EmbeddedEngine(
                settings.engine,
                found.path,
                SystemClock(),
                model=found.name,
                pause_tokens=settings.stream.pause_tokens,
                line=self.line,
            )
            adapters = adapters_of(settings, (found.name,), is_default=True)
        upstreams = build_upstreams(settings, SystemClock(), self.on_tokens)
        every = (*upstreams.engines, *upstreams.texts, engine, self.embedder)
        starting = [part for part in every if part is not None]
        for part in starting:
            stack.push_async_callback(part.stop)
        await asyncio.gather(text.start(), *(part.start() for part in starting))
        children = Children(found, text, engine, self.embedder, upstreams, adapters=adapters)
        children.check()
        children.check_words()
        return children


async def start_children(settings: Settings, clock: Clock, metrics: Metrics, stack: AsyncExitStack) -> Children:
    """Start them; `stack` stops them. Raises ConfigError."""
    check_settings(settings.engine)
    await asyncio.to_thread(hold_layouts, settings, models_dir(settings))
    found = None if settings.engine.model == NO_MODEL else await asyncio.to_thread(find_weights, settings)
    text = TextChild(found.path if found is not None else None, settings.chat, libllama=settings.engine.libllama)
    stack.push_async_callback(text.stop)
    upstreams = build_upstreams(settings, clock, metrics.observe_upstream)
    steps = EngineCounts("embedded")
    config = None if found is None else worker_config(settings, found)
    engine = None if config is None else _embedded(settings, config, clock, partial(_on_step, metrics, steps))
    pools = await build_pools(settings, config, models_dir(settings), clock, metrics.observe_step)
    embedder = await asyncio.to_thread(find_embedder, settings.engine, models_dir(settings))
    adapters = () if config is None else config.adapters
    children = Children(found, text, engine, embedder, upstreams, steps, adapters, pools)
    children.check()
    texts = (*upstreams.texts, *(() if pools is None else (model.text for model in pools.models)))
    pool = None if pools is None else pools.pool
    starting = [part for part in (*upstreams.engines, engine, embedder, pool, *texts) if part is not None]
    for part in starting:
        stack.push_async_callback(part.stop)
    await asyncio.gather(text.start(), *(part.start() for part in starting))
    children.check_words()
    say_unmet((*without_model(settings.engine, has_pools=pools is not None), *uncounted(settings.engine)))
    if engine is not None:
        say_unmet(engine.facts.unmet)
    return children


def say_unmet(lines: tuple[str, ...]) -> None:
    """What the operator asked for and doesn't get."""
    for line in lines:
        logger.warning(line)


def worker_config(settings: Settings, found: ModelFile) -> WorkerConfig:
    """What the child of the model that is always there is told."""
    adapters = adapters_of(settings, (found.name,), is_default=True)
    return WorkerConfig(found.name, found.weights_path, engine_settings(settings, found), adapters)


def _embedded(
    settings: Settings, config: WorkerConfig, clock: Clock, on_step: Callable[[StepFigures], None]
) -> EmbeddedEngine:
    return EmbeddedEngine(
        config.settings,
        config.model_path,
        clock,
        model=config.name,
        pause_tokens=settings.stream.pause_tokens,
        on_step=on_step,
        adapters=config.adapters,
    )


def _on_step(metrics: Metrics, counts: EngineCounts, figures: StepFigures) -> None:
    """Two counts of the same steps, so that `hitsend reconcile` has something to compare."""
    metrics.observe_step(figures)
    counts.observe_step(figures)


def find_model(settings: Settings) -> ModelFile:
    """The file to load, under the name by which it is served."""
    found = resolve(settings.engine.model, models_dir(settings))
    return msgspec.structs.replace(found, name=settings.engine.alias or found.name)


def find_weights(settings: Settings) -> ModelFile:
    """The same, with its weights in the layout that was asked for. May take minutes (converting, measuring)."""
    return laid_out(find_model(settings), models_dir(settings), settings.engine, logger.info)


def engine_settings(settings: Settings, found: ModelFile) -> EngineSettings:
    """The engine's section, with the draft model's file found, and what was found of the model. Raises ConfigError."""
    engine = settings.engine
    draft = engine.draft_model
    return msgspec.structs.replace(
        engine,
        draft_model=None if draft is None else resolve(draft, models_dir(settings), where="engine.draft_model").path,
        num_threads_alone=engine.num_threads_alone or found.num_threads_alone,
    )


def models_dir(settings: Settings) -> Path:
    """Where model files are looked for and put."""
    return Path(settings.engine.models_dir or Path(settings.server.data_dir) / "models")
