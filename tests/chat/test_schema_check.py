import time

import pytest

from hitsend.core.errors import InvalidRequest
from hitsend.serve.chat.schema_check import MAX_ENUM, UNSUPPORTED, check_schema
from tests.engine.schemas import SCHEMAS, generated


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


LIST = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}


def chain(length):
    """A chain of references, the definition of each behind its user."""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema", [*SCHEMAS, LIST, nested(60), chain(100), {}, {"items": True}], ids=lambda s: str(s)[:40]
)
def test_what_can_be_kept_passes(schema):
    check_schema(schema, "response_format")


@pytest.mark.parametrize("seed", range(100))
def test_generated_schemas_pass(seed):
    check_schema(generated(seed), "response_format")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
        (ENDLESS, "$ref"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref"),
        ({"anyOf": [ENDLESS | {"properties": {"n": {"$ref": "#/anyOf/0"}}}]}, "$ref"),
        ({"allOf": [{"$ref": "#"}]}, "$ref"),
        ({"$ref": "other.json"}, "$ref"),
        ({"$ref": "https://example.com/x"}, "$ref"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$ref": "#/title", "title": {"type": "string"}}, "$ref"),
        ({"$ref": "#anchor"}, "$ref"),
        ({"properties": {"x": {"enum": []}}}, "properties/x/enum"),
        ({"anyOf": []}, "anyOf"),
        ({"oneOf": []}, "oneOf"),
        ({"allOf": []}, "allOf"),
        ({"type": []}, "type"),
        ({"type": "strin"}, "type"),
        ({"type": 5}, "type"),
        ({"minimum": 5, "maximum": 3}, "minimum"),
        ({"exclusiveMinimum": 3, "maximum": 3}, "exclusiveMinimum"),
        ({"minimum": "5"}, "minimum"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"minLength": 5, "maxLength": 3}, "minLength"),
        ({"minItems": 2, "maxItems": 1}, "minItems"),
        ({"minProperties": 1, "maxProperties": 0}, "minProperties"),
        ({"maxLength": -1}, "maxLength"),
        ({"maxLength": 1.5}, "maxLength"),
        ({"minLength": 10**9}, "minLength"),
        ({"type": "object", "required": ["k"], "additionalProperties": False}, "required"),
        ({"type": "object", "required": "k"}, "required"),
        ({"required": ["a", "b"], "maxProperties": 1}, "maxProperties"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"enum": [1, 2], "type": "string"}, "enum"),
        ({"enum": list(range(MAX_ENUM + 1))}, "enum"),
        ({"enum": ["x" * 1_100_000]}, "enum"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
        ({"type": "string", "pattern": "a" * 5000}, "pattern"),
        ({"patternProperties": {"(?!x)": {}}}, "patternProperties"),
        ({"type": "string", "format": "phone"}, "format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"items": [{"type": "string"}]}, "items"),
        ({"items": {"not": {}}}, "items/not"),
        ({"properties": {"a": 5}}, "properties/a/schema"),
        ({"properties": []}, "properties"),
        ({"anyOf": {}}, "anyOf"),
        (nested(64), "deep"),
        ({"anyOf": [{}] * 5001}, "schemas"),
        ([], "schema"),
        (True, "schema"),
        (chain(2000), "$ref"),
        *(({keyword: {}}, keyword) for keyword in sorted(UNSUPPORTED)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_kept_is_refused_with_its_keyword(schema, place):
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "response_format")
    assert refused.value.param == "response_format"
    assert place in refused.value.message


def test_the_work_is_bounded():
    """Many references that need each other, none of them finite."""
    size = 1200
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * 7 + k) % size}"} for k in (1, 2, 3)]} for i in range(size)}
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        check_schema({"$ref": "#/$defs/d0", "$defs": defs}, "response_format")
    assert time.process_time() - began < 20
