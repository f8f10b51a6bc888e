"""The processes that compute: found, started, and stopped again.

Enters: settings. Leaves: text, engine and perhaps an embedder, over one model's file. Always true: all of them are
started when `start_children` returns, and the stack that it was given stops them. Next: `embed.py`.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from hitsend.core.clock import Clock
from hitsend.serve.chat.text import TextChild
from hitsend.serve.embed import find_embedder
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.embedder import Embedder
from hitsend.serve.engine.models import ModelFile, resolve
from hitsend.serve.engine.protocol import StepFigures
from hitsend.serve.usage.metrics import Metrics
from hitsend.serve.usage.reconcile import EngineCounts
from hitsend.settings import Settings


@dataclass(frozen=True)
class Children:
    """The processes that compute, started, and the file that they loaded."""

    found: ModelFile
    text: TextChild
    engine: EmbeddedEngine
    embedder: Embedder | None
    steps: EngineCounts = field(default_factory=lambda: EngineCounts("embedded"))


async def start_children(settings: Settings, clock: Clock, metrics: Metrics, stack: AsyncExitStack) -> Children:
    """Start them; `stack` stops them."""
    found = await asyncio.to_thread(_find_model, settings)
    text = TextChild(found.path, settings.chat, libllama=settings.engine.libllama)
    stack.push_async_callback(text.stop)
    engine = EmbeddedEngine(
        settings.engine,
        found.path,
        clock,
        model=found.name,
        pause_tokens=settings.stream.pause_tokens,
        on_step=partial(_on_step, metrics, steps := EngineCounts("embedded")),
    )
    stack.push_async_callback(engine.stop)
    embedder = await asyncio.to_thread(find_embedder, settings.engine, _models_dir(settings))
    if embedder is not None:
        stack.push_async_callback(embedder.stop)
    await asyncio.gather(text.start(), engine.start(), *([embedder.start()] if embedder is not None else []))
    return Children(found, text, engine, embedder, steps)


def _on_step(metrics: Metrics, counts: EngineCounts, figures: StepFigures) -> None:
    """Two counts of the same steps, so that `hitsend reconcile` has something to compare."""
    metrics.observe_step(figures)
    counts.observe_step(figures)


def _find_model(settings: Settings) -> ModelFile:
    """The file to load, under the name by which it is served."""
    found = resolve(settings.engine.model, _models_dir(settings))
    return msgspec.structs.replace(found, name=settings.engine.alias or found.name)


def _models_dir(settings: Settings) -> Path:
    return Path(settings.engine.models_dir or Path(settings.server.data_dir) / "models")
