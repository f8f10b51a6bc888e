"""`hitsend plan cost`: what traffic costs, input and output apart, several prices side by side.

Enters: requests and tokens, or the ledger's. Leaves: amounts with their arithmetic. Always true: the ledger is read by
the report that `hitsend usage` prints, and only its sums are handed over; the first price named is the document's own,
the others stand in `providers`. Next: `plan_data.py`.
"""

from datetime import datetime
from fractions import Fraction
from typing import Annotated, Any

import typer

from hitsend.cli import CallFailed, options
from hitsend.cli.plan_answer import Answer, give
from hitsend.cli.plan_memory import FactsFile
from hitsend.core.errors import ConfigError
from hitsend.plan.cost import CostPlan, Day, Traffic, day_pattern, plan_cost, spread
from hitsend.plan.facts import load_facts
from hitsend.plan.prices import cost_document, explain_cost, find_rate, usd

_DAY = ["%Y-%m-%d"]


def cost(
    price: Annotated[
        list[str], typer.Option("--price", metavar="P", help="workers-ai:qwen3.8-27b, or 0.45/3.20; repeatable.")
    ],
    requests: Annotated[int | None, typer.Option("--requests", help="In all.")] = None,
    input_tokens: Annotated[int | None, typer.Option("--input", help="Tokens a request.")] = None,
    output_tokens: Annotated[int | None, typer.Option("--output", help="Tokens a request, without reasoning.")] = None,
    reasoning: Annotated[int, typer.Option("--reasoning", help="Tokens a request that the model thinks.")] = 0,
    cached_share: Annotated[str, typer.Option("--cached-share", help="Part of the input, 0 to 1.")] = "0",
    days: Annotated[
        str, typer.Option("--days", metavar="PATTERN", help="30, burst:30, weekdays:28, or weights: 5,5,0,1.")
    ] = "30",
    batch: Annotated[bool, typer.Option("--batch", help="The provider's batch price.")] = False,
    blended: Annotated[str | None, typer.Option("--blended", help="USD per million for every token.")] = None,
    free_plan: Annotated[bool, typer.Option("--free-plan", help="Workers AI's free plan: no overage.")] = False,
    from_ledger: Annotated[bool, typer.Option("--from-ledger", help="Traffic that was recorded.")] = False,
    since: Annotated[datetime | None, typer.Option("--from", formats=_DAY, help="First UTC day of it.")] = None,
    until: Annotated[datetime | None, typer.Option("--to", formats=_DAY, help="Last UTC day of it.")] = None,
    config: options.Config = None,
    data: options.Data = None,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """Input and output apart, what a blended rate would have said, neurons per UTC day."""
    if from_ledger:
        if requests is not None or input_tokens is not None or output_tokens is not None:
            raise CallFailed("--from-ledger and --requests, --input, --output: one of them")
        traffic = _recorded(config, data, since, until)
    else:
        if requests is None or input_tokens is None or output_tokens is None:
            raise CallFailed("--requests, --input and --output are needed, or --from-ledger")
        traffic = spread(
            requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            reasoning=reasoning,
            cached=_fraction("--cached-share", cached_share),
            pattern=day_pattern(days),
        )
    known = load_facts(facts)
    rate_for_all = None if blended is None else _fraction("--blended", blended)
    rates = [find_rate(name, known) for name in price]
    plans = [
        plan_cost(traffic, rate, is_batch=batch, blended_rate_usd=rate_for_all, is_free_plan=free_plan)
        for rate in rates
    ]
    return give(_document(plans), cost_text(plans), as_json=as_json)


def cost_text(plans: list[CostPlan]) -> list[str]:
    """The arithmetic of each price, and a line for each when there are several."""
    lines: list[str] = []
    for plan in plans:
        lines.append(f"{plan.rate.name}: {usd(plan.gross_usd)} USD gross, {usd(plan.net_usd)} USD net")
        lines += [f"  {line}" for line in explain_cost(plan)]
    if len(plans) > 1:
        least = min(plan.net_usd for plan in plans)
        lines.append("side by side, net:")
        for plan in sorted(plans, key=lambda one: one.net_usd):
            times = f" ({float(plan.net_usd / least):.1f} x)" if least else ""
            lines.append(f"  {usd(plan.net_usd):>14} USD  {plan.rate.name}{times}")
    return lines


def _document(plans: list[CostPlan]) -> dict[str, Any]:
    found = [cost_document(plan) for plan in plans]
    return found[0] | {"providers": found}


def _fraction(flag: str, text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{flag}: {text!r} is no number") from None


def _recorded(config: Any, data: Any, since: datetime | None, until: datetime | None) -> Traffic:
    """The ledger's sums by UTC day. What it calls completion holds the reasoning already."""
    # the planner itself starts without the database's libraries
    from hitsend.cli.database import with_database  # noqa: PLC0415
    from hitsend.serve.usage.report import usage_report  # noqa: PLC0415

    first, last = options.days(since, until)
    report = with_database(config, data, lambda database: usage_report(database, first, last))
    if not report.by_day:
        raise CallFailed("--from-ledger: no settled request in that time")
    days = tuple(
        Day(
            input=Fraction(day.totals.prompt_tokens),
            output=Fraction(day.totals.completion_tokens),
            cached=Fraction(day.totals.cached_tokens),
            reasoning=Fraction(day.totals.reasoning_tokens),
        )
        for day in report.by_day
    )
    return Traffic(report.totals.requests, days)
