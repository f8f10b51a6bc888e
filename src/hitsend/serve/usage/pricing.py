"""What tokens cost. Integers all the way: no float ever touches an amount.

Enters: counts of tokens and a price in pico-dollars (10⁻¹² USD) per token, which is what USD per million tokens with
six decimals is. Leaves: integer micro-dollars, and micro-neurons where the price is one in neurons. Always true: a
row's cost is the exact sum of its parts, rounded once, half up; more tokens never cost less; reasoning is output; a
model without a price is an error at start-up, never free by accident (only models that run on this machine are free
when nobody priced them); of dated prices the newest that is in force counts. Next: `allowance.py`.
"""

import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.settings import PriceSettings

PICO_PER_MICRO = 1_000_000
MAX_USD_PER_MILLION = 1_000_000
PICOUSD_PER_MICRONEURON = 11
"""1,000 neurons are USD 0.011."""
ANY_ENGINE = "*"
OF_BATCHES = "-batch"
"""How the id of a lowered price ends."""
REPEAT = "batch-repeat"
"""The price of what was paid for before."""


class Price(msgspec.Struct, frozen=True):
    """A price in force; `id` is its list's version. Values are pico-USD per token; `cached_input` None bills cached
    tokens as input. `in_neurons`: each value is 11 times a whole number of micro-neurons. `is_paid_only`: the
    provider's free plan doesn't serve it. `meters`: the price whose neurons are used, where they aren't what is billed.
    """

    id: str
    input_picousd: int
    output_picousd: int
    cached_input_picousd: int | None = None
    in_neurons: bool = False
    is_paid_only: bool = False
    meters: "Price | None" = None

    @property
    def dearest_input_picousd(self) -> int:
        """The most that one token of input can cost."""
        return max(self.input_picousd, self.cached_input_picousd or 0)


LOCAL_FREE = Price(id="local-free", input_picousd=0, output_picousd=0)


class _ListedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of a list. `valid_from`: where it isn't the list's `as_of`."""

    model: str
    input: str
    output: str
    cached_input: str | None = None
    aliases: tuple[str, ...] = ()
    paid_only: bool = False
    valid_from: date | None = None


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of `prices/`."""

    id: str
    source: str
    as_of: date
    engine: str
    unit: Literal["usd", "neurons"]
    models: tuple[_ListedModel, ...]


class _Dated(msgspec.Struct, frozen=True):
    """A price, and the first day on which it counts."""

    valid_from: date
    price: Price


_Lists = dict[tuple[str, str], tuple[_Dated, ...]]


def cost_microusd(price: Price, usage: Usage) -> int:
    """What these tokens cost, rounded half up to a whole micro-dollar, once."""
    return rounded(_picousd(price, usage))


def neurons_micro(price: Price, usage: Usage) -> int | None:
    """The same in micro-neurons, exactly; None where the price isn't one in neurons."""
    return _picousd(price.meters or price, usage) // PICOUSD_PER_MICRONEURON if price.in_neurons else None


def held_microusd(price: Price, input_tokens: int, output_tokens: int) -> int:
    """The most that a request of this size can cost: nothing of it cached."""
    return rounded(_held_picousd(price, input_tokens, output_tokens))


def held_neurons_micro(price: Price, input_tokens: int, output_tokens: int) -> int | None:
    """The same in micro-neurons; None where the price isn't one in neurons."""
    held = _held_picousd(price.meters or price, input_tokens, output_tokens)
    return held // PICOUSD_PER_MICRONEURON if price.in_neurons else None


