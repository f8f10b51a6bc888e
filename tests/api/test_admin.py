"""`/admin` over the routes, with the real stores and the real authenticator behind them."""

import contextlib
import json

import msgspec
import pytest

from hitsend.core.clock import SystemClock
from hitsend.serve.access.auth import Authenticator
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.store import KeyChange, KeyOwner, KeyStore
from hitsend.serve.api.policy import POLICIES
from hitsend.serve.api.routes import ROUTES, Routes
from hitsend.serve.api.services import Administration
from hitsend.serve.database.connection import Database, database_url
from tests.edge import Call, Edge


class Admin:
    """Routes over a real database; asks as the key that was made first, an admin."""

    def __init__(self, database):
        self.keys = KeyStore(database, SystemClock())
        self.auth = Authenticator(self.keys)
        admin = Administration(self.keys, PrincipalStore(database, SystemClock()), self.auth.refresh)
        services = msgspec.structs.replace(Edge().services, auth=self.auth, admin=admin)
        self.app = Routes(services)
        self.key = None

    async def ask(self, method, path, body=None, *, key=None):
        bearer = key or self.key
        headers = ((b"authorization", f"Bearer {bearer}".encode()),) if bearer else ()
        call = Call(self.app, path, body, headers, method)
        await call.run()
        return call.answer

    async def done(self, method, path, body=None):
        """The JSON of an answer that has to be one."""
        answer = await self.ask(method, path, body)
        assert answer.status == 200, answer.body
        return answer.json()

    async def refused(self, method, path, body=None):
        """(status, param, message) of an answer that has to be an error."""
        answer = await self.ask(method, path, body)
        assert answer.status >= 400, answer.body
        return answer.status, answer.error["param"], answer.error["message"]


@contextlib.asynccontextmanager
async def admin(folder, *, with_key=True):
    database = await Database.open(database_url(None, folder))
    opened = Admin(database)
    if with_key:
        opened.key = (await opened.keys.create(KeyOwner("root"), KeyChange(role="admin"))).key
    await opened.auth.refresh()
    try:
        yield opened
    finally:
        await database.close()


async def test_a_key_s_whole_life(tmp_path):
    async with admin(tmp_path) as at:
        wanted = {
            "name": "bot", "org": "o", "app": "a", "user": "u", "role": "reader", "models": ["m"],
            "tier": 3, "max_tier": 2, "endpoints": ["/inspect"], "expires_at": "30d",
            "limits": {"requests_per_minute": 5, "usd_per_day": 1.25, "usd_per_month": "20.000001"},
        }  # fmt: skip
        made = await at.done("POST", "/admin/keys", wanted)
        assert made["key"].startswith(f"hs_{made['id']}_")
        path = f"/admin/keys/{made['id']}"
        shown = await at.done("GET", path)
        same = ("name", "org", "app", "user", "role", "models", "tier", "max_tier", "endpoints")
        assert {name: shown[name] for name in same} == {name: wanted[name] for name in same}
        assert shown["limits"] == {"requests_per_minute": 5, "usd_per_day": "1.25", "usd_per_month": "20.000001"}
        assert (await at.ask("GET", "/inspect/requests", key=made["key"])).status == 200, "at once"

        changed = await at.done("PATCH", path, {"limits": {"usd_per_day": None}, "endpoints": None, "role": "caller"})
        assert changed["limits"] == {"requests_per_minute": 5, "usd_per_month": "20.000001"}
        assert (changed["endpoints"], changed["role"], changed["name"]) == (None, "caller", "bot")
        assert (await at.done("PATCH", path, {})) == changed

        rotated = await at.done("POST", f"{path}/rotate", {"overlap": "1h"})
        assert rotated["id"] == made["id"]
        for key in (made["key"], rotated["key"]):
            assert (await at.ask("GET", "/v1/models", key=key)).status == 200
        again = await at.done("POST", f"{path}/rotate", b"")
        assert (await at.ask("GET", "/v1/models", key=rotated["key"])).status == 401, "no overlap was asked for"

        assert (await at.done("DELETE", path))["revoked_at"] is not None
        assert (await at.ask("GET", "/v1/models", key=again["key"])).status == 401
        listed = await at.done("GET", "/admin/keys")
        assert [key["name"] for key in listed["data"]] == ["root", "bot"]
        for one in (made, rotated, again):
            assert one["key"].rpartition("_")[2] not in json.dumps([listed, shown, changed])
        assert "digest" not in json.dumps(listed)
        assert "salt" not in json.dumps(listed)


