"""Is this a JSON schema that can be enforced, and that something can satisfy? Asked before it is compiled.

Enters: a schema from a client, and the request's field that it came in. Leaves: nothing, or an InvalidRequest that
names keyword and path. Always true: the work is bounded by `MAX_NODES` and `MAX_DEPTH`, references are followed but
never expanded, and a schema that passes is one whose every keyword llguidance enforces or that doesn't constrain
(titles, defaults). Runs in the text child. Next: `constraints.py`.

Refused, with the keyword: what the library can't enforce (`UNSUPPORTED`, formats and patterns beyond its own, more
`minProperties` than names are required, since it doesn't keep names unique), contradictions, empty choices, references
to elsewhere, cycles without a way out, and schemas beyond the limits below.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

from hitsend.core.errors import InvalidRequest
from hitsend.serve.chat.enforceable import MAX_EXACT, is_of_numbers
from hitsend.serve.chat.pattern import portable

MAX_DEPTH = 64
MAX_NODES = 5_000
MAX_ENUM = 10_000
MAX_ENUM_BYTES = 1024 * 1024
MAX_PATTERN = 4_096
MAX_MULTIPLE = 1_000
"""Largest `multipleOf`: the library keeps a state for each remainder."""

MIN_EXACT = 1e-12
MAX_REPEAT = 100_000
"""Largest length or count that a bound may have."""

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired",
        "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems",
        "$dynamicRef", "$recursiveRef", "x-guidance",
    }
)  # fmt: skip

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_RANGE = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\[1-9]")


def check_schema(schema: Any, param: str) -> None:
    """Raise InvalidRequest where it can't be enforced; the message begins with `param` and the path inside it."""
    try:
        _Check(schema, param).run()
    except RecursionError:
        raise InvalidRequest(f"{param}: $ref chains are too long", param=param) from None


