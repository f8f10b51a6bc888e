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
    for name in ("received", "request", "model", "state", "finish"):
        table.add_column(name, no_wrap=name == "request", overflow="fold")  # an id that is cut can't be asked for
    for name in ("in", "out", "ms", "cost"):
        table.add_column(name, justify="right")
    for request in requests:
        received = datetime.fromtimestamp(request["received_at"]).astimezone()
        cells = [
            f"{received:%H:%M:%S}",
            request["request_id"],
            request["model"] or "",
            request["state"],
            request["finish_reason"] or "",
            str(request["usage"]["prompt_tokens"]),
            str(request["usage"]["completion_tokens"]),
            f"{request['wall_ms']:.0f}",
            money(request["cost_microusd"]),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table
