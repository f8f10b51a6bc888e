"""Sampling defaults: what a model's makers recommend, from the settings, our own table or the checkpoint itself.

Enters: a model's name and metadata, the `[[models]]` settings, `generation_config.json` where one lies beside the file.
Leaves: `Defaults`, the ordered list of presets that `budget.py` asks field by field. Always true: no I/O; a value's
source is named with it; values that make no sense (a temperature of nan) are passed over. Next: `formats.py`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hitsend.settings import ModelSettings, SamplingPreset

_THINKING = SamplingPreset(
    temperature=1.0,
    top_p=0.95,
    top_k=20,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)
_PLAIN = SamplingPreset(
    temperature=0.7,
    top_p=0.8,
    top_k=20,
    min_p=0.0,
    presence_penalty=1.5,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
)


def _qwen(match: str, **thinking: float) -> ModelSettings:
    changed = msgspec.structs.replace(_THINKING, **thinking)
    return ModelSettings(match=match, thinking=changed, non_thinking=_PLAIN, thinking_by_default=True)


BUILT_IN = (
    # The "Best practices" part of each model card, as of 2026-11. More telling names first.
    _qwen("qwen3.8"),
    _qwen("qwen3.6"),
    _qwen("qwen3.5", presence_penalty=1.5),
    # The architecture that 3.5, 3.6 and 3.8 share, for files whose name says less.
    _qwen("qwen35"),
    ModelSettings(
        match="qwen3",
        thinking=msgspec.structs.replace(_THINKING, temperature=0.6),
        non_thinking=msgspec.structs.replace(_PLAIN, presence_penalty=0.0),
        thinking_by_default=True,
    ),
    # The bundled model's card asks for these; at temperature 1 so small a model wanders off.
    ModelSettings(match="smollm2", non_thinking=SamplingPreset(temperature=0.2, top_p=0.9)),
)

_METADATA_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_CONFIG_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0.0, 1_000_000.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


class Defaults(msgspec.Struct, frozen=True):
    """Presets in the order in which they are asked, each with its source, for both ways of answering."""

    thinking: tuple[tuple[str, SamplingPreset], ...] = ()
    non_thinking: tuple[tuple[str, SamplingPreset], ...] = ()
    thinking_by_default: bool = False

    def presets(self, *, is_thinking: bool) -> tuple[tuple[str, SamplingPreset], ...]:
        """(source, preset) pairs, first one first."""
        return self.thinking if is_thinking else self.non_thinking


def resolve_defaults(
    names: Iterable[str],
    metadata: Mapping[str, str],
    *,
    settings: tuple[ModelSettings, ...] = (),
    generation_config: Mapping[str, Any] | None = None,
    thinking_default: bool | None = None,
) -> Defaults:
    """The defaults of one model. `names`: everything it is called (alias, file, general.name, architecture).

    `thinking_default` is what the template does when nobody says; it wins over the presets' own word.
    """
    chosen = next(((m, "settings") for m in matching(settings, names)), None)
    built_in = next(((m, "model_card") for m in matching(BUILT_IN, names)), None)
    asked = [found for found in (chosen, built_in) if found is not None]
    checkpoint = [
        ("gguf", _numbers({field: metadata.get(key) for field, key in _METADATA_KEYS.items()})),
        ("generation_config", _from_config(generation_config or {})),
    ]
    if thinking_default is None:
        thinking_default = any(model.thinking_by_default for model, _ in asked)
    return Defaults(
        thinking=(*((source, model.thinking) for model, source in asked), *checkpoint),
        non_thinking=(*((source, model.non_thinking) for model, source in asked), *checkpoint),
        thinking_by_default=thinking_default,
    )


def matching(models: Iterable[ModelSettings], names: Iterable[str]) -> list[ModelSettings]:
    """Those of the models that one of the names fits."""
    called = [_plain_name(name) for name in names if name]
    return [model for model in models if any(_plain_name(model.match) in name for name in called)]


def _plain_name(name: str) -> str:
    # "Qwen3.8 27B", "qwen3_8-27b" and "Qwen 3.8" are one family.
    return "".join(c for c in name.lower().replace("_", ".") if c.isalnum() or c == ".")


def _from_config(config: Mapping[str, Any]) -> SamplingPreset:
    if config.get("do_sample") is False:
        return SamplingPreset()
    return _numbers({field: config.get(field) for field in _CONFIG_KEYS})


def _numbers(values: Mapping[str, Any]) -> SamplingPreset:
    found: dict[str, Any] = {}
    for field, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        low, high = _RANGES[field]
        if math.isfinite(number) and low <= number <= high and not isinstance(value, bool):
            found[field] = int(number) if field == "top_k" else number
    return SamplingPreset(**found)
