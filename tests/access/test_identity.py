"""Expiry, rotation, disabling and last use, against a real database and a clock set by hand."""

import asyncio
import contextlib

import pytest
from sqlalchemy import event

from hitsend.core.errors import InvalidApiKey, InvalidRequest, NotFound
from hitsend.core.limits import Level, Limits
from hitsend.serve.access.auth import Authenticator
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.store import KeyChange, KeyOwner, KeyStore
from hitsend.serve.access.terms import LimitsChange, TermsChange
from hitsend.serve.database.connection import Database, database_url
from tests.usage.storage import HandClock


class Access:
    def __init__(self, database):
        self.database = database
        self.clock = HandClock()
        self.keys = KeyStore(database, self.clock)
        self.principals = PrincipalStore(database, self.clock)
        self.auth = Authenticator(self.keys)

    async def ask(self, key):
        await self.auth.refresh()
        return self.ask_now(key)

    def ask_now(self, key):
        """The principal, or None where it is refused."""
        try:
            return self.auth.authenticate(f"Bearer {key}", "127.0.0.1")
        except InvalidApiKey as error:
            assert error.message == "missing or wrong API key: send `Authorization: Bearer hs_…`"
            return None


@contextlib.asynccontextmanager
async def access(folder):
    database = await Database.open(database_url(None, folder))
    opened = Access(database)
    try:
        yield opened
    finally:
        await opened.auth.stop()
        await database.close()


async def test_an_expired_key_is_refused_from_that_instant_on(tmp_path):
    async with access(tmp_path) as at:
        made = await at.keys.create(KeyOwner("k"), KeyChange(expires_at="1h"))
        assert made.expires_at == at.clock.wall() + 3600
        at.clock.seconds += 3599.9
        assert await at.ask(made.key)
        at.clock.seconds += 0.1
        assert at.ask_now(made.key) is None, "without another look at the database"
        await at.keys.change(made.id, KeyChange(expires_at=None))
        assert await at.ask(made.key)


async def test_after_a_rotation_both_secrets_are_good_until_the_overlap_ends(tmp_path):
    async with access(tmp_path) as at:
        first = await at.keys.create(KeyOwner("k", org="o"), KeyChange(limits=LimitsChange(parallel_requests=2)))
        second = await at.keys.rotate(first.id, "24h")
        assert second.id == first.id
        assert second.key != first.key
        one, two = await at.ask(first.key), at.ask_now(second.key)
        assert one == two
        assert one.levels == (Level("key", (first.id,), Limits(parallel_requests=2)),), "one bucket for both secrets"
        at.clock.seconds += 86_399
        assert at.ask_now(first.key)
        at.clock.seconds += 1
        assert at.ask_now(first.key) is None
        assert at.ask_now(second.key)


async def test_a_second_rotation_ends_the_oldest_secret_and_without_overlap_the_present_one(tmp_path):
    async with access(tmp_path) as at:
        first = await at.keys.create(KeyOwner("k"))
        second = await at.keys.rotate(first.id, "24h")
        third = await at.keys.rotate(first.id, 3600)
        await at.auth.refresh()
        assert [at.ask_now(one.key) is not None for one in (first, second, third)] == [False, True, True]
        fourth = await at.keys.rotate(first.id, 0, "30d")
        await at.auth.refresh()
        assert [at.ask_now(one.key) is not None for one in (second, third, fourth)] == [False, False, True]
        assert fourth.expires_at == at.clock.wall() + 30 * 86_400
        (stored,) = await at.keys.load()
        assert stored.previous_digest is None


