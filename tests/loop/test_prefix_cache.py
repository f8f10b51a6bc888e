"""The tree of prefixes beside a list that is searched from end to end."""

import random
from collections import Counter

import numpy as np
import pytest

from hitsend.serve.loop.prefix_cache import CacheRules, Difference, Entry, PrefixCache, ids

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


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("step", [1, 3])
def test_thousands_of_random_operations_find_what_a_list_finds(is_whole, step):
    """4 times 2,500 operations: what is found, what is matched, whose bytes go, and that the books are right."""
    rng, at, done = random.Random(step + 10 * is_whole), 0.0, Counter()
    naive, cache = Naive(is_whole, step), cache_of(is_whole=is_whole, step=step)
    for _ in range(2500):
        at += rng.choice([0.0, 1.0, 100.0])
        salt = rng.choice("abb")
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        kind = rng.choice(["add", "add", "remove", "find", "find", "use", "save"])
        chosen = rng.choice(naive.entries) if naive.entries else None
        done[kind] += 1
        if kind == "add":
            made = entry(*tokens, salt=salt, at=at, slot=rng.choice([None, 1, 2]))
            size = rng.randint(1, 120)
            if made.slot is not None or cache.make_room(size, at, worth=made.value(at)):
                made.saved = None if made.slot is not None else np.zeros(size, np.uint8)
                cache.add(made)
                naive.entries.append(made)
        elif kind == "find":
            found = cache.find(salt, ids(tokens))
            assert (found.ready.num_tokens if found.ready else 0) == naive.usable(salt, tokens)
            assert found.num_matched == naive.matched(salt, tokens)
            assert found.ready is None or found.ready.entry in naive.entries
        elif chosen is not None and kind == "remove":
            cache.remove(chosen)
        elif chosen is not None and kind == "use":
            cache.use(chosen, at)
        elif chosen is not None and kind == "save":
            before = sorted(each.value(at) for each in naive.entries if each.saved is not None)
            if chosen.saved is None and cache.save(chosen, np.zeros(rng.randint(1, 120), np.uint8), at):
                after = sorted(each.value(at) for each in cache if each.saved is not None and each is not chosen)
                assert before[len(before) - len(after) :] == after, "the least valuable went"
        gone = [each for each in naive.entries if each not in cache]
        assert kind in {"remove", "add", "save"} or not gone
        naive.entries = [each for each in naive.entries if each in cache]
        assert cache.problems() == []
        assert cache.num_bytes <= 600
        assert len(cache) == len(naive.entries)
    assert min(done.values()) > 300
    for each in list(cache):
        cache.remove(each)
    assert (cache.num_bytes, len(cache), cache._roots) == (0, 0, {})
