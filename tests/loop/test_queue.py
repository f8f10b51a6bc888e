"""Whose turn it is, who yields, and that nobody waits for ever."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.serve.loop.messages import WasAdmitted
from hitsend.serve.loop.queue import WaitingQueue
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.shares import Shares
from tests.loop.driven import Driven, submit

AGING_S = 10.0


def of(tenant, name, *args, tier=1, **kwargs):
    return msgspec.structs.replace(submit(name, *args, tier=tier, **kwargs), tenant=tenant)


def admitted(driven):
    return [report.request_id for report in driven.of(WasAdmitted)]


def test_a_hundred_waiting_requests_of_one_tenant_do_not_block_another():
    driven = Driven(num_slots=1, limits=LoopLimits(step_tokens=16, max_waiting=200))
    driven.handle(*(of(("flood",), f"f{number}") for number in range(100)))
    driven.step()
    driven.handle(of(("other",), "other"))
    driven.run()
    assert admitted(driven)[:2] == ["f0", "other"]


def test_an_organisation_of_many_users_has_one_share():
    driven = Driven(num_slots=1, limits=LoopLimits(step_tokens=16, max_waiting=200))
    driven.handle(*(of(("crowd", f"user{number}"), f"c{number}") for number in range(20)))
    driven.handle(*(of(("single", "user"), f"s{number}") for number in range(5)))
    driven.run()
    assert sum(name.startswith("s") for name in admitted(driven)[:10]) == 5


def test_users_of_an_organisation_share_its_part():
    driven = Driven(num_slots=1, limits=LoopLimits(step_tokens=16, max_waiting=200))
    driven.handle(*(of(("org", "greedy"), f"g{number}") for number in range(20)))
    driven.handle(*(of(("org", "modest"), f"m{number}") for number in range(3)))
    driven.run()
    assert {"m0", "m1", "m2"} < set(admitted(driven)[:7])


def test_a_full_queue_makes_room_for_who_has_less_waiting():
    driven = Driven(num_slots=1, limits=LoopLimits(step_tokens=16, max_waiting=4))
    driven.handle(of(("flood",), "running"))
    driven.step()
    driven.handle(*(of(("flood",), f"f{number}") for number in range(5)), of(("other",), "other"))
    driven.run()
    refused = {name for (name, _), done in driven.done.items() if done.code == "server_overloaded"}
    assert refused == {"f4", "f3"}
    assert "made room" in driven.done["f3", 0].message
    assert driven.done["f3", 0].num_output_tokens == 0
    assert driven.done["other", 0].reason == "length"


def test_nobody_with_choices_under_way_is_displaced():
    driven = Driven(num_slots=2, limits=LoopLimits(step_tokens=16, max_waiting=3))
    driven.handle(of(("flood",), "begun", seeds=(1, 2, 3, 4, 5)))
    driven.step()
    driven.handle(of(("other",), "other"))
    driven.run()
    assert driven.done["other", 0].code == "server_overloaded"
    assert {driven.done["begun", choice].reason for choice in range(5)} == {"length"}


def test_a_paused_request_in_the_queue_has_no_turn_until_it_goes_on():
    queue = WaitingQueue(Shares(), AGING_S)
    first, second = (Sequence(of(("a",), name), 0, arrival, 0.0) for arrival, name in enumerate("xy"))
    first.is_paused = True
    queue.add(first, 0.0)
    queue.add(second, 0.0)
    assert (queue.head(1.0), len(queue), list(queue)) == (second, 2, [first, second])
    queue.remove(first, 1.0)
    first.is_paused = False
    queue.add(first, 1.0)
    assert queue.head(1.0) is first


def test_a_lower_tier_is_served_in_the_end_beside_an_endless_better_one():
    """The bound that `queue.py` states: (t + 1) times `aging_s`, and then what was there before."""
    driven = Driven(num_slots=1, limits=LoopLimits(step_tokens=16, max_waiting=64, aging_s=1.0))
    driven.handle(of(("low",), "low", tier=2))
    for number in range(500):
        driven.handle(of(("high",), f"h{number}", tier=0))
        driven.step()
        if "low" in admitted(driven):
            break
    waited = driven.clock.now() - 1000.0
    assert "low" in admitted(driven)
    assert 2.0 < waited < 3.5


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_everybody_s_wait_is_bounded(seed):
    """Whatever comes later, of whatever tier and tenant: only what could be there by then can go before it."""
    rng = random.Random(seed)
    shares = Shares()
    queue = WaitingQueue(shares, AGING_S)
    tenants = [(f"o{rng.randrange(3)}", f"u{rng.randrange(3)}") for _ in range(rng.randint(1, 6))]
    watched = Sequence(of(("o0", "watched"), "watched", tier=2), 0, 0, 0.0)
    queue.add(watched, 0.0)
    at, turns, arrival = 0.0, 0, 0
    while True:
        at += 1.0
        while len(queue) < 12:
            arrival += 1
            queue.add(Sequence(of(rng.choice(tenants), f"r{arrival}", tier=rng.randrange(3)), 0, arrival, at), at)
        head = queue.head(at)
        queue.remove(head, at)
        shares.serve(head.path, rng.randint(1, 500), at)
        turns += 1
        if head is watched:
            break
        # two levels, each of at most 4 siblings that can age as far as it did
        assert turns <= 2 * (3 * AGING_S + 4 * 4), "it waits for ever"
