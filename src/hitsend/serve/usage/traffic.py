"""Requests of the past, as far as another route table would have to know them.

Enters: an open database. Leaves: one `Sent` per settled request, oldest first. Always true: it only reads; what ran for
nobody (copies, judges, drafts that were rejected) isn't traffic; where the flight record is gone, what only it knew is
None. Next: `../what_if.py`.
"""

import zlib
from collections.abc import AsyncGenerator
from datetime import date
from typing import Any

import msgspec
from sqlalchemy import select

from hitsend.core.shown import as_json
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import LEDGER, RECORDS
from hitsend.serve.usage.report import between, read_ledger

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_microusd")
_ROW = ("request_id", "model", "engine", *_COUNTS, "created_at", "price_id")


class Sent(msgspec.Struct, frozen=True):
    """One request as it was served. `route`: that it was sent to, None where it named the model itself; `facts`: what
    the route's rule knew of it then."""

    request_id: str
    model: str
    engine: str
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int
    created_at: float
    wall_ms: float | None = None
    ttft_ms: float | None = None
    wants_thinking: bool = False
    route: str | None = None
    cached_tokens: int = 0
    facts: dict[str, Any] | None = None
    price_id: str = ""


async def traffic(database: Database, since: date | None = None, until: date | None = None) -> AsyncGenerator[Sent]:
    """Settled from `since` to `until`, both days included."""
    columns = [LEDGER.c[name] for name in _ROW]
    query = (
        select(*columns, RECORDS.c.body)
        .outerjoin(RECORDS, RECORDS.c.request_id == LEDGER.c.request_id)
        .where(LEDGER.c.completion_tokens > 0, LEDGER.c.request_id.not_like("%/%"))
        .order_by(LEDGER.c.seq)
    )
    async with read_ledger(database) as connection:
        result = await connection.stream(between(query, since, until), execution_options={"yield_per": 200})
        async for found in result.mappings():
            values = {name: found[name] for name in _ROW}
            yield Sent(**values, **_recorded(found["body"]))


def _recorded(body: bytes | None) -> dict[str, Any]:
    """What the flight record adds."""
    if body is None:
        return {}
    raw = zlib.decompress(body) if body[:1] == b"x" else body
    record = msgspec.json.decode(as_json(raw))
    found: dict[str, Any] = {"wall_ms": record["wall_ms"]}
    for event in record["events"]:
        if event["type"] == "first_token" and "ttft_ms" not in found:
            found["ttft_ms"] = event["at_ms"]
        elif event["type"] == "rendered":
            found["wants_thinking"] = event["template_kwargs"].get("enable_thinking") is True
        elif event["type"] == "routed":
            found["route"] = event.get("route")
            if event.get("facts") is not None:
                found["facts"] = event["facts"]
    return found
