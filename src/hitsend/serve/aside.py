"""Runs beside a request: copies for a shadow, questions to a judge; and the rows of engines that were given up.

Enters: a request, the model that gets it, and on whose behalf. Leaves: what was answered and what it cost. Always true:
such a run has a flight record, a hold and a ledger row of its own, under nobody's key and within nobody's limits; it
goes to an engine, never to a route; copies are bounded, and none outlives the server. Next: `routed.py`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import ServeError
from hitsend.core.events import ChoiceFinished, Routed, Settled
from hitsend.core.lifecycle import State
from hitsend.core.record import Flight
from hitsend.core.request import IDLE_TIER, Delta, Principal, Request
from hitsend.serve.pipeline import run
from hitsend.serve.stages import Stages
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.rows import HoldRequest, LedgerRow

_log = logging.getLogger(__name__)


class Opening(Protocol):
    """Where records begin and end; `flights.py`."""

    def open(self, request_id: str, principal: Principal, traceparent: str | None = None) -> Flight:
        """Begin one."""
        ...

    def close(self, flight: Flight) -> None:
        """End it."""
        ...


class Aside(msgspec.Struct, frozen=True):
    """What came of one run. `ttft_s` None where nothing came; `error`: its code, where it failed."""

    text: str
    cost_microusd: int
    wall_s: float
    ttft_s: float | None
    error: str | None = None


class Tried(msgspec.Struct, frozen=True):
    """A part of a request's way that had a cost: on whose account, since when (the clock's seconds), and how much."""

    hold: HoldRequest
    settlement: Settlement
    route: str
    began_at: float


class Asides:
    """Starts them. `stages` are every model's."""

    def __init__(self, stages: Stages, flights: Opening) -> None:
        self._stages = stages
        self._flights = flights
        self._copies: dict[str, set[asyncio.Task[None]]] = {}

    @property
    def clock(self) -> Clock:
        """The server's."""
        return self._stages.clock

    async def ask(self, request: Request, suffix: str, route: str) -> Aside:
        """Run it to its end under `REQUEST_ID/suffix`. Never raises ServeErrors: they are in what is returned."""
        principal = Principal(name=f"route:{route}", tier=request.principal.tier, max_tier=request.principal.max_tier)
        request = msgspec.structs.replace(
            request, request_id=f"{request.request_id}/{suffix}", principal=principal, stream=True
        )
        flight = self._flights.open(request.request_id, principal)
        texts: list[str] = []
        try:
            async with aclosing(run(request, flight, self._stages.of(request.model))) as answer:
                texts += [item.text async for item in answer if isinstance(item, Delta) and item.index == 0]
        except ServeError as error:
            flight.fail(error)
        finally:
            self._flights.close(flight)
        first = None if flight.first_token_at is None else flight.first_token_at - flight.received_at
        code = flight.error.code if flight.error is not None else None
        return Aside("".join(texts), flight.cost_microusd, flight.wall_ms / 1000.0, first, code)

    async def keep(self, tried: Tried) -> LedgerRow:
        """Write down what an engine that was given up had computed: a row and a record of their own."""
        hold, ledger, usage = tried.hold, self._stages.ledger, tried.settlement.usage
        flight = self._flights.open(hold.request_id, hold.principal)
        flight.received_at, flight.model = tried.began_at, hold.model
        try:
            flight.record(Routed(hold.engine, hold.model, f"given up: {tried.settlement.reason}", route=tried.route))
            for state in (State.PREPARED, State.RESERVED, State.RUNNING):
                flight.enter(state)
            flight.usage = usage
            now, taken = self.clock.now(), await ledger.reserve(hold)
            flight.ledger = row = await ledger.settle(taken, tried.settlement)
            reason, discarded = tried.settlement.reason, tried.settlement.discarded_tokens
            flight.finish_reason = reason
            flight.record(ChoiceFinished(0, reason, usage.completion_tokens, discarded))
            counts = (usage.prompt_tokens, usage.completion_tokens, row.cost_microusd)
            flight.record(Settled(now, self.clock.now(), taken.hold_id, *counts, reason))
            flight.enter(State.FINISHED)
        except ServeError as error:
            flight.fail(error)
            raise
        finally:
            self._flights.close(flight)
        return row

    def copy(self, request: Request, route: str, most: int, seen: Callable[[Aside], None]) -> str | None:
        """Send a copy on its way, unless `most` of this route's run: then None. Returns its record's id."""
        running = self._copies.setdefault(route, set())
        if len(running) >= most:
            return None
        task = asyncio.create_task(self._copied(request, route, seen), name="shadow")
        running.add(task)
        task.add_done_callback(running.discard)
        return f"{request.request_id}/shadow"

    async def _copied(self, request: Request, route: str, seen: Callable[[Aside], None]) -> None:
        try:
            seen(await self.ask(msgspec.structs.replace(request, tier=IDLE_TIER), "shadow", route))
        except Exception:  # noqa: BLE001  # nobody waits for it
            _log.exception("the shadow of request %s failed", request.request_id)

    async def stop(self) -> None:
        """End all copies. Safe to call twice."""
        tasks = [task for running in self._copies.values() for task in running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
