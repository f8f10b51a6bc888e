"""`hitsend keys`: create, list and revoke API keys.

Enters: names and ids. Leaves: a new key, once, on stdout; or the keys' public parts. Always true: works with and
without a running server, which honours a change within two seconds; a secret is printed here and nowhere else.
Next: `serve/access/store.py`.
"""

import sys
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import options
from hitsend.cli.database import with_database
from hitsend.core.clock import SystemClock
from hitsend.serve.access.keys import KeyInfo
from hitsend.serve.access.store import KeyOwner, KeyStore

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Create, list and revoke API keys."
)


@app.command()
def create(
    name: Annotated[str, typer.Option("--name", help="What people call it; shown in records and in the ledger.")],
    org: Annotated[str | None, typer.Option("--org", help="Organisation it belongs to.")] = None,
    app_name: Annotated[str | None, typer.Option("--app", help="Application it belongs to.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="User it speaks for.")] = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Make a key and print it: the only time that its secret is shown."""
    owner = KeyOwner(name=name, user=user, app=app_name, org=org)
    made = with_database(config, data, lambda database: KeyStore(database, SystemClock()).create(owner))
    if as_json:
        print(msgspec.json.encode({"id": made.id, "key": made.key, "name": made.name}).decode())
        return
    print(made.key)
    print(f"Key {made.id} ({made.name}). Keep it now: it can't be shown again. Keys are required", file=sys.stderr)
    print("from now on, except on /healthz; a running server knows within two seconds.", file=sys.stderr)


@app.command("list")
def list_keys(config: options.Config = None, data: options.Data = None, as_json: options.Json = False) -> None:
    """Show all keys, revoked ones too; never a secret."""
    keys = with_database(config, data, lambda database: KeyStore(database, SystemClock()).list())
    if as_json:
        print(msgspec.json.encode(keys).decode())
        return
    if not keys:
        print("No key: the server answers this machine only, without asking who is there.", file=sys.stderr)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("id", "name", "org", "app", "user", "created", "revoked"):
        table.add_column(heading, overflow="fold")
    for key in keys:
        table.add_row(*(Text(cell) for cell in _cells(key)))
    Console().print(table)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id from `hitsend keys list`.")],
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """End a key, for good."""
    key = with_database(config, data, lambda database: KeyStore(database, SystemClock()).revoke(key_id))
    if as_json:
        print(msgspec.json.encode(key).decode())
        return
    print(f"Key {key.id} ({key.name}) is revoked; a running server knows within two seconds.", file=sys.stderr)


def _cells(key: KeyInfo) -> tuple[str, ...]:
    revoked = "" if key.revoked_at is None else _when(key.revoked_at)
    return (key.id, key.name, key.org or "", key.app or "", key.user or "", _when(key.created_at), revoked)


def _when(instant: float) -> str:
    return datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
