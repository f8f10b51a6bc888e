"""`hitsend plan data check`: which facts are stale, contradictory or unsure.

Enters: the shipped facts and the user's. Leaves: one warning per line; exit status 1 only with `--strict`. Always true:
today's date is the only thing read from outside. Next: `plan_tokens.py`.
"""

from datetime import UTC, date, datetime
from typing import Annotated

import msgspec
import typer

from hitsend.cli import options
from hitsend.cli.plan_memory import FactsFile
from hitsend.plan.facts import load_facts, own_facts
from hitsend.plan.facts_check import check_facts

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="The planner's facts.")


@app.callback()
def root() -> None:
    """Models, GPUs and prices: each with its source and the day it was read."""


@app.command()
def check(
    max_age_days: Annotated[int, typer.Option("--max-age-days", min=1, help="Older prices and GPUs are stale.")] = 180,
    today: Annotated[
        datetime | None, typer.Option("--today", formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="Default: now.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 where something is stale or conflicts.")
    ] = False,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> None:
    """Warn about what is stale, expired, contradictory or not re-read."""
    day: date = today.date() if today else datetime.now(UTC).date()
    found = check_facts(load_facts(facts), own_facts(facts), day, max_age_days)
    if as_json:
        print(msgspec.json.encode({"today": day, "warnings": found}).decode())
    else:
        for warned in found:
            print(f"{warned.kind}: {warned.what}: {warned.message}")
        print(f"{len(found)} warnings")
    if strict and any(warned.kind != "uncertain" for warned in found):
        raise typer.Exit(1)
