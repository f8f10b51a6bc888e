"""The planner's data: models, GPUs and prices, each value with its source and the day it was read.

Enters: the files of `data/`, and one of the user's own (`--facts FILE`) that goes before them. Leaves: typed entries.
Always true: no network; an entry without a source and a day isn't read at all; a user's
entry of the same name replaces ours whole. Next: `facts_check.py`.
"""

import tomllib
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hitsend.core.errors import ConfigError


class KnownModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model by name. `config` holds the keys of its config.json; `total_params` what somebody else counted."""

    name: str
    source: str
    as_of: date
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()
    total_params: int | None = None
    active_params: int | None = None
    uncertain: tuple[str, ...] = ()


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An accelerator. Rates are dense peaks, never the sparse ones of brochures; bandwidth is bytes a second, memory
    bytes that a process can see."""

    name: str
    source: str
    as_of: date
    memory_bytes: int
    bandwidth_bytes_per_s: int
    aliases: tuple[str, ...] = ()
    bf16_flops: float | None = None
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    int8_ops: float | None = None
    link: str | None = None
    link_bytes_per_s: int | None = None
    pcie_bytes_per_s: int | None = None
    power_w: int | None = None
    is_memory_measured: bool = False
    """`memory_bytes` is what a driver or an engine's log showed, not a brochure's number."""
    measured_bf16_flops: float | None = None
    note: str | None = None
    uncertain: tuple[str, ...] = ()


class ListPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """USD per million tokens as decimal text; neurons per million tokens where the provider bills in those."""

    provider: str
    model: str
    source: str
    as_of: date
    input: str
    output: str
    cached_input: str | None = None
    batch_multiplier: str | None = None
    aliases: tuple[str, ...] = ()
    neurons_input: str | None = None
    neurons_output: str | None = None
    neurons_cached_input: str | None = None
    is_paid_only: bool = False
    valid_until: date | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        """As `--price` takes it."""
        return f"{self.provider}:{self.model}"


class Rental(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an hour of one GPU costs, as decimal text in USD."""

    gpu: str
    provider: str
    source: str
    as_of: date
    usd_per_gpu_hour: str
    min_gpus: int = 1
    note: str | None = None


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Everything together. Two are equal when they are one: that makes them a key for what is built from them."""

    models: tuple[KnownModel, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    prices: tuple[ListPrice, ...] = ()
    rentals: tuple[Rental, ...] = ()


T = TypeVar("T", bound="KnownModel | Gpu | ListPrice")
_FILES = ("models", "gpus", "prices")


@cache
def shipped_facts() -> Facts:
    """What the package brings."""
    folder = Path(__file__).with_name("data")
    parts = [msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=Facts) for name in _FILES]
    return Facts(models=parts[0].models, gpus=parts[1].gpus, prices=parts[2].prices, rentals=parts[2].rentals)


def load_facts(own: Path | None = None) -> Facts:
    """The shipped ones with the user's on top. Raises ConfigError that names the file and the field."""
    shipped = shipped_facts()
    if own is None:
        return shipped
    mine = _read_own(own)
    return Facts(
        models=_merged(shipped.models, mine.models),
        gpus=_merged(shipped.gpus, mine.gpus),
        prices=_merged(shipped.prices, mine.prices),
        rentals=(*mine.rentals, *shipped.rentals),
    )


def _read_own(path: Path) -> Facts:
    try:
        content = path.read_bytes()
        if path.suffix == ".toml":
            return msgspec.convert(tomllib.loads(content.decode()), type=Facts)
        return msgspec.json.decode(content, type=Facts)
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _merged(shipped: tuple[T, ...], mine: tuple[T, ...]) -> tuple[T, ...]:
    names = {entry.name.casefold() for entry in mine}
    return (*mine, *(entry for entry in shipped if entry.name.casefold() not in names))


def own_facts(path: Path | None) -> Facts:
    """The user's entries alone."""
    return Facts() if path is None else _read_own(path)
