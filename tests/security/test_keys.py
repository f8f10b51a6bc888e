"""Guessing, forging and measuring keys."""

import random
import secrets
import time

import pytest

from hitsend.core.errors import InvalidApiKey
from hitsend.serve.access.auth import Authenticator
from hitsend.serve.access.keys import StoredKey, digest, make_salt
from hitsend.serve.api.routes import ROUTES
from tests.access.test_auth import hostile
from tests.api.test_admin import admin
from tests.edge import Call
from tests.security.sockets import say_all, serving

EVERY = [(route.replace("{id}", "x"), method) for route, handlers in ROUTES.items() for method in handlers]
CLOSED = [(path, method) for path, method in EVERY if path != "/healthz"]


async def test_500_hostile_authorizations_are_a_401_on_whichever_route(tmp_path):
    async with admin(tmp_path) as opened:
        values = hostile(opened.key)
        said = set()
        for number, value in enumerate(values):
            path, method = CLOSED[number % len(CLOSED)]
            for name in (b"authorization", b"x-api-key"):
                if name == b"x-api-key" and value.removeprefix("Bearer ").strip() == opened.key:
                    continue  # without the scheme that spoils it, this is the key
                headers = ((name, value.encode("utf-8", "surrogatepass")),)
                call = Call(opened.app, path, {} if method in ("POST", "PATCH") else None, headers, method)
                await call.run()
                assert call.answer.status == 401, (path, name, value)
                said.add(call.answer.error["message"])
        assert len(said) == 1, "no answer tells more than another"


async def test_hostile_authorizations_over_a_socket(tmp_path):
    async with admin(tmp_path) as opened:
        key = opened.key.encode()
        values = [
            *(b"Bearer " + key[:-1], b"Bearer " + key + b",", b"Bearer  \t" + key + b"\t", b"bearer\xa0" + key, key),
            *(b"Bearer " + key + b"\r\nauthorization: Bearer " + key, b"Basic " + key, b"Basic Og==", b"Digest x", b""),
            *(
                b"Bearer " + b"a.b.c",
                b"Bearer " + b"." * 100,
                b"Bearer \xff\xfe",
                b"Bearer ' OR '1'='1",
                b"Negotiate x",
            ),
        ]
        requests = [b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: " + value + b"\r\n\r\n" for value in values]
        async with serving(opened.app) as port:
            came = await say_all(port, requests)
            good = await say_all(port, [requests[0].replace(values[0], b"Bearer " + key)])
        assert {answer.status for answer in came} == {401}
        assert [answer.status for answer in good] == [200]


class Stocked(Authenticator):
    """An authenticator with these keys in memory, as `refresh` would have read them."""

    def __init__(self, keys: list[StoredKey]) -> None:
        super().__init__(Clocked())
        self._keys = {key.key_id: key for key in keys}


class Clocked:
    """All that a lookup asks of the store: the time."""

    @property
    def clock(self):
        return self

    def wall(self) -> float:
        return 0.0


def stored(key_id: str, secret: str) -> StoredKey:
    salt = make_salt()
    kept = digest(salt, f"hs_{key_id}_{secret}")
    return StoredKey(key_id, salt, kept, name=key_id, user=None, app=None, org=None, created_at=0.0)


def test_a_thousand_pairs_with_a_common_beginning_do_not_cross():
    """Neighbours share nearly all of their id, or of their secret, or both, and are asked for in turns."""
    draw = random.Random(5)
    pairs = []
    while len(pairs) < 1000:
        secret = secrets.token_hex(32)
        shared = draw.randrange(1, 64)
        other = secret[:shared] + secrets.token_hex(32)[shared:]
        base = secrets.token_hex(6)
        neighbour = base[:-1] + ("0" if base[-1] != "0" else "1")
        if other != secret:
            pairs.append(((base, secret), (neighbour, other)))
    keys = Stocked([stored(*key) for pair in pairs for key in pair])
    keys._are_keys_required = True
    for (one, secret), (two, other) in pairs:
        for key_id, right, wrong in ((one, secret, other), (two, other, secret)):
            assert keys.authenticate(f"Bearer hs_{key_id}_{right}", None).key_id == key_id
            for guess in (wrong, keys._keys[key_id].digest, right[:-1], right.upper(), f"{right}0"):
                if guess == right:  # a secret of digits only is its own capitals
                    continue
                with pytest.raises(InvalidApiKey):
                    keys.authenticate(f"Bearer hs_{key_id}_{guess}", None)


def area_under_curve(one: list[int], other: list[int]) -> float:
    """The chance that a value of `one` is below a value of `other`, ties as a half."""
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    below = ties = wins = 0.0
    number = 0
    while number < len(ranked):
        value, end = ranked[number][0], number
        zeros = ones = 0
        while end < len(ranked) and ranked[end][0] == value:
            zeros += ranked[end][1] == 0
            ones += ranked[end][1] == 1
            end += 1
        wins += ones * below
        ties += ones * zeros
        below += zeros
        number = end
    return (wins + 0.5 * ties) / (len(one) * len(other))


SHIFT = str.maketrans("0123456789", "5678901234")


def measure(draw: random.Random) -> float:
    """20,000 lookups in random order: how well time tells a guess that is right but for its end from one that is wrong.

    Every guess is a new text of digits (how long one is read depends on what the guesser wrote), for one of many keys:
    so it isn't measured where in memory one text or one key happens to lie. Ids are public; `test_auth.py` counts that
    an unknown one takes the same way.
    """
    secrets_of = {
        "".join(draw.choices("0123456789", k=12)): "".join(draw.choices("0123456789", k=64)) for _ in range(64)
    }
    keys = Stocked([stored(key_id, secret) for key_id, secret in secrets_of.items()])
    plan = []
    for _ in range(20_000):
        key_id, matching = draw.choice(list(secrets_of)), draw.choice((0, 63))
        secret = secrets_of[key_id]
        plan.append((matching, f"hs_{key_id}_{secret[:matching]}{secret[matching:].translate(SHIFT)}"))
    taken: dict[int, list[int]] = {0: [], 63: []}
    for matching, guess in plan:
        started = time.perf_counter_ns()
        keys._matching(guess, 0.0)
        taken[matching].append(time.perf_counter_ns() - started)
    return area_under_curve(taken[0], taken[63])


def test_the_time_of_a_lookup_tells_nothing_of_the_secret():
    """A machine that is busy with others may spoil one measurement, and not five in a row."""
    draw = random.Random(7)
    tried = []
    for _ in range(5):
        tried.append(measure(draw))
        if 0.45 <= tried[-1] <= 0.55:
            return
    pytest.fail(f"time tells guesses apart: {tried}")


def test_the_measure_of_the_test_above_can_tell():
    assert area_under_curve([1, 2, 3], [4, 5, 6]) == 1
    assert area_under_curve([4, 5, 6], [1, 2, 3]) == 0
    assert area_under_curve([1, 1], [1, 1]) == 0.5
