"""Schemas and patterns in the library's words: the same or narrower, whoever validates the answer."""

import copy
import datetime as dt
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.errors import InvalidRequest
from hitsend.serve.chat.enforceable import MAX_EXACT, enforceable
from hitsend.serve.chat.pattern import portable
from hitsend.serve.chat.schema_check import check_schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -MAX_EXACT, "maximum": MAX_EXACT}),
        ({"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "exclusiveMinimum": 0}),
        ({"exclusiveMinimum": 0.5}, {"exclusiveMinimum": 0.5}),
        ({"exclusiveMinimum": 0, "maximum": 0.1}, {"minimum": 1e-9, "maximum": 0.1}),
        ({"exclusiveMinimum": 0, "minimum": 2}, {"minimum": 2}),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, {"maximum": -1.000000001, "minimum": -1.5}),
        ({"minLength": 1.0, "maxItems": 2.0}, {"minLength": 1, "maxItems": 2}),
        ({"uniqueItems": False, "$id": "https://a.b", "$schema": "x", "$dynamicAnchor": "m"}, {}),
        ({"$ref": "#/$defs/a b%25ü"}, {"$ref": "#/$defs/a%20b%25%C3%BC"}),
        ({"properties": {"pattern": {"pattern": "."}, "$id": {}}}, None),
        ({"const": {"minimum": 2**70, "pattern": "."}}, {"const": {"minimum": 2**70, "pattern": "."}}),
        ({"enum": [{"$id": 1}], "default": {"$ref": "a b"}}, {"enum": [{"$id": 1}], "default": {"$ref": "a b"}}),
        ({"items": {"anyOf": [{"minLength": 1.0}]}}, {"items": {"anyOf": [{"minLength": 1}]}}),
        ({"minimum": None, "pattern": 5, "items": 3, "anyOf": {}, "format": []}, None),
        (True, True),
        ({"exclusiveMinimum": True}, {"exclusiveMinimum": True}),
        ({"exclusiveMinimum": float("inf")}, None),
        ({"exclusiveMaximum": float("nan")}, None),
    ],
    ids=str,
)
def test_the_copy(schema, expected):
    before = copy.deepcopy(schema)
    found = enforceable(schema)
    assert str(schema) == str(before)
    if expected is not None:
        assert found == expected


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer", "format": "int32"}, (-(2**31), 2**31 - 1)),
        ({"type": "integer", "format": "int32", "minimum": 1, "maximum": 2**40}, (1, 2**31 - 1)),
        ({"type": ["integer", "null"], "format": "uint8"}, (0, 255)),
        ({"type": "integer", "format": "uint64"}, (0, None)),
        ({"type": "integer", "format": "int64"}, (None, None)),
        ({"type": "number", "format": "double", "maximum": 3}, (None, 3)),
    ],
    ids=str,
)
def test_formats_of_numbers_are_bounds(schema, bounds):
    check_schema(schema, "response_format")
    found = enforceable(schema)
    assert ("format" in found, found.get("minimum"), found.get("maximum")) == (False, *bounds)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "int32"},
        {"format": "int32"},
        {"type": ["integer", "string"], "format": "int32"},
        {"type": "integer", "format": "int12"},
    ],
    ids=str,
)
def test_formats_of_numbers_are_of_numbers_alone(schema):
    with pytest.raises(InvalidRequest, match="format"):
        check_schema(schema, "response_format")


def test_a_format_and_a_pattern_stand_side_by_side():
    found = enforceable({"format": "date", "pattern": "^2020", "allOf": [{"maxLength": 10}]})
    assert "format" not in found
    assert found["pattern"] == "^2020"
    assert [*found["allOf"][0], *found["allOf"][1]] == ["maxLength", "pattern"]


