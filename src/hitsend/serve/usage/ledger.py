"""Holds before work starts, one append-only row when it ended.

Enters: a `HoldRequest`, then a `Settlement`. Leaves: a `Hold`, then a `LedgerRow`. Always true: a hold is in the
database before `reserve` returns, on its disk before `secure` does, and ends in exactly one row, whatever happens:
settled twice, it keeps the first row; settled while the database fails, it is tried again until it stands; left by a
dead process, it is closed with nothing billed and flagged `recovered_after_crash`. A request id is used once: a second
request with it is refused, or it would run free. Next: `report.py`.

Holds of a process that is certainly dead are recovered at once; where that can't be known (another machine), when
their lease ran out.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, update
from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.clock import Clock
from hitsend.core.errors import InsufficientQuota, InvalidRequest, StorageFailed
from hitsend.core.ids import IDS
from hitsend.core.request import Usage
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import HOLDS
from hitsend.serve.database.writer import Operation, Writer
from hitsend.serve.usage import owner as owners
from hitsend.serve.usage.allowance import DayNeurons, refusal
from hitsend.serve.usage.bulk import end_holds, insert_holds, take_at_once
from hitsend.serve.usage.meter import check
from hitsend.serve.usage.pricing import cost_microusd, held_microusd, held_neurons_micro, neurons_micro
from hitsend.serve.usage.rows import (
    Hold,
    HoldRequest,
    LedgerRow,
    end_hold,
    end_hold_if_taken,
    find_row,
    foreign_holds,
    ledger_row,
    move_hold,
    row_of,
)
from hitsend.settings import UsageSettings

logger = logging.getLogger(__name__)

TEND_S = 1.0
"""How often failed settlements are tried again; leases are renewed and dead holds looked for at a third of a lease."""

RECOVERED = "recovered_after_crash"
UNCONFIRMED = "unconfirmed"
"""Reason of a row whose hold turned out to be written although the caller was gone or was told that it failed."""


class Settlement(msgspec.Struct, frozen=True):
    """How a request ended. The cost follows from `usage` and the hold's price. `reason`: see `LedgerRow`."""

    usage: Usage
    reason: str
    discarded_tokens: int = 0
    is_estimate: bool = False


