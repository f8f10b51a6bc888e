"""Settings of the engine that a model, its file or this machine can't follow: refused, or said in one line each.

Enters: settings and what is known of a model without loading it. Leaves: a ConfigError, or lines that name the setting,
its value and what comes of it. Always true: no setting that somebody wrote is left out in silence; what could only be
a mistake stops the start, what is harmless is done as far as it goes and said. Next: `loading.py`.
"""

from collections.abc import Callable, Iterator

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, read_header
from hitsend.serve.engine.blas import gains_by
from hitsend.serve.engine.models import NO_MODEL
from hitsend.serve.engine.shape import SNAPSHOTS, CellPlan, MemoryShape, memory_shape
from hitsend.settings import EngineSettings

_STEP_TOKENS = 64
"""Saved prefixes have at least so many tokens (`engine.prefix_cache_step` as it is by default)."""

_OF_THE_CACHE = ("prefix_cache_bytes", "prefix_cache_dir", "prefix_cache_disk_bytes", "prefix_cache_step")
_OF_GUESSING = ("speculation", "draft_model", "snapshots")
_OF_MEMORY = ("num_slots", "context", "kv_type", "kv_mode", "kv_budget_bytes", "memory_budget_bytes")
_OF_STEPS = ("alias", "layout", "blas", "step_tokens", "num_threads_alone")
_WITH_MODEL = frozenset((*_OF_THE_CACHE, *_OF_GUESSING, *_OF_MEMORY, *_OF_STEPS))
_WITH_DEFAULT = frozenset({"alias", "draft_model", "snapshots"})
"""Those that models which come and go have for themselves."""


class Known(msgspec.Struct, frozen=True):
    """A model as its header tells of it, and how its memory is divided. `num_cores`: of this machine."""

    header: GgufHeader
    shape: MemoryShape
    plan: CellPlan
    num_cores: int


def check_settings(settings: EngineSettings) -> None:
    """What contradicts itself whatever the model is. Raises ConfigError."""
    if settings.speculation == "draft" and settings.draft_model is None:
        raise ConfigError("engine.speculation: draft needs engine.draft_model to say with which model")
    folder, size = settings.prefix_cache_dir, settings.prefix_cache_disk_bytes
    if (folder is not None or size) and not (folder is not None and size and settings.prefix_cache_bytes):
        raise ConfigError(
            "engine.prefix_cache_dir and engine.prefix_cache_disk_bytes go together, and with prefix_cache_bytes: "
            f"they are {folder!r}, {size} and {settings.prefix_cache_bytes}"
        )
    if settings.embedding_context and settings.embedding_model is None:
        raise ConfigError(
            f"engine.embedding_context is {settings.embedding_context}, but engine.embedding_model isn't set"
        )


def uncounted(settings: EngineSettings) -> list[str]:
    """What a budget doesn't cover."""
    budget, model = settings.memory_budget_bytes, settings.embedding_model
    if budget is None or model is None:
        return []
    return [
        f"engine.memory_budget_bytes is {budget}: the process of engine.embedding_model {model} isn't counted in it"
    ]


def without_model(settings: EngineSettings, *, has_pools: bool) -> list[str]:
    """Where `engine.model` is `none`: what of the section is then for nobody."""
    if settings.model != NO_MODEL:
        return []
    default = EngineSettings()
    asked = sorted(_WITH_DEFAULT if has_pools else _WITH_MODEL)
    unused = [f"engine.{name}" for name in asked if getattr(settings, name) != getattr(default, name)]
    return [f"engine.model is none: there is nothing that {', '.join(unused)} could be for"] if unused else []


def unmet(settings: EngineSettings, known: Known) -> tuple[str, ...]:
    """One line for each setting that has no effect here, or another than its value says. Raises ConfigError for a draft
    model that can never be one."""
    rules: tuple[Callable[[EngineSettings, Known], Iterator[str]], ...] = (
        _context,
        _threads,
        _layout,
        _steps,
        _drafts,
        _snapshots,
        _prefixes,
    )
    return tuple(line for rule in rules for line in rule(settings, known))


