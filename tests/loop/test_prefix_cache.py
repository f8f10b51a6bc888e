"""The tree of prefixes beside a list that is searched from end to end."""

import random
from collections import Counter

import numpy as np
import pytest

from hitsend.serve.loop.prefix_cache import CacheRules, Entry, PrefixCache, ids
from hitsend.serve.loop.radix import Difference

RULES = CacheRules(max_bytes=600, step=1, is_whole=False, takes_inexact=True)


def entry(*tokens, salt="a", at=0.0, num_bytes=None, slot=None):
    made = Entry(salt, ids(tokens), at=at, num_exact=len(tokens))
    made.saved = None if num_bytes is None else np.zeros(num_bytes, np.uint8)
    made.slot = slot
    return made


def cache_of(*entries, **rules):
    cache = PrefixCache(CacheRules(**({"max_bytes": 600, "step": 1, "is_whole": False, "takes_inexact": True} | rules)))
    for each in entries:
        cache.add(each)
    return cache


@pytest.mark.parametrize(
    ("is_whole", "matched", "used", "prompt", "limit"),
    [
        (False, 0, 0, 300, ""),
        (False, 128, 128, 300, ""),
        (False, 150, 128, 300, "step"),
        (False, 40, 0, 300, "step"),
        (False, 128, 64, 128, "step"),  # the last token is always computed
        (False, 150, 64, 300, "place"),
        (False, 150, 0, 300, "place"),
        (True, 150, 128, 300, "checkpoint"),
        (True, 150, 150, 300, ""),
    ],
)
def test_why_no_more_was_used(is_whole, matched, used, prompt, limit):
    rules = CacheRules(max_bytes=1, step=64, is_whole=is_whole, takes_inexact=True)
    assert rules.limit_of(matched, used, prompt) == limit


class Files:
    """A disk that is sometimes busy and loses things."""

    problem = None

    def __init__(self, rng=None):
        self.rng, self.files, self.number = rng, {}, 0

    def takes(self, num_bytes):
        return self.rng is None or self.rng.random() < 0.8

    def put(self, salt, tokens, saved):
        self.number += 1
        self.files[self.number] = (salt, tokens.tobytes(), saved)
        return self.number

    def get(self, number, salt, tokens):
        found_salt, found_tokens, saved = self.files[number]
        assert (found_salt, found_tokens) == (salt, tokens.tobytes())
        return None if self.rng is not None and self.rng.random() < 0.2 else saved

    def fetch(self, number):
        return self.rng is None or self.rng.random() < 0.5

    def drop(self, number):
        del self.files[number]


def usable(cache, *tokens, salt="a"):
    found = cache.find(salt, ids(tokens))
    return found.ready.num_tokens if found.ready else 0


def test_a_prompt_goes_on_from_what_it_shares_but_for_its_last_token():
    cache = cache_of(entry(1, 2, 3, 4, slot=0))
    assert usable(cache, 1, 2, 3, 4, 5) == 4
    assert usable(cache, 1, 2, 3, 4) == 3
    assert usable(cache, 1, 2, 9) == 2
    assert usable(cache, 9) == 0


def test_a_miss_says_where_and_what():
    cache = cache_of(entry(1, 2, 3, slot=0), entry(1, 2, 4, slot=1))
    assert cache.find("a", ids((1, 2, 7))).difference == Difference(2, 3, 7)
    assert cache.find("a", ids((1, 8))).difference == Difference(1, 2, 8)
    assert cache.find("a", ids((1, 2, 3, 5))).difference is None, "nothing else was ever there"
    assert cache.find("b", ids((1, 8))) == cache.find("c", ids((1, 2, 3))), "nothing is known under another salt"


def test_prompts_go_on_at_whole_steps():
    cache = cache_of(entry(*range(10), slot=0), step=4)
    assert usable(cache, *range(12)) == 8
    assert usable(cache, *range(8)) == 4
    assert usable(cache, *range(3)) == 0


def test_an_entry_that_cannot_be_cut_counts_only_whole():
    cache = cache_of(entry(1, 2, 3, 4, slot=0), entry(1, 2, slot=1), is_whole=True)
    assert usable(cache, 1, 2, 3, 9) == 2
    assert usable(cache, 1, 2, 3, 4, 9) == 4


