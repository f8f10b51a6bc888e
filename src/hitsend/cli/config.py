"""`hitsend config`: every setting, its value, where that came from; and the page that documents them.

Enters: the same flags as `serve`. Leaves: a table, JSON, or Markdown. Always true: `docs/settings.md` is what `docs`
prints (a test compares them), meanings are the docstrings in `settings.py` and the modules that it is made of, and no
password is printed. Next: `settings_source.py`.
"""

import ast
import inspect
import json
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend import settings, settings_engines, settings_routes
from hitsend.cli import options
from hitsend.settings_source import Loaded, described, fields, shown

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Show every setting and where it came from."
)


@app.command()
def show(
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Print each setting's value and its source."""
    loaded = options.settings_from(config, sets, data=data)
    rows = effective(loaded)
    if as_json:
        print(json.dumps({"settings": rows}, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "value", "source"):
        table.add_column(name, overflow="fold")
    for key, row in rows.items():
        style = "" if row["source"] == "default" else "bold"
        table.add_row(Text(key), Text(json.dumps(row["value"], ensure_ascii=False)), Text(row["source"]), style=style)
    Console().print(table)


@app.command()
def docs() -> None:
    """Print the settings page (docs/settings.md)."""
    print(page(), end="")


def effective(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """key -> {value, source}, in the tree's order."""
    rows: dict[str, dict[str, Any]] = {}
    for key, _, _ in fields():
        value: Any = loaded.settings
        for name in key.split("."):
            value = getattr(value, name)
        rows[key] = {"value": shown(key, value), "source": loaded.sources.get(key, "default")}
    return rows


_HEAD = """# Settings

Written by `make docs` from `src/hitsend/settings.py`; don't edit. Later sources win: built-in default, `hitsend.toml`
(or `--config FILE`), environment `HITSEND__SECTION__FIELD`, flags (`--set section.field=value`, and short forms like
`--port`). An unknown or ill-typed setting stops the start and is named. `hitsend config show` prints the values in
force and where each came from. Lists are JSON, or texts with commas, in the environment and in flags.
"""


def page() -> str:
    """docs/settings.md, whole."""
    meanings = _meanings()
    titled = [(f"`[{field.name}]`", field.type) for field in msgspec.structs.fields(settings.Settings)]
    tables = (
        settings.ModelSettings,
        settings.SamplingPreset,
        settings.PooledSettings,
        settings.UpstreamSettings,
        settings.UpstreamPrices,
        settings.RouteSettings,
        settings.CanarySettings,
        settings.CascadeSettings,
        settings.AdapterSettings,
        settings.PriceSettings,
    )
    titled += [(table.__name__, table) for table in tables]
    return _HEAD + "".join(
        f"\n## {title}\n\n{_doc(section)}\n\n{_rows(section, meanings)}"
        for title, section in titled
        if isinstance(section, type) and issubclass(section, settings.Section)
    )


def _rows(section: type[msgspec.Struct], meanings: dict[tuple[str, str], str]) -> str:
    head = "| setting | type | default | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(_row(section.__name__, field, meanings) for field in msgspec.structs.fields(section))


def _row(section: str, field: msgspec.structs.FieldInfo, meanings: dict[tuple[str, str], str]) -> str:
    if field.required:
        default = "required"
    elif isinstance(field.default, settings.Section) or field.default_factory is not msgspec.NODEFAULT:
        default = "empty"
    else:
        default = f"`{json.dumps(msgspec.to_builtins(field.default))}`"
    return f"| `{field.name}` | {described(field.type)} | {default} | {meanings.get((section, field.name), '')} |\n"


def _doc(section: type) -> str:
    return inspect.getdoc(section) or ""


def _meanings() -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring under the field, which Python itself throws away."""
    found: dict[tuple[str, str], str] = {}
    modules = (settings, settings_engines, settings_routes)
    for node in (one for module in modules for one in ast.parse(inspect.getsource(module)).body):
        if isinstance(node, ast.ClassDef):
            for field, doc in zip(node.body, node.body[1:], strict=False):
                match field, doc:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[node.name, name] = " ".join(text.split())
    return found
