"""`hitsend keys`: create, list, change, rotate and revoke API keys.

Enters: names, ids and flags. Leaves: a new key, once, on stdout; or the keys' public parts. Always true: works with and
without a running server, which honours a change within two seconds; a secret is printed here and nowhere else.
Next: `serve/access/store.py`.
"""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hitsend.cli import CallFailed, options
from hitsend.cli.database import with_database
from hitsend.cli.principals import columns, limits_text, models_text, tiers_text
from hitsend.cli.terms import NONE, names_in, taking_terms
from hitsend.core.clock import SystemClock
from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Role
from hitsend.serve.access.keys import KeyInfo, NewKey
from hitsend.serve.access.store import KeyChange, KeyOwner, KeyStore
from hitsend.serve.access.terms import TermsChange, instant, seconds
from hitsend.serve.api.policy import check_endpoints

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Create, list, change, rotate and revoke API keys.",
)

_Id = Annotated[str, typer.Argument(metavar="ID", help="The id from `hitsend keys list`.")]
_Role = Annotated[
    Role | None, typer.Option("--role", help="admin: everything; reader: looks at everything; caller: its own.")
]
_Endpoints = Annotated[
    str | None, typer.Option("--endpoints", metavar="A,B", help="The only routes (or what they begin with); none: all.")
]
_Expires = Annotated[
    str | None,
    typer.Option("--expires", metavar="WHEN", help="30d, 12h, 2030-01-31 or 2030-01-31T12:00Z; none: never."),
]


@app.command()
@taking_terms
def create(
    *,
    name: Annotated[str, typer.Option("--name", help="What people call it; shown in records and in the ledger.")],
    terms: TermsChange,
    org: Annotated[str | None, typer.Option("--org", help="Organisation it belongs to.")] = None,
    app_name: Annotated[str | None, typer.Option("--app", help="Application it belongs to.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="User it speaks for.")] = None,
    role: _Role = None,
    endpoints: _Endpoints = None,
    expires: _Expires = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Make a key and print it: the only time that its secret is shown."""
    owner = KeyOwner(name=name, user=user, app=app_name, org=org)
    change = _change(terms, role, endpoints, expires)
    made = with_database(config, data, lambda database: _store(database).create(owner, change))
    _show_secret(made, as_json)
    if not as_json:
        print("Keys are required from now on, except on /healthz; a running server knows within", file=sys.stderr)
        print("two seconds.", file=sys.stderr)


@app.command("list")
def list_keys(config: options.Config = None, data: options.Data = None, as_json: options.Json = False) -> None:
    """Show all keys, revoked ones too; never a secret."""
    keys = with_database(config, data, lambda database: _store(database).list())
    if as_json:
        print(msgspec.json.encode(keys).decode())
        return
    if not keys:
        print("No key: the server answers this machine only, without asking who is there.", file=sys.stderr)
        return
    Console().print(_table(keys))


@app.command("set")
@taking_terms
def change(
    *,
    key_id: _Id,
    terms: TermsChange,
    name: Annotated[str | None, typer.Option("--name", help="What people call it.")] = None,
    role: _Role = None,
    endpoints: _Endpoints = None,
    expires: _Expires = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Change what a key may do; what isn't named stays."""
    asked = _change(terms, role, endpoints, expires)
    if name is not None:
        asked = msgspec.structs.replace(asked, name=name)
    if asked == KeyChange():
        raise CallFailed("nothing to set: give at least one of --role, --rpm, --usd-day, --expires … (see --help)")
    changed = with_database(config, data, lambda database: _store(database).change(key_id, asked))
    if as_json:
        print(msgspec.json.encode(changed).decode())
        return
    Console().print(_table((changed,)))
    print(f"Key {changed.id} is changed; a running server knows within two seconds.", file=sys.stderr)


@app.command()
def rotate(
    key_id: _Id,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="How long the present secret is good beside the new one.")
    ] = "0",
    expires: _Expires = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Give a key another secret and print it. Its id, limits, spending and records stay."""
    lasting, ends_at = _read(seconds, "--overlap", overlap), None if expires is None else _expiry(expires)
    made = with_database(config, data, lambda database: _store(database).rotate(key_id, lasting, ends_at))
    _show_secret(made, as_json)
    if not as_json:
        until = f"is good for {overlap} more" if lasting else "is refused from now on"
        print(f"The secret before it {until}.", file=sys.stderr)


@app.command()
def revoke(
    key_id: _Id,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """End a key, for good."""
    key = with_database(config, data, lambda database: _store(database).revoke(key_id))
    if as_json:
        print(msgspec.json.encode(key).decode())
        return
    print(f"Key {key.id} ({key.name}) is revoked; a running server knows within two seconds.", file=sys.stderr)


def _change(terms: TermsChange, role: Role | None, endpoints: str | None, expires: str | None) -> KeyChange:
    fields: dict[str, Any] = msgspec.structs.asdict(terms)
    if role is not None:
        fields["role"] = role
    if endpoints is not None:
        fields["endpoints"] = None if endpoints == NONE else names_in("--endpoints", endpoints)
        try:
            check_endpoints(fields["endpoints"] or ())
        except InvalidRequest as error:
            raise CallFailed(f"--{error.message}") from error
    if expires is not None:
        fields["expires_at"] = None if expires == NONE else _expiry(expires)
    return KeyChange(**fields)


def _expiry(text: str) -> float:
    return _read(partial(instant, now=SystemClock().wall()), "--expires", text)


def _read(reader: Callable[[str, str], float], flag: str, text: str) -> float:
    """What was typed, or one line that names the flag."""
    try:
        return reader(flag, text)
    except InvalidRequest as error:
        raise CallFailed(error.message) from error


def _show_secret(made: NewKey, as_json: bool) -> None:
    if as_json:
        shown = {"id": made.id, "key": made.key, "name": made.name, "expires_at": made.expires_at}
        print(msgspec.json.encode(shown).decode())
        return
    print(made.key)
    print(f"Key {made.id} ({made.name}). Keep it now: it can't be shown again.", file=sys.stderr)


def _table(keys: tuple[KeyInfo, ...]) -> Table:
    headings = ("id", "name", "org", "app", "user", "role", "limits", "models", "endpoints", "tier", "created", "state")
    return columns((*headings, "last used"), [_cells(key) for key in keys])


def _cells(key: KeyInfo) -> tuple[str, ...]:
    allowed = (limits_text(key.limits), models_text(key.models), models_text(key.endpoints))
    return (
        *(key.id, key.name, key.org or "", key.app or "", key.user or "", key.role),
        *(*allowed, tiers_text(key.tier, key.max_tier), _when(key.created_at), _state(key), _when(key.last_used_at)),
    )


def _state(key: KeyInfo) -> str:
    now = SystemClock().wall()
    if key.revoked_at is not None:
        return f"revoked {_when(key.revoked_at)}"
    if key.expires_at is not None:
        return f"{'expired' if key.expires_at <= now else 'until'} {_when(key.expires_at)}"
    if key.overlap_until is not None and key.overlap_until > now:
        return f"old secret until {_when(key.overlap_until)}"
    return ""


def _when(instant: float | None) -> str:
    return "" if instant is None else datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%MZ")


def _store(database: Any) -> KeyStore:
    return KeyStore(database, SystemClock())
