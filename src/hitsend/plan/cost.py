"""What traffic costs: `hitsend plan cost`.

Enters: tokens per UTC day and a price. Leaves: a `CostPlan` with input and output apart. Always true: the two streams
are never blended, and what a blended rate would have said stands beside; reasoning is output, cached tokens are a part
of the input and are never counted twice; neurons are counted per UTC day and what is free on one day isn't carried
over; exact fractions all the way, rounded once to whole micro-dollars. Next: `prices.py`.
"""

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError

MILLION = 1_000_000
FREE_NEURONS = 10_000
"""Per UTC day and account (Workers AI's pricing page)."""
USD_PER_NEURON = Fraction(11, MILLION)
"""1,000 neurons are USD 0.011."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A price. USD per million tokens; neurons per million tokens where the provider bills in those."""

    name: str
    input_usd: Fraction
    output_usd: Fraction
    cached_usd: Fraction | None = None
    """None: cached tokens cost what others cost."""
    batch_multiplier: Fraction | None = None
    input_neurons: Fraction | None = None
    output_neurons: Fraction | None = None
    cached_neurons: Fraction | None = None
    has_free_days: bool = False
    is_paid_only: bool = False
    """The provider's free plan doesn't serve it."""
    source: str = ""
    as_of: str = ""
    note: str | None = None


class Day(msgspec.Struct, frozen=True):
    """Tokens of one UTC day. `cached` is a part of `input`, `reasoning` a part of `output`."""

    input: Fraction
    output: Fraction
    cached: Fraction = Fraction(0)
    reasoning: Fraction = Fraction(0)

    def __add__(self, other: "Day") -> "Day":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Day(*(mine + its for mine, its in pairs))


class Traffic(msgspec.Struct, frozen=True):
    """Requests, and their tokens by UTC day."""

    requests: int
    days: tuple[Day, ...]

    @property
    def total(self) -> Day:
        """All days together."""
        return sum(self.days, Day(Fraction(0), Fraction(0)))


class CostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """USD as exact fractions. `neurons` None: the price isn't one in neurons. `pooled_usd`: what one allowance for the
    whole time would have left, the usual mistake. `without_reasoning_usd`: the gross without the thoughts."""

    rate: Rate
    traffic: Traffic
    input_usd: Fraction
    output_usd: Fraction
    gross_usd: Fraction
    net_usd: Fraction
    blended_usd: Fraction
    blended_rate_usd: Fraction
    without_reasoning_usd: Fraction
    multiplier: Fraction
    neurons: Fraction | None = None
    billed_neurons: Fraction | None = None
    one_day_usd: Fraction | None = None
    pooled_usd: Fraction | None = None
    refused_days: int = 0


def spread(
    requests: int, *, input_tokens: int, output_tokens: int, reasoning: int, cached: Fraction, pattern: Sequence[int]
) -> Traffic:
    """So many alike requests over days with these weights. `cached`: share of the input. Raises ConfigError."""
    for name, value in (("--requests", requests), ("--input", input_tokens), ("--output", output_tokens)):
        if value < 0:
            raise ConfigError(f"{name} is {value}, needed is 0 or more")
    if reasoning < 0:
        raise ConfigError(f"--reasoning is {reasoning}, needed is 0 or more")
    if not 0 <= cached <= 1:
        raise ConfigError(f"--cached-share is {float(cached):g}, needed is 0 to 1")
    whole = sum(pattern)
    if whole <= 0 or min(pattern) < 0:
        raise ConfigError("--days: the weights must be 0 or more, and one of them above 0")
    days = []
    for weight in pattern:
        share = Fraction(requests * weight, whole)
        days.append(
            Day(
                input=share * input_tokens,
                output=share * (output_tokens + reasoning),
                cached=share * input_tokens * cached,
                reasoning=share * reasoning,
            )
        )
    return Traffic(requests, tuple(days))


