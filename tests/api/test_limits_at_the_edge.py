"""Limits through the whole edge: real routes, real account, real ledger, and an engine that answers two tokens."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from hitsend.core.errors import StorageFailed
from hitsend.core.lifecycle import State
from hitsend.core.limits import Level, Limits
from hitsend.core.record import Flight
from hitsend.core.request import Completed, Principal, Request, Started
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.account import Account
from hitsend.serve.api.routes import Routes
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.pricing import Price
from hitsend.serve.usage.report import Spending
from hitsend.serve.usage.rows import Hold, HoldRequest
from hitsend.testing import FakeClock
from tests.access.books import org
from tests.edge import Answer, Call, Edge, chat_body, end, text
from tests.stream.test_sockets import head, serving
from tests.usage.storage import Storage, storage

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

PRICE = Price("p", 1_000_000, 2_000_000)
IN, OUT = 10, 20


class Limited:
    """A server for a principal with levels. `gate` holds every answer back until it is set."""

    def __init__(self, opened: Storage, *levels: Level) -> None:
        self.clock = FakeClock()
        self.quota = MemoryQuota(self.clock, Spending(opened.database))
        self.ledger: Any = opened.ledger
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.most_running = 0
        principal = Principal(key_id="k1", name="k", org="acme", levels=levels)
        self.edge = Edge(keys={"good": principal})
        self.edge.services = msgspec.structs.replace(self.edge.services, pipeline=self.answer, shed=self.quota.shed)
        self.app = Routes(self.edge.services)

    async def answer(self, request: Request, flight: Flight) -> AsyncGenerator[Any, None]:
        flight.model = request.model
        flight.enter(State.PREPARED)
        hold = HoldRequest(request.request_id, request.principal, "m", "e", PRICE, IN, OUT)
        async with Account(self.ledger, hold, flight, self.clock, quota=self.quota):
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                yield Started("r", 1, "m", windows=flight.windows)
                await self.gate.wait()
                yield text("hi")
                yield end()
            finally:
                self.running -= 1
            flight.enter(State.RUNNING)
        flight.enter(State.FINISHED)
        yield Completed(flight.usage, flight.cost_microusd, {})

    def call(self, path: str = "/v1/chat/completions", **fields: Any) -> Call:
        return Call(self.app, path, chat_body(**fields), ((b"authorization", b"Bearer good"),), None)

    async def ask(self, path: str = "/v1/chat/completions", **fields: Any) -> Answer:
        call = self.call(path, **fields)
        await call.run()
        return call.answer


@pytest.fixture
async def opened(tmp_path):
    async with storage(database_url(None, tmp_path)) as found:
        yield found


@pytest.mark.parametrize(
    ("limits", "admits"),
    [
        ({"requests_per_minute": 37}, 37),
        ({"output_tokens_per_minute": 30 * OUT + 1}, 30),
        ({"usd_per_day_microusd": 25 * (IN + 2 * OUT) + 1}, 25),
        ({"parallel_requests": 11}, 11),
    ],
)
async def test_of_500_requests_at_once_never_more_pass_than_fit(opened, limits, admits):
    limited = Limited(opened, Level("global", (), Limits(requests_per_minute=10_000)), org(**limits))
    limited.gate.clear()
    calls = [limited.call(stream=number % 2 == 0) for number in range(500)]
    running = [asyncio.create_task(call.run()) for call in calls]
    async with asyncio.timeout(30):
        while sum(task.done() for task in running) < 500 - admits or limited.running < admits:
            await asyncio.sleep(0.01)
        limited.gate.set()
        await asyncio.gather(*running)
    statuses = [call.answer.status for call in calls]
    assert (statuses.count(200), statuses.count(429)) == (admits, 500 - admits)
    assert limited.most_running == admits
    assert len(await opened.rows()) == admits
    assert await opened.holds() == []
    assert limited.quota.num_open == 0
    for call in calls:
        if call.answer.status == 429:
            assert next(iter(limits)).removesuffix("_microusd") + " of org acme is" in call.answer.error["message"]
            assert int(call.answer.headers[b"retry-after"]) * 1000 >= int(call.answer.headers[b"retry-after-ms"]) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_tells_what_is_left(opened, stream):
    limited = Limited(opened, org(requests_per_minute=60, input_tokens_per_minute=600, output_tokens_per_minute=60))
    answer = await limited.ask(stream=stream)
    told = {name.decode(): value.decode() for name, value in answer.headers.items() if b"ratelimit" in name}
    assert told == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "20s",
        "x-ratelimit-limit-input-tokens": "600",
        "x-ratelimit-remaining-input-tokens": "590",
        "x-ratelimit-reset-input-tokens": "1s",
        "x-ratelimit-limit-output-tokens": "60",
        "x-ratelimit-remaining-output-tokens": "40",
        "x-ratelimit-reset-output-tokens": "20s",
    }


async def test_a_refusal_is_openai_s_and_waiting_that_long_is_enough(opened):
    limited = Limited(opened, org(requests_per_minute=2))
    assert [(await limited.ask()).status for _ in range(3)] == [200, 200, 429]
    refused = await limited.ask()
    assert refused.error["type"] == "rate_limit_error"
    assert refused.error["code"] == "rate_limit_exceeded"
    assert refused.headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert (refused.headers[b"retry-after"], refused.headers[b"retry-after-ms"]) == (b"30", b"30000")
    limited.clock.advance(29.999)
    assert (await limited.ask()).status == 429
    limited.clock.advance(0.001)
    assert (await limited.ask()).status == 200


async def test_a_used_up_budget_is_insufficient_quota(opened):
    limited = Limited(opened, org(usd_per_day_microusd=60))
    assert (await limited.ask()).status == 200
    assert [row["cost_microusd"] for row in await opened.rows()] == [IN]
    assert (await limited.ask()).status == 200
    refused = await limited.ask()
    assert refused.status == 429
    assert (refused.error["type"], refused.error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert "usd_per_day of org acme is 0.000060 USD" in refused.error["message"]


async def test_messages_tell_it_in_anthropic_s_words_too(opened):
    limited = Limited(opened, org(requests_per_minute=1))
    answer = await limited.ask("/v1/messages", max_tokens=5)
    assert answer.headers[b"anthropic-ratelimit-requests-remaining"] == b"0"
    assert answer.headers[b"anthropic-ratelimit-requests-reset"].endswith(b"Z")
    refused = await limited.ask("/v1/messages", max_tokens=5)
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert refused.headers[b"anthropic-ratelimit-requests-limit"] == b"1"
    assert refused.headers[b"retry-after"] == b"60"


async def test_the_record_shows_every_level_that_was_checked(opened):
    key = Level("key", ("k1",), Limits(parallel_requests=3))
    limited = Limited(opened, org(input_tokens_per_minute=IN), key)
    await limited.ask()
    await limited.ask()
    passed, refused = (flight.snapshot()["limits"] for flight in limited.edge.flights.all)
    assert [check for check in passed if "level" in check] == [
        {"level": "org acme", "name": "input_tokens_per_minute", "value": IN, "limit": IN},
        {"level": "key k1", "name": "parallel_requests", "value": 1, "limit": 3},
    ]
    assert [check["value"] for check in refused if "level" in check] == [2 * IN, 1]


async def test_a_client_that_leaves_gives_everything_back(opened):
    limited = Limited(opened, org(parallel_requests=1, output_tokens_per_minute=OUT, input_tokens_per_minute=IN))
    limited.gate.clear()
    call = limited.call(stream=True)
    task = asyncio.create_task(call.run())
    while not call.answer.status:
        await asyncio.sleep(0.005)
    call.leave()
    await task
    assert limited.quota.num_open == 0
    limited.gate.set()
    assert (await limited.ask()).status == 200


class ClosedLedger:
    """A ledger that takes no hold: it fails, or never answers."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.reached = asyncio.Event()

    async def reserve(self, request: HoldRequest) -> Hold:
        self.reached.set()
        if not self.fails:
            await asyncio.Event().wait()
        raise StorageFailed("the database did not take the write")


