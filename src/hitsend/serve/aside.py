"""Runs beside a request: copies for a shadow, questions to a judge; and the rows of engines that were given up, and of
servers that were left for a faster one.

Enters: a request, the model that gets it, and on whose behalf. Leaves: what was answered and what it cost. Always
true: such a run has a flight record, a hold and a ledger row of its own, under nobody's key, within the budgets for
everybody and what its route may cost the operator; it goes to an engine, never to a route; copies are bounded, and
none outlives the server or the longest life of a request. Next: `routed.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import DeadlineExceeded, LimitError, ServeError
from hitsend.core.events import ChoiceFinished, Reserved, Routed, Settled
from hitsend.core.lifecycle import State
from hitsend.core.limits import Level, Limits
from hitsend.core.record import Flight
from hitsend.core.request import IDLE_TIER, Delta, Principal, Request
from hitsend.serve.access.quota import Ask, Used
from hitsend.serve.engine.hedge import Lost
from hitsend.serve.pipeline import run
from hitsend.serve.stages import Stages
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.rows import HoldRequest, LedgerRow
from hitsend.settings import RouteSettings

_log = logging.getLogger(__name__)


LEFT = "hedged"
"""The reason of the row of a server that was left for a faster one."""


class Opening(Protocol):
    """Where records begin and end; `flights.py`."""

    def open(self, request_id: str, principal: Principal, traceparent: str | None = None) -> Flight:
        """Begin one."""
        ...

    def close(self, flight: Flight) -> None:
        """End it."""
        ...


class Aside(msgspec.Struct, frozen=True):
    """What came of one run. `ttft_s` None where nothing came; `error`: its code, where it failed; `is_refused`: nothing
    was held for it, so nobody was asked."""

    text: str
    cost_microusd: int
    wall_s: float
    ttft_s: float | None
    error: str | None = None
    is_refused: bool = False


class Tried(msgspec.Struct, frozen=True):
    """A part of a request's way that had a cost: on whose account, since when (the clock's seconds), and how much.

    `is_counted`: the caller's levels have it already."""

    hold: HoldRequest
    settlement: Settlement
    route: str | None
    began_at: float
    is_counted: bool = False


def payer_of(route: RouteSettings, caller: Principal) -> Principal:
    """The operator, as far as this route is concerned: the budgets for everybody count, and the route's own.

    The route is the "application" in its rows: that is how a restart finds again what it has spent.
    """
    payer = _operator(f"route:{route.model}", caller)
    if route.operator_usd_per_day is not None:
        most = Limits(usd_per_day_microusd=round(route.operator_usd_per_day * 1e6))
        own = Level("app", ("", payer.name), most)
        payer = msgspec.structs.replace(payer, levels=(*payer.levels, own))
    return payer


def _operator(name: str, caller: Principal) -> Principal:
    """Under that name, within the budgets for everybody."""
    levels = tuple(
        Level("global", (), Limits(usd_per_day_microusd=day, usd_per_month_microusd=month))
        for level in caller.levels
        if level.kind == "global"
        and (day := level.limits.usd_per_day_microusd, month := level.limits.usd_per_month_microusd) != (None, None)
    )
    return Principal(name=name, app=name, levels=levels, tier=caller.tier, max_tier=caller.max_tier)


