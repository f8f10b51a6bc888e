"""`/admin/usage`, `/admin/ledger`, `/admin/reconcile`: what was used, row by row, and whether the books agree.

Enters: GET exchanges of admins and readers. Leaves: JSON. Always true: an unknown or malformed field of the query is
refused by name; nothing is changed; rows come in bounded pages, each with the number to go on after.
Next: `../usage/statement.py`.
"""

from datetime import date
from typing import get_args
from urllib.parse import parse_qsl

from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.usage.books import Books
from hitsend.serve.usage.statement import By

DEFAULT_ROWS = 100
MAX_ROWS = 1000
MAX_SEQ = 2**63 - 1
_MAX_QUERY_BYTES = 1024


async def usage(exchange: Exchange) -> None:
    """A statement: `by` org, app, user, key, model, engine or day; `from` and `to` are UTC days, both included."""
    books = _books(exchange)
    asked = _query(exchange, "by", "from", "to")
    wanted = asked.get("by", "key")
    by: By | None = next((known for known in get_args(By) if known == wanted), None)
    if by is None:
        raise InvalidRequest(f"by: {wanted[:40]!r}, expected one of {', '.join(get_args(By))}", param="by")
    await exchange.answer_json(await books.statement(by, _day(asked, "from"), _day(asked, "to")))


async def ledger(exchange: Exchange) -> None:
    """Rows in the order of settlement, `limit` of them `after` a number; `next_after` is null on the last page."""
    books = _books(exchange)
    asked = _query(exchange, "from", "to", "limit", "after")
    limit = _number(asked, "limit", DEFAULT_ROWS, 1, MAX_ROWS)
    after = _number(asked, "after", 0, 0, MAX_SEQ)
    rows = await books.rows(since=_day(asked, "from"), until=_day(asked, "to"), after=after, limit=limit)
    following = rows[-1].seq if len(rows) == limit else None
    await exchange.answer_json({"object": "list", "data": rows, "next_after": following})


async def reconcile(exchange: Exchange) -> None:
    """Every check by name with both figures; `drifted` names those that don't hold."""
    books = _books(exchange)
    _query(exchange)
    await exchange.answer_json(await books.reconcile())


def _books(exchange: Exchange) -> Books:
    """Raises NotFound where this server keeps none."""
    books = exchange.services.books
    if books is None:
        raise NotFound("no ledger is kept here")
    return books


def _query(exchange: Exchange, *known: str) -> dict[str, str]:
    """The fields of the query, each once. Raises InvalidRequest."""
    raw: bytes = exchange.scope.get("query_string", b"")
    if len(raw) > _MAX_QUERY_BYTES:
        raise InvalidRequest(f"the query has {len(raw)} bytes, limit {_MAX_QUERY_BYTES}")
    asked: dict[str, str] = {}
    for name, value in parse_qsl(raw.decode("latin-1"), keep_blank_values=True):
        if name not in known or name in asked:
            fault = "given twice" if name in asked else f"unknown; known: {', '.join(known) or 'none'}"
            raise InvalidRequest(f"{name[:40]!r} in the query: {fault}", param=name[:40])
        asked[name] = value
    return asked


def _day(asked: dict[str, str], name: str) -> date | None:
    if name not in asked:
        return None
    try:
        return date.fromisoformat(asked[name])
    except ValueError:
        raise InvalidRequest(f"{name}: {asked[name][:40]!r} is no day, expected YYYY-MM-DD", param=name) from None


def _number(asked: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = asked.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise InvalidRequest(f"{name}: {text[:40]!r}, expected {least} to {most}", param=name)
    return int(text)
