"""`/inspect/plan`: the planner, for the inspector's page.

Enters: a GET (what may be asked), a POST (a question). Leaves: JSON. Always true: the work is done in a process of its
own, so no request waits for it; a caller gives numbers, known names and perhaps what a file would hold, never a path or
an address. Next: `exchange.py`.
"""

from typing import Any, Literal

import msgspec

from hitsend.core.errors import InvalidRequest, RequestTooLarge
from hitsend.serve.api import strict_json
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.planning import ask
from hitsend.serve.stream.deliver import Delivery

MAX_BYTES = 256 * 1024
"""Of a question. The largest config.json that is known has a tenth of that."""

Plan = Literal["memory", "speed", "compare", "cost", "fleet", "rent-or-buy", "train"]

LONG = ("fleet",)
"""They simulate."""

_kept: list[bytes] = []


class PlanBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fields` are the flags of `hitsend plan PLAN`, without their dashes; `config` is a model's config.json; the rest
    is what the files hold that the flags of these names read: one document, or one a line."""

    plan: Plan
    fields: dict[str, Any] = {}
    config: dict[str, Any] | None = None
    calibrate: dict[str, Any] | list[dict[str, Any]] | None = None
    trace: list[dict[str, Any]] | None = None
    facts: dict[str, Any] | None = None


class _Answer(msgspec.Struct, frozen=True):
    error: str | None = None
    param: str | None = None


async def fields(exchange: Exchange) -> None:
    """What may be asked: each plan's fields, and the names of models, GPUs and prices that are known."""

    async def told() -> bytes:
        if not _kept:
            _kept.append(await ask(b"{}"))
        return _kept[0]

    await _delivery(exchange).whole(told, ())


async def plan(exchange: Exchange) -> None:
    """A plan: its text, its document, and the command that says the same in a terminal. Raises InvalidRequest."""
    body = await read_json_body(exchange.receive, exchange.headers, exchange.services.access)
    if len(body) > MAX_BYTES:
        raise RequestTooLarge(f"the body has {len(body)} bytes, limit {MAX_BYTES} for a plan")
    tree, _ = strict_json.decode(body, exchange.services.access.max_json_depth)
    asked = strict_json.typed(tree, PlanBody)
    question = msgspec.json.encode(asked)

    async def told() -> bytes:
        answer = await ask(question, is_long=asked.plan in LONG)
        wrong = msgspec.json.decode(answer, type=_Answer)
        if wrong.error is not None:
            raise InvalidRequest(wrong.error, param=wrong.param)
        return answer

    await _delivery(exchange).whole(told, ())


def _delivery(exchange: Exchange) -> Delivery:
    return Delivery(exchange.receive, exchange.send, exchange.services.stream, exchange.services.clock)
