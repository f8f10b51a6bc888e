"""`/admin/usage`, `/admin/ledger`, `/admin/reconcile`: what was used, row by row, and whether the books agree.

Enters: GET exchanges of admins and readers. Leaves: JSON. Always true: an unknown or malformed field of the query is
refused by name; nothing is changed; rows come in bounded pages, each with the number to go on after.
Next: `../usage/statement.py`.
"""

from typing import get_args

from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.query import days, number, query
from hitsend.serve.usage.books import Books
from hitsend.serve.usage.statement import By

DEFAULT_ROWS = 100
MAX_ROWS = 1000
MAX_SEQ = 2**63 - 1


async def usage(exchange: Exchange) -> None:
    """A statement: `by` org, app, user, key, model, engine or day; `from` and `to` are UTC days, both included."""
    books = _books(exchange)
    asked = query(exchange, "by", "from", "to")
    wanted = asked.get("by", "key")
    by: By | None = next((known for known in get_args(By) if known == wanted), None)
    if by is None:
        raise InvalidRequest(f"by: {wanted[:40]!r}, expected one of {', '.join(get_args(By))}", param="by")
    await exchange.answer_json(await books.statement(by, *days(asked)))


async def ledger(exchange: Exchange) -> None:
    """Rows in the order of settlement, `limit` of them `after` a number; `next_after` is null on the last page."""
    books = _books(exchange)
    asked = query(exchange, "from", "to", "limit", "after")
    limit = number(asked, "limit", 1, MAX_ROWS) or DEFAULT_ROWS
    after = number(asked, "after", 0, MAX_SEQ) or 0
    since, until = days(asked)
    rows = await books.rows(since=since, until=until, after=after, limit=limit)
    following = rows[-1].seq if len(rows) == limit else None
    await exchange.answer_json({"object": "list", "data": rows, "next_after": following})


async def reconcile(exchange: Exchange) -> None:
    """Every check by name with both figures; `drifted` names those that don't hold."""
    books = _books(exchange)
    query(exchange)
    await exchange.answer_json(await books.reconcile())


def _books(exchange: Exchange) -> Books:
    """Raises NotFound where this server keeps none."""
    books = exchange.services.books
    if books is None:
        raise NotFound("no ledger is kept here")
    return books
