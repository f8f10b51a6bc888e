"""`/inspect/usage`: what the caller used, what it cost by kind of token, and what is left of its budgets.

Enters: GET requests. Leaves: JSON. Always true: a caller sees the rows of its own key and the budgets above itself; who
sees all sees every row, and of budgets every level's that has one. Next: `inspect.py`.
"""

from typing import get_args

import msgspec

from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.core.limits import Level
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.inspect_search import own_key
from hitsend.serve.api.policy import sees_all
from hitsend.serve.api.query import days, query
from hitsend.serve.usage.statement import By


async def usage(exchange: Exchange) -> None:
    """Cost and tokens `by` org, app, user, key, model, engine or day, and budgets; `from` and `to` are UTC days."""
    books = exchange.services.books
    if books is None:
        raise NotFound("no ledger is kept here")
    asked = query(exchange, "by", "from", "to")
    wanted = asked.get("by", "day")
    by: By | None = next((known for known in get_args(By) if known == wanted), None)
    if by is None:
        raise InvalidRequest(f"by: {wanted[:40]!r}, expected one of {', '.join(get_args(By))}", param="by")
    found = await books.spent(by, own_key(exchange), *days(asked))
    levels, names = await _levels(exchange)
    budgets = [
        msgspec.to_builtins(budget) | {"name_of_key": names.get(budget.level)}
        for budget in await books.budgets(tuple(levels))
    ]
    await exchange.answer_json(msgspec.to_builtins(found) | {"budgets": budgets})


MAX_BUDGETS = 100
"""Levels whose budgets are told at once to who sees all: each is a sum over the ledger."""


async def _levels(exchange: Exchange) -> tuple[list[Level], dict[str, str]]:
    """Levels with budgets, and the names of those that are keys, by the levels' titles."""
    principal, admin = exchange.principal, exchange.services.admin
    if not sees_all(principal) or admin is None:
        levels, names = list(principal.levels), {f"key {principal.key_id}": principal.name}
    else:
        keys = await admin.keys.load()
        levels = [Level(one.kind, one.path, one.terms.limits) for one in await admin.principals.load()]
        levels += [Level("key", (one.key_id,), one.terms.limits) for one in keys]
        names = {f"key {one.key_id}": one.name for one in keys}
    return [level for level in levels if _has_budget(level)][:MAX_BUDGETS], names


def _has_budget(level: Level) -> bool:
    return level.limits.usd_per_day_microusd is not None or level.limits.usd_per_month_microusd is not None
