"""The flags that several commands share.

Enters: what was typed. Leaves: settings and where to call. Always true: a flag is only another way to write a setting,
so `--port 8001` and `--set server.port=8001` are the same. Next: `settings.py`.
"""

from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import typer

from hitsend.cli import CallFailed
from hitsend.core.errors import ConfigError
from hitsend.settings_source import Loaded, load_process

DEFAULT_URL = "http://127.0.0.1:8000"

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file; default ./hitsend.toml, if there.")
]
Data = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Ledger, keys and records; default .hitsend.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting; repeatable.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="PATH|NAME", help="GGUF file, a model's name, or hf:owner/repo[:file].")
]
Url = Annotated[str | None, typer.Option("--url", envvar="HITSEND_URL", help=f"The server; default {DEFAULT_URL}.")]
Key = Annotated[str | None, typer.Option("--key", envvar="HITSEND_KEY", help="API key, where the server wants one.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]


def days(since: datetime | None, until: datetime | None) -> tuple[date | None, date | None]:
    """What --from and --to mean. Raises CallFailed where the one is later than the other."""
    first, last = (None if day is None else day.date() for day in (since, until))
    if first is not None and last is not None and first > last:
        raise CallFailed(f"--from {first} is later than --to {last}")
    return first, last


def settings_from(
    config: Path | None, sets: list[str] | None, *, data: Path | None = None, **flags: str | None
) -> Loaded:
    """Settings with these flags on top; `flags` are keys with `__` for the dot. Raises ConfigError."""
    given: dict[str, str] = {}
    for text in sets or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"flag --set {text}: it must be SECTION.FIELD=VALUE")
        given[key.strip()] = value
    if data is not None:
        given["server.data_dir"] = str(data)
    given |= {key.replace("__", "."): value for key, value in flags.items() if value is not None}
    return load_process(config, given)
