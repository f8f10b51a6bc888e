"""engine/pool.py: what is in memory, decided without any memory."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.pool import Member, Pool, Turn

PATIENCE_S = 10.0


def pool(budget=100, **sizes):
    made = Pool(budget, PATIENCE_S)
    for name, size in sizes.items():
        made.add(Member(name, size))
    return made


def loaded(made, *names, at=0.0):
    for number, name in enumerate(names):
        made[name].stage, made[name].used_at = "loaded", at + number


def test_what_fits_is_loaded_beside_the_others():
    made = pool(a=40, b=60)
    made.want("a", 0.0)
    made.want("b", 1.0)
    assert made.turn(1.0) == Turn(load="a")
    assert made.turn(1.0) == Turn(load="b")
    assert (made.turn(1.0), made.used_bytes) == (Turn(), 100)


def test_the_least_recently_used_one_makes_room_and_its_bytes_count_until_it_is_gone():
    made = pool(a=40, b=40, c=40)
    loaded(made, "a", "b")
    made.want("c", 5.0)
    assert made.turn(5.0) == Turn(unload=("a",))
    assert made.turn(5.0) == Turn(), "it is on its way out"
    made["a"].stage = "unloaded"
    assert made.turn(6.0) == Turn(load="c")


def test_nobody_goes_who_need_not():
    made = pool(small=10, big=60, other=30, new=60)
    loaded(made, "small", "big", "other")
    made.want("new", 5.0)
    assert made.turn(5.0) == Turn(unload=("big",))


def test_nobody_goes_for_nothing():
    made = pool(a=30, b=70, c=80)
    loaded(made, "a", "b")
    made["b"].is_busy = True
    made.want("c", 5.0)
    assert made.turn(5.0) == Turn()
    assert not made["b"].is_closing


def test_the_busy_and_the_pinned_stay():
    made = Pool(100, PATIENCE_S)
    made.add(Member("default", 50, is_pinned=True))
    made.add(Member("a", 50))
    made.add(Member("b", 50))
    loaded(made, "default", "a")
    made["a"].is_busy = True
    made.want("b", 0.0)
    assert made.turn(0.0) == Turn()
    assert made.next_look(0.0) == PATIENCE_S
    assert made.turn(PATIENCE_S) == Turn()
    assert (made["a"].is_closing, made["default"].is_closing) == (True, False), "no new requests for it"
    made["a"].is_busy = False
    assert made.turn(PATIENCE_S + 1) == Turn(unload=("a",))
    assert not made["a"].is_closing


def test_who_gives_up_waiting_opens_the_others_again():
    made = pool(a=60, b=60)
    loaded(made, "a")
    made["a"].is_busy = True
    made.want("b", 0.0)
    made.turn(PATIENCE_S)
    made["b"].wanted_at = None
    made.turn(PATIENCE_S + 1)
    assert not made["a"].is_closing


def test_a_small_one_does_not_overtake_a_large_one():
    made = pool(a=50, large=90, small=10)
    loaded(made, "a")
    made["a"].is_busy = True
    made.want("large", 1.0)
    made.want("small", 2.0)
    assert made.turn(2.0) == Turn()


def test_rest_ends_in_going():
    made = Pool(None, PATIENCE_S)
    made.add(Member("a", 10, idle_s=30.0))
    loaded(made, "a")
    assert (made.turn(29.0), made.next_look(29.0)) == (Turn(), 1.0)
    assert made.turn(30.0) == Turn(unload=("a",))


def test_what_can_never_fit_is_refused_with_the_numbers():
    made = Pool(100, PATIENCE_S)
    made.add(Member("default", 60, is_pinned=True))
    with pytest.raises(ConfigError, match=r"100.*'a' takes 41.*beside 60.*1 too many"):
        made.add(Member("a", 41))
    later = Pool(100, PATIENCE_S)
    later.add(Member("a", 60))
    with pytest.raises(ConfigError, match=r"'a' takes 60.*beside 50.*10 too many"):
        later.add(Member("pinned", 50, is_pinned=True))


class AnyPool(RuleBasedStateMachine):
    """Random life, with invariants after every turn, and everybody served once those in the way let go."""

    @initialize(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), pinned=st.booleans())
    def start(self, sizes, pinned):
        self.now = 0.0
        self.pool = Pool(100, PATIENCE_S)
        self.names = []
        for number, size in enumerate(sizes):
            is_first = number == 0
            member = Member(str(number), min(size, 40) if is_first else size, idle_s=20.0 if number % 2 else None)
            if is_first and pinned:
                member.is_pinned, member.stage, member.idle_s = True, "loaded", None
            self.pool.add(member)
            self.names.append(member.name)

    def members(self, *stages):
        return [self.pool[name] for name in self.names if self.pool[name].stage in stages]

    def turn(self):
        before = {name: (self.pool[name].stage, self.pool[name].is_busy) for name in self.names}
        asked = [each for each in self.members("unloaded") if each.wanted_at is not None]
        oldest = min(asked, key=lambda each: each.wanted_at, default=None)
        wished = oldest and (oldest.name, oldest.wanted_at)
        found = self.pool.turn(self.now)
        for name in found.unload:
            assert before[name] == ("loaded", False)
            assert not self.pool[name].is_pinned
        if found.load is not None:
            assert before[found.load][0] == "unloaded"
            assert wished is not None
            assert self.pool[found.load].used_at == self.now

    @rule(data=st.data(), seconds=st.floats(0.0, 15.0))
    def want(self, data, seconds):
        self.now += seconds
        self.pool.want(data.draw(st.sampled_from(self.names)), self.now)
        self.turn()

    @precondition(lambda self: self.members("loading"))
    @rule(is_success=st.booleans(), is_busy=st.booleans())
    def finish_loading(self, is_success, is_busy):
        for each in self.members("loading"):
            each.stage = "loaded" if is_success else "unloaded"
            each.is_busy = is_success and is_busy
        self.turn()

    @precondition(lambda self: self.members("unloading"))
    @rule()
    def finish_unloading(self):
        self.members("unloading")[0].stage = "unloaded"
        self.turn()

    @precondition(lambda self: self.members("loaded"))
    @rule(data=st.data())
    def use(self, data):
        each = data.draw(st.sampled_from(self.members("loaded")))
        if not each.is_closing:
            each.is_busy, each.used_at = not each.is_busy, self.now
        self.turn()

    @invariant()
    def holds(self):
        if hasattr(self, "pool"):
            assert self.pool.used_bytes <= 100
            assert all(not each.is_closing for each in self.members("unloaded", "loading", "unloading"))

    def teardown(self):
        """When everybody lets go, whoever is wanted gets its turn."""
        if not hasattr(self, "pool"):
            return
        wanted = {each.name for each in self.members("unloaded") if each.wanted_at is not None}
        served = set()
        for _ in range(10 * len(self.names)):
            self.now += PATIENCE_S
            for each in self.members("unloading"):
                each.stage = "unloaded"
            for each in self.members("loading"):
                each.stage = "loaded"
            for each in self.members("loaded"):
                each.is_busy = False
            self.turn()
            served |= {each.name for each in self.members("loading")}
        assert wanted <= served


TestAnyPool = AnyPool.TestCase
TestAnyPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
