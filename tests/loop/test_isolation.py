"""One tenant at a hundred times its share beside nine honest ones, in simulated time."""

import random

import msgspec
import pytest

from hitsend.serve.loop.roster import LoopLimits
from tests.loop.simulated import REQUEST_S, Simulated, percentile, poisson

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

SHARE_PER_S = 1 / REQUEST_S / 10
"""A tenth of what the machine can do, in requests/s."""

SECONDS = 200.0


def honest(part_of_share=0.5):
    arrivals = []
    for number in range(9):
        tenant = (f"org{number}", "", "user", "key")
        arrivals += poisson(random.Random(number), tenant, SHARE_PER_S * part_of_share, SECONDS, name=f"honest{number}")
    return arrivals


def flood(**more):
    return poisson(random.Random(99), ("flood", "", "user", "key"), 100 * SHARE_PER_S, SECONDS, name="flood", **more)


@pytest.mark.parametrize(
    "flooding",
    [
        {},
        pytest.param({"prompt_tokens": 320}, marks=pytest.mark.slow),
        pytest.param({"tier": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_flood_costs_the_honest_little_and_refuses_none_of_them(flooding):
    alone = Simulated(honest())
    beside = Simulated(honest() + flood(**flooding), until_s=SECONDS + 30)
    before, after = percentile(alone.of("honest"), 0.95), percentile(beside.of("honest"), 0.95)
    assert len(beside.of("honest")) == len(alone.of("honest")) > 150
    assert after <= 1.5 * before, f"p95 TTFT {after * 1000:.0f} ms beside the flood, {before * 1000:.0f} ms alone"
    assert beside.codes("honest") == []
    assert len(beside.codes("flood")) > 2000
    assert len(beside.of("flood")) > 50, "it is slowed down, not stopped"


@pytest.mark.slow
def test_a_hundred_keys_of_one_organisation_flood_no_better_than_one():
    many = [
        arrival
        for number in range(100)
        for arrival in poisson(
            random.Random(1000 + number), ("flood", "", f"u{number}", "k"), SHARE_PER_S, SECONDS, name=f"flood{number}"
        )
    ]
    alone = Simulated(honest())
    beside = Simulated(honest() + many, until_s=SECONDS + 30)
    assert percentile(beside.of("honest"), 0.95) <= 1.5 * percentile(alone.of("honest"), 0.95)
    assert beside.codes("honest") == []


@pytest.mark.slow
def test_without_sharing_it_would_fail():
    """Guards the tests above: the same traffic, all of one tenant, makes the honest wait behind the flood."""
    everybody = [(at, msgspec.structs.replace(submit, tenant=())) for at, submit in honest() + flood()]
    beside = Simulated(everybody, until_s=SECONDS + 30)
    assert beside.codes("honest")


DEADLINE_S = 30.0
"""What a client of these requests would bear: they take some 15 s each when all slots are taken."""


def goodput(load):
    """Requests/s that ended within the deadline, at so many times what the machine can do, from ten tenants."""
    arrivals = []
    for number in range(10):
        tenant, rate = (f"org{number}", "", "user", "key"), load / REQUEST_S / 10
        arrivals += poisson(random.Random(number), tenant, rate, SECONDS, name=f"t{number}-", deadline_s=10.0)
    ran = Simulated(arrivals, limits=LoopLimits(max_waiting=16), until_s=SECONDS)
    ended = [name for name, done in ran.done.items() if done.code is None and ran.ended_s[name] <= DEADLINE_S]
    return len(ended) / SECONDS, ran


@pytest.mark.slow
def test_ten_times_the_load_keeps_the_goodput():
    peak = max(goodput(load)[0] for load in (0.8, 1.0, 1.5))
    overloaded, ran = goodput(10.0)
    assert overloaded >= 0.8 * peak, f"{overloaded:.2f} requests/s in time, {peak:.2f} at the best load"
    refused = sorted(ran.ended_s[name] for name, done in ran.done.items() if done.code == "server_overloaded")
    step_s = 0.8
    assert percentile(refused, 0.9) < step_s, "a full queue refuses when the request comes: after the step under way"
