import json

import msgspec
import pytest

from hitsend.core.request import Principal
from hitsend.serve.api import inspect as pages
from hitsend.serve.api.openapi import ANSWERS, BODIES, UPLOADS, document
from hitsend.serve.api.routes import OPEN_TO_ALL, ROUTES
from tests.edge import Edge


@pytest.fixture(scope="module")
def api():
    return document(ROUTES)


def resolve(api, schema):
    return api["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def refs(value):
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else ())
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def test_every_route_and_method_is_in_it_with_a_summary(api):
    assert set(api["paths"]) == set(ROUTES)
    for path, handlers in ROUTES.items():
        assert {key.upper() for key in api["paths"][path] if key != "parameters"} == set(handlers)
        assert all(api["paths"][path][method.lower()]["summary"] for method in handlers)
    names = [item["operationId"] for path in api["paths"].values() for key, item in path.items() if key != "parameters"]
    assert len(names) == len(set(names))


def test_every_route_that_reads_a_body_says_which(api):
    posts = {path for path, handlers in ROUTES.items() if "POST" in handlers}
    assert posts == {*BODIES, *UPLOADS, "/v1/batches/{id}/cancel"}
    assert "multipart/form-data" in api["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    for path, struct in BODIES.items():
        schema = resolve(api, api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
        assert schema["additionalProperties"] is False, "as the server does it"
        fields = {field.encode_name for field in msgspec.structs.fields(struct)}
        assert set(schema["properties"]) == fields
        assert set(schema.get("required", ())) == {f.encode_name for f in msgspec.structs.fields(struct) if f.required}


def test_every_field_of_every_answer_is_in_it(api):
    for path, kinds in ANSWERS.items():
        for kind, struct in kinds.items():
            schema = resolve(api, api["paths"][path]["post"]["responses"]["200"]["content"][kind]["schema"])
            assert set(schema["properties"]) == {field.encode_name for field in msgspec.structs.fields(struct)}


def test_every_reference_leads_somewhere(api):
    found = set(refs(api))
    assert found
    assert {ref.rpartition("/")[2] for ref in found} <= set(api["components"]["schemas"])


def test_what_needs_no_key_says_so(api):
    free = {path for path, item in api["paths"].items() if item.get("get", {}).get("security") == []}
    assert free == OPEN_TO_ALL


async def test_it_is_served_and_needs_a_key_where_keys_exist():
    answer = await Edge().ask("/openapi.json")
    assert (answer.status, answer.json()["openapi"]) == (200, "3.1.0")
    keyed = Edge(keys={"sk-1": Principal("k1")})
    assert (await keyed.ask("/openapi.json")).status == 401
    assert (await keyed.ask("/docs")).status == 401
    assert (await keyed.ask("/openapi.json", None, (b"authorization", b"Bearer sk-1"))).status == 200


async def test_the_page_is_served_under_a_strict_policy_and_loads_only_from_here():
    edge = Edge()
    edge.services.page.update(pages.load_page())
    answer = await edge.ask("/docs")
    assert answer.status == 200
    assert b"default-src 'none'" in answer.headers[b"content-security-policy"]
    assert b"unsafe" not in answer.headers[b"content-security-policy"]
    html = answer.body.decode()
    assert "http:" not in html
    assert "https:" not in html
    for file in ("docs.js", "docs.css", "page.css"):
        assert f"/inspect/web/{file}" in html
        assert (await edge.ask(f"/inspect/web/{file}")).status == 200
    assert "innerHTML" not in json.dumps([file.body.decode() for file in edge.services.page.values()])
