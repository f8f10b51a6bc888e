"""Every role on every route with everybody's objects: what isn't granted in `policy.py` never answers 2xx."""

import json
from typing import Any

import pytest

from hitsend.core.errors import InvalidRequest, PermissionDenied
from hitsend.core.request import Principal
from hitsend.serve.api.policy import OPEN_TO_ALL, POLICIES, ROLES, check_endpoints, check_rights, covers
from hitsend.serve.api.routes import ROUTES
from hitsend.serve.api.services import PageFile, ServedModel
from tests.edge import Edge, chat_body

MODEL = ServedModel("e", 1, 512)
ROLE_NAMES = ("admin", "reader", "caller")
KEYS = {role: Principal(key_id=f"k-{role}", name=role, role=role) for role in ROLE_NAMES} | {
    "other": Principal(key_id="k-other", name="other")
}
OWN, FOREIGN, MISSING = "own", "foreign", "missing"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": chat_body(),
    "/v1/chat/completions/input_tokens": chat_body(),
    "/v1/chat/completions/render": chat_body(),
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/embeddings": {"model": "e", "input": "hi"},
    "/v1/estimate": chat_body(),
    "/v1/routes/explain": chat_body(),
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [104]},
}
BOOKS = ("/admin/usage", "/admin/ledger", "/admin/reconcile")
ELSEWHERE = [("/inspect/plan", "POST")]
"""Starts a process each time: `tests/cli/test_plan_page.py` asks it."""
EVERY = [
    (route, method) for route, handlers in ROUTES.items() for method in handlers if (route, method) not in ELSEWHERE
]
PLANNING = {"/inspect/plan"}
"""A POST that changes nothing: it has a body because it has many fields."""
WHOSE = [
    (route, method, whose)
    for route, method in EVERY
    for whose in ((OWN, FOREIGN, MISSING) if "{id}" in route else (OWN,))
]