def undrafted(settings: EngineSettings, why_not: str) -> list[str]:
    """Where there is a draft model that `auto` could take, and didn't."""
    is_left = settings.draft_model is not None and settings.speculation == "auto" and why_not
    return [f"engine.draft_model is {settings.draft_model}: it isn't loaded, since {why_not}"] if is_left else []


def _context(settings: EngineSettings, known: Known) -> Iterator[str]:
    trained, longest = known.shape.context_train, known.plan.cells_per_slot
    if settings.context > longest:
        yield f"engine.context is {settings.context}, the model was trained on {trained}: a sequence gets {longest}"
    if settings.reserve_tokens > longest:
        yield f"engine.reserve_tokens is {settings.reserve_tokens}, a sequence has {longest} cells at most"


def _threads(settings: EngineSettings, known: Known) -> Iterator[str]:
    for name in ("num_threads", "num_threads_alone"):
        count = getattr(settings, name)
        if count > known.num_cores:
            yield f"engine.{name} is {count}, this machine has {known.num_cores} cores: threads wait for each other"


def _layout(settings: EngineSettings, known: Known) -> Iterator[str]:
    if settings.layout != "auto" and settings.layout_max_loss != EngineSettings().layout_max_loss:
        yield (
            f"engine.layout_max_loss is {settings.layout_max_loss:g}, but engine.layout is {settings.layout}: "
            "it only bounds what auto may choose"
        )
    if settings.blas is not None and not gains_by(settings.blas, known.header):
        yield (
            f"engine.blas is {settings.blas}: it isn't loaded, since libllama's own kernels suit these weights better"
        )


def _steps(settings: EngineSettings, known: Known) -> Iterator[str]:
    if settings.step_tokens < known.plan.num_slots:
        yield (
            f"engine.step_tokens is {settings.step_tokens}, engine.num_slots {known.plan.num_slots}: "
            f"of more than {settings.step_tokens} sequences not all get a token in each step"
        )
    if settings.step_tokens > known.plan.num_cells:
        yield f"engine.step_tokens is {settings.step_tokens}, there are {known.plan.num_cells} cells in all"


def _drafts(settings: EngineSettings, known: Known) -> Iterator[str]:
    draft = settings.draft_model
    if draft is None:
        return
    if settings.speculation not in ("auto", "draft"):
        yield f"engine.draft_model is {draft}: it isn't loaded, since engine.speculation is {settings.speculation}"
        return
    shape = memory_shape(read_header(draft, "engine.draft_model"))
    trained = shape.context_train
    if shape.state_bytes_per_slot:
        raise ConfigError(f"engine.draft_model: {draft} keeps one state per sequence and can't take tokens back")
    if trained < known.plan.cells_per_slot:
        yield (
            f"engine.draft_model is {draft}, trained on {trained} tokens: in sequences of up to "
            f"{known.plan.cells_per_slot} its later guesses are worth little"
        )


def _snapshots(settings: EngineSettings, known: Known) -> Iterator[str]:
    asked, kept = settings.snapshots, known.plan.num_snapshots
    if not asked or asked == kept:
        return
    if not known.shape.state_bytes_per_slot:
        why = "the model has attention only and takes guesses back without them"
    elif settings.speculation == "off":
        why = "engine.speculation is off"
    else:
        counts = ", ".join(map(str, sorted(SNAPSHOTS)))
        why = f"{counts} can be, within a quarter of engine.kv_budget_bytes {settings.kv_budget_bytes}"
    yield f"engine.snapshots is {asked}, kept are {kept}: {why}"


def _prefixes(settings: EngineSettings, known: Known) -> Iterator[str]:
    size, step, longest = settings.prefix_cache_bytes, settings.prefix_cache_step, known.plan.cells_per_slot
    if size and step >= longest:
        yield f"engine.prefix_cache_step is {step}, a sequence has {longest} cells at most: no prefix is used again"
    least = min(step, _STEP_TOKENS) * known.shape.kv_bytes_per_cell + known.shape.state_bytes_per_slot
    for name in ("prefix_cache_bytes", "prefix_cache_disk_bytes"):
        value = getattr(settings, name)
        if 0 < value < least:
            yield f"engine.{name} is {value}: the shortest saved prefix takes {least}, so none is kept there"
