"""`hitsend orgs`, `apps` and `users`: create, list, set, disable, enable. One group of commands, made for each kind.

Enters: names and flags. Leaves: what was stored, on stdout with `--json`, else as a table. Always true: works with and
without a running server, which honours a change within two seconds; nothing is ever deleted.
Next: `serve/access/principals.py`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import CallFailed, options
from hitsend.cli.database import with_database
from hitsend.cli.terms import is_empty, taking_terms
from hitsend.core.clock import SystemClock
from hitsend.serve.access.principals import PrincipalInfo, PrincipalKind, PrincipalStore
from hitsend.serve.access.terms import TermsChange

WORDS: dict[PrincipalKind, str] = {"org": "organisation", "app": "application", "user": "user"}


class Where(msgspec.Struct, frozen=True):
    """The database that a command works on, and how it answers."""

    config: Path | None
    data: Path | None
    as_json: bool


_ABOVE: dict[PrincipalKind, tuple[str, ...]] = {"org": (), "app": ("org",), "user": ("org", "app")}
"""The levels that each kind belongs to, from the outermost."""


def group(kind: PrincipalKind) -> typer.Typer:
    """The commands of one kind."""
    words = WORDS[kind]
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help=f"Create, list, change and disable {words}s.",
    )
    made = f"Make an {words}" if words[0] in "ao" else f"Make a {words}"
    app.command("create", help=f"{made}. Keys may name it before or after.")(taking_terms(_placed(kind, create)))
    app.command("list", help="Show all of them, disabled ones too.")(_listing(kind))
    app.command("set", help="Change what is granted; what isn't named stays.")(taking_terms(_placed(kind, change)))
    disabling, enabling = (partial(switch, is_disabled=is_disabled) for is_disabled in (True, False))
    app.command("disable", help="Refuse every key beneath it, until it is enabled.")(_placed(kind, disabling))
    app.command("enable", help="Let its keys in again.")(_placed(kind, enabling))
    return app


def _listing(kind: PrincipalKind) -> Callable[..., None]:
    def listing(config: options.Config = None, data: options.Data = None, as_json: options.Json = False) -> None:
        show_all(kind, Where(config, data, as_json))

    return listing


def _placed(kind: PrincipalKind, work: Callable[..., None]) -> Callable[..., None]:
    """`work(kind, path, where, ...)` as a command with NAME, a flag for each level above it, and where it is stored."""

    def placed(**given: Any) -> None:
        names = path(*(given.pop(level) for level in _ABOVE[kind]), given.pop("name"))
        where = Where(given.pop("config"), given.pop("data"), given.pop("as_json"))
        work(kind, names, where, **given)

    parameters = [_flag("name", Annotated[str, typer.Argument(metavar="NAME", help=f"The {WORDS[kind]}'s name.")], ...)]
    for level in _ABOVE[kind]:
        words = WORDS["org" if level == "org" else "app"]
        option = typer.Option(f"--{level}", help=f"The {words} that it belongs to.")
        parameters.append(_flag(level, Annotated[str | None, option], None))
    if "terms" in inspect.signature(work).parameters:
        parameters.append(_flag("terms", TermsChange, ...))
    for name, annotation in (("config", options.Config), ("data", options.Data)):
        parameters.append(_flag(name, annotation, None))
    parameters.append(_flag("as_json", options.Json, default=False))
    # typer and `taking_terms` read a command's flags from both
    placed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # any function has it
    placed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return placed


def _flag(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def path(*names: str | None) -> tuple[str, ...]:
    """Names as a path; those that aren't given are empty."""
    return tuple(name or "" for name in names)


def create(kind: PrincipalKind, names: tuple[str, ...], where: Where, terms: TermsChange) -> None:
    """Store a new one and say so."""
    made = with_database(where.config, where.data, lambda database: _store(database).create(kind, names, terms))
    answer(made, where, f"{WORDS[kind].capitalize()} {made.id} is made.")


def change(kind: PrincipalKind, names: tuple[str, ...], where: Where, terms: TermsChange) -> None:
    """Change its terms and show them."""
    if is_empty(terms):
        raise CallFailed("nothing to set: give at least one of --rpm, --input-tpm, --usd-day, --models … (see --help)")
    changed = with_database(where.config, where.data, lambda database: _store(database).change(kind, names, terms))
    answer(changed, where, f"{WORDS[kind].capitalize()} {changed.id} is changed.")


def switch(kind: PrincipalKind, names: tuple[str, ...], where: Where, *, is_disabled: bool) -> None:
    """Disable or enable it."""
    nothing = TermsChange()
    changed = with_database(
        where.config,
        where.data,
        lambda database: _store(database).change(kind, names, nothing, is_disabled=is_disabled),
    )
    state = "disabled: every key beneath it is refused" if is_disabled else "enabled"
    answer(changed, where, f"{WORDS[kind].capitalize()} {changed.id} is {state}.")


def show_all(kind: PrincipalKind, where: Where) -> None:
    """List them."""
    found = with_database(where.config, where.data, lambda database: _store(database).list(kind))
    if where.as_json:
        print(msgspec.json.encode(found).decode())
        return
    Console().print(table(found))


def answer(shown: PrincipalInfo, where: Where, words: str) -> None:
    """One document, or a table and a sentence."""
    if where.as_json:
        print(msgspec.json.encode(shown).decode())
        return
    Console().print(table([shown]))
    print(f"{words} A running server knows within two seconds.", file=sys.stderr)


def table(found: Sequence[PrincipalInfo]) -> Table:
    """One line for each."""
    rows = [
        (
            *(one.org or "", one.app or "", one.user or "", limits_text(one.limits), models_text(one.models)),
            *(tiers_text(one.tier, one.max_tier), "yes" if one.disabled_at is not None else ""),
        )
        for one in found
    ]
    return columns(("org", "app", "user", "limits", "models", "tier", "disabled"), rows)


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of those columns in which anything stands."""
    drawn = Table(box=None, pad_edge=False)
    shown = [number for number in range(len(headings)) if any(row[number] for row in rows)]
    for number in shown:
        drawn.add_column(headings[number], overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(row[number]) for number in shown))
    return drawn


def limits_text(limits: dict[str, int | str]) -> str:
    """Limits in one cell, by their flags, one below the other."""
    return "\n".join(f"{_FLAGS.get(name, name)} {value}" for name, value in limits.items())


_FLAGS = {
    "requests_per_minute": "rpm",
    "input_tokens_per_minute": "input-tpm",
    "output_tokens_per_minute": "output-tpm",
    "parallel_requests": "parallel",
    "tokens_per_request": "request-tokens",
    "usd_per_day": "usd-day",
    "usd_per_month": "usd-month",
}


def models_text(models: tuple[str, ...] | None) -> str:
    """Models in one cell."""
    return "" if models is None else ", ".join(models) or "none"


def tiers_text(tier: int | None, max_tier: int | None) -> str:
    """A tier, and the best one that may be asked for."""
    own = "" if tier is None else str(tier)
    return own if max_tier is None else f"{own} (best {max_tier})".strip()


def _store(database: Any) -> PrincipalStore:
    return PrincipalStore(database, SystemClock())
