"""Several targets, or several rounds of one: medians, and ratios with how far they spread.

Enters: levels by target and round. Leaves: one median level per load, and per load and metric the ratio to the first
target. Always true: a ratio is of medians; its spread is the least and the greatest ratio of one round's pair, so
rounds are compared with themselves, not with each other. Next: `run.py`.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from hitsend.load.report import Level, Spread

METRICS = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "requests_per_s",
    "goodput_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "e2e_p50_ms",
    "e2e_p99_ms",
)


def metric(level: Level, name: str) -> float | None:
    """One figure: a field, or `KIND_pNN_ms` of a spread."""
    if name in Level.__struct_fields__:
        value: float | None = getattr(level, name)
        return value
    kind, part, _ = name.split("_")
    found: Spread | None = getattr(level, f"{kind}_ms")
    return None if found is None else float(getattr(found, part))


def load_of(level: Level) -> tuple[str, float]:
    """What a level is compared by."""
    if level.concurrency is not None:
        return "concurrency", float(level.concurrency)
    return "rate", level.rate_per_s or 0.0


class Ratio(msgspec.Struct, frozen=True):
    """`target`'s median over `base`'s, of one metric at one load; `least` and `greatest` of the rounds' pairs."""

    by: str
    load: float
    metric: str
    target: str
    base: str
    ratio: float
    least: float
    greatest: float
    rounds: int

    def said(self, of_rounds: int) -> str:
        """In words; of how many rounds, where some have no such figure."""
        few = f"; {self.rounds} of {of_rounds} rounds" if self.rounds < of_rounds else ""
        return f"{self.ratio:.2f} ({self.least:.2f} to {self.greatest:.2f}{few})"


def by_load(levels: Sequence[Level]) -> dict[tuple[str, float], list[Level]]:
    """Rounds of each load, in the order in which the loads first came."""
    found: dict[tuple[str, float], list[Level]] = {}
    for level in levels:
        found.setdefault(load_of(level), []).append(level)
    return found


def medians(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """Per load: the load, how many rounds, and the median of every metric (None where no round has it)."""
    found = []
    for (by, load), rounds in by_load(levels).items():
        row: dict[str, Any] = {"by": by, "load": load, "rounds": len(rounds)}
        for name in METRICS:
            values = [value for one in rounds if (value := metric(one, name)) is not None]
            row[name] = median(values) if values else None
        found.append(row)
    return found


def middle(levels: Sequence[Level]) -> list[Level]:
    """Per load the round whose output tokens per second are the median: a level that was really measured."""
    return [
        sorted(rounds, key=lambda one: one.output_tokens_per_s)[(len(rounds) - 1) // 2]
        for rounds in by_load(levels).values()
    ]


def ratios(targets: Sequence[tuple[str, Sequence[Level]]]) -> list[Ratio]:
    """Every target after the first, over the first, at every load both have."""
    if len(targets) < 2:
        return []
    (base, base_levels), *others = targets
    first = by_load(base_levels)
    return [
        found
        for target, levels in others
        for load, rounds in by_load(levels).items()
        if load in first
        for name in METRICS
        if (found := _ratio(load, name, (base, first[load]), (target, rounds))) is not None
    ]


def _ratio(
    load: tuple[str, float], name: str, base: tuple[str, list[Level]], target: tuple[str, list[Level]]
) -> Ratio | None:
    theirs = {one.round: metric(one, name) for one in base[1]}
    ours = {one.round: metric(one, name) for one in target[1]}
    pairs = [
        (mine, other)
        for number, mine in ours.items()
        if mine is not None and (other := theirs.get(number)) is not None and other > 0
    ]
    if not pairs:
        return None
    each = [mine / other for mine, other in pairs]
    ratio = median(mine for mine, _ in pairs) / median(other for _, other in pairs)
    return Ratio(*load, name, target[0], base[0], ratio, min(each), max(each), len(pairs))
