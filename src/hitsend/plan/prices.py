"""Which price somebody means, and a cost plan in words.

Enters: `workers-ai:qwen3.8-27b` or `0.45/3.20`; a `CostPlan`. Leaves: a `Rate`; lines of text and the JSON document of
`hitsend plan cost`. Always true: a name that isn't known is refused with the nearest ones; every line shows the
numbers it was made from. Next: `tokens.py`.
"""

import difflib
from fractions import Fraction
from typing import Any

from hitsend.core.errors import ConfigError
from hitsend.plan.cost import FREE_NEURONS, MILLION, CostPlan, Rate, microusd
from hitsend.plan.facts import Facts, ListPrice

MAX_USD_PER_MILLION = 1_000_000
TIMES = "\u00d7"
MOST_TIMES = 10**9


def find_rate(wanted: str, facts: Facts) -> Rate:
    """A name, or input/output or input/cached/output in USD per million tokens. Raises ConfigError."""
    if "/" in wanted and ":" not in wanted and wanted.replace("/", "").replace(".", "").isdecimal():
        return _typed(wanted)
    name = wanted.casefold()
    table = {known: price for price in reversed(facts.prices) for known in _names(price)}
    found = table.get(name)
    if found is None:
        near = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
        raise ConfigError(
            f"--price {wanted}: no such price"
            + (f"; near it are {', '.join(near)}" if near else "")
            + "; give PROVIDER:MODEL, INPUT/OUTPUT or INPUT/CACHED/OUTPUT in USD per million tokens"
        )
    return rate_of(found)


def _names(price: ListPrice) -> list[str]:
    return [f"{price.provider}:{model}".casefold() for model in (price.model, *price.aliases)]


def _typed(text: str) -> Rate:
    parts = [_decimal(part, text) for part in text.split("/")]
    if len(parts) == 2:
        return Rate(name=text, input_usd=parts[0], output_usd=parts[1], source="as given")
    if len(parts) == 3:
        return Rate(name=text, input_usd=parts[0], cached_usd=parts[1], output_usd=parts[2], source="as given")
    raise ConfigError(f"--price {text}: needed is INPUT/OUTPUT or INPUT/CACHED/OUTPUT in USD per million tokens")


