"""The query of a GET: its fields by name, and what they say.

Enters: an exchange. Leaves: values. Always true: a field that the route doesn't know, one given twice, one out of
range: each is refused by name. Next: `admin_books.py`.
"""

import math
from datetime import date
from urllib.parse import parse_qsl

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api.exchange import Exchange

MAX_QUERY_BYTES = 2048

Asked = dict[str, str]


def query(exchange: Exchange, *known: str) -> Asked:
    """The fields of the query, each once. Raises InvalidRequest."""
    raw: bytes = exchange.scope.get("query_string", b"")
    if len(raw) > MAX_QUERY_BYTES:
        raise InvalidRequest(f"the query has {len(raw)} bytes, limit {MAX_QUERY_BYTES}")
    asked: Asked = {}
    for name, value in parse_qsl(raw.decode("latin-1"), keep_blank_values=True):
        if name not in known or name in asked:
            fault = "given twice" if name in asked else f"unknown; known: {', '.join(known) or 'none'}"
            raise InvalidRequest(f"{name[:40]!r} in the query: {fault}", param=name[:40])
        if "\0" in value:  # PostgreSQL takes it for a fault of its caller's, not for a text that isn't there
            raise InvalidRequest(f"{name}: a zero byte is part of no name", param=name)
        asked[name] = value
    return asked


def day(asked: Asked, name: str) -> date | None:
    """A UTC day. Raises InvalidRequest."""
    if name not in asked:
        return None
    try:
        return date.fromisoformat(asked[name])
    except ValueError:
        raise InvalidRequest(f"{name}: {asked[name][:40]!r} is no day, expected YYYY-MM-DD", param=name) from None


def days(asked: Asked) -> tuple[date | None, date | None]:
    """`from` and `to`, both included. Raises InvalidRequest where no day lies between them, too."""
    first, last = day(asked, "from"), day(asked, "to")
    if first is not None and last is not None and first > last:
        raise InvalidRequest(f"from: {first} is later than to, {last}", param="from")
    return first, last


def number(asked: Asked, name: str, least: int, most: int) -> int | None:
    """A whole number between the two. Raises InvalidRequest."""
    text = asked.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise InvalidRequest(f"{name}: {text[:40]!r}, expected {least} to {most}", param=name)
    return int(text)


def amount(asked: Asked, name: str, most: float) -> float | None:
    """A number from 0 to `most`, perhaps broken. Raises InvalidRequest."""
    text = asked.get(name)
    if text is None:
        return None
    try:
        value = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise InvalidRequest(f"{name}: {text[:40]!r}, expected 0 to {most:g}", param=name)
    return value


def words(asked: Asked, name: str, most: int) -> str | None:
    """A text of 1 to `most` characters. Raises InvalidRequest."""
    text = asked.get(name)
    if text is not None and not 1 <= len(text) <= most:
        raise InvalidRequest(f"{name} has {len(text)} characters, expected 1 to {most}", param=name)
    return text
