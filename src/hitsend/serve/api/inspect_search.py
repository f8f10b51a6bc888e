"""`/inspect/requests` and `/inspect/percentiles`: which requests there were, and how long they took.

Enters: GET requests. Leaves: JSON. Always true: a caller finds what its own key did and nothing else, whatever it asks
for, unless its role sees all; pages are bounded, and each names where the next one begins. Next: `live.py`.
"""

import re
from collections.abc import Sequence
from typing import Any

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.policy import sees_all
from hitsend.serve.api.query import Asked, amount, number, query, words
from hitsend.serve.api.services import RecordSummary
from hitsend.serve.usage.record_search import Place, RecordFilter

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
MAX_WORDS = 512
MAX_MS = 1e9
MAX_MICROUSD = 10**15
FILTERS = ("name", "model", "finish_reason", "min_wall_ms", "min_cost_microusd", "before")
"""Fields of the query that say which requests are meant."""

_PLACE = re.compile(r"(?P<at>[0-9]{1,12}(?:\.[0-9]{1,9})?)~(?P<id>[\x21-\x7d]{1,256})")


async def requests(exchange: Exchange) -> None:
    """The newest requests, newest first; `next_before` is where the next page begins, null on the last."""
    asked = query(exchange, "limit", *FILTERS)
    limit = number(asked, "limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
    wanted = _filter(asked)
    found = await exchange.services.records.list(limit, key_id=own_key(exchange), wanted=wanted)
    await exchange.answer_json({"requests": [_line(one) for one in found], "next_before": _next(found, limit)})


async def percentiles(exchange: Exchange) -> None:
    """How long the newest 5,000 that are meant took, with the request that stands at each percentile."""
    wanted = _filter(query(exchange, *FILTERS))
    await exchange.answer_json(await exchange.services.records.percentiles(key_id=own_key(exchange), wanted=wanted))


def own_key(exchange: Exchange) -> str | None:
    """Whose requests may be shown: that key's, or None for everybody's."""
    return None if sees_all(exchange.principal) else exchange.principal.key_id


def _filter(asked: Asked) -> RecordFilter:
    return RecordFilter(
        name=words(asked, "name", MAX_WORDS),
        model=words(asked, "model", MAX_WORDS),
        finish_reason=words(asked, "finish_reason", MAX_WORDS),
        min_wall_ms=amount(asked, "min_wall_ms", MAX_MS),
        min_cost_microusd=number(asked, "min_cost_microusd", 0, MAX_MICROUSD),
        before=_place(asked.get("before")),
    )


def _place(text: str | None) -> Place | None:
    if text is None:
        return None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"before: {text[:40]!r} is no next_before of an answer", param="before")
    return (float(found["at"]), found["id"])


def _next(found: Sequence[RecordSummary], limit: int) -> str | None:
    return f"{found[-1].received_at!r}~{found[-1].request_id}" if len(found) == limit else None


def _line(summary: RecordSummary) -> dict[str, Any]:
    return {
        "request_id": summary.request_id,
        "received_at": summary.received_at,
        "state": summary.state,
        "finish_reason": summary.finish_reason,
        "error": summary.error_code,
        "model": summary.model,
        "name": summary.key_name,
        "wall_ms": summary.wall_ms,
        "ttft_ms": summary.ttft_ms,
        "usage": {"prompt_tokens": summary.prompt_tokens, "completion_tokens": summary.completion_tokens},
        "cost_microusd": summary.cost_microusd,
    }