class Asides:
    """Starts them. `stages` are every model's, `routes` all of them by name; none takes longer than `longest_s`."""

    def __init__(
        self, stages: Stages, flights: Opening, routes: Mapping[str, RouteSettings], *, longest_s: float
    ) -> None:
        self.stages = stages
        self._longest_s = longest_s
        self._flights = flights
        self._routes = routes
        self._copies: dict[str, set[asyncio.Task[None]]] = {}
        self._keeping: set[asyncio.Task[None]] = set()

    @property
    def clock(self) -> Clock:
        """The server's."""
        return self.stages.clock

    async def ask(self, request: Request, suffix: str, route: str) -> Aside:
        """Run it to its end under `REQUEST_ID/suffix`. Never raises ServeErrors: they are in what is returned."""
        principal = payer_of(self._routes[route], request.principal)
        request = msgspec.structs.replace(
            request, request_id=f"{request.request_id}/{suffix}", principal=principal, stream=True
        )
        flight = self._flights.open(request.request_id, principal)
        texts: list[str] = []
        is_refused = False
        limit = asyncio.timeout(None)
        timer = asyncio.get_running_loop().call_later(self._longest_s, self._expire, flight, limit)
        try:
            async with limit, aclosing(run(request, flight, self.stages.of(request.model))) as answer:
                texts += [item.text async for item in answer if isinstance(item, Delta) and item.index == 0]
        except TimeoutError:
            pass  # its flight knows
        except ServeError as error:
            is_refused = not any(isinstance(one, Reserved) for one in flight.events())
            flight.fail(error)
        finally:
            timer.cancel()
            self._flights.close(flight)
        first = None if flight.first_token_at is None else flight.first_token_at - flight.received_at
        code = flight.error.code if flight.error is not None else None
        return Aside("".join(texts), flight.cost_microusd, flight.wall_ms / 1000.0, first, code, is_refused)

    def _expire(self, flight: Flight, limit: asyncio.Timeout) -> None:
        """An upstream that pings for ever is never silent."""
        longest = f"{self._longest_s:g} s (limit stream.request_timeout_s)"
        flight.fail(DeadlineExceeded(f"the answer was not finished after {longest}"))
        limit.reschedule(asyncio.get_running_loop().time())

    async def may_spend(self, request: Request, route: RouteSettings) -> bool:
        """Whether the operator has anything left for this route."""
        levels = payer_of(route, request.principal).levels
        try:
            if levels:
                await self.stages.quota.preview(Ask(f"{request.request_id}/route", levels, 0, 0, 1))
        except LimitError:
            return False
        return True

    async def keep(self, tried: Tried) -> LedgerRow:
        """Write down what an engine that was given up had computed: a row and a record of their own."""
        hold, usage, ledger, quota = tried.hold, tried.settlement.usage, self.stages.ledger, self.stages.quota
        flight = self._flights.open(hold.request_id, hold.principal)
        flight.received_at, flight.model = tried.began_at, hold.model
        cost = 0
        try:
            flight.record(Routed(hold.engine, hold.model, f"given up: {tried.settlement.reason}", route=tried.route))
            for state in (State.PREPARED, State.RESERVED, State.RUNNING):
                flight.enter(state)
            flight.usage = usage
            if hold.principal.levels and not tried.is_counted:  # before its row: a level seen first knows all rows
                with suppress(ServeError):  # spent is spent: where a budget is used up there is nothing to refuse
                    await quota.reserve(Ask(hold.request_id, hold.principal.levels, 0, 0, 0))
            now = self.clock.now()
            flight.ledger = row = await ledger.enter(hold, tried.settlement)
            cost = row.cost_microusd
            reason, discarded = tried.settlement.reason, tried.settlement.discarded_tokens
            flight.finish_reason = reason
            flight.record(ChoiceFinished(0, reason, usage.completion_tokens, discarded))
            counts = (usage.prompt_tokens, usage.completion_tokens, cost)
            flight.record(Settled(now, self.clock.now(), row.hold_id, *counts, reason))
            flight.enter(State.FINISHED)
        except ServeError as error:
            flight.fail(error)
            raise
        finally:
            self._flights.close(flight)
            await quota.settle(hold.request_id, Used(cost_microusd=cost))
        return row

    def lost(self, lost: Lost) -> None:
        """Write down what a server that was left for a faster one may have cost; nobody waits for it."""
        task = asyncio.create_task(self._keep_lost(lost), name="hedge")
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep_lost(self, lost: Lost) -> None:
        request = lost.request
        name, route = self.stages.engines[request.model].name, self._routes.get(request.route or "")
        caller = request.principal
        hold = HoldRequest(
            request_id=lost.request_id,
            principal=_operator(f"engine:{name}", caller) if route is None else payer_of(route, caller),
            model=request.model,
            engine=name,
            price=self.stages.prices.find(request.model, is_local=False),
            input_tokens=lost.usage.prompt_tokens,
            output_tokens=lost.usage.completion_tokens,
        )
        settlement = Settlement(lost.usage, LEFT, is_estimate=True)
        try:
            await self.keep(Tried(hold, settlement, request.route, lost.began_at))
        except Exception:  # noqa: BLE001  # nobody waits for it
            _log.exception("%s has no row", lost.request_id)

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
        """End all copies, once what was left is written down. Safe to call twice."""
        await asyncio.gather(*self._keeping)
        tasks = [task for running in self._copies.values() for task in running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
