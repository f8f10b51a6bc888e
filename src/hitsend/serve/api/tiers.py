"""Which class of service a request asks for, in the words of each dialect.

Enters: `service_tier` and `priority` as the wire has them, and the caller. Leaves: a tier (0 is served first), or none:
the caller's own; and the name of the tier for the answer. Always true: nobody gets a better tier than the key may use;
who asks for one is told, instead of being served in another. Next: `chat_request.py`.
"""

from typing import Annotated

from msgspec import Meta

from hitsend.core.errors import InvalidRequest, PermissionDenied
from hitsend.core.request import Principal, Request

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

BEST, STANDARD, FLEX = 0, 1, 2
TIERS = {"auto": None, "default": STANDARD, "flex": FLEX, "priority": BEST}
"""What `service_tier` may be, as OpenAI names it. auto: the caller's own tier."""


def read_tier(service_tier: str | None, priority: int | None, caller: Principal) -> int | None:
    """The tier asked for. Raises InvalidRequest, or PermissionDenied naming the field that asks for too much."""
    if service_tier is not None and service_tier not in TIERS:
        raise InvalidRequest(f"service_tier is not one of {', '.join(TIERS)}", param="service_tier")
    return _within(None if service_tier is None else TIERS[service_tier], priority, caller)


def read_messages_tier(service_tier: str | None, priority: int | None, caller: Principal) -> int | None:
    """The same for /v1/messages, whose standard_only is for callers whose own tier is better. Raises the same."""
    if service_tier not in (None, "auto", "standard_only"):
        raise InvalidRequest("service_tier: only auto and standard_only are supported", param="service_tier")
    return _within(max(STANDARD, caller.tier) if service_tier == "standard_only" else None, priority, caller)


def _within(tier: int | None, priority: int | None, caller: Principal) -> int | None:
    by_priority = _tier_of(priority)
    if tier is not None and by_priority is not None and tier != by_priority:
        text = f"priority: {priority} is tier {by_priority}, and service_tier is tier {tier}: give one of them"
        raise InvalidRequest(text, param="priority")
    asked, field = (tier, "service_tier") if tier is not None else (by_priority, "priority")
    best = min(caller.tier, caller.max_tier)
    if asked is not None and asked < best:
        raise PermissionDenied(f"{field}: tier {asked} was asked for, this key's best is tier {best}", param=field)
    return asked


def _tier_of(priority: int | None) -> int | None:
    """vLLM's numbers: lower goes first, and 0 is what everybody has who says nothing."""
    if not priority:
        return None
    return BEST if priority < 0 else FLEX


def tier_name(request: Request) -> str:
    """OpenAI's name of it; every tier below flex is called flex, too."""
    return {BEST: "priority", STANDARD: "default"}.get(request.served_tier, "flex")