def _decimal(text: str, field: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--price {field}: {text!r} is no number") from None
    if not 0 <= value <= MAX_USD_PER_MILLION:
        raise ConfigError(f"--price {field}: {text} USD per million tokens, limit 0 to {MAX_USD_PER_MILLION:,}")
    return value


def rate_of(price: ListPrice) -> Rate:
    """A list price as exact fractions."""

    def exact(text: str | None) -> Fraction | None:
        return None if text is None else Fraction(text)

    return Rate(
        name=price.name,
        input_usd=Fraction(price.input),
        output_usd=Fraction(price.output),
        cached_usd=exact(price.cached_input),
        batch_multiplier=exact(price.batch_multiplier),
        input_neurons=exact(price.neurons_input),
        output_neurons=exact(price.neurons_output),
        cached_neurons=exact(price.neurons_cached_input),
        has_free_days=price.neurons_input is not None,
        is_paid_only=price.is_paid_only,
        source=price.source,
        as_of=price.as_of.isoformat(),
        note=price.note,
    )


def explain_cost(plan: CostPlan) -> list[str]:
    """The arithmetic, one line each."""
    rate, total = plan.rate, plan.traffic.total
    lines = [_input_line(plan), _output_line(plan)]
    shares = _share(total.output, total.input + total.output), _share(plan.output_usd, plan.gross_usd)
    lines.append(
        f"gross: {usd(plan.input_usd)} + {usd(plan.output_usd)} = {usd(plan.gross_usd)} USD; output is "
        f"{shares[0]} of the tokens and {shares[1]} of the cost"
    )
    if total.reasoning:
        base = plan.without_reasoning_usd
        times = f" ({float(plan.gross_usd / base):.1f} {TIMES})" if base else ""
        lines.append(
            f"thinking: off {usd(base)}, on {usd(plan.gross_usd)} USD: {usd(plan.gross_usd - base)} more{times}"
        )
    lines.append(_blended_line(plan))
    if plan.neurons is not None:
        lines += _neuron_lines(plan)
    lines.append(f"price: {rate.name}, {rate.source}" + (f", as of {rate.as_of}" if rate.as_of else ""))
    if rate.note:
        lines.append(f"price: {rate.note}")
    return lines


def _input_line(plan: CostPlan) -> str:
    rate, total = plan.rate, plan.traffic.total
    batch = f" x {float(plan.multiplier):g} (batch)" if plan.multiplier != 1 else ""
    if total.cached and rate.cached_usd is not None:
        fresh = total.input - total.cached
        return (
            f"input: {_tokens(fresh)} x {_rate(rate.input_usd)} + {_tokens(total.cached)} cached x "
            f"{_rate(rate.cached_usd)} USD per million{batch} = {usd(plan.input_usd)} USD"
        )
    cached = " (cached tokens have no price of their own)" if total.cached else ""
    told = f"{_tokens(total.input)} x {_rate(rate.input_usd)} USD per million{batch}"
    return f"input: {told} = {usd(plan.input_usd)} USD{cached}"


def _output_line(plan: CostPlan) -> str:
    total = plan.traffic.total
    batch = f" x {float(plan.multiplier):g} (batch)" if plan.multiplier != 1 else ""
    thought = f", {_tokens(total.reasoning)} of them reasoning" if total.reasoning else ""
    return (
        f"output: {_tokens(total.output)}{thought} x {_rate(plan.rate.output_usd)} USD per million{batch} = "
        f"{usd(plan.output_usd)} USD"
    )


def _blended_line(plan: CostPlan) -> str:
    total, blended = plan.traffic.total, plan.blended_usd
    told = f"blended: {_tokens(total.input + total.output)} x {_rate(plan.blended_rate_usd)} = {usd(blended)} USD"
    return f"{told}, {blended_verdict(plan)}"


def blended_verdict(plan: CostPlan) -> str:
    """How wrong one rate for both would have been."""
    gross, blended = plan.gross_usd, plan.blended_usd
    if gross == blended or not gross or not blended:
        return "which is right" if gross == blended else "which says nothing"
    if gross > blended:
        return f"{float(min(gross / blended, Fraction(MOST_TIMES))):,.1f} {TIMES} too low"
    return f"{float(min(blended / gross, Fraction(MOST_TIMES))):,.1f} {TIMES} too high"


def _neuron_lines(plan: CostPlan) -> list[str]:
    rate, days = plan.rate, len(plan.traffic.days)
    if plan.neurons is None or plan.billed_neurons is None or plan.one_day_usd is None or plan.pooled_usd is None:
        return []
    free = FREE_NEURONS if rate.has_free_days else 0
    allowed = f"{free:,} free each day and none carried over"
    billed = f"{_count(plan.billed_neurons)} billed x 0.011 / 1,000 = {usd(plan.net_usd)} USD net"
    pooled = f"with one allowance for all days (wrong): {usd(plan.pooled_usd)} USD"
    lines = [
        f"neurons: {_count(plan.neurons)} over {days} UTC days, {allowed}: {billed}",
        f"the same traffic on one UTC day: {usd(plan.one_day_usd)} USD; {pooled}",
    ]
    if plan.refused_days:
        why = "it serves this model to nobody" if rate.is_paid_only else "10,000 neurons are a day's limit"
        lines.append(f"on the free plan requests fail on {plan.refused_days} of {days} days: {why}")
    return lines


def cost_document(plan: CostPlan) -> dict[str, Any]:
    """What `--json` prints: USD as numbers rounded to whole micro-dollars."""
    total = plan.traffic.total
    return {
        "price": plan.rate.name,
        "requests": plan.traffic.requests,
        "input_tokens": _plain(total.input),
        "cached_tokens": _plain(total.cached),
        "output_tokens": _plain(total.output),
        "reasoning_tokens": _plain(total.reasoning),
        "days": len(plan.traffic.days),
        "gross_usd": _usd(plan.gross_usd),
        "net_usd": _usd(plan.net_usd),
        "input_usd": _usd(plan.input_usd),
        "output_usd": _usd(plan.output_usd),
        "neurons": None if plan.neurons is None else _plain(plan.neurons),
        "billed_neurons": None if plan.billed_neurons is None else _plain(plan.billed_neurons),
        "blended_usd": _usd(plan.blended_usd),
        "blended_verdict": blended_verdict(plan),
        "without_reasoning_usd": _usd(plan.without_reasoning_usd),
        "reasoning_factor": round(float(plan.gross_usd / plan.without_reasoning_usd), 4)
        if plan.without_reasoning_usd
        else None,
        "one_day_usd": None if plan.one_day_usd is None else _usd(plan.one_day_usd),
        "refused_days": plan.refused_days,
        "gross_microusd": microusd(plan.gross_usd),
        "net_microusd": microusd(plan.net_usd),
        "as_of": plan.rate.as_of or None,
        "explain": explain_cost(plan),
    }


def usd(value: Fraction) -> str:
    """Two decimals, or as many as a small amount needs."""
    micro = microusd(value)
    if micro % 10_000 == 0 or abs(micro) >= MILLION:
        return f"{micro / MILLION:,.2f}"
    return f"{micro / MILLION:,.6f}".rstrip("0")


def _usd(value: Fraction) -> float:
    return microusd(value) / MILLION


def _plain(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else round(float(value), 6)


def _count(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.1f}"


def _tokens(value: Fraction) -> str:
    if value >= MILLION:
        return f"{float(value / MILLION):,.6g} M"
    return _count(value)


def _rate(value: Fraction) -> str:
    exact = f"{float(value):.6f}".rstrip("0")
    whole, _, decimals = exact.partition(".")
    return f"{whole}.{decimals.ljust(2, '0')}"


def _share(part: Fraction, whole: Fraction) -> str:
    return f"{float(part / whole):.0%}" if whole else "0%"
