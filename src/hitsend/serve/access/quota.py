"""What a request reserves on every level above it, before the engine works, and gives back afterwards.

Enters: an `Ask` that names the levels and the most that the request can use; later what it really used. Leaves: what is
left of the rates, or a refusal that names the level, the limit and the value. Always true: all limits of all levels
are checked and taken in one atomic step, or nothing changes anywhere; a hold ends once. Next: `auth.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from hitsend.core.limits import Level, RateWindows


class Ask(msgspec.Struct, frozen=True):
    """One request's reservation: its input, all the output it may produce, and the most that both can cost.

    `input_param` is the field that an error names when the input alone is too much.
    """

    request_id: str
    levels: tuple[Level, ...]
    input_tokens: int
    output_tokens: int
    held_microusd: int
    input_param: str = "messages"


class Used(msgspec.Struct, frozen=True):
    """What it really used. What was reserved beyond that goes back. `requests` 0: it never began, so its place in the
    requests per minute goes back too."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_microusd: int = 0
    requests: int = 1


class BudgetUse(msgspec.Struct, frozen=True):
    """What everybody together may spend in this UTC day or month, and what is spent and held of it."""

    window: str
    limit_microusd: int
    used_microusd: int


class QuotaHealth(msgspec.Struct, frozen=True):
    """Whether limits are counted where they should be. Totals since the start: `num_unchecked` requests were counted in
    this process only, `num_refused` not served, because the shared server was away. `budgets`: those for everybody,
    where they are counted in this process and a request has come since the start."""

    is_up: bool = True
    num_outages: int = 0
    num_unchecked: int = 0
    num_refused: int = 0
    budgets: tuple[BudgetUse, ...] = ()


class Quota(Protocol):
    """Where reservations are counted: in this process, or in Valkey for several gateways."""

    async def reserve(self, ask: Ask) -> RateWindows:
        """Take it, on every level at once. Raises RateLimitExceeded (with a `retry_after_s` that is enough),
        InsufficientQuota, InvalidRequest for what can never pass or for an id that holds already, or StorageFailed."""
        ...

    async def preview(self, ask: Ask) -> RateWindows:
        """What `reserve` would return or raise now; takes nothing."""
        ...

    async def shed(self, levels: Sequence[Level]) -> None:
        """Before a request is read: raises RateLimitExceeded when these levels have no room for any request. Takes
        nothing; says nothing where finding out would cost a caller who has room something."""
        ...

    async def settle(self, request_id: str, used: Used) -> None:
        """End the reservation. Unknown ids are ignored: it has ended already. Never raises."""
        ...


class Spent(Protocol):
    """What the ledger knows of a level: asked once per level and period, so that a restart forgets no spending."""

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        """Cost of the level's rows from that UTC day (YYYY-MM-DD) on."""
        ...