def test_decoded_tokens_count_only_where_they_may():
    short = entry(1, 2, 3, 4, slot=0)
    short.num_exact = 2
    assert usable(cache_of(short), 1, 2, 3, 4, 5) == 4
    assert usable(cache_of(short, takes_inexact=False), 1, 2, 3, 4, 5) == 2


def test_what_is_still_computed_can_be_waited_for():
    running = entry(1, 2, 3, 4, slot=0)
    running.owner, running.num_ready = object(), 2
    cache = cache_of(running, entry(1, slot=1))
    found = cache.find("a", ids((1, 2, 3, 9)))
    assert (found.ready.num_tokens, found.ahead.num_tokens) == (2, 3)
    running.num_ready = 4
    found = cache.find("a", ids((1, 2, 3, 9)))
    assert (found.ready.num_tokens, found.ahead) == (3, None)


def test_the_least_valuable_bytes_go_and_never_for_something_worth_less():
    cache = cache_of(entry(*range(10), num_bytes=300), entry(50, 51, num_bytes=300))
    poor, rich = entry(60, at=0.0, slot=0), entry(*range(70, 80), at=0.0, slot=1)
    for each in (poor, rich):
        cache.add(each)
    assert not cache.save(poor, np.zeros(100, np.uint8), 0.0)
    assert cache.save(rich, np.zeros(100, np.uint8), 0.0)
    assert (usable(cache, *range(10), 99), usable(cache, 50, 51, 52)) == (10, 0)
    assert not cache.save(poor, np.zeros(601, np.uint8), 0.0)
    assert cache.problems() == []