async def test_what_can_not_be_rotated_says_so(tmp_path):
    async with access(tmp_path) as at:
        made = await at.keys.create(KeyOwner("k"), KeyChange(expires_at="1h"))
        for overlap in ("soon", "-1h", "367d", -1, float("nan")):
            with pytest.raises(InvalidRequest, match="overlap"):
                await at.keys.rotate(made.id, overlap)
        at.clock.seconds += 3600
        with pytest.raises(InvalidRequest, match="expired"):
            await at.keys.rotate(made.id, 0)
        assert await at.ask((await at.keys.rotate(made.id, 0, "1h")).key)
        await at.keys.revoke(made.id)
        with pytest.raises(InvalidRequest, match="revoked"):
            await at.keys.rotate(made.id, 0, "1h")
        with pytest.raises(NotFound):
            await at.keys.rotate("nope", 0)


async def test_revoking_ends_both_secrets(tmp_path):
    async with access(tmp_path) as at:
        first = await at.keys.create(KeyOwner("k"))
        second = await at.keys.rotate(first.id, "24h")
        await at.keys.revoke(first.id)
        await at.auth.refresh()
        assert at.ask_now(first.key) is None
        assert at.ask_now(second.key) is None


async def test_a_level_that_is_disabled_refuses_its_keys_until_it_is_enabled(tmp_path):
    async with access(tmp_path) as at:
        made = await at.keys.create(KeyOwner("k", user="u", app="a", org="o"))
        other = await at.keys.create(KeyOwner("other", org="p"))
        assert await at.ask(made.key), "an organisation that nobody made has no limits"
        for kind, path in (("org", ("o",)), ("app", ("o", "a")), ("user", ("o", "a", "u"))):
            await at.principals.create(kind, path, TermsChange())
            assert await at.ask(made.key)
            await at.principals.change(kind, path, TermsChange(), is_disabled=True)
            assert await at.ask(made.key) is None
            assert at.ask_now(other.key)
            await at.principals.change(kind, path, TermsChange(), is_disabled=False)
            assert await at.ask(made.key)


async def test_everything_that_is_granted_reaches_the_principal_and_changes_do(tmp_path):
    async with access(tmp_path) as at:
        granted = KeyChange(
            role="reader",
            models=("m", "n"),
            endpoints=("/v1/embeddings",),
            tier=2,
            max_tier=1,
            limits=LimitsChange(usd_per_day="1.5"),
        )
        made = await at.keys.create(KeyOwner("k"), granted)
        await at.principals.change("global", (), TermsChange(limits=LimitsChange(requests_per_minute=7)))
        found = await at.ask(made.key)
        assert (found.role, found.models, found.endpoints) == ("reader", ("m", "n"), ("/v1/embeddings",))
        assert (found.tier, found.max_tier) == (2, 1)
        assert [level.kind for level in found.levels] == ["global", "key"]
        await at.keys.change(made.id, KeyChange(role="admin", limits=None, name="new"))
        found = await at.ask(made.key)
        assert (found.role, found.name, found.endpoints) == ("admin", "new", ("/v1/embeddings",))
        assert [level.kind for level in found.levels] == ["global"]


async def test_the_global_limits_hold_for_the_machine_s_owner_too(tmp_path):
    async with access(tmp_path) as at:
        await at.principals.change("global", (), TermsChange(limits=LimitsChange(parallel_requests=3)))
        await at.auth.refresh()
        owner = at.auth.authenticate(None, "127.0.0.1")
        assert owner.is_anonymous
        assert owner.levels == (Level("global", (), Limits(parallel_requests=3)),)


async def test_nothing_is_read_again_while_nothing_has_changed(tmp_path):
    async with access(tmp_path) as at:
        made = await at.keys.create(KeyOwner("k"))
        await at.auth.refresh()
        seen = []
        for engine in at.database.sync_engines:
            event.listen(
                engine,
                "before_cursor_execute",
                lambda connection, cursor, statement, *rest: seen.append(statement),
            )
        for _ in range(3):
            await at.ask(made.key)
        asked = [statement for statement in seen if "SELECT" in statement]
        assert len(asked) == 3
        assert all("access_changes" in statement for statement in asked)
        await at.keys.revoke(made.id)
        seen.clear()
        assert await at.ask(made.key) is None
        assert any("FROM keys" in statement for statement in seen)