@pytest.mark.parametrize(
    ("kind", "names", "place"),
    [("org", {"org": "o"}, "o"), ("app", {"org": "o", "app": "a"}, "o/a"), ("user", {"user": "u", "app": "a"}, "/a/u")],
)
async def test_a_level_s_whole_life(tmp_path, kind, names, place):
    async with admin(tmp_path) as at:
        key = (await at.done("POST", "/admin/keys", names | {"name": "k"}))["key"]
        made = await at.done("POST", f"/admin/{kind}s", names | {"limits": {"parallel_requests": 2}})
        assert (made["id"], made["kind"], made["limits"]) == (place, kind, {"parallel_requests": 2})
        path = f"/admin/{kind}s/{place}"
        assert await at.done("GET", path) == made
        assert (await at.done("GET", f"/admin/{kind}s"))["data"] == [made]
        assert (await at.refused("POST", f"/admin/{kind}s", names))[:2] == (400, kind)
        changed = await at.done("PATCH", path, {"limits": None, "models": ["m"], "max_tier": 4})
        assert (changed["limits"], changed["models"], changed["max_tier"]) == ({}, ["m"], 4)
        assert (await at.ask("GET", "/v1/models", key=key)).status == 200
        assert (await at.done("DELETE", path))["disabled_at"] is not None
        assert (await at.ask("GET", "/v1/models", key=key)).status == 401
        assert (await at.done("PATCH", path, {"disabled": False}))["disabled_at"] is None
        assert (await at.ask("GET", "/v1/models", key=key)).status == 200


async def test_limits_for_everybody(tmp_path):
    async with admin(tmp_path) as at:
        assert (await at.done("GET", "/admin/limits"))["limits"] == {}
        assert (await at.done("PATCH", "/admin/limits", {"limits": {"usd_per_day": 0}}))["limits"] == {
            "usd_per_day": "0"
        }
        principal = at.auth.authenticate(f"Bearer {at.key}", None)
        assert [(level.kind, level.limits.usd_per_day_microusd) for level in principal.levels] == [("global", 0)]
        await at.done("DELETE", "/admin/limits")
        assert at.auth.authenticate(f"Bearer {at.key}", None).levels == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": 5}, "name"),
        ({"name": "n", "nmae": 1}, "nmae"),
        ({"name": "n", "org": "a/b"}, "org"),
        ({"name": "n", "role": "root"}, "role"),
        ({"name": "n", "tier": 10}, "tier"),
        ({"name": "n", "tier": -1}, "tier"),
        ({"name": "n", "models": "m"}, "models"),
        ({"name": "n", "models": [""]}, "models[0]"),
        ({"name": "n", "endpoints": ["/v1", "/nowhere"]}, "endpoints[1]"),
        ({"name": "n", "expires_at": "2020-01-01"}, "expires_at"),
        ({"name": "n", "expires_at": "soon"}, "expires_at"),
        ({"name": "n", "limits": {"rpm": 5}}, "limits.rpm"),
        ({"name": "n", "limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"name": "n", "limits": {"requests_per_minute": 1.5}}, "limits.requests_per_minute"),
        ({"name": "n", "limits": {"requests_per_minute": True}}, "limits.requests_per_minute"),
        ({"name": "n", "limits": {"usd_per_day": "1,5"}}, "limits.usd_per_day"),
        ({"name": "n", "limits": {"usd_per_day": 0.0000001}}, "limits.usd_per_day"),
        ({"name": "n", "limits": {"usd_per_month": -1}}, "limits.usd_per_month"),
        (b'{"name": "n", "name": "m"}', "name"),
        (b'{"name": "n", "limits": {"usd_per_day": NaN}}', "limits.usd_per_day"),
    ],
)
async def test_what_is_wrong_in_a_body_is_named_and_nothing_is_made(tmp_path, body, param):
    async with admin(tmp_path) as at:
        assert (await at.refused("POST", "/admin/keys", body))[:2] == (400, param)
        assert len(await at.keys.list()) == 1


async def test_what_is_not_there_is_not_found(tmp_path):
    async with admin(tmp_path) as at:
        for path in (
            "keys/nope",
            "orgs/nope",
            "orgs/a/b",
            "orgs/",
            "apps/nope",
            "apps/a/",
            "users/a/b",
            "users/a/b/c/d",
        ):
            for method, body in (("GET", None), ("PATCH", {}), ("DELETE", None)):
                status, _, _ = await at.refused(method, f"/admin/{path}", body)
                assert status == 404, (method, path)
        assert (await at.refused("POST", "/admin/keys/nope/rotate", {}))[0] == 404
        assert (await at.refused("PUT", "/admin/keys", {}))[0] == 405


async def test_nobody_but_an_admin_reaches_any_of_it(tmp_path):
    async with admin(tmp_path) as at:
        others = [(await at.keys.create(KeyOwner(role), KeyChange(role=role))).key for role in ("reader", "caller")]
        await at.auth.refresh()
        before = await at.keys.list()
        routes = [
            (path, method) for path, handlers in ROUTES.items() if POLICIES[path] == "admin" for method in handlers
        ]
        assert len(routes) >= 20
        for path, method in routes:
            target = path.replace("{id}", before[0].id)
            for key, status in (*((other, 403) for other in others), ("hs_wrong", 401)):
                assert (await at.ask(method, target, {}, key=key)).status == status
        assert await at.keys.list() == before


async def test_the_machine_s_owner_makes_the_first_key_and_needs_it_from_then_on(tmp_path):
    async with admin(tmp_path, with_key=False) as at:
        made = await at.done("POST", "/admin/keys", {"name": "root", "role": "admin"})
        assert (await at.ask("GET", "/admin/keys")).status == 401
        assert (await at.ask("GET", "/admin/keys", key=made["key"])).status == 200
