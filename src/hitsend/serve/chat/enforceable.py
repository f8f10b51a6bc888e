"""A client's schema in words that the grammar library keeps: the same one, or a narrower one.

Enters: a schema, checked or about to be. Leaves: a copy. Always true: what matches the copy matches the original; what
isn't a schema's word (names of properties, values of enum and const) is left alone; the original isn't changed.
Next: `constraints.py`.

Changed are: bounds that the library computes in floats (beyond 2**53 it is wrong, behind an open bound that is a whole
number it begins with that number), dates that aren't in the calendar, patterns (`pattern.py`), references with
characters that have to be escaped in URIs, whole numbers written as 1.0, and words without a meaning here.
"""

import contextlib
from typing import Any
from urllib.parse import quote

from hitsend.serve.chat.pattern import portable

MAX_EXACT = 2**53 - 1
"""Whole numbers up to here are exact as floats."""

_MAPS = frozenset({"properties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLES = frozenset({"items", "additionalProperties"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_LOW, _HIGH = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
_WITHOUT_MEANING = frozenset({"$schema", "$id", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment"})
_REF_SAFE = "#/%~!$&'()*+,;=:@?"

_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""RFC 3339, without the year 0 and without leap seconds, which many readers don't know."""
_NUMBERS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
_NUMBERS |= {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}
"""Of OpenAPI's registry, which tools made from APIs carry along. Its `float` and `double` are any number."""


def enforceable(schema: Any) -> Any:
    """The copy. Takes anything: what is wrong with it is for `schema_check.py` to say."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _WITHOUT_MEANING or (key == "uniqueItems" and not value):
            continue
        out[key] = _value(key, value)
    _close_open_bounds(out)
    _spell_out_format(out)
    return out


def _value(key: str, value: object) -> object:
    if isinstance(value, dict):
        if key in _MAPS:
            return {name: enforceable(each) for name, each in value.items()}
        if key == "patternProperties":
            return {_pattern(name): enforceable(each) for name, each in value.items()}
        return enforceable(value) if key in _SINGLES else value
    if isinstance(value, list):
        return [enforceable(each) for each in value] if key in _LISTS else value
    if isinstance(value, str):
        return _pattern(value) if key == "pattern" else quote(value, safe=_REF_SAFE) if key == "$ref" else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(key, value)
    return value


def _pattern(text: str) -> str:
    with contextlib.suppress(ValueError):
        return portable(text)
    return text


def _number(key: str, value: float) -> float:
    if key in _COUNTS and value == value // 1:
        return int(value)
    if key in _LOW:
        return max(value, -MAX_EXACT)
    return min(value, MAX_EXACT) if key in _HIGH else value


def _close_open_bounds(node: dict[str, Any]) -> None:
    """An open bound that is a whole number becomes a closed one a little further in."""
    if node.get("type") == "integer":
        return
    for opened, closed, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        value = node.get(opened)
        if isinstance(value, bool) or not isinstance(value, int | float) or value * sign < 0 or value != value // 1:
            continue
        step = next(step for step in (1e-9, 1e-6, 1e-3, 1) if value + step != value)
        inner = value + sign * step
        other = node.get(closed)
        if isinstance(other, int | float):
            inner = max(inner, other) if sign > 0 else min(inner, other)
        del node[opened]
        node[closed] = inner


def _spell_out_format(node: dict[str, Any]) -> None:
    name = node.get("format")
    if is_of_numbers(node):
        del node["format"]
        _bound(node, *_NUMBERS.get(str(name), (-MAX_EXACT, MAX_EXACT)))
        return
    pattern = _FORMATS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    del node["format"]
    if "pattern" not in node:
        node["pattern"] = pattern
    elif isinstance(node.get("allOf", []), list):
        node["allOf"] = [*node.get("allOf", []), {"pattern": pattern}]


def is_of_numbers(node: dict[str, Any]) -> bool:
    """Whether its format is one of numbers, and numbers are all that it may be."""
    name, kinds = node.get("format"), node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(name, str) or not isinstance(kinds, list) or not kinds:
        return False
    is_one = name in _NUMBERS or name in ("float", "double")
    return is_one and all(kind in ("integer", "number", "null") for kind in kinds)


def _bound(node: dict[str, Any], low: int, high: int) -> None:
    for keyword, bound, inner in (("minimum", low, max), ("maximum", high, min)):
        given = node.get(keyword, bound)
        if isinstance(given, int | float) and abs(bound) < MAX_EXACT:
            node[keyword] = inner(given, bound)
