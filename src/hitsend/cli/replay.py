"""`hitsend replay`: ask a recorded request again, with something changed, and show where the answers part.

Enters: a request id of the running server, or a file of `hitsend inspect ID --export`; changed fields. Leaves: for each
choice the first token that differs, with the text around it. Always true: the request runs as any other
does, with limits and a bill; the recorded one is left as it is. Next: `../inspect/replay.py`.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from hitsend.cli import options
from hitsend.cli.client import Client
from hitsend.core.errors import ConfigError
from hitsend.inspect.replay import Comparison, Export, body_of, compare, export_of, read_export

app = typer.Typer(add_completion=False, rich_markup_mode=None)

FIXED = ("prompt", "n", "stream", "echo")
"""What makes two answers comparable."""


@app.command()
def replay(
    what: Annotated[str, typer.Argument(metavar="ID|FILE", help="A request, or an export of one.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A field of /v1/completions to change; repeatable."),
    ] = None,
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
) -> None:
    """Run a recorded request again, perhaps with a changed setting; show where it differs."""
    path, fields = Path(what), changed(changes or [])
    export = read_export(path.read_bytes(), what) if path.is_file() else None
    found = asyncio.run(_replay(export, what, fields, url or options.DEFAULT_URL, key))
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        Console().print(shown(found))


def changed(given: list[str]) -> dict[str, Any]:
    """FIELD=VALUE, the value as JSON where it is some. Raises ConfigError."""
    fields: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in FIXED:
            raise ConfigError(f"flag --set {text}: it must be FIELD=VALUE, and none of {', '.join(FIXED)}")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


async def _replay(
    export: Export | None, request_id: str, changes: dict[str, Any], url: str, key: str | None
) -> dict[str, Any]:
    async with Client(url, key) as client:
        if export is None:
            record = await client.get(f"/inspect/requests/{quote(request_id, safe='')}")
            export = export_of(record, has_texts=False)
        await client.post("/v1/completions", body_of(export, changes))
        replayed_as = client.request_id or ""
        record = await client.get(f"/inspect/requests/{quote(replayed_as, safe='')}")
        choices = [await _told(client, export, each) for each in compare(export, record)]
        return {
            "request_id": export.request_id,
            "replayed_as": replayed_as,
            "model": export.model,
            "changes": changes,
            "is_same": all(choice["at"] is None for choice in choices),
            "choices": choices,
        }


async def _told(client: Client, export: Export, found: Comparison) -> dict[str, Any]:
    """With the text of what is around the difference."""
    told: dict[str, Any] = msgspec.to_builtins(found)
    for name in ("before", "recorded", "replayed"):
        tokens = list(getattr(found, name))
        answer = (
            await client.post("/detokenize", {"model": export.model, "tokens": tokens}) if tokens else {"content": ""}
        )
        told[f"{name}_text"] = answer["content"]
    return told


def shown(found: dict[str, Any]) -> RenderableType:
    """For a person."""
    changes = ", ".join(f"{name}={json.dumps(value)}" for name, value in found["changes"].items()) or "nothing"
    parts: list[RenderableType] = [
        Text(f"{found['request_id']} again as {found['replayed_as']}, changed: {changes}", style="bold")
    ]
    for choice in found["choices"]:
        name = f"choice {choice['choice']}: "
        if choice["at"] is None:
            parts.append(Text(f"{name}the same {choice['num_recorded']} tokens"))
            continue
        step = "" if choice["step"] is None else f", step {choice['step']} of the engine"
        parts.append(Text(f"{name}the first {choice['at']} tokens are the same; token {choice['at']} differs{step}"))
        for label in ("before", "recorded", "replayed"):
            text = choice[f"{label}_text"]
            parts.append(Text(f"  {label:<9} {json.dumps(text, ensure_ascii=False) if text else '(ended)'}"))
    return Group(*parts)