def bearer(role: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {role}".encode())


async def stocked(role: str) -> tuple[Edge, dict[str, str]]:
    """An edge on which this role and another caller both made a request and a stored response; their ids."""
    edge = Edge(keys=KEYS, embedding_model=MODEL)
    edge.services.page["docs.html"] = PageFile("text/html", b"")
    for key, whose in ((role, OWN), ("other", FOREIGN)):
        edge.flights.close(edge.flights.open(f"req-{whose}", KEYS[key]))
        kept = json.dumps({"items": [], "response": {"id": f"resp-{whose}", "output": []}}).encode()
        await edge.responses.put(f"resp-{whose}", kept, key_id=KEYS[key].key_id)
    return edge, {OWN: "own", FOREIGN: "foreign", MISSING: "missing"}


def is_denied(role: str, route: str) -> bool:
    """Whether it is not this role's, written down apart from the code that decides."""
    if role == "caller":
        return route.startswith("/admin/") or route in ("/metrics", "/inspect/state")
    if route in BOOKS:
        return False
    works = (
        "/v1/chat/",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/estimate",
        "/v1/responses",
        "/v1/messages",
        "/v1/routes",
        "/v1/files",
    )
    return role == "reader" and route.startswith((*works, "/v1/batches", "/tokenize", "/detokenize", "/admin/"))


def path_of(route: str, whose: str) -> str:
    kind = "resp" if route.startswith("/v1/responses") else "req"
    fixed = {"/v1/models/{id}": "m", "/inspect/web/{id}": "index.html"}
    endless = "?frames=1" if route == "/inspect/live" else ""
    return route.replace("{id}", fixed.get(route, f"{kind}-{whose}")) + endless


def expected(role: str, route: str, whose: str) -> bool:
    """Whether it is to be answered at all."""
    if is_denied(role, route):
        return False
    if route == "/inspect/usage":
        return False  # this edge keeps no ledger
    if route.startswith("/inspect/requests/{id}"):
        return whose == OWN or (whose == FOREIGN and role in ("admin", "reader"))
    if route.startswith("/v1/responses/{id}"):
        return whose == OWN
    # this edge administers nothing and keeps no files: `test_admin.py` and `test_batches.py` do
    return not route.startswith(("/admin", "/v1/files", "/v1/batches"))


@pytest.mark.parametrize(("route", "method", "whose"), WHOSE)
@pytest.mark.parametrize("role", ROLE_NAMES)
async def test_a_role_gets_what_is_granted_and_nothing_else(role, route, method, whose):
    edge, _ = await stocked(role)
    body = BODIES.get(route, {}) if method in ("POST", "PATCH") else None
    answer = await edge.ask(path_of(route, whose), body, bearer(role), method=method)
    assert (200 <= answer.status < 300) == expected(role, route, whose), (answer.status, answer.body)
    if answer.status != 200:
        is_role = is_denied(role, route)
        assert answer.status == (403 if is_role else 404), answer.body
        if is_role:
            assert route in answer.error["message"]
            assert edge.pipeline.requests == []
            assert edge.embedded == []


def test_every_route_has_a_policy_and_no_policy_is_for_nothing():
    assert set(POLICIES) == set(ROUTES)
    assert {"/healthz"} == OPEN_TO_ALL


def test_a_route_without_a_policy_is_nobody_s():
    for role in ROLE_NAMES:
        with pytest.raises(PermissionDenied):
            check_rights(Principal(key_id="k", role=role), "/new")


def test_what_each_role_is_for():
    may = {role: {route for route, policy in POLICIES.items() if role in ROLES[policy]} for role in ROLE_NAMES}
    assert may["admin"] == set(ROUTES)
    assert {"/metrics", "/inspect/state", "/inspect/requests", *BOOKS} <= may["reader"]
    assert not any("POST" in ROUTES[route] or "DELETE" in ROUTES[route] for route in may["reader"] - PLANNING)
    assert not may["caller"] & {"/metrics", "/inspect/state"}
    assert not any(route.startswith("/admin") for route in may["caller"] | (may["reader"] - set(BOOKS)))


async def test_on_its_own_machine_without_keys_the_owner_may_do_everything():
    edge = Edge()
    for route, method in EVERY:
        body = BODIES.get(route, {}) if method in ("POST", "PATCH") else None
        assert (await edge.ask(path_of(route, MISSING), body, method=method)).status not in (401, 403)


async def test_a_key_with_endpoints_has_those_and_what_lies_below_them():
    limited = Principal(key_id="k", name="n", role="admin", endpoints=("/v1/embeddings", "/v1/chat"))
    edge = Edge(keys={"limited": limited}, embedding_model=MODEL)
    for route, method in EVERY:
        if route in OPEN_TO_ALL:
            continue
        body = BODIES.get(route, {}) if method in ("POST", "PATCH") else None
        answer = await edge.ask(path_of(route, MISSING), body, bearer("limited"), method=method)
        if route == "/v1/embeddings" or route.startswith("/v1/chat/"):
            assert answer.status == 200
        else:
            assert answer.status == 403
            assert route in answer.error["message"]


def test_endpoints_end_at_a_slash_and_have_to_be_somewhere():
    assert covers("/v1", "/v1/chat/completions")
    assert not covers("/v1/chat/completions", "/v1/completions")
    assert not covers("/v1/embed", "/v1/embeddings")
    check_endpoints(("/v1", "/v1/chat", "/inspect/requests/{id}"))
    with pytest.raises(InvalidRequest, match=r"endpoints\[1\]"):
        check_endpoints(("/v1", "/v2"))


async def test_models_that_are_not_allowed_are_denied_by_name_and_not_listed():
    keys = {name: Principal(key_id=name, name=name, models=(name,)) for name in ("m", "e", "x")}
    edge = Edge(keys=keys, embedding_model=MODEL)
    for name, listed in (("m", ["m"]), ("e", ["e"]), ("x", [])):
        found = (await edge.ask("/v1/models", None, bearer(name))).json()["data"]
        assert [model["id"] for model in found] == listed
    denied = await edge.ask("/v1/models/e", None, bearer("m"))
    assert (denied.status, "'e'" in denied.error["message"]) == (403, True)
    assert (await edge.ask("/v1/models/nope", None, bearer("m"))).status == 404
    reading = ("/v1/estimate", "/v1/routes/explain", "/v1/chat/completions/render", "/tokenize", "/detokenize")
    counting = ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/chat/completions/input_tokens")
    for route in (*reading, *counting):
        assert (await edge.ask(route, BODIES[route], bearer("m"))).status == 200, route
        for name in ("e", "x"):
            denied = await edge.ask(route, BODIES[route], bearer(name))
            assert denied.status == 403, route
            assert "'m'" in denied.error["message"]
    hidden = await edge.ask("/tokenize", {"content": "hi", "model": "unknown"}, bearer("x"))
    assert hidden.status == 403, "a name that nobody serves is no way around"
