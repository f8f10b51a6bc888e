"""What tokens cost. Integers all the way: no float ever touches an amount.

Enters: counts of tokens and a price in pico-dollars (10⁻¹² USD) per token, which is what USD per million tokens with
six decimals is. Leaves: integer micro-dollars. Always true: a row's cost is the exact sum of its parts, rounded once,
half up; more tokens never cost less; a model without a price is an error at start-up, never free by accident (only
models that run on this machine are free when nobody priced them). Next: `ledger.py`.
"""

import tomllib
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from importlib.resources import files

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.settings import PriceSettings

PICO_PER_MICRO = 1_000_000
MAX_USD_PER_MILLION = 1_000_000


class Price(msgspec.Struct, frozen=True):
    """A price in force. Values are pico-USD per token; `cached_input` None bills cached tokens as input."""

    id: str
    input_picousd: int
    output_picousd: int
    cached_input_picousd: int | None = None

    @property
    def dearest_input_picousd(self) -> int:
        """The most that one token of input can cost."""
        return max(self.input_picousd, self.cached_input_picousd or 0)


LOCAL_FREE = Price(id="local-free", input_picousd=0, output_picousd=0)


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `prices.toml`."""

    id: str
    source: str
    as_of: object
    model: str
    input: str
    output: str
    aliases: tuple[str, ...] = ()
    cached_input: str | None = None


def cost_microusd(price: Price, usage: Usage) -> int:
    """What these tokens cost, rounded half up to a whole micro-dollar, once."""
    return _rounded(_picousd(price, usage))


def held_microusd(price: Price, input_tokens: int, output_tokens: int) -> int:
    """The most that a request of this size can cost: nothing of it cached."""
    return _rounded(input_tokens * price.dearest_input_picousd + output_tokens * price.output_picousd)


class PriceBook:
    """Finds the price of a model: settings by name, then settings `*`, then the built-in list, then free if local."""

    def __init__(self, settings: Iterable[PriceSettings] = ()) -> None:
        self._settings = {entry.model.casefold(): _from_settings(entry) for entry in settings}
        self._listed = _built_in()

    def find(self, model: str, *, is_local: bool) -> Price:
        """The price in force. Raises ConfigError where there is none: ask at start-up for every model served."""
        name = model.casefold()
        for found in (self._settings.get(name), self._settings.get("*"), self._listed.get(name)):
            if found is not None:
                return found
        if is_local:
            return LOCAL_FREE
        raise ConfigError(
            f"prices: no price for the model {model!r}, which does not run on this machine; "
            f'add [[prices]] model = "{model}", input = …, output = … (USD per million tokens; 0 if it is free)'
        )


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


def _picousd(price: Price, usage: Usage) -> int:
    cached_price = price.input_picousd if price.cached_input_picousd is None else price.cached_input_picousd
    return (
        (usage.prompt_tokens - usage.cached_tokens) * price.input_picousd
        + usage.cached_tokens * cached_price
        + usage.completion_tokens * price.output_picousd
    )


def _rounded(picousd: int) -> int:
    return (picousd + PICO_PER_MICRO // 2) // PICO_PER_MICRO


def _from_settings(entry: PriceSettings) -> Price:
    field = f"prices[{entry.model}]"
    cached = entry.cached_input
    return Price(
        id=entry.id,
        input_picousd=picousd_per_token(entry.input, f"{field}.input"),
        output_picousd=picousd_per_token(entry.output, f"{field}.output"),
        cached_input_picousd=None if cached is None else picousd_per_token(cached, f"{field}.cached_input"),
    )


def _built_in() -> dict[str, Price]:
    text = (files("hitsend.serve.usage") / "prices.toml").read_text(encoding="utf-8")
    listed: dict[str, Price] = {}
    for entry in msgspec.convert(tomllib.loads(text)["prices"], tuple[_Listed, ...]):
        cached = entry.cached_input
        price = Price(
            id=entry.id,
            input_picousd=picousd_per_token(entry.input, f"{entry.id}.input"),
            output_picousd=picousd_per_token(entry.output, f"{entry.id}.output"),
            cached_input_picousd=None if cached is None else picousd_per_token(cached, f"{entry.id}.cached_input"),
        )
        for name in (entry.model, *entry.aliases):
            listed[name.casefold()] = price
    return listed
