import pytest

from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.serve.access.store import KeyOwner
from hitsend.serve.access.terms import MAX_NAME_CHARS
from tests.access.test_auth import ALICE, access


async def test_keys_are_listed_in_order_without_secrets(url):
    async with access(url) as (store, _):
        made = [await store.create(KeyOwner(name=f"k{number}", org="o")) for number in range(5)]
        listed = await store.list()
        assert [key.id for key in listed] == [key.id for key in made]
        assert {(key.org, key.app, key.revoked_at) for key in listed} == {("o", None, None)}
        assert all(key.key not in repr(listed) for key in made)


async def test_revoking_twice_keeps_the_first_time(url):
    async with access(url) as (store, _):
        made = await store.create(ALICE)
        first = await store.revoke(made.id)
        assert first.revoked_at is not None
        assert await store.revoke(made.id) == first


async def test_revoking_what_is_not_there_says_so(url):
    async with access(url) as (store, _):
        for key_id in ("nope", "' OR 1=1 --", ""):
            with pytest.raises(NotFound):
                await store.revoke(key_id)


@pytest.mark.parametrize("bad", ["", " x", "a\nb", "a\x1b[31m", "x" * (MAX_NAME_CHARS + 1), "\u202e"])
@pytest.mark.parametrize("field", ["name", "user", "app", "org"])
async def test_names_that_would_break_a_log_or_a_terminal_are_refused(url, field, bad):
    async with access(url) as (store, _):
        with pytest.raises(InvalidRequest, match=field) as refused:
            await store.create(KeyOwner(**({"name": "n"} | {field: bad})))
        assert refused.value.param == field
        assert await store.list() == ()
