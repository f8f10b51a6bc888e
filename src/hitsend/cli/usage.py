"""`hitsend usage`: the ledger, added up by model, caller and day.

Enters: a range of days. Leaves: tables, or one JSON document. Always true: only settled rows count, and every amount is
an integer of micro-dollars until it is printed. Next: `serve/usage/report.py`.
"""

from datetime import datetime
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import options
from hitsend.cli.database import with_database
from hitsend.serve.usage.report import Totals, UsageReport, usage_report

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Add up the ledger.")

_Day = Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="UTC day, included.")]


@app.command()
def usage(
    since: _Day = None,
    until: _Day = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Show requests, tokens and cost by model, caller and day."""
    first, last = (None if day is None else day.date() for day in (since, until))
    report = with_database(config, data, lambda database: usage_report(database, first, last))
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    console = Console()
    console.print(_table(report))
    if report.holds_open:
        console.print(Text(f"{report.holds_open} requests hold a reservation and are not settled yet."))


def _table(report: UsageReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("requests", "prompt", "cached", "completion", "discarded", "cost USD"):
        table.add_column(heading, justify="right")
    for by_model in report.by_model:
        table.add_row(*_cells(f"model {by_model.model}", by_model.totals))
    for caller in report.by_caller:
        table.add_row(*_cells(f"key {caller.key_id or '-'} ({caller.name})", caller.totals))
    for by_day in report.by_day:
        table.add_row(*_cells(f"day {by_day.day}", by_day.totals))
    table.add_row(*_cells("total", report.totals), style="bold")
    return table


def _cells(name: str, totals: Totals) -> tuple[Text, ...]:
    counts = (
        totals.requests,
        totals.prompt_tokens,
        totals.cached_tokens,
        totals.completion_tokens,
        totals.discarded_tokens,
    )
    return (Text(name), *(Text(f"{count:,}") for count in counts), Text(usd(totals.cost_microusd)))


def usd(microusd: int) -> str:
    """Micro-dollars as dollars with all six decimals, by integer arithmetic."""
    return f"{microusd // 1_000_000:,}.{microusd % 1_000_000:06d}"
