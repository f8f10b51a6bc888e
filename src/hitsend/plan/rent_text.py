"""Rent or buy in words: crossover, chart, and the honest sentence.

Enters: a `RentPlan`. Leaves: lines and the JSON document of `hitsend plan rent-or-buy`. Always true: the sentence names
what turns the answer round. Next: `fleet.py`.
"""

import math
from typing import Any

import msgspec

from hitsend.plan.rent import RentPlan, dedicated_usd, replicas_needed

CHART_WIDTH = 40
CHART_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def rent_document(plan: RentPlan) -> dict[str, Any]:
    """What `--json` prints."""
    asked = plan.question
    crossover = plan.crossover
    return {
        "managed_usd": asked.managed_usd,
        "dedicated_usd": plan.dedicated_usd,
        "replicas": plan.replicas,
        "ratio": plan.ratio,
        "cheaper": cheaper(plan),
        "crossover_factor": crossover,
        "crossover_requests": None if crossover is None else crossover * asked.requests,
        "crossover_settled_factor": plan.settled,
        "crossover_utilization": plan.crossover_utilization,
        "mean_utilization": plan.mean_utilization,
        "sensitivity": [msgspec.to_builtins(case) for case in plan.cases],
        "curve": [
            {
                "factor": factor,
                "managed_usd": asked.managed_usd * factor,
                "dedicated_usd": dedicated_usd(asked, factor),
                "replicas": replicas_needed(asked, factor),
            }
            for factor in CHART_FACTORS
        ],
        "verdict": verdict(plan),
        "explain": explain_rent(plan),
    }


def cheaper(plan: RentPlan) -> str:
    """Who: managed, dedicated, or unclear."""
    if not plan.is_clear:
        return "unclear"
    return "dedicated" if plan.ratio > 1 else "managed"


def verdict(plan: RentPlan) -> str:
    """One sentence that holds."""
    winner = "dedicated" if plan.ratio > 1 else "managed"
    times = max(plan.ratio, 1 / plan.ratio)
    if plan.is_clear:
        return f"{winner} costs {times:.1f} x less, and none of the cases above turns that round"
    turned = [f"{case.what} {case.value}" for case in plan.cases if (case.ratio > 1) != (plan.ratio > 1)]
    because = f"it turns round with {', '.join(turned)}" if turned else "the two are too near each other"
    return (
        f"neither wins clearly: {winner} costs {times:.2f} x less as asked, but {because}; decide by what isn't money "
        "(privacy, latency, who gets up at night), and stay managed while traffic isn't known"
    )


def explain_rent(plan: RentPlan) -> list[str]:
    """The arithmetic, one line each."""
    asked = plan.question
    spare = f" + {asked.redundancy} spare" if asked.redundancy else ""
    needed = plan.replicas - asked.redundancy
    lines = [
        f"managed: {asked.managed_usd:,.2f} USD in {asked.days:g} days for {asked.requests:,} requests",
        (
            f"dedicated: ({needed}{spare}) x {asked.dedicated_usd:,.2f} + {asked.ops_usd:,.2f} people = "
            f"{plan.dedicated_usd:,.2f} USD"
        ),
    ]
    if asked.tokens_per_s is None:
        lines.append(
            "capacity: nobody said how fast a replica is, so one is taken to carry everything (--tokens-per-s)"
        )
    else:
        mean = asked.output_tokens / (asked.days * 86_400)
        lines.append(
            f"capacity: {mean:,.2f} output tokens/s on average x {asked.peak_factor:g} at peak / "
            f"({asked.tokens_per_s:,.1f} x "
            f"{asked.utilization:.0%}) = {needed} replicas, busy {plan.mean_utilization or 0:.1%} of the time"
        )
    lines += [_crossover_line(plan), *chart(plan), *_case_lines(plan), verdict(plan)]
    return lines


def _crossover_line(plan: RentPlan) -> str:
    asked = plan.question
    if plan.crossover is None:
        return "crossover: never: a full replica costs more than its tokens do managed"
    told = f"{plan.crossover:,.2f} x the traffic, {plan.crossover * asked.requests:,.0f} requests"
    busy = "" if plan.crossover_utilization is None else f", replicas busy {plan.crossover_utilization:.1%} of the time"
    line = f"crossover: dedicated / managed = {told}{busy}"
    if plan.settled is not None and plan.settled > plan.crossover * 1.001:
        line += f"; each new replica makes it dearer again for a while, for good from {plan.settled:,.2f} x"
    return line


def chart(plan: RentPlan) -> list[str]:
    """Costs by traffic, on a logarithmic scale: m managed, d dedicated, X both."""
    asked = plan.question
    rows = [(factor, asked.managed_usd * factor, dedicated_usd(asked, factor)) for factor in CHART_FACTORS]
    costs = [cost for _, managed, own in rows for cost in (managed, own)]
    low, high = math.log(min(costs)), math.log(max(costs))

    def place(cost: float) -> int:
        return round((math.log(cost) - low) / ((high - low) or 1) * (CHART_WIDTH - 1))

    lines = [f"cost by traffic ({min(costs):,.0f} to {max(costs):,.0f} USD, logarithmic; m managed, d dedicated):"]
    for factor, managed, own in rows:
        cells = [" "] * CHART_WIDTH
        cells[place(managed)] = "m"
        cells[place(own)] = "X" if place(own) == place(managed) else "d"
        lines.append(f"x {factor:<5g}|{''.join(cells)}| {managed:,.0f} and {own:,.0f} USD")
    return lines


def _case_lines(plan: RentPlan) -> list[str]:
    """How far one number turns the answer."""
    lines = ["managed / dedicated, above 1 dedicated is cheaper:"]
    for case in plan.cases:
        turned = "  turns round" if (case.ratio > 1) != (plan.ratio > 1) else ""
        bar = "#" * max(1, min(CHART_WIDTH, round(case.ratio * 10)))
        lines.append(f"{case.what:20} {case.value:7} {case.ratio:8.2f} {bar}{turned}")
    return lines
