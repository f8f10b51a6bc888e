"""`hitsend orgs`: organisations, what is granted to them, and whether they are let in.

Enters: names and flags. Leaves: what was stored. Always true: as in `principals.py`, which does the work.
Next: `apps.py`.
"""

from typing import Annotated

import typer

from hitsend.cli import options, principals
from hitsend.cli.principals import Where
from hitsend.cli.terms import taking_terms
from hitsend.serve.access.terms import TermsChange

app = principals.app_of("org")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The organisation's name.")]


@app.command()
@taking_terms
def create(
    *,
    name: _Name,
    terms: TermsChange,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Make an organisation. Keys may name it before or after."""
    principals.create("org", principals.path(name), terms, Where(config, data, as_json))


@app.command("list")
def list_all(config: options.Config = None, data: options.Data = None, as_json: options.Json = False) -> None:
    """Show all of them, disabled ones too."""
    principals.show_all("org", Where(config, data, as_json))


@app.command("set")
@taking_terms
def change(
    *,
    name: _Name,
    terms: TermsChange,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Change what is granted; what isn't named stays."""
    principals.change("org", principals.path(name), terms, Where(config, data, as_json))


@app.command()
def disable(
    name: _Name,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Refuse every key beneath it, until it is enabled."""
    principals.switch("org", principals.path(name), Where(config, data, as_json), is_disabled=True)


@app.command()
def enable(
    name: _Name,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Let its keys in again."""
    principals.switch("org", principals.path(name), Where(config, data, as_json), is_disabled=False)
