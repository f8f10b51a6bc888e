"""Where settings come from: defaults, a file, the environment and flags, folded into one tree.

Enters: built-in defaults, `hitsend.toml`, `HITSEND__SECTION__FIELD` environment variables and flags; later ones win.
Leaves: one `Settings`, and the source of each value. Always true: an unknown or ill-typed setting is a `ConfigError`
that names it, its source and what would be right; `os.environ` is read in this file and nowhere else; what a variable
named by a setting holds (a key) never enters the tree. Next: `serve/app.py`, which builds everything from it.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.settings import Section, Settings


class Loaded(msgspec.Struct, frozen=True):
    """The settings, and where each one that isn't a default came from (key -> source, in words)."""

    settings: Settings
    sources: dict[str, str] = {}


def fields(section: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every setting of the tree as (key, type, default), in order. `[[models]]` and other tables count as one each."""
    for field in msgspec.structs.fields(section):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from fields(field.type, f"{key}.")
        else:
            yield key, field.type, field.default


def load(
    config: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Loaded:
    """Fold into one tree: defaults < `config` (TOML) < `env` < `flags` (key -> text). Raises ConfigError."""
    types = {key: kind for key, kind, _ in fields()}
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for given in _all(config, env or {}, flags or {}):
        key = given.key
        if key not in types:
            raise ConfigError(f"{given.source}: there is no setting {key}{_nearest(key, types)}")
        *section, name = key.split(".")
        (tree.setdefault(section[0], {}) if section else tree)[name] = _typed(given, types[key])
        sources[key] = given.source
    return Loaded(msgspec.convert(tree, Settings, from_attributes=True), sources)


def load_process(config: Path | None = None, flags: Mapping[str, str] | None = None) -> Loaded:
    """`load` with this process's environment; without `config`, the working folder's `hitsend.toml` if there is one."""
    if config is None and Path("hitsend.toml").is_file():
        config = Path("hitsend.toml")
    return load(config, os.environ, flags)


def secret(variable: str) -> str | None:
    """What an environment variable that a setting names holds: never kept in the tree, so never printed with it."""
    return os.environ.get(variable) or None


def shown(key: str, value: Any) -> Any:
    """A value as it may be printed: passwords inside URLs are masked."""
    if key == "engines":
        text = msgspec.json.encode(value).decode()
        return msgspec.json.decode(re.sub(r"(://)[^@/\"]*@", r"\1***@", text))
    if key == "tracing.otlp_url" and isinstance(value, str):  # there a name without a password may be a token
        return re.sub(r"(://)[^@/]*@", r"\1***@", value)
    if key in ("usage.url", "access.quota_url") and isinstance(value, str):
        return re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", value)
    return msgspec.to_builtins(value)


def described(kind: Any) -> str:
    """A setting's type in words: `integer, at least 1`, `one of "pretty", "json"`, `text or nothing`."""
    if get_origin(kind) in (UnionType, Union):
        return f"{described(get_args(kind)[0])} or nothing"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is Annotated:
        base, meta = get_args(kind)
        words = (
            f"{described(base)} above {meta.gt}" if meta.gt is not None else f"{described(base)}, at least {meta.ge}"
        )
        return words if meta.le is None else f"{words} and at most {meta.le}"
    if get_origin(kind) is dict:
        return "table of texts" if get_args(kind)[1] is str else "table of numbers"
    if get_origin(kind) is tuple:
        return "list of texts" if get_args(kind)[0] is str else "array of tables"
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind.__name__
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[kind]


class _Given(msgspec.Struct, frozen=True):
    """One setting from one source; `is_text` when it may have to be read as a number, a truth value, a list or JSON."""

    key: str
    value: Any
    source: str
    is_text: bool = True


def _all(config: Path | None, env: Mapping[str, str], flags: Mapping[str, str]) -> Iterator[_Given]:
    if config is not None:
        yield from _from_file(config)
    meant = {f"HITSEND_{key}".replace(".", "_").upper(): key for key, _, _ in fields()}
    for name in sorted(env):
        if name.startswith("HITSEND__"):
            yield _Given(name.removeprefix("HITSEND__").replace("__", ".").lower(), env[name], f"environment {name}")
        elif name in meant:
            right = f"HITSEND__{meant[name]}".replace(".", "__").upper()
            raise ConfigError(f"environment {name}: is read by nobody; it is written {right}")
    for key, text in flags.items():
        yield _Given(key, text, f"flag {key}")


def _from_file(path: Path) -> Iterator[_Given]:
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML ({error})") from error
    for name, value in tree.items():
        inner = {f"{name}.{field}": held for field, held in value.items()} if isinstance(value, dict) else {name: value}
        for key, held in inner.items():
            yield _Given(key, held, str(path), is_text=False)


def _typed(given: _Given, kind: Any) -> Any:
    """The value as `kind`, or a ConfigError that says what would be right."""
    try:
        value = _from_text(given.value, kind) if given.is_text else given.value
        value = _of_a_kind(value) if given.key == "engines" else value
        typed = msgspec.convert(value, kind, strict=not given.is_text)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise _wrong(given, kind, str(error)) from error
    if isinstance(typed, float) and not math.isfinite(typed):
        raise _wrong(given, kind, "not finite")
    return typed


def _wrong(given: _Given, kind: Any, detail: str) -> ConfigError:
    right = described(kind)
    if right == "array of tables":  # its values aren't shown: somebody may have written a key into one
        what, _, where = detail.replace("`", "").partition(" - at $")
        right = "" if where else f" (it must be {right})"
        return ConfigError(f"{given.source}: {given.key}{where}: {what}{right}")
    return ConfigError(f"{given.source}: {given.key} can't be {shown(given.key, given.value)!r}, it must be {right}")


def _from_text(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind == str | None:
        return text or None
    if get_origin(kind) is not tuple:
        return text
    if get_args(kind)[0] is str and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    return msgspec.json.decode(text)


def _of_a_kind(tables: Any) -> Any:
    """`[[engines]]` without a kind are upstreams, which came first."""
    if not isinstance(tables, list):
        return tables
    return [{"kind": "openai"} | table if isinstance(table, dict) else table for table in tables]


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    table = key.partition(".")[0]
    if table in known and described(known[table]) == "array of tables":
        return f"; {table} are several, each begins with [[{table}]]"
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else " (`hitsend config show` lists them all)"
