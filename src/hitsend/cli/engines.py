"""`hitsend engines`: what the settings have for engines, and whether those elsewhere answer.

Enters: the same flags as `serve`. Leaves: a table or one JSON document; with `check`, exit status 1 where an upstream
isn't well. Always true: no key is printed; no server has to run, but for `diff`; `check` asks each server of each
upstream once, for a few tokens, and not at all with `--no-ask`. Next: `engines_diff.py`, `../serve/engine/probe.py`.
"""

import asyncio
import json
import textwrap
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import options
from hitsend.cli.client import Client
from hitsend.cli.engines_diff import compare, show
from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.models import NO_MODEL
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.probe import Probe, probe
from hitsend.serve.engine.terms import addresses, changes, drops, kind_of, terms_of
from hitsend.serve.upstreams import key_of
from hitsend.settings import PooledSettings, Settings
from hitsend.settings_upstreams import UpstreamBase

COLUMNS = 100
LEAST_COLUMNS = 80
"""Below, a table of five columns can't be read."""
PIPED_COLUMNS = 100_000
COLUMN_NAMES = ("name", "kind", "serves", "where", "key")

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="What runs requests, here and elsewhere."
)

NoAsk = Annotated[bool, typer.Option("--no-ask", help="Ask for no answer, which would cost a few tokens.")]
Only = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="These only; default all upstreams.")]


@app.command(name="list")
def list_engines(
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Print every engine of the settings: where it is, what it serves, what it leaves out or changes."""
    rows = [*_local(settings := options.settings_from(config, sets, data=data).settings), *_elsewhere(settings)]
    if as_json:
        print(json.dumps({"engines": rows}, ensure_ascii=False))
        return
    console = Console()
    if console.is_terminal and console.width < LEAST_COLUMNS:
        for row in rows:
            name, kind, *others = _cells(row)
            print("\n  ".join((f"{name} ({kind})", *map(": ".join, zip(COLUMN_NAMES[2:], others, strict=True)))))
        return
    table = Table(box=None, pad_edge=False)
    for heading in COLUMN_NAMES:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, _cells(row)))
    if not console.is_terminal:  # who reads it from a pipe wants an address in one piece
        console = Console(width=PIPED_COLUMNS)
    console.print(table)


@app.command()
def check(
    names: Only = None,
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
    no_ask: NoAsk = False,
    as_json: options.Json = False,
) -> None:
    """Reach every upstream, with its key; list its models; measure one time to first token; say what it changes."""
    settings = options.settings_from(config, sets, data=data).settings
    found = [one for one in settings.engines if isinstance(one, UpstreamBase) and (not names or one.name in names)]
    if strays := set(names or ()) - {one.name for one in found}:
        raise ConfigError(f"engines: none of the upstreams is called {min(strays)!r}")
    rows = asyncio.run(_check(found, asks=not no_ask))
    if as_json:
        print(json.dumps({"engines": rows}, ensure_ascii=False))
    else:
        _show(rows)
    if not all(row["is_well"] for row in rows):
        raise typer.Exit(1)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A model that the server serves.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What both are asked.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
) -> None:
    """Ask two models of a running server the same: prompts, counts, defaults, dropped fields, answers, prices."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}

    async def run() -> dict[str, Any]:
        async with Client(url or options.DEFAULT_URL, key) as client:
            return await compare(client, (first, second), body)

    document = asyncio.run(run())
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        show(document)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    serves = ", ".join(f"{ours} → {theirs}" for ours, theirs in (row["models"] | row["embedding_models"]).items())
    return row["name"], row["kind"], serves, ", ".join(row["base_urls"]) or "here", row["key"]


def _local(settings: Settings) -> list[dict[str, Any]]:
    """Engines of this machine."""
    found = []
    if settings.engine.model != NO_MODEL:
        found.append(("embedded", {settings.engine.alias or settings.engine.model: settings.engine.model}))
    pooled = [one for one in settings.engines if isinstance(one, PooledSettings)]
    found += [(one.name, dict.fromkeys(one.aliases or (one.model,), one.model)) for one in pooled]
    rest: dict[str, Any] = {"embedding_models": {}, "base_urls": [], "key": "", "drops": [], "changes": []}
    return [{"name": name, "kind": "embedded", "models": models} | rest for name, models in found]


def _elsewhere(settings: Settings) -> list[dict[str, Any]]:
    return [_row(one) | {"key": _key(one)} for one in settings.engines if isinstance(one, UpstreamBase)]


def _row(one: UpstreamBase) -> dict[str, Any]:
    terms = terms_of(one)
    return {
        "name": one.name,
        "kind": kind_of(one),
        "profile": terms.profile.name,
        "source": terms.profile.source,
        "models": one.models,
        "embedding_models": one.embedding_models,
        "base_urls": list(addresses(one)),
        "unsupported": one.unsupported,
        "drops": drops(terms),
        "changes": changes(terms),
    }


def _key(one: UpstreamBase) -> str:
    """Where the key comes from, and whether it is there: never what it is."""
    named = one.api_key_env or one.api_key_file
    if named is None:
        return "none"
    try:
        key_of(one)
    except ConfigError:
        return f"{named}: missing"
    return named


async def _check(found: Sequence[UpstreamBase], *, asks: bool) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(_check_one(one, asks=asks) for one in found)))


async def _check_one(one: UpstreamBase, *, asks: bool) -> dict[str, Any]:
    row = _row(one)
    try:
        key = key_of(one)
    except ConfigError as error:
        return row | {"is_well": False, "fault": str(error), "servers": []}
    servers: list[Probe] = []
    for url in addresses(one):
        # one engine per server, so that each is asked itself
        alone = msgspec.structs.replace(one, base_url=url, base_urls=(), draining=(), metrics_poll_s=0.0)
        engine = OpenAIEngine(alone, SystemClock(), key=key, salt=b"check")
        async with AsyncExitStack() as stack:
            await engine.start()
            stack.push_async_callback(engine.stop)
            servers.append(await probe(engine, engine.replicas.all[0], asks=asks))
    is_well = bool(servers) and all(server.is_well for server in servers)
    fault = None if servers else "it has no base_url"
    return row | {"is_well": is_well, "fault": fault, "servers": [msgspec.to_builtins(one) for one in servers]}


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['name']} ({row['kind']}, profile {row['profile']}): {'well' if row['is_well'] else 'NOT well'}")
        if row["fault"]:
            print(f"  {row['fault']}")
        for server in row["servers"]:
            print(f"  {server['base_url']}")
            print(f"    reaches {_yes(server['reaches'])}, authenticates {_yes(server['authenticates'])}")
            for name, is_listed in (server["listed"] or {}).items():
                print(f"    {name}: {'listed' if is_listed else 'not in its list of models'}")
            if server["ttft_ms"] is not None:
                usage = "gives usage" if server["gives_usage"] else "no usage: counted here, rows flagged as estimates"
                print(f"    first token after {server['ttft_ms']:.0f} ms, {usage}")
            if server["fault"]:
                print(f"    {server['fault']}")
        word = "refuses" if row["unsupported"] == "refuse" else "leaves out"
        dropped = f"  {word}: {', '.join(row['drops']) or 'nothing'}"
        print(textwrap.fill(dropped, COLUMNS, subsequent_indent="    ", break_on_hyphens=False))
        for change in row["changes"]:
            print(f"  changes {change}")


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "unknown"}[value]
