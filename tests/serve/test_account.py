"""The hold as a block, with an engine that says more than anybody waited for."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hitsend.core import events as ev
from hitsend.core.errors import ClientGone, StorageFailed
from hitsend.core.lifecycle import State
from hitsend.core.limits import Level, Limits
from hitsend.core.record import Flight
from hitsend.core.request import Message, Principal, Request
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.account import Account
from hitsend.serve.engine.protocol import Produced
from hitsend.serve.pipeline import started
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.pricing import Price
from hitsend.serve.usage.rows import Hold, HoldRequest
from hitsend.testing import FakeClock
from tests.serve.test_estimate import FACTS

REQUEST = HoldRequest(
    request_id="req_1",
    principal=Principal(),
    model="m",
    engine="e",
    price=Price("p", 450_000, 3_200_000),
    input_tokens=31,
    output_tokens=300,
)
QUOTA = MemoryQuota(FakeClock(), None)  # type: ignore[arg-type]  # no budgets


class KeptLedger:
    """Keeps what was settled; rows are never durable, which nobody has to wait for here."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []

    async def reserve(self, request: HoldRequest) -> Hold:
        return Hold("hold_1", request, 0, 0.0)

    def settle(self, hold: Hold, settlement: Settlement) -> "asyncio.Future[Any]":
        self.settled.append(settlement)
        row: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        row.set_result({"hold_id": hold.hold_id})
        return row


class SlowDisk(KeptLedger):
    """Its holds are on the disk when it is told so; or the disk is full."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def secure(self) -> None:
        await self.disk


class CutOff:
    """A generation with events that nobody has read; what it produced is only known once it has been closed."""

    def __init__(self, *unread: Any, close_s: float = 0.0) -> None:
        self._unread = list(unread)
        self._close_s = close_s
        self.produced = Produced(prompt_tokens=0, output_tokens=(0,))

    async def aclose(self) -> None:
        await asyncio.sleep(self._close_s)
        self.produced = Produced(prompt_tokens=31, output_tokens=(1,))

    async def __aiter__(self) -> AsyncIterator[Any]:
        for event in self._unread:
            if isinstance(event, Exception):
                raise event
            yield event


async def _cut_off(ledger: KeptLedger, flight: Flight, *unread: Any) -> None:
    """Live through a request whose client leaves while it waits, and whose generation has this left to say."""
    flight.state = State.PREPARED
    async with Account(ledger, REQUEST, flight, FakeClock(), quota=QUOTA) as account:  # type: ignore[arg-type]
        flight.record(ev.Queued(0.0, 1, 0))
        account.watch(CutOff(*unread), [])  # type: ignore[arg-type]  # a small ledger
        flight.fail(ClientGone("gone"))
        raise asyncio.CancelledError


async def test_a_request_that_was_admitted_while_its_client_left_is_settled() -> None:
    ledger, flight = KeptLedger(), Flight("req_1", FakeClock())
    admitted = ev.Admitted(0.1, 0, 0, 1000, 69)
    with pytest.raises(asyncio.CancelledError):
        await _cut_off(ledger, flight, admitted, ev.Preempted(0.2, 0, 31), ev.Released(0.3, 0))
    assert [(settled.reason, settled.usage.prompt_tokens) for settled in ledger.settled] == [("client_gone", 31)]
    assert flight.state is State.CANCELLED
    assert admitted in flight.events()
    assert isinstance(flight.events()[-1], ev.Settled)
    assert flight.ledger is not None


async def test_a_record_that_breaks_does_not_cost_the_row() -> None:
    ledger = KeptLedger()
    with pytest.raises(LookupError):
        await _cut_off(ledger, Flight("req_1", FakeClock()), LookupError("a bug"))
    assert [settled.reason for settled in ledger.settled] == ["client_gone"]


async def test_a_record_that_breaks_keeps_no_place_on_any_level() -> None:
    level = Level("key", ("k1",), Limits(parallel_requests=1, input_tokens_per_minute=31))
    request = msgspec.structs.replace(REQUEST, principal=Principal(key_id="k1", levels=(level,)))
    quota = MemoryQuota(FakeClock(), None)  # type: ignore[arg-type]  # no budgets
    flight = Flight("req_1", FakeClock())
    flight.state = State.PREPARED

    async def work() -> None:
        async with Account(KeptLedger(), request, flight, FakeClock(), quota=quota) as account:  # type: ignore[arg-type]
            account.watch(CutOff(LookupError("a bug")), [])  # type: ignore[arg-type]  # a small ledger
            assert quota.num_open == 1

    with pytest.raises(LookupError):
        await work()
    assert quota.num_open == 0
    assert [type(event) for event in flight.events()][:2] == [ev.LimitsChecked, ev.Reserved]


async def test_a_request_cancelled_again_while_the_engine_lets_go_is_billed_what_was_computed() -> None:
    """A write to a client that left fails in the work itself, and then the watch over the client cancels that work."""
    ledger, flight = KeptLedger(), Flight("req_1", FakeClock())
    flight.state = State.PREPARED
    is_ending = asyncio.Event()

    async def work() -> None:
        async with Account(ledger, REQUEST, flight, FakeClock(), quota=QUOTA) as account:  # type: ignore[arg-type]
            account.watch(CutOff(close_s=0.05), [])  # type: ignore[arg-type]  # a small ledger
            is_ending.set()
            raise ClientGone("the client could not be reached")

    task = asyncio.create_task(work())
    await is_ending.wait()
    for _ in range(3):
        await asyncio.sleep(0.005)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [(settled.reason, settled.usage.prompt_tokens) for settled in ledger.settled] == [("client_gone", 31)]
    assert flight.ledger is not None
    assert isinstance(flight.events()[-1], ev.Settled)


async def test_a_stream_waits_for_its_hold_to_be_safe_while_the_engine_works() -> None:
    ledger, flight = SlowDisk(), Flight("req_1", FakeClock())
    flight.state = State.PREPARED
    async with Account(ledger, REQUEST, flight, FakeClock(), quota=QUOTA, is_streamed=True) as account:  # type: ignore[arg-type]
        engine = SimpleNamespace(gives="tokens", name="e", is_local=True, facts=FACTS)
        job = SimpleNamespace(num_prompt_tokens=31, num_prompt_estimated=0)
        attempt = SimpleNamespace(request=Request("req_1", "m", (Message("user", "x"),)), job=job, engine=engine)
        waiting = asyncio.ensure_future(started(attempt, flight, account))  # type: ignore[arg-type]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        ledger.disk.set_result(None)
        assert (await waiting).prompt_tokens == 31


async def test_what_is_not_streamed_waits_for_no_disk() -> None:
    flight = Flight("req_1", FakeClock())
    flight.state = State.PREPARED
    async with Account(SlowDisk(), REQUEST, flight, FakeClock(), quota=QUOTA) as account:  # type: ignore[arg-type]
        await account.secured()


async def test_a_disk_that_fails_ends_the_stream_before_its_first_byte() -> None:
    ledger, flight = SlowDisk(), Flight("req_1", FakeClock())
    flight.state = State.PREPARED
    ledger.disk.set_exception(StorageFailed("the disk did not take the hold"))
    account = Account(ledger, REQUEST, flight, FakeClock(), quota=QUOTA, is_streamed=True)  # type: ignore[arg-type]

    async def work() -> None:
        async with account:
            await account.secured()

    with pytest.raises(StorageFailed):
        await work()
    assert [settled.reason for settled in ledger.settled] == ["storage_failed"]