@pytest.mark.parametrize("fails", [True, False])
async def test_a_hold_that_the_ledger_did_not_take_is_given_back_on_every_level(opened, fails):
    level = org(requests_per_minute=1, parallel_requests=1, input_tokens_per_minute=IN, output_tokens_per_minute=OUT)
    limited = Limited(opened, level)
    limited.ledger = ClosedLedger(fails)
    call = limited.call()
    task = asyncio.create_task(call.run())
    await limited.ledger.reached.wait()
    if not fails:
        call.leave()
    await task
    assert call.answer.status == (503 if fails else 0)
    assert limited.quota.num_open == 0
    limited.ledger = opened.ledger
    assert (await limited.ask()).status == 200


async def test_who_has_no_request_left_is_refused_before_the_body_is_read(opened):
    limited = Limited(opened, org(requests_per_minute=1))
    assert (await limited.ask()).status == 200
    call = limited.call()
    await call.run()
    assert call.answer.status == 429
    assert len(call.pieces) == 1  # nobody asked for it
    assert [type(event).__name__ for event in limited.edge.flights.all[1].events()] == [
        "Received",
        "Authenticated",
        "Failed",
    ]


async def test_a_connection_goes_on_after_a_body_that_nobody_read(opened):
    limited = Limited(opened, org(requests_per_minute=1))
    limited.edge.app = limited.app
    body = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 200_000}])).encode()
    statuses = []
    async with serving(limited.edge) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(head(body, "content-type: application/json", "authorization: Bearer good") + body)
            await writer.drain()
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            statuses.append(answer.split()[1])
            await reader.readexactly(int(answer.partition("content-length: ")[2].partition("\r\n")[0]))
            assert "connection: close" not in answer
        writer.close()
    assert statuses == ["200", "429", "429"]