class Naive:
    """Every entry, looked at one by one."""

    def __init__(self, is_whole, step):
        self.entries, self.is_whole, self.step = [], is_whole, step

    def usable(self, salt, prompt):
        best = 0
        for each in self.entries:
            if each.salt != salt:
                continue
            tokens = each.tokens.tolist()
            common = next((i for i, (x, y) in enumerate(zip(tokens, prompt, strict=False)) if x != y), None)
            common = min(len(tokens), len(prompt)) if common is None else common
            common = min(common, len(prompt) - 1)
            if self.is_whole:
                best = max(best, len(tokens) if common >= len(tokens) else 0)
            else:
                best = max(best, common // self.step * self.step)
        return best

    def matched(self, salt, prompt):
        same = [each.tokens.tolist() for each in self.entries if each.salt == salt]
        return max(
            (next((i for i, (x, y) in enumerate(zip(t, prompt, strict=False)) if x != y), min(len(t), len(prompt))))
            for t in [*same, []]
        )


class Played:
    """Random operations on a cache over a disk that is sometimes busy and loses things, beside the list."""

    def __init__(self, is_whole, step):
        self.rng, self.at, self.done = random.Random(step + 10 * is_whole), 0.0, Counter()
        self.naive = Naive(is_whole, step)
        self.cache = cache_of(is_whole=is_whole, step=step, max_disk_bytes=900)
        self.disk = self.cache.disk = Files(self.rng)

    def play(self, kind):
        self.at += self.rng.choice([0.0, 1.0, 100.0])
        self.done[kind] += 1
        chosen = self.rng.choice(self.naive.entries) if self.naive.entries else None
        if kind in {"add", "find"} or chosen is not None:
            getattr(self, kind)(chosen)
        gone = [each for each in self.naive.entries if each not in self.cache]
        assert kind in {"remove", "add", "save", "load"} or not gone
        self.naive.entries = [each for each in self.naive.entries if each in self.cache]
        self.check()

    def prompt(self):
        return self.rng.choice("abb"), [self.rng.randrange(3) for _ in range(self.rng.randint(1, 12))]

    def add(self, _chosen):
        salt, tokens = self.prompt()
        made = entry(*tokens, salt=salt, at=self.at, slot=self.rng.choice([None, 1, 2]))
        size = self.rng.randint(1, 120)
        if made.slot is not None or self.cache.make_room(size, self.at, worth=made.value(self.at)):
            made.saved = None if made.slot is not None else np.zeros(size, np.uint8)
            self.cache.add(made)
            self.naive.entries.append(made)

    def find(self, _chosen):
        salt, tokens = self.prompt()
        found = self.cache.find(salt, ids(tokens))
        assert (found.ready.num_tokens if found.ready else 0) == self.naive.usable(salt, tokens)
        assert found.num_matched == self.naive.matched(salt, tokens)
        assert found.ready is None or found.ready.entry in self.naive.entries

    def remove(self, chosen):
        self.cache.remove(chosen)

    def use(self, chosen):
        self.cache.use(chosen, self.at)

    def save(self, chosen):
        if chosen.has_copy:
            return
        before = sorted(each.value(self.at) for each in self.naive.entries if each.saved is not None)
        self.cache.save(chosen, np.zeros(self.rng.randint(1, 120), np.uint8), self.at)
        if chosen.saved is not None:
            others = [each for each in self.cache if each.saved is not None and each is not chosen]
            after = sorted(each.value(self.at) for each in others)
            assert before[len(before) - len(after) :] == after, "the least valuable went"

    def load(self, _chosen):
        stored = [each for each in self.naive.entries if each.stored is not None]
        if not stored:
            return
        chosen = self.rng.choice(stored)
        num_bytes, was_near = chosen.stored.num_bytes, chosen.is_near
        saved = self.cache.load(chosen)
        self.done["lost" if saved is None else "read"] += 1
        if saved is None:
            assert (chosen in self.cache, chosen.stored) == (was_near, None)
        else:
            assert saved.nbytes == num_bytes
            self.cache.save(chosen, saved, self.at)
            assert chosen in self.cache, "what is being read never makes way for itself"

    def check(self):
        self.done["only on disk"] += sum(not each.is_near for each in self.naive.entries)
        stored = {each.stored.number for each in self.naive.entries if each.stored is not None}
        assert self.disk.files.keys() == stored
        assert sum(saved.nbytes for _, _, saved in self.disk.files.values()) == self.cache.num_disk_bytes <= 900
        assert self.cache.problems() == []
        assert self.cache.num_bytes <= 600
        assert len(self.cache) == len(self.naive.entries)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("step", [1, 3])
def test_thousands_of_random_operations_find_what_a_list_finds(is_whole, step):
    """4 times 2,500 operations: what is found, what is matched, whose bytes go where, and that the books are right."""
    played = Played(is_whole, step)
    for _ in range(2500):
        played.play(played.rng.choice(["add", "add", "remove", "find", "find", "use", "save", "load"]))
    assert min(played.done[kind] for kind in ("add", "remove", "find", "use", "save", "load")) > 250
    assert min(played.done[kind] for kind in ("lost", "read", "only on disk")) > 25
    cache = played.cache
    for each in list(cache):
        cache.remove(each)
    left = (cache.num_bytes, cache.num_disk_bytes, len(cache), cache._roots, played.disk.files)
    assert left == (0, 0, 0, {}, {})


def test_what_has_to_leave_memory_goes_to_disk_and_comes_back():
    cache = cache_of(entry(*range(10), num_bytes=400), max_disk_bytes=500)
    disk = cache.disk = Files()
    (first,) = cache
    rich = entry(*range(50, 70), slot=1)
    cache.add(rich)
    assert cache.save(rich, np.zeros(600, np.uint8), 0.0)
    assert (first.place, cache.num_bytes, cache.num_disk_bytes, len(disk.files)) == ("disk", 600, 400, 1)
    assert usable(cache, *range(10), 99) == 10
    assert cache.load(first).nbytes == 400
    poor = entry(90, slot=2)
    cache.add(poor)
    assert not cache.save(poor, np.zeros(200, np.uint8), 0.0), "nothing goes for something worth less, nowhere"
    assert (cache.problems(), first in cache) == ([], True)
    best = entry(*range(100, 140), num_bytes=None, slot=3)
    cache.add(best)
    assert cache.save(best, np.zeros(600, np.uint8), 0.0)
    assert (rich.saved, rich.place, best.place) == (None, "live", "live"), "what has a slot needs no file"
    assert cache.problems() == []
