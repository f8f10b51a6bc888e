"""`hitsend limits`: what holds for everybody, above all organisations.

Enters: flags. Leaves: what was stored. Always true: it bounds the sum of all callers, anonymous ones too.
Next: `serve/access/rights.py`.
"""

import msgspec
import typer
from rich.console import Console

from hitsend.cli import CallFailed, options, principals
from hitsend.cli.database import with_database
from hitsend.cli.principals import Where
from hitsend.cli.terms import is_empty, taking_terms
from hitsend.core.clock import SystemClock
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.terms import TermsChange

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Set and show what holds for everybody."
)


@app.command("set")
@taking_terms
def change(
    *,
    terms: TermsChange,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Change what holds for everybody; what isn't named stays."""
    if is_empty(terms):
        raise CallFailed("nothing to set: give at least one of --rpm, --input-tpm, --usd-day, --models … (see --help)")
    changed = with_database(
        config, data, lambda database: PrincipalStore(database, SystemClock()).change("global", (), terms)
    )
    principals.answer(changed, Where(config, data, as_json), "The limits for everybody are changed.")


@app.command()
def show(config: options.Config = None, data: options.Data = None, as_json: options.Json = False) -> None:
    """Show what holds for everybody."""
    found = with_database(config, data, lambda database: PrincipalStore(database, SystemClock()).get("global", ()))
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    Console().print(principals.table([found]))
