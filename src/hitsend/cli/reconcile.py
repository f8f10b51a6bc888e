"""`hitsend reconcile`: whether ledger, engine counters, metrics and records agree.

Enters: a server's address and key, or a database. Leaves: every check with both figures; exit status 1 when one
drifted. Always true: without --url and --key the database alone is checked, which needs no server; a server also
compares what its own process computed and counted since it started. Next: `config.py`.
"""

import asyncio

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import options
from hitsend.cli.client import Client
from hitsend.cli.database import with_database
from hitsend.core.clock import SystemClock
from hitsend.serve.usage.reconcile import Reconciliation
from hitsend.serve.usage.reconcile import reconcile as reconciled

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Prove that the books agree.")


@app.command()
def reconcile(
    url: options.Url = None,
    key: options.Key = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Compare the ledger with the records, and with a server's own counters where --url or --key names one."""
    if url is not None or key is not None:
        found = asyncio.run(_ask(url or options.DEFAULT_URL, key))
    else:
        found = with_database(config, data, lambda database: reconciled(database, SystemClock().wall()))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        Console().print(_table(found))
        for line in _words(found):
            print(line)
    if found.drifted:
        raise typer.Exit(1)


async def _ask(url: str, key: str | None) -> Reconciliation:
    async with Client(url, key) as client:
        return msgspec.convert(await client.get("/admin/reconcile"), Reconciliation)


def _table(found: Reconciliation) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "left", "", "right", ""):
        table.add_column(heading, justify="right" if heading in ("left", "right") else "left", no_wrap=True)
    for check in found.checks:
        verdict = "ok" if check.is_good else "DRIFT"
        table.add_row(check.name, f"{check.left:,}", check.relation, f"{check.right:,}", Text(verdict))
    return table


def _words(found: Reconciliation) -> list[str]:
    lines = []
    for check in found.checks:
        if not check.is_good:
            examples = f": {', '.join(check.examples)}" if check.examples else ""
            lines.append(f"{check.name}: {check.what}{examples}")
    if not found.is_at_rest:
        lines.append("requests were under way: figures of the moment were held to inequalities only")
    lines.append(f"{len(found.drifted)} of {len(found.checks)} checks drifted")
    return lines
