import asyncio
import contextlib
import random
import sys

import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import InvalidApiKey
from hitsend.core.request import Principal
from hitsend.serve.access import auth, keys
from hitsend.serve.access.auth import Authenticator, is_loopback
from hitsend.serve.access.store import KeyOwner, KeyStore
from hitsend.serve.database.connection import Database, database_url

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

ALICE = KeyOwner(name="alice", user="u", app="a", org="o")


@contextlib.asynccontextmanager
async def access(place):
    """`place`: a URL, or the folder of an SQLite file."""
    database = await Database.open(place if isinstance(place, str) else database_url(None, place))
    store = KeyStore(database, SystemClock())
    authenticator = Authenticator(store)
    try:
        yield store, authenticator
    finally:
        await authenticator.stop()
        await database.close()


async def test_without_keys_only_this_machine_is_served(tmp_path):
    async with access(tmp_path) as (_, authenticator):
        await authenticator.refresh()
        for host in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
            assert authenticator.authenticate(None, host) == Principal()
            assert authenticator.authenticate("Bearer whatever the client sends", host).is_anonymous
        for host in (None, "", "10.0.0.1", "0.0.0.0", "::", "localhost", "::ffff:10.0.0.1", "not an address"):
            with pytest.raises(InvalidApiKey):
                authenticator.authenticate(None, host)


async def test_before_the_keys_were_read_everybody_is_refused(tmp_path):
    async with access(tmp_path) as (_, authenticator):
        with pytest.raises(InvalidApiKey):
            authenticator.authenticate(None, "127.0.0.1")


async def test_once_a_key_exists_everybody_needs_one(tmp_path):
    async with access(tmp_path) as (store, authenticator):
        made = await store.create(ALICE)
        await authenticator.refresh()
        expected = Principal(key_id=made.id, name="alice", user="u", app="a", org="o")
        assert authenticator.authenticate(f"Bearer {made.key}", "10.0.0.1") == expected
        assert authenticator.authenticate(f"bearer  {made.key} ", None) == expected
        with pytest.raises(InvalidApiKey):
            authenticator.authenticate(None, "127.0.0.1")


async def test_revoking_the_last_key_does_not_open_the_door(tmp_path):
    async with access(tmp_path) as (store, authenticator):
        made = await store.create(ALICE)
        await store.revoke(made.id)
        await authenticator.refresh()
        for authorization in (f"Bearer {made.key}", None):
            with pytest.raises(InvalidApiKey):
                authenticator.authenticate(authorization, "127.0.0.1")


async def test_a_running_server_honours_changes(tmp_path):
    async with access(tmp_path) as (store, authenticator):
        await authenticator.start()
        made = await store.create(ALICE)
        await _until(lambda: is_refused(authenticator, None))
        authenticator.authenticate(f"Bearer {made.key}", None)
        await store.revoke(made.id)
        await _until(lambda: is_refused(authenticator, f"Bearer {made.key}"))
    assert auth.REFRESH_S <= 1.0


def is_refused(authenticator, authorization):
    try:
        authenticator.authenticate(authorization, "127.0.0.1")
    except InvalidApiKey:
        return True
    return False


async def _until(is_so):
    for _ in range(400):
        if is_so():
            return
        await asyncio.sleep(0.05)
    pytest.fail("it never came")


def hostile(key: str) -> list[str]:
    """500 header values, none of which is the key."""
    secret = key.rpartition("_")[2]
    values = [
        "", " ", "Bearer", "Bearer ", f"Basic {key}", key, f"Bearer{key}", f"Bearer\t{key}", f"Bearer {key} {key}",
        f"Bearer {key[:-1]}", f"Bearer {key}0", f"Bearer {key.upper()}", f"Bearer {key}\n", f"Bearer {key}\x00",
        f"Bearer \x00{key}", f"Bearer {key[:20]}", f"Bearer {secret}", f"Bearer hs__{secret}", "Bearer hs_",
        "Bearer ' OR 1=1 --", "Bearer hs_'; DROP TABLE keys; --", "Bearer %s%s%n", "Bearer ../../etc/passwd",
        "Bearer {{7*7}}", "Bearer ${jndi:ldap://x}", "Bearer null", "Bearer None", "Bearer undefined", "Bearer *",
        "Bearer " + "a" * 100_000, "Bearer " + "hs_" * 10_000, f"Bearer {key}" + " " * 1000, "Bearer \ud800",
        f"Bearer {key.replace('_', '-')}", f"Bearer {key.translate({ord('0') + i: 0x660 + i for i in range(10)})}",
    ]  # fmt: skip
    draw = random.Random(3)
    while len(values) < 500:
        broken = list(key)
        for _ in range(draw.randrange(1, 4)):
            broken[draw.randrange(len(broken))] = chr(draw.choice([draw.randrange(32, 127), draw.randrange(256)]))
        if "".join(broken) != key:
            values.append("Bearer " + "".join(broken))
    return values


