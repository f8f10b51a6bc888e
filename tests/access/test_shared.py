"""access/shared.py: four gateways, one set of counters, with every frame really encoded and decoded."""

import asyncio

import pytest

from hitsend.core.errors import InsufficientQuota, InvalidRequest, RateLimitExceeded, StorageFailed
from hitsend.core.limits import Level, Limits
from hitsend.serve.access import shared
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.quota import Ask, Used
from hitsend.serve.access.shared import QuotaDesk, RemoteQuota
from hitsend.testing import FakeClock

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

NUM = 4


class NothingSpent:
    """A ledger without rows, which answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def spent_microusd(self, level: Level, since_day: str) -> int:
        await self.may_answer.wait()
        return 0


class House:
    """A desk and its gateways; frames arrive one turn of the loop later, in order."""

    def __init__(self) -> None:
        self.spent = NothingSpent()
        self.quota = MemoryQuota(FakeClock(), self.spent)
        self.desk = QuotaDesk(self.quota)
        self.gateways = [RemoteQuota(lambda body, number=number: self._post(number, body)) for number in range(NUM)]
        self.gone: set[int] = set()
        for number, gateway in enumerate(self.gateways):
            self.desk.join(number, lambda body, gateway=gateway: self._loop.call_soon(gateway.receive, body))
        self._loop = asyncio.get_running_loop()

    def _post(self, number: int, body: bytes) -> bool:
        if number in self.gone:
            return False
        self._loop.call_soon(self.desk.receive, number, body)
        return True

    def leave(self, number: int) -> None:
        """What the supervisor does when a gateway's process is gone."""
        self.gone.add(number)
        self.desk.leave(number)


def ask(name: str, limits: Limits, output: int = 1) -> Ask:
    levels = (Level("global", (), Limits(requests_per_minute=10_000)), Level("key", ("k",), limits))
    return Ask(name, levels, input_tokens=10, output_tokens=output, held_microusd=10 + output)


@pytest.mark.parametrize(
    ("limits", "most", "error"),
    [
        (Limits(requests_per_minute=37), 37, RateLimitExceeded),
        (Limits(parallel_requests=5), 5, RateLimitExceeded),
        (Limits(input_tokens_per_minute=230), 23, RateLimitExceeded),
        (Limits(output_tokens_per_minute=19), 19, RateLimitExceeded),
        (Limits(usd_per_day_microusd=110), 10, InsufficientQuota),
    ],
)
async def test_five_hundred_at_once_over_four_gateways(limits: Limits, most: int, error: type[Exception]) -> None:
    house = House()
    calls = (house.gateways[i % NUM].reserve(ask(f"r{i}", limits)) for i in range(500))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    passed = [i for i, answer in enumerate(answers) if not isinstance(answer, BaseException)]
    assert len(passed) == house.quota.num_open == most
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert all(type(one) is error for one in refused)
    for one in refused:
        assert isinstance(one, RateLimitExceeded | InsufficientQuota)
        assert one.windows is not None
        assert "key k" in str(one)
    await asyncio.gather(*(house.gateways[i % NUM].settle(f"r{i}", Used(10, 1, 11)) for i in passed))
    assert house.quota.num_open == 0


async def test_a_place_is_free_everywhere_once_its_end_was_confirmed() -> None:
    house, one = House(), Limits(parallel_requests=1)
    for number in range(200):
        await house.gateways[number % NUM].reserve(ask(f"r{number}", one))
        await house.gateways[number % NUM].settle(f"r{number}", Used())
    assert house.quota.num_open == 0


async def test_a_gateway_that_dies_leaves_nothing_held_and_ends_nothing_of_others() -> None:
    house, three = House(), Limits(parallel_requests=3)
    for number in range(3):
        await house.gateways[number].reserve(ask(f"r{number}", three))
    with pytest.raises(RateLimitExceeded):
        await house.gateways[3].reserve(ask("r3", three))
    await house.gateways[2].settle("r0", Used())  # somebody else's
    assert house.quota.num_open == 3
    house.leave(0)
    await house.gateways[3].reserve(ask("r3", three))
    assert house.quota.num_open == 3
    with pytest.raises(InvalidRequest, match="r1"):
        await house.gateways[3].reserve(ask("r1", three))


@pytest.mark.parametrize("turns", range(8))
async def test_a_reservation_whose_caller_left_is_never_kept(turns: int) -> None:
    """Cancelled at each turn between the question and its answer."""
    house = House()
    waiting = asyncio.ensure_future(house.gateways[0].reserve(ask("r", Limits(usd_per_day_microusd=1_000))))
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    done = (await asyncio.gather(waiting, return_exceptions=True))[0]
    if not isinstance(done, BaseException):
        await house.gateways[0].settle("r", Used(requests=0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert house.quota.num_open == 0


@pytest.mark.parametrize("how", ["cancelled", "dead"])
async def test_one_that_waits_for_the_ledger_is_never_kept_either(how: str) -> None:
    house = House()
    house.spent.may_answer.clear()
    waiting = asyncio.ensure_future(house.gateways[0].reserve(ask("r", Limits(usd_per_day_microusd=1_000))))
    for _ in range(10):
        await asyncio.sleep(0)
    if how == "dead":
        house.leave(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    house.spent.may_answer.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert house.quota.num_open == 0


async def test_a_preview_takes_nothing() -> None:
    house = House()
    left = await house.gateways[1].preview(ask("p", Limits(requests_per_minute=1)))
    assert left.requests is not None
    assert house.quota.num_open == 0
    await house.gateways[2].reserve(ask("r", Limits(requests_per_minute=1)))


async def test_without_its_owner_a_gateway_admits_nobody() -> None:
    house = House()
    waiting = asyncio.ensure_future(house.gateways[0].reserve(ask("r", Limits())))
    await asyncio.sleep(0)
    house.gone.add(0)
    house.gateways[0].lose()
    with pytest.raises(StorageFailed):
        await waiting
    with pytest.raises(StorageFailed):
        await house.gateways[0].reserve(ask("s", Limits()))
    await house.gateways[0].settle("r", Used())


async def test_a_caller_who_was_refused_is_asked_about_before_the_next_request_is_read():
    house = House()
    one, other = house.gateways[:2]
    limits = Limits(parallel_requests=1)
    levels = ask("any", limits).levels
    sent = []
    for gateway in (one, other):
        post = gateway._send
        gateway._send = lambda body, post=post: sent.append(body) or post(body)
    await one.reserve(ask("a", limits))
    sent.clear()
    await one.shed(levels)  # nobody was refused: nothing is asked
    assert sent == []
    with pytest.raises(RateLimitExceeded):
        await one.reserve(ask("b", limits))
    sent.clear()
    with pytest.raises(RateLimitExceeded) as refused:
        await one.shed(levels)
    assert "parallel_requests of key k is 1" in refused.value.message
    assert len(sent) == 1
    await other.shed(levels)  # it knows of no refusal
    await one.shed(ask("any", Limits(parallel_requests=2)).levels)  # nor of one of these
    assert len(sent) == 1
    await one.settle("a", Used())
    await one.shed(levels)  # there is room again, and that is known at once
    assert house.quota.num_open == 0
    await one.reserve(ask("c", limits))
    await one.settle("c", Used())


async def test_what_is_remembered_of_refusals_is_bounded():
    house = House()
    one = house.gateways[0]
    for number in range(shared.MOST_WARY + 10):
        one._note_refusal((Level("key", (str(number),)),))
    assert len(one._refused) == shared.MOST_WARY
