"""`hitsend inspect`: what the running server remembers of its requests.

Enters: a request id, or nothing. Leaves: that request's record, or a list of the recent ones. Always true: with
`--json` the server's document is printed as it came. Next: `serve/api/inspect.py`, which answers.
"""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hitsend.cli import CallFailed, options
from hitsend.cli.client import Client
from hitsend.cli.waterfall import draw, money
from hitsend.inspect.replay import export_of

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def inspect(
    request_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Without it: the recent requests.")] = None,
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where its time and money went, and what would have changed it.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write what `hitsend replay` needs of it.")
    ] = None,
    redact: Annotated[bool, typer.Option("--redact", help="Without texts in the export, only token ids.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many recent requests.")] = 20,
) -> None:
    """Show one request's flight record, or list the recent ones."""
    path = f"/inspect/requests/{quote(request_id, safe='')}" if request_id else f"/inspect/requests?limit={limit}"
    if explain and not request_id:
        raise CallFailed("--explain: which request? Give its id")
    if export is not None and (not request_id or explain):
        raise CallFailed("--export: of which request? Give its id, without --explain")
    document = asyncio.run(_get(url or options.DEFAULT_URL, key, path + ("/explain" if explain else "")))
    if export is not None:
        export.write_bytes(msgspec.json.encode(export_of(document, has_texts=not redact)))
    elif as_json:
        print(json.dumps(document, ensure_ascii=False))
    elif explain:
        Console().print(explained(document))
    else:
        Console().print(draw(document) if request_id else listed(document["requests"]))


async def _get(url: str, key: str | None, path: str) -> Any:
    async with Client(url, key) as client:
        return await client.get(path)


def explained(found: dict[str, Any]) -> RenderableType:
    """Causes that add up, what would have helped, what it cost."""
    causes, changes, cost = (Table(box=None, pad_edge=False, show_header=False) for _ in range(3))
    for cause in found["causes"]:
        if cause["ms"]:
            bar = "█" * round(cause["share"] * 30)
            causes.add_row(f"{cause['ms']:.1f} ms", f"{cause['share']:.1%}", Text(cause["text"]), Text(bar))
    for change in found["changes"]:
        cheaper = f", {money(change['saved_microusd'])}" if change["saved_microusd"] else ""
        saved = f"-{change['saved_ms']:.1f} ms{cheaper}"
        changes.add_row(saved, Text(change["name"].replace("_", " ")), Text(change["basis"]))
    for kind in found["cost"]:
        cost.add_row(money(kind["microusd"]), f"{kind['num_tokens']} tokens", Text(kind["kind"].replace("_", " ")))
    head = Text(f"{found['request_id']}: {found['wall_ms']:.1f} ms, most of it {_text(found)}", style="bold")
    parts: list[RenderableType] = [head, causes]
    parts += [Text(found["cache"])] if found["cache"] else []
    parts += [Text("What would have changed it (estimates)", style="bold"), changes] if found["changes"] else []
    parts += [Text("What it cost", style="bold"), cost] if found["cost"] else []
    return Group(*parts)


def _text(found: dict[str, Any]) -> str:
    return next(str(cause["text"]) for cause in found["causes"] if cause["name"] == found["largest"])


def listed(requests: list[dict[str, Any]]) -> Table:
    """One line per request, newest first, as the server orders them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("at", no_wrap=True, min_width=8)
    table.add_column("request", no_wrap=True, min_width=28)  # an id that is cut can't be asked for
    table.add_column("ended", no_wrap=True, min_width=6)
    costs = [money(request["cost_microusd"]) if request["cost_microusd"] else "$0" for request in requests]
    for name, width in (("in", 4), ("out", 4), ("ms", 5), ("cost", max(map(len, costs), default=4))):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("model", no_wrap=True, overflow="ellipsis")
    for request, cost in zip(requests, costs, strict=True):
        received = datetime.fromtimestamp(request["received_at"]).astimezone()
        cells = [
            f"{received:%H:%M:%S}",
            request["request_id"],
            request["finish_reason"] or request["state"],
            str(request["usage"]["prompt_tokens"]),
            str(request["usage"]["completion_tokens"]),
            f"{request['wall_ms']:.0f}",
            cost,
            request["model"] or "",
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table
