import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import OutputFormat
from hitsend.serve.api.output_format import read_output_format


def schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}} | fields}


@pytest.mark.parametrize(
    ("response_format", "extension", "expected"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, OutputFormat("json_object")),
        (schema(), None, OutputFormat("json_schema", {"type": "null"}, "n", strict=False)),
        (schema(strict=True, description="d"), None, OutputFormat("json_schema", {"type": "null"}, "n", strict=True)),
        (None, {"regex": "a+"}, OutputFormat("regex", "a+")),
        (None, {"lark": "start: /a/", "json": None}, OutputFormat("lark", "start: /a/")),
        (None, {"choice": ["a", "b"]}, OutputFormat("choice", ["a", "b"])),
        ({"type": "text"}, {"json": {}}, OutputFormat("json_schema", {})),
    ],
)
def test_what_is_asked_for(response_format, extension, expected):
    assert read_output_format(response_format, extension) == expected


@pytest.mark.parametrize(
    ("response_format", "extension", "param"),
    [
        ("json", None, "response_format"),
        ({}, None, "response_format.type"),
        ({"type": "xml"}, None, "response_format.type"),
        ({"type": []}, None, "response_format.type"),
        ({"type": "json_object", "schema": {}}, None, "response_format.schema"),
        ({"type": "json_schema"}, None, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": []}, None, "response_format.json_schema"),
        (schema(name=None), None, "response_format.json_schema.name"),
        (schema(name="x" * 65), None, "response_format.json_schema.name"),
        (schema(strict="yes"), None, "response_format.json_schema.strict"),
        (schema(schema=True), None, "response_format.json_schema.schema"),
        (schema(nonsense=1), None, "response_format.json_schema.nonsense"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, None, "response_format.json_schema.schema"),
        (None, [], "structured_outputs"),
        (None, {}, "structured_outputs"),
        (None, {"regex": "a", "lark": "b"}, "structured_outputs"),
        (None, {"regex": ""}, "structured_outputs.regex"),
        (None, {"lark": 5}, "structured_outputs.lark"),
        (None, {"json": "{}"}, "structured_outputs.json"),
        (None, {"choice": []}, "structured_outputs.choice"),
        (None, {"choice": ["a", 1]}, "structured_outputs.choice[1]"),
        (None, {"choice": ["x" * 600_000] * 2}, "structured_outputs.choice"),
        (None, {"grammar": "x"}, "structured_outputs.grammar"),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_shapes_are_named(response_format, extension, param):
    with pytest.raises(InvalidRequest) as refused:
        read_output_format(response_format, extension)
    assert refused.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["type", "json_schema", "x"]), below),
    max_leaves=8,
)


@given(JSON, JSON)
def test_anything_is_read_or_refused(response_format, extension):
    try:
        found = read_output_format(response_format, extension)
    except InvalidRequest as refused:
        assert refused.param
    else:
        assert found is None or isinstance(found, OutputFormat)
