"""Values between tags, as a grammar: texts stand there without quotes, everything else is JSON.

Enters: the schema of one parameter. Leaves: lines in the library's notation. Always true: what is forced here is
read by `output/xml_calls.py` as a value that the schema allows: where a text may stand, only null, an array or an
object are read as something else, so a text that begins like one of the latter two is not written.
Next: `constraints.py`.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from hitsend.core.constraint import WHITESPACE
from hitsend.serve.chat.enforceable import enforceable
from hitsend.serve.chat.pattern import portable

MAX_DEPTH = 8
"""References and choices that are looked through."""

_STRUCTURED = ("null", "array", "object")
_LIMITS = frozenset({"minLength", "maxLength", "pattern"})
_OTHERS = frozenset({"allOf", "oneOf", "anyOf", "format", "$ref"})
_IN_CLASS_OR_ESCAPED = re.compile(r"\\.|\[(?:\\.|\[(?:\\.|[^\]\\])*\]|[^\]\\])*\]", re.DOTALL)
_ANY_TEXT = r"/(.|\n)*/"
_NO_OTHER_VALUE = r"~/\s*[\[{](?s:.*)/"
_NO_TAG = r"~/(?s:.*)<\/parameter>(?s:.*)/"


class _Parts(msgspec.Struct, frozen=True):
    """What a schema allows: some words, text within limits, other values. `is_exact` False: and it says more."""

    words: tuple[str, ...] = ()
    text: dict[str, Any] | None = None
    other: dict[str, Any] | None = None
    is_exact: bool = True


def xml_value(rule: str, schema: Any, definitions: dict[str, Any], end: str, *, is_strict: bool) -> Iterator[str]:
    """Rule `rule`: the value and `end`. Raises ValueError where a strict tool asks for what can't be forced here."""
    closing = json.dumps(end, ensure_ascii=False)
    parts = _parts(schema, definitions)
    if is_strict and not parts.is_exact:
        raise ValueError("such a choice of texts can't be forced between tags")
    # one literal with the tag: a lexeme that ends where a text may go on would never be taken
    words = [*parts.words, *(["null"] if _allows_null(parts.other) and parts.text is not None else [])]
    ways = [json.dumps(word + end, ensure_ascii=False) for word in words]
    if parts.text is not None:
        ways.append(f"{rule}_text")
        limits = [*_limits(parts.text, is_strict=is_strict)]
        if parts.other is not None:
            limits = [*limits, _ANY_TEXT, _NO_OTHER_VALUE]
        yield f"{rule}_text[suffix={closing}]: {rule.upper() if limits else _ANY_TEXT}"
        if limits:
            yield f"{rule.upper()}: {' & '.join([*limits, _NO_TAG])}"
    if parts.other is not None:
        ways.append(f"{rule}_json {closing}")
        yield f"{rule}_json: {json_rule(definitions | parts.other)}"
    yield f"{rule}: {' | '.join(ways)}"


def _parts(schema: Any, definitions: dict[str, Any], depth: int = 0) -> _Parts:
    own = _resolved(schema, definitions)
    if "enum" in own or "const" in own:
        return _of_values(own)
    branches = own.get("anyOf", own.get("oneOf"))
    if "type" not in own and isinstance(branches, list) and depth < MAX_DEPTH:
        return _of_branches(own, [_parts(each, definitions, depth + 1) for each in branches])
    types = own.get("type", ["string"])
    types = [types] if isinstance(types, str) else types
    if "string" not in types:
        return _Parts(other=own)
    structured = [name for name in types if name in _STRUCTURED]
    other = own | {"type": structured} if structured else None
    return _Parts((), own, other, is_exact=not _OTHERS & own.keys())


def _of_values(own: dict[str, Any]) -> _Parts:
    values = own["enum"] if "enum" in own else [own["const"]]
    words = tuple(value for value in values if isinstance(value, str))
    if not words:
        return _Parts(other=own)
    # beside texts, a number would be read as one
    rest = [value for value in values if value is None or isinstance(value, list | dict)]
    return _Parts(words, None, {"enum": rest} if rest else None, is_exact=not (_OTHERS | _LIMITS) & own.keys())


def _of_branches(own: dict[str, Any], branches: list[_Parts]) -> _Parts:
    texts = [each.text for each in branches if each.text is not None]
    words = tuple(word for each in branches for word in each.words)
    others = [each.other for each in branches if each.other is not None]
    if not (texts or words):
        return _Parts(other=own)
    structured = [each for each in others if "enum" in each or _is_structured(each.get("type"))]
    is_exact = len(texts) <= 1 and all(each.is_exact for each in branches) and len(_OTHERS & own.keys()) == 1
    text = texts[0] if len(texts) == 1 else {} if texts else None
    return _Parts(words, text, {"anyOf": structured} if structured else None, is_exact=is_exact)


def _allows_null(schema: dict[str, Any] | None) -> bool:
    if schema is None:
        return False
    types = schema.get("type", [])
    return "null" in types or None in schema.get("enum", []) or any(map(_allows_null, schema.get("anyOf", [])))


def _is_structured(types: Any) -> bool:
    return bool(types) and all(each in _STRUCTURED for each in ([types] if isinstance(types, str) else types))


def _resolved(schema: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema behind references that have nothing beside them."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        steps = reference.split("/") if isinstance(reference, str) else []
        if len(steps) != 3 or _LIMITS & schema.keys() or "type" in schema:
            break
        schema = definitions.get(steps[1], {}).get(steps[2].replace("~1", "/").replace("~0", "~"), {})
    return schema if isinstance(schema, dict) else {}


def json_rule(schema: dict[str, Any]) -> str:
    """A value that the library holds to a schema."""
    return "%json " + json.dumps(enforceable(schema) | {"x-guidance": {"whitespace_pattern": WHITESPACE}})


def slashed(regex: str) -> str:
    """Between slashes; those inside are escaped, once."""
    return "/" + re.sub(r"(?s)\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], regex) + "/"


def _limits(schema: dict[str, Any], *, is_strict: bool) -> Iterator[str]:
    if not _LIMITS & schema.keys():
        return
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    yield f"/(?s:.{{{int(least)},{int(most) if most != '' else ''}}})/"
    if "pattern" in schema:
        try:
            yield slashed(_whole(schema["pattern"]))
        except ValueError:
            if is_strict:
                raise


def _whole(pattern: str) -> str:
    """What the whole text has to match. Raises ValueError where that isn't plain to see."""
    found = portable(pattern)
    bare = _IN_CLASS_OR_ESCAPED.sub("_", found)
    if not (bare.startswith("^") and bare.endswith("$")) or re.search(r"[\^$]", bare[1:-1]) or _is_choice(bare):
        raise ValueError("pattern: between tags only patterns of the form ^…$ can be forced")
    return found[1:-1]


def _is_choice(bare: str) -> bool:
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            return True
    return False