async def test_last_uses_are_written_in_one_batch_and_never_backwards(tmp_path):
    async with access(tmp_path) as at:
        made = [await at.keys.create(KeyOwner(f"k{number}")) for number in range(3)]
        await at.auth.refresh()
        known = at.auth._version
        for key in made[:2]:
            at.ask_now(key.key)
        at.ask_now(f"hs_{made[2].id}_{'0' * 64}")
        assert [key.last_used_at for key in await at.keys.list()] == [None] * 3, "not on the request's way"
        await at.auth._write_uses()
        used = {key.id: key.last_used_at for key in await at.keys.list()}
        assert [used[key.id] for key in made] == [at.clock.wall(), at.clock.wall(), None]
        await at.keys.touch({made[0].id: at.clock.wall() - 5})
        assert (await at.keys.get(made[0].id)).last_used_at == at.clock.wall()
        assert (await at.keys.snapshot(known)) is None, "a use changes nothing that servers have to read"


async def test_uses_that_could_not_be_written_are_kept_for_later(tmp_path):
    async with access(tmp_path) as at:
        made = await at.keys.create(KeyOwner("k"))
        assert await at.ask(made.key)
        await at.database.write(lambda c: c.exec_driver_sql("ALTER TABLE keys RENAME TO lost"))
        await at.auth._write_uses()
        await at.database.write(lambda c: c.exec_driver_sql("ALTER TABLE lost RENAME TO keys"))
        await at.auth._write_uses()
        assert (await at.keys.get(made.id)).last_used_at == at.clock.wall()


@pytest.mark.slow  # the second between two looks at the keys
async def test_a_running_server_honours_a_disabled_organisation(tmp_path):
    async with access(tmp_path) as at:
        made = await at.keys.create(KeyOwner("k", org="o"))
        await at.auth.start()
        assert at.ask_now(made.key)
        await at.principals.create("org", ("o",), TermsChange())
        await at.principals.change("org", ("o",), TermsChange(), is_disabled=True)
        for _ in range(400):
            if at.ask_now(made.key) is None:
                break
            await asyncio.sleep(0.05)
        assert at.ask_now(made.key) is None


async def test_principals_are_made_once_listed_and_never_deleted(tmp_path):
    async with access(tmp_path) as at:
        await at.principals.create("app", ("o", "bot"), TermsChange(limits=LimitsChange(requests_per_minute=3)))
        await at.principals.create("app", ("", "bot"), TermsChange())
        with pytest.raises(InvalidRequest, match="exists already"):
            await at.principals.create("app", ("o", "bot"), TermsChange())
        for kind, path in (
            ("org", ("",)),
            ("org", ("a/b",)),
            ("user", ("o", "a", "")),
            ("org", ("..",)),
            ("org", (" x",)),
        ):
            with pytest.raises(InvalidRequest):
                await at.principals.create(kind, path, TermsChange())
        with pytest.raises(NotFound):
            await at.principals.change("org", ("nobody",), TermsChange())
        listed = await at.principals.list("app")
        assert {(one.id, one.org, one.app) for one in listed} == {("o/bot", "o", "bot"), ("/bot", None, "bot")}
        assert {one.id: one.limits for one in listed}["o/bot"] == {"requests_per_minute": 3}
        assert (await at.principals.get("global", ())).limits == {}


@pytest.mark.parametrize("endpoint", ["", "/", "v1", "/v1/", "//", "/v1 x", "/a?b", "/../x\n", "/é"])
async def test_endpoints_have_to_look_like_routes(tmp_path, endpoint):
    async with access(tmp_path) as at:
        with pytest.raises(InvalidRequest, match=r"endpoints\[0\]"):
            await at.keys.create(KeyOwner("k"), KeyChange(endpoints=(endpoint,)))
        assert await at.keys.list() == ()
