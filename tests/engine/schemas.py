"""JSON schemas that have to be enforced, by hand and by a generator."""

import random
from typing import Any

S = {"type": "string", "maxLength": 6}
I = {"type": "integer", "minimum": -20, "maximum": 300}  # noqa: E741  # a table reads better with short names


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A closed object, everything in it required unless said otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False} | more


def text(**limits: Any) -> dict[str, Any]:
    """A string."""
    return {"type": "string"} | limits


def some(items: Any, **limits: Any) -> dict[str, Any]:
    """A short array."""
    return {"type": "array", "items": items, "maxItems": 3} | limits


LIST = obj({"v": I, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
TREE = {"$ref": "#/$defs/t", "$defs": {"t": obj({"l": S, "kids": some({"$ref": "#/$defs/t"}, maxItems=1)})}}

SCHEMAS: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "boolean"},
    I,
    {"type": "integer", "minimum": 0, "maximum": 0},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    {"type": "number", "minimum": 1e3, "maximum": 1e4},
    S,
    text(minLength=3, maxLength=3),
    text(maxLength=0),
    text(pattern="^[a-z]{2,4}$"),
    text(pattern="^\\d{3}-\\d{4}$"),
    text(pattern="^(北|京)+$", maxLength=4),
    text(pattern="^a|b$", maxLength=3),
    text(pattern='^[^"\\\\]{1,5}$'),
    text(pattern="^\\$[0-9]+\\.[0-9]{2}$", maxLength=8),
    text(format="date"),
    text(format="time"),
    text(format="date-time"),
    text(format="uuid"),
    text(format="ipv4"),
    text(format="ipv6"),
    text(format="email", maxLength=12),
    text(format="hostname", maxLength=12),
    text(format="duration"),
    {"enum": [1, "1", None, True, [1], {"a": 1}]},
    {"enum": ["北京", 'a"b', "\\n", "\n", "", "é", "🙂"]},
    {"enum": ["a", "ab", "abc", "b"]},
    {"type": "string", "enum": ["x", 5]},
    {"const": "ünï"},
    {"const": {"a": [1, 2, {"b": None}]}},
    {"const": -0.5},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["string", "boolean"], "maxLength": 2},
    {"anyOf": [I, S]},
    {"anyOf": [obj({"a": I}), obj({"b": S})]},
    {"anyOf": [{"const": 1}, {"const": 2}, {"type": "null"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    {"oneOf": [obj({"k": {"const": "a"}, "x": I}), obj({"k": {"const": "b"}, "y": S})]},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 50}]},
    {
        "allOf": [obj({"a": I, "b": S}, additionalProperties=True), {"properties": {"a": {"maximum": 9}}}],
        "maxProperties": 3,
    },
    some(I),
    some(S, minItems=2),
    some({"type": "boolean"}, minItems=3),
    some(some(I, maxItems=2), minItems=1),
    {"type": "array", "prefixItems": [I, S], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    obj({}),
    obj({"a": I}),
    obj({"a": I, "b": S}, ["b"]),
    obj({"a": S, "b": S, "c": S}, []),
    obj({"naïve": I, "北京": S, 'q"uote': {"type": "null"}, "back\\slash": I}),
    obj({"a": obj({"b": obj({"c": {"const": 1}})})}),
    {"type": "object", "properties": {"a": I}, "required": ["a"], "additionalProperties": I, "maxProperties": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^x[0-9]$": I}, "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "required": ["r"], "properties": {}, "additionalProperties": I, "maxProperties": 2},
    obj({"p": {"$ref": "#/$defs/p"}, "q": {"$ref": "#/$defs/p"}}) | {"$defs": {"p": obj({"x": I})}},
    {"$ref": "#/definitions/d", "definitions": {"d": some(S)}},
    {"$ref": "#/properties/a", "properties": {"a": {"type": "integer", "maximum": 5, "minimum": 1}}},
    LIST,
    TREE,
    {"title": "T", "description": "d", "default": 3, "examples": [1], "$comment": "c", **I},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://e.com/a", **obj({"a": I})},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1},
    {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.001},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1},
    {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.01}]},
    {"type": "integer", "minimum": -(2**63), "maximum": -5},
    {"type": "integer", "minimum": 2**53 - 3, "maximum": 2**63 - 1},
    {"enum": [2**53 - 1, 0.1, 1e-7, -12345.678]},
    text(pattern='^[^"]$'),
    text(pattern='^[^"]{1,3}$'),
    text(pattern="^[^\\\\]{1,3}$"),
    text(pattern="^[^a-z\"']+$", maxLength=3),
    text(pattern="^[\\x00-\\x1f]$"),
    text(pattern="^\\W{3}$"),
    text(pattern="^[^\\w]$"),
    text(pattern="^\\D\\S\\s.$"),
    text(pattern="^[^[\\]&]{2}$"),
    text(pattern="^\\u0041\\x41$"),
    text(pattern="-02-29$", format="date"),
    text(pattern="^0", format="date"),
    text(pattern="^(1900|2000|2100|2023)-02", format="date-time"),
    {"type": "array", "uniqueItems": False, "items": I, "minItems": 1.0, "maxItems": 2.0},
    {"$ref": "#/$defs/a b", "$defs": {"a b": {"type": "null"}}},
    obj({"d": text(format="date"), "n": {"type": ["number", "null"], "minimum": 0, "maximum": 5}}),
]


def generated(seed: int) -> dict[str, Any]:
    """Some schema of moderate size."""
    rng = random.Random(seed)
    names = ["a", "name", "größe", "城", "x y", 'q"', "n1"]
    schema = _some(rng, 3, names)
    if rng.random() < 0.3:
        schema = obj({"left": {"$ref": "#/$defs/d"}, "right": {"$ref": "#/$defs/d"}}) | {"$defs": {"d": schema}}
    return schema


def _some(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    if depth and rng.random() < 0.7:
        kind = rng.choice(["object", "object", "array", "any", "tuple", "map"])
        below = [_some(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]
        if kind == "object":
            properties = dict(zip(rng.sample(names, len(below)), below, strict=True))
            return obj(properties, [name for name in properties if rng.random() < 0.6])
        if kind == "array":
            low = rng.randint(0, 2)
            return some(below[0], minItems=low, maxItems=low + rng.randint(0, 2))
        if kind == "any":
            return {"anyOf": below}
        if kind == "map":
            return {"type": "object", "additionalProperties": below[0], "maxProperties": 2}
        return {"type": "array", "prefixItems": below, "items": False, "minItems": rng.randint(0, len(below))}
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 50) / 4},
            text(minLength=(least := rng.randint(0, 3)), maxLength=least + rng.randint(0, 5)),
            text(
                pattern=rng.choice(["^[a-f0-9]{4}$", "^x+y?$", "^[\\wß]{1,4}$", "^(ab|cd){1,2}$", "^.{2}$"]),
                maxLength=9,
            ),
            text(format=rng.choice(["date", "time", "uuid", "ipv4"])),
            {"enum": rng.sample(["a", "b", "ä", "北", 'x"', 1, 2.5, None, False, [1]], rng.randint(1, 5))},
            {"const": rng.choice([0, "c", None, True, {"k": []}])},
            {"type": rng.choice(["boolean", "null"])},
            {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 20},
        ]
    )