def day_pattern(text: str) -> tuple[int, ...]:
    """`30`: evenly over so many days. `burst:30`: all on one of them. `weekdays:28`: Monday first, nothing on weekends.
    `5,5,0,1`: weights of the days. Without a number a word means 30 days. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    try:
        if kind in {"even", "burst", "weekdays"}:
            days = _count(rest or "30")
            if kind == "burst":
                return (1, *(0,) * (days - 1))
            return tuple(1 if kind == "even" or day % 7 < 5 else 0 for day in range(days))
        if "," in text:
            return tuple(int(part) for part in text.split(","))
        return (1,) * _count(text)
    except ValueError:
        raise ConfigError(
            f"--days {text}: needed is a number of days (1 to 3660), burst:N, weekdays:N, or weights such as 5,5,0,1"
        ) from None


def _count(text: str) -> int:
    days = int(text)
    if not 1 <= days <= 3660:
        raise ValueError
    return days


def plan_cost(
    traffic: Traffic,
    rate: Rate,
    *,
    is_batch: bool = False,
    blended_rate_usd: Fraction | None = None,
    is_free_plan: bool = False,
) -> CostPlan:
    """Input + output, each at its own rate (cached at its own where there is one). Raises ConfigError.

    Neurons (Workers AI): per UTC day max(0, neurons - 10,000) * 0.011 / 1,000; on the free plan nothing is billed, and
    a day that needs more is one on which requests fail. `blended_rate_usd` None: the input's rate for every token, the
    rate that headlines show.
    """
    multiplier = Fraction(1)
    if is_batch:
        if rate.batch_multiplier is None:
            raise ConfigError(f"--batch: no batch price is known for {rate.name}")
        multiplier = rate.batch_multiplier
    total = traffic.total
    entry, leave = _input_usd(total, rate) * multiplier, total.output * rate.output_usd / MILLION * multiplier
    thought = total.reasoning * rate.output_usd / MILLION * multiplier
    gross = entry + leave
    blended = rate.input_usd if blended_rate_usd is None else blended_rate_usd
    plain = CostPlan(
        rate=rate,
        traffic=traffic,
        input_usd=entry,
        output_usd=leave,
        gross_usd=gross,
        net_usd=gross,
        blended_usd=(total.input + total.output) * blended / MILLION,
        blended_rate_usd=blended,
        without_reasoning_usd=gross - thought,
        multiplier=multiplier,
    )
    return plain if rate.input_neurons is None else _in_neurons(plain, is_free_plan=is_free_plan)


def _input_usd(day: Day, rate: Rate) -> Fraction:
    cached = rate.input_usd if rate.cached_usd is None else rate.cached_usd
    return ((day.input - day.cached) * rate.input_usd + day.cached * cached) / MILLION


def neurons_of(day: Day, rate: Rate) -> Fraction:
    """One day's neurons. Raises ConfigError where the price isn't one in neurons."""
    if rate.input_neurons is None or rate.output_neurons is None:
        raise ConfigError(f"{rate.name} isn't billed in neurons")
    cached = rate.input_neurons if rate.cached_neurons is None else rate.cached_neurons
    fresh = day.input - day.cached
    return (fresh * rate.input_neurons + day.cached * cached + day.output * rate.output_neurons) / MILLION


def billed_neurons(neurons: Sequence[Fraction], *, free: int = FREE_NEURONS) -> Fraction:
    """What days are billed for: each day's excess over what is free on that day."""
    return sum((max(Fraction(0), one - free) for one in neurons), Fraction(0))


def _in_neurons(plan: CostPlan, *, is_free_plan: bool) -> CostPlan:
    by_day = [neurons_of(day, plan.rate) for day in plan.traffic.days]
    free = FREE_NEURONS if plan.rate.has_free_days else 0
    whole, billed = sum(by_day, Fraction(0)), billed_neurons(by_day, free=free)
    per_neuron = USD_PER_NEURON * plan.multiplier
    over = sum(1 for one in by_day if one > (0 if plan.rate.is_paid_only else FREE_NEURONS))
    return msgspec.structs.replace(
        plan,
        net_usd=Fraction(0) if is_free_plan else billed * per_neuron,
        neurons=whole,
        billed_neurons=Fraction(0) if is_free_plan else billed,
        one_day_usd=billed_neurons([whole], free=free) * per_neuron,
        pooled_usd=max(Fraction(0), whole - free * len(by_day)) * per_neuron,
        refused_days=over if is_free_plan else 0,
    )


def microusd(value: Fraction) -> int:
    """Rounded half up to a whole micro-dollar, once."""
    scaled = value * MILLION
    return (2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)
