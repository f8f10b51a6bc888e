"""Embedded models as the settings name them: the one that is always there, those that come and go, their adapters.

Enters: `[engine]`, `[[engines]]` of kind `embedded`, `[[adapters]]`. Leaves: `LocalModel`s and the `ModelPool` that
loads them. Always true: no two engines share a name, nor two models; every file's header was judged, and its memory
predicted, before anything listens; each model has a text process of its own, which stays, so that a prompt is counted
and refused without its model being in memory. Next: `children.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.serve.chat.text import TextChild
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.models import ModelFile, resolve
from hitsend.serve.engine.pool import Pool
from hitsend.serve.engine.pooled import ModelPool, PooledModel
from hitsend.serve.engine.protocol import Engine, StepFigures
from hitsend.serve.engine.sizing import Sized, sizes
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.weights import hold_known, laid_out
from hitsend.settings import AdapterSettings, EngineSettings, PooledSettings, Settings

_log = logging.getLogger(__name__)

OnStep = Callable[[StepFigures, str], None]
"""One step, and the engine's name."""

_TAKEN = ("embedded", "embedder")
_OWN = ("num_slots", "context", "kv_budget_bytes", "num_threads", "layout", "max_waiting")


@dataclass(frozen=True)
class LocalModel:
    """One embedded model, under the names that serve it as it is; `adapters` have names of their own."""

    found: ModelFile
    served: tuple[str, ...]
    text: TextChild
    engine: Engine
    adapters: tuple[AdapterSettings, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that it is called."""
        own = self.text.metadata.get("general.name", "")
        return (*self.served, Path(self.found.path).stem, own, self.engine.facts.architecture)

    @property
    def every_name(self) -> tuple[str, ...]:
        """The keys of `by_name` as they were given, twice where one was given twice."""
        return (*self.served, *(adapter.name for adapter in self.adapters))

    @property
    def by_name(self) -> dict[str, str | None]:
        """Every name under which it is served, and the adapter that this means."""
        return dict.fromkeys(self.served) | {adapter.name: adapter.name for adapter in self.adapters}


@dataclass(frozen=True)
class Pools:
    """The models that come and go, not started yet."""

    models: tuple[LocalModel, ...]
    pool: ModelPool


class _Planned(msgspec.Struct, frozen=True):
    """One of them: what was asked for, what was found, what its child is told."""

    asked: PooledSettings
    found: ModelFile
    served: tuple[str, ...]
    config: WorkerConfig


async def build_pools(
    settings: Settings,
    default: WorkerConfig | None,
    models_dir: Path,
    clock: Clock,
    on_step: OnStep = lambda _figures, _engine: None,
) -> Pools | None:
    """Find and judge them; None without any. `default` is always there, and counts. Raises ConfigError."""
    planned = await asyncio.to_thread(_plan, settings, models_dir)
    _check_adapters(settings, [name for one in planned for name in one.served], default)
    configs = [*([] if default is None else [default]), *(one.config for one in planned)]
    if not planned and (default is None or settings.engine.memory_budget_bytes is None):
        return None
    found = await sizes(configs)
    pool = ModelPool(Pool(settings.engine.memory_budget_bytes, settings.engine.aging_s), clock)
    if default is not None:
        pool.pin("embedded", found.pop(0).num_bytes)  # its engine's name, which no other can have
    for one, sized in zip(planned, found, strict=True):
        for line in sized.facts.unmet:
            _log.warning("engines[%s]: %s", one.asked.name, line)
    local = [
        _build(settings, one, sized, pool, partial(_engine, settings, one, clock, on_step))
        for one, sized in zip(planned, found, strict=True)
    ]
    return Pools(tuple(local), pool) if planned else None


def adapters_of(settings: Settings, served: Iterable[str], *, is_default: bool = False) -> tuple[AdapterSettings, ...]:
    """Those over the model that is served so."""
    names = set(served)
    return tuple(one for one in settings.adapters if one.model in names or (one.model is None and is_default))


def _plan(settings: Settings, models_dir: Path) -> list[_Planned]:
    planned: list[_Planned] = []
    names = {*_TAKEN, *(one.name for one in settings.engines if not isinstance(one, PooledSettings))}
    for one in settings.engines:
        if not isinstance(one, PooledSettings):
            continue
        if one.name in names or not one.name:
            raise ConfigError(f"engines.name: {one.name!r} is taken, or empty")
        names.add(one.name)
        own = _own(settings.engine, one, models_dir)
        found = _laid_out(one, own, models_dir)
        own = msgspec.structs.replace(own, num_threads_alone=own.num_threads_alone or found.num_threads_alone)
        served = one.aliases or (found.name,)
        config = WorkerConfig(served[0], found.weights_path, own, adapters_of(settings, served))
        planned.append(_Planned(one, found, served, config))
    return planned


def _own(shared: EngineSettings, one: PooledSettings, models_dir: Path) -> EngineSettings:
    """The `[engine]` section as this model has it. Raises ConfigError."""
    given = {name: value for name in _OWN if (value := getattr(one, name)) is not None}
    draft, shared_way = one.draft_model, shared.speculation
    return msgspec.structs.replace(
        shared,
        model=one.model,
        alias=None,
        draft_model=draft and resolve(draft, models_dir, where=f"engines[{one.name}].draft_model").path,
        # whoever drafts has the words of one model, and not every model has a head
        speculation=one.speculation or ("auto" if shared_way in ("draft", "mtp") else shared_way),
        snapshots=one.snapshots,
        **given,
    )


def _found(one: PooledSettings, models_dir: Path) -> ModelFile:
    return resolve(one.model, models_dir, where=f"engines[{one.name}].model")


def _laid_out(one: PooledSettings, own: EngineSettings, models_dir: Path) -> ModelFile:
    """The file, with its weights in the layout that was asked for. May take minutes. Raises ConfigError."""
    try:
        return laid_out(_found(one, models_dir), models_dir, own, _log.info)
    except ConfigError as error:
        raise ConfigError(str(error).replace("engine.layout:", f"engines[{one.name}].layout:", 1)) from error


def hold_layouts(settings: Settings, models_dir: Path) -> None:
    """Converted copies that they will run on stay, whatever is tidied up for another model. Raises ConfigError."""
    for one in settings.engines:
        if isinstance(one, PooledSettings):
            hold_known(_found(one, models_dir), models_dir, _own(settings.engine, one, models_dir))


def _check_adapters(settings: Settings, pooled: Sequence[str], default: WorkerConfig | None) -> None:
    """Every adapter has its model. Raises ConfigError."""
    known = {*pooled, *([] if default is None else [default.name])}
    for one in settings.adapters:
        if one.model is None and default is None:
            raise ConfigError(f"adapters[{one.name}].model: engine.model is none, so it has to be named")
        if one.model is not None and one.model not in known:
            raise ConfigError(
                f"adapters[{one.name}].model: no embedded model is served as {one.model!r}; "
                f"there are: {', '.join(sorted(known)) or 'none'}"
            )


def check_names(names: Sequence[str]) -> None:
    """No two models share a name. Raises ConfigError."""
    twice = sorted({name for name in names if names.count(name) > 1 or not name})
    if twice:
        raise ConfigError(f"engines, adapters: the model name {twice[0]!r} is empty, or means two models")


def _build(
    settings: Settings,
    one: _Planned,
    sized: Sized,
    pool: ModelPool,
    build: Callable[[Callable[[], None]], EmbeddedEngine],
) -> LocalModel:
    model = PooledModel(
        one.asked.name,
        sized.facts,
        sized.num_bytes,
        one.config.settings.max_waiting,
        one.asked.max_concurrent,
        one.asked.idle_unload_s or None,
        one.asked.is_loaded_at_start,
        one.found.path,
    )
    # `chat.template` is for the model of `[engine]`
    chat = msgspec.structs.replace(settings.chat, template=None)
    text = TextChild(one.found.path, chat, libllama=settings.engine.libllama)
    return LocalModel(one.found, one.served, text, pool.add(model, build), one.config.adapters)


def _engine(
    settings: Settings, one: _Planned, clock: Clock, on_step: OnStep, on_rest: Callable[[], None]
) -> EmbeddedEngine:
    name = one.asked.name
    return EmbeddedEngine(
        one.config.settings,
        one.config.model_path,
        clock,
        name=name,
        model=one.served[0],
        pause_tokens=settings.stream.pause_tokens,
        on_step=lambda figures: on_step(figures, name),
        on_rest=on_rest,
        adapters=one.config.adapters,
    )