class PriceBook:
    """Finds the price of a model: settings by name, then settings `*`, then the built-in lists, then free if local.

    `now`: seconds since the epoch; its UTC day says which dated price is in force. `elsewhere`: for models of
    upstreams, by their names here, the upstream's kind and its own name, by which its lists know them.
    """

    def __init__(
        self,
        settings: Iterable[PriceSettings] = (),
        now: Callable[[], float] = time.time,
        elsewhere: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        entries = {entry.model.casefold(): entry for entry in settings}
        self._settings = {name: _from_settings(entry) for name, entry in entries.items()}
        self._discounts = {name: entry.batch_discount for name, entry in entries.items() if entry.batch_discount}
        self._elsewhere = elsewhere or {}
        self._now = now

    def of_batches(self) -> "PriceBook":
        """The same book for lines of batches: those prices lowered that have a discount for them."""
        book = PriceBook(now=self._now, elsewhere=self._elsewhere)
        book._settings = {
            name: _discounted(price, self._discounts[name]) if name in self._discounts else price
            for name, price in self._settings.items()
        }
        return book

    def find(self, model: str, *, is_local: bool, engine: str = ANY_ENGINE, on: date | None = None) -> Price:
        """The price in force on that UTC day (today), for an engine of this kind.

        Raises ConfigError where there is none: ask at start-up for every model served.
        """
        name = model.casefold()
        found = self._settings.get(name) or self._settings.get("*")
        if found is not None:
            return found
        day = on or datetime.fromtimestamp(self._now(), UTC).date()
        engine, there = self._elsewhere.get(model, (engine, name))
        names = (there.casefold(), name)
        of_kind = next((price for one in names if (price := _in_force(engine, one, day))), None)
        found = of_kind or next((price for one in names if (price := _in_force(ANY_ENGINE, one, day))), None)
        if found is not None:
            return found
        if is_local:
            return LOCAL_FREE
        own = "prices = { input = …, output = … } to its [[engines]], or " if model in self._elsewhere else ""
        raise ConfigError(
            f"prices: no price for the model {model!r} on {day}, which does not run on this machine; "
            f'add {own}[[prices]] model = "{model}", input = …, output = … (USD per million tokens; 0 if it is free)'
        )


class Unbilled(PriceBook):
    """For work that was paid for before and has to be done once more: nothing costs anything, but what the provider
    counts in neurons uses them once more."""

    def __init__(self, book: PriceBook) -> None:
        super().__init__()
        self._book = book

    def find(self, model: str, *, is_local: bool, engine: str = ANY_ENGINE, on: date | None = None) -> Price:
        """Zero, under an id that says why. Raises as the book does."""
        found = self._book.find(model, is_local=is_local, engine=engine, on=on)
        meters = found if found.in_neurons else None
        return Price(id=REPEAT, input_picousd=0, output_picousd=0, in_neurons=found.in_neurons, meters=meters)


def picousd_per_token(usd_per_million: float | str, field: str) -> int:
    """USD per million tokens as pico-USD per token. Raises ConfigError when not exact, negative or absurd."""
    try:
        # repr of a float is the shortest text that means it: what the operator wrote
        exact = Decimal(str(usd_per_million))
    except InvalidOperation as error:
        raise ConfigError(f"{field}: {usd_per_million!r} is no price in USD per million tokens") from error
    if not exact.is_finite() or not 0 <= exact <= MAX_USD_PER_MILLION:
        raise ConfigError(f"{field}: {usd_per_million} USD per million tokens, limit 0 to {MAX_USD_PER_MILLION}")
    scaled = exact * PICO_PER_MICRO
    if scaled != scaled.to_integral_value():
        raise ConfigError(f"{field}: {usd_per_million} USD per million tokens, limit 6 decimals")
    return int(scaled)


def rounded(picousd: int) -> int:
    """Pico-dollars as micro-dollars, half up."""
    return (picousd + PICO_PER_MICRO // 2) // PICO_PER_MICRO


def _picousd(price: Price, usage: Usage) -> int:
    cached_price = price.input_picousd if price.cached_input_picousd is None else price.cached_input_picousd
    return (
        (usage.prompt_tokens - usage.cached_tokens) * price.input_picousd
        + usage.cached_tokens * cached_price
        + usage.completion_tokens * price.output_picousd
    )


def _held_picousd(price: Price, input_tokens: int, output_tokens: int) -> int:
    return input_tokens * price.dearest_input_picousd + output_tokens * price.output_picousd


def _from_settings(entry: PriceSettings) -> Price:
    field = f"prices[{entry.model}]"
    cached = entry.cached_input
    return Price(
        id=entry.id,
        input_picousd=picousd_per_token(entry.input, f"{field}.input"),
        output_picousd=picousd_per_token(entry.output, f"{field}.output"),
        cached_input_picousd=None if cached is None else picousd_per_token(cached, f"{field}.cached_input"),
    )


def _discounted(price: Price, share: float) -> Price:
    """Rounded down to whole pico-dollars; the share counts with four decimals."""
    left = 10_000 - round(share * 10_000)
    cached = price.cached_input_picousd
    return Price(
        id=f"{price.id}{OF_BATCHES}",
        input_picousd=price.input_picousd * left // 10_000,
        output_picousd=price.output_picousd * left // 10_000,
        cached_input_picousd=None if cached is None else cached * left // 10_000,
    )


def _in_force(engine: str, name: str, day: date) -> Price | None:
    dated = [entry for entry in _built_in().get((engine, name), ()) if entry.valid_from <= day]
    return max(dated, key=lambda entry: entry.valid_from).price if dated else None


@cache
def _built_in() -> _Lists:
    found: dict[tuple[str, str], list[_Dated]] = {}
    for file in sorted((files("hitsend.serve.usage") / "prices").iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".toml"):
            continue
        listed = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _List)
        for entry in listed.models:
            dated = _Dated(entry.valid_from or listed.as_of, _price(listed, entry))
            for name in (entry.model, *entry.aliases):
                found.setdefault((listed.engine, name.casefold()), []).append(dated)
    return {key: tuple(entries) for key, entries in found.items()}


def _price(listed: _List, entry: _ListedModel) -> Price:
    def per_token(value: str) -> int:
        if listed.unit == "usd":
            return picousd_per_token(value, f"{listed.id}.{entry.model}")
        return int(value) * PICOUSD_PER_MICRONEURON

    return Price(
        id=listed.id,
        input_picousd=per_token(entry.input),
        output_picousd=per_token(entry.output),
        cached_input_picousd=None if entry.cached_input is None else per_token(entry.cached_input),
        in_neurons=listed.unit == "neurons",
        is_paid_only=entry.paid_only,
    )