async def test_500_hostile_headers_are_refused_alike(tmp_path):
    async with access(tmp_path) as (store, authenticator):
        made = await store.create(ALICE)
        await authenticator.refresh()
        values = hostile(made.key)
        said = set()
        for value in values:
            with pytest.raises(InvalidApiKey) as refused:
                authenticator.authenticate(value, "127.0.0.1")
            said.add(refused.value.message)
        assert len(values) == 500
        assert len(said) == 1
        authenticator.authenticate(f"Bearer {made.key}", "127.0.0.1")


async def test_what_is_stored_is_no_key(tmp_path):
    async with access(tmp_path) as (store, authenticator):
        made = await store.create(ALICE)
        await authenticator.refresh()
        (stored,) = await store.load()
        for guess in (stored.digest, f"hs_{made.id}_{stored.digest}", f"hs_{made.id}_{stored.salt}{stored.salt}"):
            with pytest.raises(InvalidApiKey):
                authenticator.authenticate(f"Bearer {guess}", None)
        database = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert made.id.encode() in database
        assert made.key.encode() not in database
        assert made.key.rpartition("_")[2].encode() not in database


async def test_keys_do_not_cross(tmp_path):
    """The same id with another's secret, and secrets that share long beginnings."""
    async with access(tmp_path) as (store, authenticator):
        one, other = await store.create(ALICE), await store.create(KeyOwner(name="bob"))
        await authenticator.refresh()
        with pytest.raises(InvalidApiKey):
            authenticator.authenticate(f"Bearer hs_{one.id}_{other.key.rpartition('_')[2]}", None)
        for length in range(16, len(one.key)):
            changed = "0" if one.key[length] != "0" else "1"
            with pytest.raises(InvalidApiKey):
                authenticator.authenticate(f"Bearer {one.key[:length]}{changed}{one.key[length + 1 :]}", None)


def _calls(work):
    """Every call, ours and the library's, in order."""
    seen = []

    def profile(frame, event, argument):
        if event == "call":
            seen.append(frame.f_code.co_qualname)
        elif event == "c_call":
            seen.append(argument.__qualname__)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen[:-1]


async def test_known_and_unknown_ids_take_the_same_way(tmp_path):
    """The same calls in the same order: counted, not timed."""
    async with access(tmp_path) as (store, authenticator):
        made = await store.create(ALICE)
        await authenticator.refresh()
        known = _calls(lambda: authenticator._matching(f"hs_{made.id}_{'0' * 64}", 0.0))
        unknown = _calls(lambda: authenticator._matching(f"hs_{'0' * 12}_{'0' * 64}", 0.0))
        await store.rotate(made.id, "1h")
        await authenticator.refresh()
        rotated = _calls(lambda: authenticator._matching(f"hs_{made.id}_{'0' * 64}", 0.0))
        assert known == unknown == rotated
        assert sum("compare_digest" in call for call in known) == 2, "the secret, and the one before it"
        assert len(authenticator._nobody.digest) == len((await store.load())[0].digest)


async def test_a_database_that_fails_keeps_the_last_known_keys(tmp_path):
    async with access(tmp_path) as (store, authenticator):
        made = await store.create(ALICE)
        await authenticator.refresh()
        for statement in ("UPDATE access_changes SET version = version + 1", "ALTER TABLE keys RENAME TO lost"):
            await store._database.write(lambda c, statement=statement: c.exec_driver_sql(statement))
        task = asyncio.create_task(authenticator._keep_fresh())
        await asyncio.sleep(1.2)
        assert not task.done()
        task.cancel()
        authenticator.authenticate(f"Bearer {made.key}", None)


def test_a_secret_has_256_bits_and_never_shows_in_a_repr():
    made = {keys.make_key() for _ in range(50)}
    assert len(made) == 50
    for key_id, key in made:
        assert keys.id_of(key) == key_id
        assert len(bytes.fromhex(key.rpartition("_")[2])) == 32
        assert key not in repr(keys.NewKey(key_id, key, "n"))


def test_loopback_is_decided_on_addresses_not_names():
    assert not is_loopback("localhost")
    assert not is_loopback("127.0.0.1.example.com")
    assert is_loopback("::1")
