"""The weights that a model's settings ask for: the file as it is, or a converted copy of it.

Enters: a model file and settings. Leaves: the same with `weights` set. Always true: the copy that it names is held by
this process before anybody could delete it; with `auto` the machine is measured once, by one process; copies of what
the file was before go. Next: `measure.py`.
"""

from pathlib import Path

import msgspec

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.copies import discard_older
from hitsend.serve.engine.layouts import AS_SHIPPED, Say, converted, hold, measuring_alone
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.patience import Patience
from hitsend.serve.engine.tuned import BOUND_S, Tuned, explained, remembered, tidy, tuned_now
from hitsend.settings import EngineSettings


def hold_known(found: ModelFile, models_dir: Path, settings: EngineSettings) -> None:
    """Hold the copy that `laid_out` will choose, as far as that is known without measuring. Raises ConfigError."""
    layout: str = settings.layout
    if layout == "auto":
        result = remembered(found, models_dir, settings)
        chosen = None if result is None else result.choice(settings.layout_max_loss, settings.num_slots)
        layout = AS_SHIPPED if chosen is None else chosen.way.layout
    if layout != AS_SHIPPED:
        hold(Path(found.path), models_dir, layout)


def laid_out(found: ModelFile, models_dir: Path, settings: EngineSettings, say: Say) -> ModelFile:
    """The model with the weights that `engine.layout` asks for. May take minutes. Raises ConfigError; with `auto` it
    says what went wrong, and the weights stay as they are."""
    if settings.layout == AS_SHIPPED:
        return found
    if settings.layout != "auto":
        return _converted(found, models_dir, settings, settings.layout, say)
    try:
        return _best(found, models_dir, settings, say)
    except ConfigError as failure:
        say(f"layout auto: as shipped, since no other can be had: {failure}")
        return found


def _best(found: ModelFile, models_dir: Path, settings: EngineSettings, say: Say) -> ModelFile:
    discard_older(Path(found.path), models_dir, say)
    result = _measured_once(found, models_dir, settings, say)
    chosen = result.choice(settings.layout_max_loss, settings.num_slots)
    say(f"layout auto: {explained(result, settings.layout_max_loss, settings.num_slots)}")
    found = msgspec.structs.replace(found, num_threads_alone=chosen.num_threads_alone)
    layout = chosen.way.layout
    return found if layout == AS_SHIPPED else _converted(found, models_dir, settings, layout, say)


def _converted(found: ModelFile, models_dir: Path, settings: EngineSettings, layout: str, say: Say) -> ModelFile:
    source = Path(found.path)
    discard_older(source, models_dir, say)
    hold(source, models_dir, layout)
    weights = converted(source, models_dir, layout, libllama=settings.libllama, say=say)
    say(f"layout {layout}: weights of {found.name} from {weights}")
    return msgspec.structs.replace(found, weights=str(weights))


def _measured_once(found: ModelFile, models_dir: Path, settings: EngineSettings, say: Say) -> Tuned:
    """Of several starts at the same time one measures, the others wait for it; what a killed one left goes."""
    result = remembered(found, models_dir, settings)
    with measuring_alone(models_dir, say if result is None else None) as is_alone:
        result = result or remembered(found, models_dir, settings)
        if result is None:
            say(f"layout auto: measuring {found.name} on this machine once (`hitsend models tune` measures longer)")
            return tuned_now(found, models_dir, settings, Patience(say, SystemClock(), BOUND_S), is_quick=True, say=say)
        if is_alone:
            tidy(result, Path(found.path), models_dir, settings)
        return result
