"""`hitsend usage`: the ledger, added up by model, caller and day, as a statement, or row by row.

Enters: a range of days. Leaves: tables, CSV, or one JSON document. Always true: only settled rows count, and every
amount is an integer of micro-dollars until it is printed. Next: `statement.py`.
"""

from datetime import datetime
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import CallFailed, options
from hitsend.cli.database import with_database
from hitsend.cli.statement import print_csv, print_rows, print_table, usd
from hitsend.serve.usage.report import Totals, UsageReport, usage_report
from hitsend.serve.usage.statement import By, statement, stream_rows

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Add up the ledger.")

_DAY = "%Y-%m-%d"
_From = Annotated[
    datetime | None,
    typer.Option("--from", "--since", formats=[_DAY], metavar="YYYY-MM-DD", help="First UTC day."),
]
_To = Annotated[
    datetime | None,
    typer.Option("--to", "--until", formats=[_DAY], metavar="YYYY-MM-DD", help="Last UTC day, included."),
]


@app.command()
def usage(
    since: _From = None,
    until: _To = None,
    by: Annotated[By | None, typer.Option("--by", help="A statement with one line for each of these.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Every row instead of sums.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values on stdout.")] = False,
    as_json: options.Json = False,
    config: options.Config = None,
    data: options.Data = None,
) -> None:
    """Show requests, tokens and cost by model, caller and day; with --by or --csv as a statement."""
    if as_csv and as_json:
        raise CallFailed("--csv and --json: one of them")
    if rows and by:
        raise CallFailed("--rows and --by: one of them")
    first, last = options.days(since, until)
    if rows:
        form = "csv" if as_csv else "json" if as_json else "text"
        with_database(config, data, lambda database: print_rows(stream_rows(database, first, last), form))
        return
    if by or as_csv:
        found = with_database(config, data, lambda database: statement(database, by or "key", first, last))
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            (print_csv if as_csv else print_table)(found)
        return
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