class Ledger:
    """The holds of this process, and the way to their rows."""

    def __init__(
        self, database: Database, writer: Writer, clock: Clock, settings: UsageSettings, *, owner: str | None = None
    ) -> None:
        self.owner = owner or owners.this_process()
        self.started_at = clock.wall()
        self._database = database
        self._writer = writer
        self._clock = clock
        self._lease_s = settings.hold_lease_s
        self._open: dict[str, Hold] = {}
        self._ending: set[str] = set()
        self._owed: dict[str, Operation[Any]] = {}
        self._tended_at = clock.now()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Close what dead processes left, then keep leases and owed rows in the background. The writer must run."""
        await self.recover()
        self._task = asyncio.create_task(self._tend_forever(), name="ledger")

    async def stop(self) -> None:
        """End the background work and write what is still owed. Call before the writer stops. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        await self._pay_what_is_owed()
        for hold_id in self._owed:
            logger.error("hold %s could not be settled; the next start will close it unbilled", hold_id)

    @property
    def holds_open(self) -> int:
        """Holds of this process without a durable row yet."""
        return len(self._open)

    async def reserve(self, request: HoldRequest) -> Hold:
        """Take a hold that survives the death of this process; a power cut too once `secure` or its row is there.

        Raises InvalidRequest for a used request id, InsufficientQuota where the day's neurons
        don't suffice, StorageFailed when it can't be written.
        """
        now = self._clock.wall()
        held = held_microusd(request.price, request.input_tokens, request.output_tokens)
        hold = Hold(IDS.dated(16), request, held, now)
        lease = (hold, self.owner, now + self._lease_s)
        if take_at_once(self._writer, *lease):
            self._open[hold.hold_id] = hold
            return hold
        writing = self._writer.submit_bulk(insert_holds, lease, may_lag=True)
        self._open[hold.hold_id] = hold
        try:
            taken = await asyncio.shield(writing)
        except (asyncio.CancelledError, StorageFailed):
            # it may or may not stand in the database: close it there, if it does
            self._end(hold, Settlement(Usage(), UNCONFIRMED), end_hold_if_taken)
            raise
        if taken != "taken":
            del self._open[hold.hold_id]
            if isinstance(taken, DayNeurons):
                raise _refusal(request, taken, now)
            raise InvalidRequest(f"request id {request.request_id!r} was used before", param="x-request-id")
        return hold

    async def secure(self) -> None:
        """Return when every hold that was taken survives a power cut. Raises StorageFailed."""
        try:
            await self._database.sync()
        except OSError as error:
            raise StorageFailed("the disk did not take the hold", retry_after_s=1.0) from error

    async def move(self, hold: Hold, request: HoldRequest) -> Hold:
        """The same hold for another engine; waited for only where a day's neurons count: else the write is for the row
        of a crash, which shall name the engine. Raises InsufficientQuota where they don't suffice, StorageFailed."""
        held = held_microusd(request.price, request.input_tokens, request.output_tokens)
        moved = msgspec.structs.replace(hold, request=request, held_microusd=held)
        writing = self._writer.submit(partial(move_hold, hold=moved))
        writing.add_done_callback(_look_at)
        if hold.request.price.in_neurons or request.neurons_limit_micro is not None:
            today = await asyncio.shield(writing)
            if today is not None:
                raise _refusal(request, today, self._clock.wall())
        return moved

    def settle(self, hold: Hold, settlement: Settlement) -> "asyncio.Future[LedgerRow]":
        """Hand the hold's row over now; await the result to know that it is durable (or StorageFailed: it is owed).

        Safe in a `finally`: nothing is lost when the caller doesn't wait. Raises WrongCounts for impossible counts.
        """
        check(settlement.usage)
        writing = self._end(hold, settlement, None)
        waiting = asyncio.shield(writing)
        waiting.add_done_callback(_look_at)
        return waiting

    def enter(self, request: HoldRequest, settlement: Settlement) -> "asyncio.Future[LedgerRow]":
        """The row of what was computed under another request's hold, in one write: a hold of its own would come too
        late to keep anything. As `settle`, it is tried again until it stands."""
        hold = Hold(IDS.dated(16), request, 0, self._clock.wall())
        self._open[hold.hold_id] = hold
        return self.settle(hold, settlement)

    def release(self, hold: Hold, reason: str) -> "asyncio.Future[LedgerRow]":
        """Settle with nothing used."""
        return self.settle(hold, Settlement(Usage(), reason))

    @asynccontextmanager
    async def holding(self, request: HoldRequest) -> AsyncGenerator[Hold]:
        """A hold for a `with` block: released as `unsettled` when the block ends without having settled it."""
        hold = await self.reserve(request)
        try:
            yield hold
        finally:
            if hold.hold_id in self._open and hold.hold_id not in self._ending:
                self.release(hold, "unsettled")

    async def row(self, request_id: str) -> LedgerRow | None:
        """The row of a request, once settled."""
        async with self._database.reading() as connection:
            return await connection.run_sync(find_row, request_id)

    async def recover(self) -> int:
        """Close the holds of dead owners, one flagged row each; returns how many. Raises what the database raises."""
        async with self._database.reading() as connection:
            held = (await connection.execute(foreign_holds(self.owner))).mappings().all()
        now = self._clock.wall()
        writing = []
        for values in held:
            dead = owners.is_dead(values["owner"])
            if dead or (dead is None and values["lease_until"] <= now):
                nothing = {"discarded_tokens": 0, "cost_microusd": 0, "reason": RECOVERED, "is_estimate": True}
                nothing["neurons_micro"] = None if values["neurons_micro"] is None else 0
                row = ledger_row(dict(values), Usage(), now, **nothing)
                writing.append(self._writer.submit(partial(end_hold_if_taken, row=row, owner=self.owner)))
        for recovered in await asyncio.gather(*writing):
            if recovered is not None:
                logger.warning("request %s was left by a dead process: closed unbilled", recovered.request_id)
        return len(writing)

    async def tend(self) -> None:
        """One round of the background work, for tests and for the task itself."""
        await self._pay_what_is_owed()
        if self._clock.now() - self._tended_at >= self._lease_s / 3:
            self._tended_at = self._clock.now()
            await self._writer.submit(partial(_renew, owner=self.owner, until=self._clock.wall() + self._lease_s))
            await self.recover()

    async def _tend_forever(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            try:
                await self.tend()
            except (StorageFailed, SQLAlchemyError) as error:
                logger.warning("the ledger's database fails (%s): will try again", type(error).__name__)

    def _end(self, hold: Hold, settlement: Settlement, write: Callable[..., Any] | None) -> asyncio.Future[Any]:
        """`write` where it isn't `end_holds`, together with others."""
        row = row_of(
            hold,
            settlement.usage,
            self._clock.wall(),
            discarded_tokens=settlement.discarded_tokens,
            cost_microusd=cost_microusd(hold.request.price, settlement.usage),
            reason=settlement.reason,
            is_estimate=settlement.is_estimate,
            neurons_micro=neurons_micro(hold.request.price, settlement.usage),
        )
        operation = partial(write or end_hold, row=row, owner=self.owner)
        grouped = write is None
        writing = self._writer.submit_bulk(end_holds, (row, self.owner)) if grouped else self._writer.submit(operation)
        if hold.hold_id in self._open and hold.hold_id not in self._ending:
            self._ending.add(hold.hold_id)
            writing.add_done_callback(partial(self._ended, hold, operation))
        return writing

    def _ended(self, hold: Hold, operation: Operation[Any], writing: asyncio.Future[Any]) -> None:
        if writing.cancelled() or writing.exception() is not None:
            self._owed[hold.hold_id] = operation
            return
        self._open.pop(hold.hold_id, None)
        self._ending.discard(hold.hold_id)

    async def _pay_what_is_owed(self) -> None:
        paying = []
        owed, self._owed = self._owed, {}
        for hold_id, operation in owed.items():
            writing = self._writer.submit(operation)
            writing.add_done_callback(partial(self._ended, self._open[hold_id], operation))
            paying.append(writing)
        await asyncio.gather(*paying, return_exceptions=True)


def _refusal(request: HoldRequest, today: DayNeurons, now: float) -> InsufficientQuota:
    wanted = held_neurons_micro(request.price, request.input_tokens, request.output_tokens) or 0
    return refusal(wanted, today, now)


def _renew(connection: Connection, owner: str, until: float) -> None:
    connection.execute(update(HOLDS).where(HOLDS.c.owner == owner).values(lease_until=until))


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