class _Check:
    """One schema on the way through. `nodes` are all schemas inside it, by path."""

    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param
        self._nodes: list[tuple[str, Any]] = []
        self._targets: dict[str, Any] = {}
        self._places: set[int] = set()

    def run(self) -> None:
        if not isinstance(self._root, dict):
            self._refuse("", "schema", "has to be an object")
        self._collect()
        self._places = {id(node) for _, node in self._nodes}
        for path, node in self._nodes:
            if node is False or node is True:
                continue
            if not isinstance(node, dict):
                self._refuse(path, "schema", "has to be an object, true or false")
            self._check_node(path, node)
        _Finite(self._targets, self._param).check(self._root)

    def _refuse(self, path: str, keyword: str, why: str) -> NoReturn:
        where = f"{path}/{keyword}".lstrip("/")[:200]
        raise InvalidRequest(f"{self._param}: {where}: {why}", param=self._param)

    def _collect(self) -> None:
        """All schemas, breadth first, within the limits."""
        waiting = [("", self._root, 1)]
        for path, node, depth in waiting:
            self._nodes.append((path, node))
            if depth > MAX_DEPTH:
                self._refuse(path, "schema", f"is nested more than {MAX_DEPTH} deep")
            if isinstance(node, dict):
                waiting += [(below, child, depth + 1) for below, child in self._children(path, node)]
            if len(waiting) > MAX_NODES:
                self._refuse("", "schema", f"has more than {MAX_NODES} schemas inside")

    def _children(self, path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for keyword in _MAPS:
            children = node.get(keyword, {})
            if not isinstance(children, dict):
                self._refuse(path, keyword, "has to be an object")
            for name, child in children.items():
                yield f"{path}/{keyword}/{name}", child
        for keyword in _LISTS:
            members = node.get(keyword, [])
            if not isinstance(members, list):
                self._refuse(path, keyword, "has to be an array")
            for index, child in enumerate(members):
                yield f"{path}/{keyword}/{index}", child
        for keyword in _SINGLES:
            if keyword in node:
                if isinstance(node[keyword], list):
                    self._refuse(path, keyword, "an array of schemas is written prefixItems now")
                yield f"{path}/{keyword}", node[keyword]

    def _check_node(self, path: str, node: dict[str, Any]) -> None:
        for keyword, value in node.items():
            if keyword in UNSUPPORTED or (keyword == "uniqueItems" and value):
                self._refuse(path, keyword, "is not supported: it can't be enforced while text is generated")
            if keyword == "$id" and path:
                self._refuse(path, keyword, "is supported at the top only: below, it changes what references mean")
            if keyword in ("enum", "const"):
                self._check_exact(path, keyword, value)
        self._check_type(path, node)
        self._check_choices(path, node)
        self._check_bounds(path, node)
        self._check_range(path, node)
        self._check_text(path, node)
        self._check_object(path, node)
        if "$ref" in node:
            self._resolve(path, node["$ref"])

    def _check_type(self, path: str, node: dict[str, Any]) -> None:
        found = node.get("type", "null")
        types = found if isinstance(found, list) else [found]
        if not types:
            self._refuse(path, "type", "is empty, so nothing can match")
        for each in types:
            if not isinstance(each, str) or each not in TYPES:
                self._refuse(path, "type", f"{str(each)[:40]!r} is no type of JSON schema")

    def _check_choices(self, path: str, node: dict[str, Any]) -> None:
        for keyword in ("anyOf", "oneOf", "allOf"):
            if node.get(keyword) == []:
                self._refuse(path, keyword, "is empty, so nothing can match")
        if "enum" not in node:
            return
        values = node["enum"]
        if not isinstance(values, list):
            self._refuse(path, "enum", "has to be an array")
        if not values:
            self._refuse(path, "enum", "is empty, so nothing can match")
        if len(values) > MAX_ENUM:
            self._refuse(path, "enum", f"has {len(values)} values, limit {MAX_ENUM}")
        if (size := len(json.dumps(values))) > MAX_ENUM_BYTES:
            self._refuse(path, "enum", f"has {size} bytes, limit {MAX_ENUM_BYTES}")
        types = node.get("type")
        if types is not None and not any(_is_of(value, types) for value in values):
            self._refuse(path, "enum", "none of its values is of the type that the schema wants")

    def _check_bounds(self, path: str, node: dict[str, Any]) -> None:
        for low, high in _BOUNDS:
            for keyword in (low, high):
                value = node.get(keyword, 0)
                if not _is_number(value) or value < 0 or value != int(value):
                    self._refuse(path, keyword, "has to be a whole number from 0 on")
                if value > MAX_REPEAT:
                    self._refuse(path, keyword, f"{value}, limit {MAX_REPEAT}")
            if low in node and high in node and node[low] > node[high]:
                self._refuse(path, low, f"{node[low]} is more than {high} {node[high]}")

    def _check_range(self, path: str, node: dict[str, Any]) -> None:
        for keyword in (*_RANGE, "multipleOf"):
            if keyword in node and not _is_number(node[keyword]):
                self._refuse(path, keyword, "has to be a number")
        self._check_multiple(path, node.get("multipleOf", 1))
        self._check_magnitude(path, node)
        for low in ("minimum", "exclusiveMinimum"):
            for high in ("maximum", "exclusiveMaximum"):
                if low not in node or high not in node:
                    continue
                is_open = (low, high) != ("minimum", "maximum")
                if node[low] > node[high] or (is_open and node[low] == node[high]):
                    self._refuse(path, low, f"{node[low]} leaves nothing below {high} {node[high]}")

    def _check_magnitude(self, path: str, node: dict[str, Any]) -> None:
        for keyword in _RANGE:
            if 0 < abs(node.get(keyword, 0)) < MIN_EXACT:
                self._refuse(path, keyword, f"lies nearer to 0 than {MIN_EXACT}")
        for keyword, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
            if node.get(keyword, 0) * sign > MAX_EXACT:
                self._refuse(path, keyword, f"lies beyond ±{MAX_EXACT}, where numbers can't be kept exactly")
        if "minimum" in node and node["minimum"] == node.get("maximum"):
            self._check_exact(path, "minimum", node["minimum"])

    def _check_multiple(self, path: str, value: float) -> None:
        if value <= 0:
            self._refuse(path, "multipleOf", "has to be more than 0")
        if value > MAX_MULTIPLE:
            self._refuse(path, "multipleOf", f"{str(value)[:40]}, limit {MAX_MULTIPLE}")
        if value * 1024 % 1:
            self._refuse(
                path, "multipleOf", "a fraction has to be binary (0.5, 0.25, …): others aren't exact as floats"
            )

    def _check_exact(self, path: str, keyword: str, value: Any) -> None:
        """Numbers in `value` have to be such that the library writes them as they are."""
        waiting = [value]
        for each in waiting:
            if isinstance(each, dict):
                waiting += each.values()
            elif isinstance(each, list):
                waiting += each
            elif _is_number(each) and not _is_exact(each):
                self._refuse(path, keyword, f"{str(each)[:40]} can't be kept exactly: too large, too small or too long")

    def _check_text(self, path: str, node: dict[str, Any]) -> None:
        patterns = node.get("patternProperties", {})
        for keyword, pattern in (("pattern", node.get("pattern")), *(("patternProperties", each) for each in patterns)):
            if pattern is None:
                continue
            if not isinstance(pattern, str):
                self._refuse(path, keyword, "has to be a string")
            if len(pattern) > MAX_PATTERN:
                self._refuse(path, keyword, f"has {len(pattern)} characters, limit {MAX_PATTERN}")
            if _LOOKAROUND.search(pattern):
                self._refuse(path, keyword, "look-around and back-references are not supported")
            try:
                portable(pattern)
            except ValueError as error:
                self._refuse(path, keyword, str(error))
        found = node.get("format")
        if found is not None and found not in FORMATS and not is_of_numbers(node):
            self._refuse(
                path, "format", f"{str(found)[:40]!r} is not supported; there are {', '.join(sorted(FORMATS))}"
            )

    def _check_object(self, path: str, node: dict[str, Any]) -> None:
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._refuse(path, "required", "has to be an array of names")
        properties, patterns = node.get("properties", {}), node.get("patternProperties", {})
        if node.get("additionalProperties") is False and not patterns:
            missing = [name for name in required if name not in properties]
            if missing:
                text = f"{missing[0][:64]!r} is not in properties, and additionalProperties is false"
                self._refuse(path, "required", text)
        least, most = node.get("minProperties", 0), node.get("maxProperties")
        if least > max(1, len(set(required))):
            self._refuse(path, "minProperties", f"{least} is not supported: more than 1 and more than are required")
        if most is not None and len(set(required)) > most:
            self._refuse(path, "maxProperties", f"{most} is less than the {len(set(required))} that are required")

    def _resolve(self, path: str, ref: Any) -> None:
        if not isinstance(ref, str):
            self._refuse(path, "$ref", "has to be a string")
        if not (ref == "#" or ref.startswith("#/")):
            self._refuse(path, "$ref", f"{ref[:80]!r} leads outside; only #, #/… are supported")
        found = self._root
        for part in ref[2:].split("/") if ref != "#" else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                self._refuse(path, "$ref", f"{ref[:80]!r} leads nowhere")
        if not isinstance(found, bool) and id(found) not in self._places:
            self._refuse(path, "$ref", f"{ref[:80]!r} leads to no schema")
        self._targets[ref] = found


class _Finite:
    """Whether a schema has an instance that ends: references are taken to have none until one is found."""

    def __init__(self, targets: dict[str, Any], param: str) -> None:
        self._targets = targets
        self._param = param
        self._has: set[str] = set()
        self._is_asked: set[str] = set()

    def check(self, root: Any) -> None:
        """Raises InvalidRequest."""
        while True:
            before = len(self._has)
            self._is_asked = set()
            if self._node(root):
                return
            if len(self._has) == before:
                raise InvalidRequest(
                    f"{self._param}: $ref: nothing finite can match: a cycle of references has no way out, or what is "
                    "required can't be",
                    param=self._param,
                )

    def _node(self, node: Any) -> bool:
        if isinstance(node, bool):
            return node
        if "$ref" in node and not self._ref(node["$ref"]):
            return False
        if not all(self._node(each) for each in node.get("allOf", ())):
            return False
        if any(key in node and not any(self._node(each) for each in node[key]) for key in ("anyOf", "oneOf")):
            return False
        if "enum" in node or "const" in node:
            return True
        types = node.get("type", ["null"])
        return any(self._type(each, node) for each in ([types] if isinstance(types, str) else types))

    def _ref(self, ref: str) -> bool:
        if ref not in self._has and ref not in self._is_asked:
            self._is_asked.add(ref)
            if self._node(self._targets[ref]):
                self._has.add(ref)
        return ref in self._has

    def _type(self, name: str, node: dict[str, Any]) -> bool:
        if name == "array":
            count, first = int(node.get("minItems", 0)), node.get("prefixItems", [])
            needed = [*first[:count], *([node.get("items", True)] if count > len(first) else [])]
            return all(self._node(each) for each in needed)
        if name == "object":
            properties, rest = node.get("properties", {}), node.get("additionalProperties", True)
            patterns = bool(node.get("patternProperties"))
            return all(patterns or self._node(properties.get(key, rest)) for key in node.get("required", ()))
        return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    if value == 0:
        return True
    return 1e-9 <= abs(value) <= MAX_EXACT and float(f"{value:.15g}" if value % 1 else value) == value


def _is_of(value: Any, types: Any) -> bool:
    names = {
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number", "integer"},
        str: {"string"},
        list: {"array"},
        dict: {"object"},
        type(None): {"null"},
    }[type(value)]
    return bool(names & set([types] if isinstance(types, str) else types))
