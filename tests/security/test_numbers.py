"""Every number on every route, and every field of `/admin`, with whatever isn't one: never the server's fault."""

import itertools
import json
import random
from typing import Any

import pytest

from hitsend.serve.api.services import ServedModel
from tests.api.test_admin import admin
from tests.api.test_fuzz import NUMBERS, OTHERS, with_field
from tests.api.test_policy import BODIES
from tests.edge import Edge

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

VALUES = [*NUMBERS, *OTHERS, "2147483647", "-2147483648", "9007199254740992", "-1e308", "1e15", "-0.0", "1e-7"]
DEPTH = 4
Step = str | int


def numbers_in(schema: Any, document: Any, depth: int = DEPTH) -> list[tuple[Step, ...]]:
    """Where a document's schema lets a number stand, in and under a field."""
    if depth == 0 or not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        return numbers_in(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document, depth)
    kinds = schema.get("type", [])
    found: set[tuple[Step, ...]] = (
        {()} if {"number", "integer"} & set([kinds] if isinstance(kinds, str) else kinds) else set()
    )
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        found |= set(numbers_in(part, document, depth))
    for name, inner in schema.get("properties", {}).items():
        found |= {(name, *path) for path in numbers_in(inner, document, depth - 1)}
    if isinstance(schema.get("items"), dict):
        found |= {(0, *path) for path in numbers_in(schema["items"], document, depth - 1)}
    if isinstance(schema.get("additionalProperties"), dict):
        found |= {("3", *path) for path in numbers_in(schema["additionalProperties"], document, depth - 1)}
    return sorted(found, key=str)


def put(path: tuple[Step, ...], value: str) -> str:
    """JSON text with the value at the end of the path."""
    for step in reversed(path):
        value = f"[{value}]" if isinstance(step, int) else f'{{"{step}":{value}}}'
    return value


async def fields_of(edge: Edge, route: str, method: str) -> list[tuple[Step, ...]]:
    document = (await edge.ask("/openapi.json")).json()
    schema = document["paths"][route][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    return [path for path in numbers_in(schema, document) if path]


@pytest.mark.parametrize("route", list(BODIES))
async def test_every_number_of_every_route(route: str):
    await check_numbers(route, some=6)


@pytest.mark.slow
@pytest.mark.parametrize("route", list(BODIES))
async def test_every_number_of_every_route_with_every_value(route: str):
    await check_numbers(route, some=len(VALUES))


async def check_numbers(route: str, some: int) -> None:
    """Every place with so many of the values, in turns."""
    values = itertools.cycle(VALUES)
    edge = Edge(embedding_model=ServedModel("e", 1, 512))
    paths = await fields_of(edge, route, "POST")
    plain = json.dumps(BODIES[route])
    for path in paths:
        rest = json.dumps({name: value for name, value in BODIES[route].items() if name != path[0]})
        for value in itertools.islice(values, some):
            body = with_field(rest, str(path[0]), put(path[1:], value)).replace(b"{,", b"{")
            answer = await edge.ask(route, body)
            assert answer.status in (200, 400, 403, 404), (body, answer.body)
            if answer.status != 200:
                assert isinstance(answer.error["message"], str)
    for value in VALUES:
        assert (await edge.ask(route, value.encode())).status in (200, 400)
    assert (await edge.ask(route, plain.encode())).status == 200
    assert edge.flights.num_open == 0


async def test_the_walk_finds_the_numbers():
    found = await fields_of(Edge(), "/v1/chat/completions", "POST")
    assert {("temperature",), ("max_tokens",), ("n",), ("seed",), ("logit_bias", "3")} <= set(found)


LIMITS = (
    *("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "parallel_requests"),
    *("tokens_per_request", "usd_per_day", "usd_per_month", "nonsense"),
)
TERMS = ("limits", "models", "tier", "max_tier", "nonsense")
ADMIN_FIELDS = {
    ("POST", "/admin/keys"): ("name", "org", "app", "user", "role", "endpoints", "expires_at", *TERMS),
    ("PATCH", "/admin/keys/{id}"): ("name", "role", "endpoints", "expires_at", *TERMS),
    ("POST", "/admin/keys/{id}/rotate"): ("overlap", "expires_at", "nonsense"),
    ("POST", "/admin/orgs"): ("org", *TERMS),
    ("PATCH", "/admin/orgs/o"): ("disabled", *TERMS),
    ("POST", "/admin/apps"): ("app", "org", *TERMS),
    ("POST", "/admin/users"): ("user", "app", "org", *TERMS),
    ("PATCH", "/admin/limits"): TERMS,
}


def admin_values(method: str, path: str) -> list[tuple[str, str]]:
    """Every field with every value; limits also one by one."""
    fields = ADMIN_FIELDS[method, path]
    limits = LIMITS if "limits" in fields else ()
    found = [(field, value) for field in fields for value in VALUES]
    return found + [("limits", f'{{"{limit}":{value}}}') for limit in limits for value in VALUES]


@pytest.mark.parametrize(("method", "path"), list(ADMIN_FIELDS))
async def test_every_field_of_admin(tmp_path, method: str, path: str):
    async with admin(tmp_path) as at:
        made = await at.done("POST", "/admin/keys", {"name": "n"})
        await at.done("POST", "/admin/orgs", {"org": "o"})
        where = path.replace("{id}", made["id"])
        names = {"/admin/keys": "name", "/admin/orgs": "org", "/admin/apps": "app", "/admin/users": "user"}
        num_refused = 0
        values = admin_values(method, path)
        chosen = values if len(values) < 200 else random.Random(path).sample(values, 200)
        for number, (field, value) in enumerate(chosen):
            base = {names[path]: f"n{number}"} if path in names and names[path] != field else {}
            body = with_field(json.dumps(base), field, value).replace(b"{,", b"{")
            answer = await at.ask(method, where, body)
            assert answer.status in (200, 400, 404, 409), (body, answer.body)
            if answer.status != 200:
                num_refused += 1
                assert isinstance(answer.error["message"], str)
        assert num_refused > 20
        for listed in ("/admin/keys", "/admin/orgs", "/admin/apps", "/admin/users", "/admin/limits"):
            json.dumps(await at.done("GET", listed), allow_nan=False)
