"""`hitsend inspect`: what the running server remembers of its requests.

Enters: a request id, or nothing. Leaves: that request's record, or a list of the recent ones. Always true: with
`--json` the server's document is printed as it came. Next: `serve/api/inspect.py`, which answers.
"""

import asyncio
import json
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import options
from hitsend.cli.client import Client
from hitsend.cli.waterfall import draw, money

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def inspect(
    request_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Without it: the recent requests.")] = None,
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many recent requests.")] = 20,
) -> None:
    """Show one request's flight record, or list the recent ones."""
    path = f"/inspect/requests/{quote(request_id, safe='')}" if request_id else f"/inspect/requests?limit={limit}"
    document = asyncio.run(_get(url or options.DEFAULT_URL, key, path))
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        Console().print(draw(document) if request_id else listed(document["requests"]))


async def _get(url: str, key: str | None, path: str) -> Any:
    async with Client(url, key) as client:
        return await client.get(path)


def listed(requests: list[dict[str, Any]]) -> Table:
    """One line per request, newest first, as the server orders them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("at", no_wrap=True, min_width=8)
    table.add_column("request", no_wrap=True, min_width=28)  # an id that is cut can't be asked for
    table.add_column("ended", no_wrap=True, min_width=6)
    for name, width in (("in", 4), ("out", 4), ("ms", 5), ("cost", 9)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("model", no_wrap=True, overflow="ellipsis")
    for request in requests:
        received = datetime.fromtimestamp(request["received_at"]).astimezone()
        cells = [
            f"{received:%H:%M:%S}",
            request["request_id"],
            request["finish_reason"] or request["state"],
            str(request["usage"]["prompt_tokens"]),
            str(request["usage"]["completion_tokens"]),
            f"{request['wall_ms']:.0f}",
            money(request["cost_microusd"]),
            request["model"] or "",
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table