def test_dates_are_those_of_the_calendar():
    pattern = re.compile(enforceable({"format": "date"})["pattern"])
    for year in (0, 1, 4, 100, 400, 1900, 1904, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    dt.date.fromisoformat(text)
                    is_date = True
                except ValueError:
                    is_date = False
                assert bool(pattern.match(text)) == is_date, text
    moment = re.compile(enforceable({"format": "date-time"})["pattern"])
    assert moment.match("2024-02-29T23:59:59.5+01:00")
    for text in ("2023-02-29T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01 00:00:00Z"):
        assert not moment.match(text)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^ab+?c{2,3}$", "^ab+?c{2,3}$"),
        ("a.", r"a[^\n\r\x{2028}\x{2029}\x00]"),
        (r"[a\]b]", r"[[a\]b]&&[^\x00]]"),
        (r"[^[&~]", r"[[^\[\&\~]&&[^\x00]]"),
        (r"\d[^\d]", r"[[0-9]&&[^\x00]][[^\p{Nd}]&&[^\x00]]"),
        (r"\u0041\x41\cA", r"\x{41}\x{41}\x{1}"),
        (r"\ud83d\uDE00", r"\x{1f600}"),
        (r"\.\\\/\$", r"\.\\\/\$"),
        (r"(?:a)(?<n>b)(?P<m>c)(?i)d", r"(?:a)(?<n>b)(?P<m>c)(?i)d"),
        (r"\++", r"\++"),
        (r"\p{L}", r"[\p{L}&&[^\x00]]"),
    ],
)
def test_patterns_for_the_library(pattern, expected):
    assert portable(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("a++", "a*+", "a{2}{3}", "(?x)a", "(?m)^a", "(?>a)", "[]a]", "[^]", "[a--b]", "[ab", "a\\", r"\x00", r"\0"),
        *("\0", r"\ud83d", r"\ude00x", "[\\ud83d]"),
    ],
)
def test_what_is_read_differently_by_different_validators_is_refused(pattern):
    with pytest.raises(InvalidRequest, match="pattern"):
        check_schema({"type": "string", "pattern": pattern}, "response_format")


@given(st.text(alphabet="ab[]^-&~\\dDwWsS.(){}*+?|:<>uxp0123éAF$,", max_size=14))
def test_any_text_is_a_pattern_or_refused(pattern):
    try:
        found = portable(pattern)
    except ValueError:
        return
    assert len(found) <= 80 * (len(pattern) + 1)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": 2**53 + 1}, "const"),
        ({"const": -(2**63)}, "const"),
        ({"enum": [1, [{"a": 10**30}]]}, "enum"),
        ({"enum": [1e300]}, "enum"),
        ({"const": 123456789.12345679}, "const"),
        ({"const": 1e-300}, "const"),
        ({"minimum": 123456789.12345679, "maximum": 123456789.12345679}, "minimum"),
        ({"minimum": 2**53}, "minimum"),
        ({"exclusiveMinimum": 2**63}, "exclusiveMinimum"),
        ({"maximum": -(2**63)}, "maximum"),
        ({"exclusiveMaximum": -1e300}, "exclusiveMaximum"),
        ({"minimum": 5e-324}, "minimum"),
        ({"multipleOf": 0.01}, "multipleOf"),
        ({"multipleOf": 1e-320}, "multipleOf"),
        ({"multipleOf": 1_000_003}, "multipleOf"),
        ({"$defs": {"a": {"$id": "inner"}}}, "$defs/a/$id"),
    ],
    ids=str,
)
def test_numbers_that_would_come_out_as_others_are_refused(schema, keyword):
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "response_format")
    assert keyword in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"const": MAX_EXACT},
        {"enum": [0, -0.0, 0.1, 1e-7, 12345.6789]},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"multipleOf": 0.25},
        {"multipleOf": 1000},
        {"const": {"a": "9" * 30}},
        {"$id": "https://a.b/c"},
    ],
    ids=str,
)
def test_numbers_that_are_kept(schema):
    check_schema(schema, "response_format")
