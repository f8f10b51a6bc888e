"""What is wrong with the planner's data: stale, expired, contradictory, or never re-read.

Enters: facts, the user's own, and a day. Leaves: `Warned`s. Always true: nothing is repaired or left out because of a
warning; a conflict names both values. Next: `models.py`.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import date

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.config import checkpoint_of
from hitsend.plan.facts import Facts, Gpu, KnownModel, ListPrice, Rental, shipped_facts

PARAMS_TOLERANCE = 0.005


class Warned(msgspec.Struct, frozen=True):
    """Something to look at. `kind`: `stale`, `conflict`, `expired` or `uncertain`."""

    kind: str
    what: str
    message: str


def check_facts(facts: Facts, own: Facts, today: date, max_age_days: int) -> list[Warned]:
    """What is stale, expired, contradictory or unsure. `own`: the user's entries, compared with the shipped ones."""
    found = [warned for entry in _dated(facts) for warned in _stale(entry, today, max_age_days)]
    found += [
        Warned("expired", price.name, f"its price counted until {price.valid_until}")
        for price in facts.prices
        if price.valid_until and price.valid_until < today
    ]
    found += _rental_conflicts(facts.rentals) + _price_conflicts(facts.prices)
    found += _replaced(own) + _twice(own) + _miscounted(facts.models)
    unsure = [(model.name, model.uncertain) for model in facts.models] + [
        (gpu.name, gpu.uncertain) for gpu in facts.gpus
    ]
    found += [Warned("uncertain", name, "; ".join(what)) for name, what in unsure if what]
    return found


def _replaced(own: Facts) -> list[Warned]:
    """The user's entries that stand in place of ours, with the fields in which they differ."""
    shipped = {entry.name.casefold(): entry for entry in _named(shipped_facts())}
    return [
        Warned("conflict", entry.name, f"your file replaces the shipped entry; {_difference(entry, before)}")
        for entry in _named(own)
        if (before := shipped.get(entry.name.casefold())) is not None
    ]


def _twice(own: Facts) -> list[Warned]:
    counts = Counter(entry.name.casefold() for entry in _named(own))
    return [
        Warned("conflict", name, f"it stands {count} times in your file; the first counts")
        for name, count in counts.items()
        if count > 1
    ]


def _named(facts: Facts) -> tuple[KnownModel | Gpu | ListPrice, ...]:
    return (*facts.models, *facts.gpus, *facts.prices)


def _difference(mine: msgspec.Struct, before: msgspec.Struct) -> str:
    parts = [
        f"{field}: yours {getattr(mine, field)!r}, ours {getattr(before, field, None)!r}"
        for field in mine.__struct_fields__
        if field not in {"name", "source", "as_of", "aliases", "note", "uncertain"}
        and getattr(mine, field) != getattr(before, field, None)
    ]
    return "; ".join(parts) or "the values are the same"


def _miscounted(models: Iterable[KnownModel]) -> list[Warned]:
    """Shapes that don't add up to the parameters that somebody else counted, or that can't be read at all."""
    found = []
    for model in models:
        try:
            params = checkpoint_of(model.config, model.name).params
        except ConfigError as refused:
            found.append(Warned("conflict", model.name, str(refused)))
            continue
        total = model.total_params
        if params is not None and total and abs(params.total - total) > PARAMS_TOLERANCE * total:
            told = f"its shapes add up to {params.total:,} parameters, stated are {total:,}"
            found.append(Warned("conflict", model.name, told))
    return found


def _dated(facts: Facts) -> Iterable[tuple[str, date]]:
    for gpu in facts.gpus:
        yield gpu.name, gpu.as_of
    for price in facts.prices:
        yield price.name, price.as_of
    for rental in facts.rentals:
        yield f"{rental.provider}: {rental.gpu}", rental.as_of


def _stale(entry: tuple[str, date], today: date, max_age_days: int) -> list[Warned]:
    name, as_of = entry
    age = (today - as_of).days
    return [Warned("stale", name, f"read on {as_of}, {age} days ago, limit {max_age_days}")] * (age > max_age_days)


def _rental_conflicts(rentals: tuple[Rental, ...]) -> list[Warned]:
    """The same offer quoted differently on different days: only the newest may be used."""
    by_offer: dict[tuple[str, str], list[Rental]] = {}
    for rental in rentals:
        by_offer.setdefault((rental.gpu, rental.provider), []).append(rental)
    return [
        Warned(
            "conflict",
            f"{provider}: {gpu}",
            ", ".join(f"{one.usd_per_gpu_hour} USD on {one.as_of}" for one in sorted(same, key=lambda one: one.as_of))
            + "; the newest counts",
        )
        for (gpu, provider), same in by_offer.items()
        if len({one.usd_per_gpu_hour for one in same}) > 1
    ]


def _price_conflicts(prices: tuple[ListPrice, ...]) -> list[Warned]:
    """A provider that bills in neurons shows dollars too; beyond rounding they must say the same."""
    found = []
    for price in prices:
        for side in ("input", "output"):
            neurons, shown = getattr(price, f"neurons_{side}"), float(getattr(price, side))
            if neurons is not None and abs(float(neurons) * 11e-6 - shown) > max(0.0006, shown * 0.002):
                told = f"{neurons} neurons are {float(neurons) * 11e-6:.4f} USD, shown are {shown}"
                found.append(Warned("conflict", price.name, f"{side}: {told}"))
    return found
