"""Calls written as tags, one per parameter; their values are text, and the tool's schema says what they are.

Enters: a `Source` that stands behind the opening marker, or before a function's, and the tools. Leaves: calls with
compact JSON arguments. Always true: texts are passed on as they come; other values when they are whole; one that isn't
what the schema says is passed on as the text that it is. A closing tag ends a value only where another tag follows, so
it may stand inside one. Next: `python_calls.py`.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from hitsend.core.tool_format import ToolFormat
from hitsend.serve.output.calls import Calls, Malformed
from hitsend.serve.output.source import BLANKS, Parse, Source

MAX_NAME = 256
MAX_BLANKS = 64
"""Between two tags; so much has to be looked at before it is known whether a value is over."""

_STRUCTURED = frozenset({"null", "array", "object"})
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows, none where it doesn't say. Looks through $ref, anyOf, oneOf, allOf."""
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return types_of(_resolved(reference, root), root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    found = {_type_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches[:64] if isinstance(branches, list) else ():
            found |= types_of(branch, root, depth + 1)
    return frozenset(found)


def _resolved(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def as_json(text: str, types: frozenset[str]) -> str:
    """The value as compact JSON of one of the types, else as a JSON text."""
    wanted = (types & _STRUCTURED) if "string" in types else types
    if wanted:
        try:
            value = _read(text)
            kind = _type_of(value)
            is_whole = isinstance(value, float) and value.is_integer() and "integer" in wanted
            if kind in wanted or (kind == "integer" and "number" in wanted) or is_whole:
                written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
                return written if _is_text(written) else json.dumps(value, separators=(",", ":"))
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _is_text(written: str) -> bool:
    """Whether it holds no half of a surrogate pair, which has to stay the escape that the model wrote."""
    return written.isascii() or not any("\ud800" <= char <= "\udfff" for char in written)


def _read(text: str) -> Any:
    word = text.strip().lower()
    return _WORDS[word] if word in _WORDS else json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


class XmlCalls:
    """Reads what stands behind one marker."""

    def __init__(self, source: Source, calls: Calls, form: ToolFormat) -> None:
        self._source = source
        self._calls = calls
        self._form = form

    def read(self, *, is_certain: bool) -> Parse[None]:
        """One call; without its marker (`is_certain` False) only of a known function. Raises Malformed, OneTooMany."""
        source, form, calls = self._source, self._form, self._calls
        yield from source.blanks()
        yield from self._expect(form.function_begin)
        name = yield from self._name()
        if not (is_certain or (name in calls.known and (yield from self._goes_on()))):
            raise Malformed("this is not a call")
        calls.announce(name)
        source.commit()
        calls.arguments("{")
        tool = calls.known.get(name)
        schema: Mapping[str, Any] = tool.parameters if tool is not None else {}
        seen: set[str] = set()
        yield from source.blanks()
        while (yield from source.starts(form.parameter_begin)):
            source.skip(len(form.parameter_begin))
            yield from self._parameter(schema, seen)
            yield from source.blanks()
        if not (yield from source.starts(form.end)):  # what ends the call ends the function
            yield from self._expect(form.function_end)
        calls.arguments("}")
        calls.complete()
        source.commit()

    def _goes_on(self) -> Parse[bool]:
        """Whether a tag follows that belongs to a call."""
        yield from self._source.blanks()
        for tag in (self._form.parameter_begin, self._form.function_end, self._form.end):
            if (yield from self._source.starts(tag)):
                return True
        return False

    def _parameter(self, schema: Mapping[str, Any], seen: set[str]) -> Parse[None]:
        source, calls = self._source, self._calls
        key = yield from self._name()
        if key in seen:
            raise Malformed("a parameter is given twice")
        properties = schema.get("properties")
        types = types_of(properties.get(key), schema) if isinstance(properties, dict) else frozenset()
        start = f"{',' if seen else ''}{json.dumps(key, ensure_ascii=False)}:"
        seen.add(key)
        if types - {"string"}:
            value: list[str] = []
            yield from self._value(value.append)
            calls.arguments(start + as_json("".join(value), types))
        else:
            source.commit()
            calls.arguments(start + '"')
            yield from self._value(self._send)
            calls.arguments('"')
        source.commit()

    def _send(self, text: str) -> None:
        self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        self._source.commit()

    def _value(self, take: Any) -> Parse[None]:
        """The text up to the closing tag, without the line breaks that set it off."""
        source, end = self._source, self._form.parameter_end
        if (yield from source.starts("\n")):
            source.skip(1)
        held = ""
        while True:
            part, is_end = yield from source.until(end)
            if not part and not is_end:
                raise Malformed("the answer ends inside a call")
            text = held + part
            held = "\n" if text.endswith("\n") else ""
            if text[: len(text) - len(held)]:
                take(text[: len(text) - len(held)])
            if is_end:
                if (yield from self._is_over(end)):
                    source.skip(len(end))
                    return
                take(held + source.skip(1))
                held = ""

    def _is_over(self, end: str) -> Parse[bool]:
        """Whether a tag follows the closing tag that is next."""
        source, form = self._source, self._form
        while True:
            start = source.at + len(end)
            found = BLANKS.match(source.text, start, start + MAX_BLANKS)
            blank = found.end() - start if found else 0
            source.work += blank
            if blank == MAX_BLANKS or start + blank < len(source.text) or source.is_ended:
                break
            yield
        tags = (form.parameter_begin, form.function_end, form.end)
        for tag in tags:
            if (yield from source.starts(tag, len(end) + blank)):
                return True
        begin = source.at + len(end) + blank
        rest = source.text[begin : begin + MAX_BLANKS] if source.is_ended else "."
        return any(tag.startswith(rest) for tag in tags)

    def _name(self) -> Parse[str]:
        source, tag_end = self._source, self._form.tag_end
        parts: list[str] = []
        is_end = False
        while not is_end:
            part, is_end = yield from source.until(tag_end)
            parts.append(part)
            if not (part or is_end) or sum(map(len, parts)) > MAX_NAME:
                raise Malformed("a tag has no end")
        source.skip(len(tag_end))
        name = "".join(parts).strip().strip("\"'")
        if not name or "<" in name:
            raise Malformed("a tag has no name")
        return name

    def _expect(self, tag: str) -> Parse[None]:
        if not (yield from self._source.starts(tag)):
            is_over = not (yield from self._source.peek())
            raise Malformed("the answer ends inside a call" if is_over else f"{tag} was expected")
        self._source.skip(len(tag))
