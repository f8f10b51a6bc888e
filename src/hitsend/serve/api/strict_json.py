"""JSON from outside, taken at its word: strictly.

Enters: a body. Leaves: typed values. Always true: whatever is accepted has one meaning for every JSON reader: no
duplicate keys, no NaN or Infinity (spelled out or by overflow), no integer beyond 64 bits, no unpaired surrogate,
nothing after the document, no nesting deeper than the limit; every refusal is an InvalidRequest that names the field.
The error text quotes field names (shortened) and numbers, never strings from the body. Next: `chat_request.py`.
"""

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from hitsend.core.errors import InvalidRequest

_T = TypeVar("_T")
_MAX_SHOWN = 64
_MAX_SEARCHED = 100_000
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
_ODD_NUMBER = re.compile(rb"[0-9]{19}|[0-9.][eE]\+?[0-9]{2}|NaN|Infinity")
"""Only such can leave 64 bits or the floats; without one the decoder's own C code reads all numbers."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


MAX_VALUES = 100_000
"""Values in one document. The largest request that passes the other limits has a tenth; a body of the largest size that
is all brackets has millions, and would keep every other client waiting for half a second."""


class _Unusable:
    """Stands for a number that no typed field can take, until it is known where it is."""

    def __init__(self, why: str) -> None:
        self.why = why


def decode(body: bytes, max_depth: int) -> tuple[Any, int]:
    """Return the document and its depth. Raises InvalidRequest."""
    if len(body) > MAX_VALUES:
        _check_count(body)
    unusable: list[_Unusable] = []
    decoder = _PLAIN if _ODD_NUMBER.search(body) is None else _careful(unusable)
    try:
        tree = decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        why = f"{error.msg} (character {error.pos})"
        why = "it is empty" if not body.strip() else why
        why = "it begins with a byte order mark" if body.startswith(BOM_UTF8) else why
        raise InvalidRequest(f"the body is not valid JSON: {why}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body is nested deeper than {max_depth} levels (limit max_json_depth)") from error
    depth = _depth(tree, max_depth)
    if b"\\ud" in body or b"\\uD" in body:
        _check_surrogates(tree)
    if unusable:
        where = _find(tree, lambda value: value is unusable[0])
        raise InvalidRequest(f"{where or 'the body'} {unusable[0].why}", param=where or None)
    return tree, depth


def typed(tree: Any, kind: type[_T]) -> _T:
    """Return the tree as a struct. Raises InvalidRequest that names the field, what was expected and a wrong number."""
    try:
        return msgspec.convert(tree, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _as_invalid(str(error), tree) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest(f"the field {_shown(name)} is given twice", param=_shown(name))
            seen.add(name)
    return found


def _careful(unusable: list[_Unusable]) -> json.JSONDecoder:
    """A decoder that puts a mark where a number can't be used, and the mark into the list."""

    def refuse(why: str) -> _Unusable:
        unusable.append(_Unusable(why))
        return unusable[-1]

    def integer(token: str) -> int | _Unusable:
        value = int(token) if len(token) <= 20 else None
        return value if value is not None and -(2**63) <= value < 2**63 else refuse("is beyond 64 bits")

    def real(token: str) -> float | _Unusable:
        value = float(token)
        return value if math.isfinite(value) else refuse("is too large for a number")

    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_int=integer,
        parse_float=real,
        parse_constant=lambda token: refuse(f"is {token}, which is not a JSON number"),
    )


_PLAIN = json.JSONDecoder(object_pairs_hook=_object)
"""For bodies in which no number can be out of bounds: made once, and all of it in C but for the pairs."""


def _check_count(body: bytes) -> None:
    """Count values without making them. Quotes first, so that what removing strings costs is bounded as well."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_VALUES:
        raise InvalidRequest(f"the body holds too many values (limit {MAX_VALUES})")
    bare = _STRING.sub(b"", body)
    if sum(map(bare.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InvalidRequest(f"the body holds too many values (limit {MAX_VALUES})")


def _depth(tree: Any, max_depth: int) -> int:
    """Levels of arrays and objects. Level by level, so that a hostile document costs no recursion."""
    depth = 0
    level = [tree] if isinstance(tree, dict | list) else []
    while level:
        depth += 1
        if depth > max_depth:
            raise InvalidRequest(f"the body is nested deeper than {max_depth} levels (limit max_json_depth)")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return depth


def _check_surrogates(tree: Any) -> None:
    try:
        msgspec.json.encode(tree, enc_hook=lambda _: None)
    except UnicodeEncodeError as error:
        where = _find(tree, _is_cut)
        message = f"{where or 'a field name'} holds half of a surrogate pair, which is no text"
        raise InvalidRequest(message, param=where or None) from error


def _is_cut(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)


def _find(tree: Any, is_wanted: Callable[[Any], bool]) -> str | None:
    """The path of the first value that is wanted, None when it isn't among the first `_MAX_SEARCHED` values."""
    open_branches = [iter([("", tree)])]
    for _ in range(_MAX_SEARCHED):
        step = next(open_branches[-1], None)
        if step is None:
            open_branches.pop()
            if not open_branches:
                return None
            continue
        path, value = step
        if is_wanted(value):
            return path.lstrip(".")
        open_branches.append(_inner(path, value))
    return None


def _inner(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((f"{path}.{_shown(key)}", one) for key, one in value.items())
    if isinstance(value, list):
        return ((f"{path}[{index}]", one) for index, one in enumerate(value))
    return iter(())


def _shown(name: str) -> str:
    """A field name from the body, fit for an error message: short, and text in any case."""
    short = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "…"
    return short.encode("utf-8", "replace").decode()


def _as_invalid(message: str, tree: Any) -> InvalidRequest:
    parts = _WHERE.match(message)
    what, path = (parts["what"], parts["path"] or "") if parts else (message, "")
    field = _FIELD.match(what)
    if field is not None:
        name = f"{path}.{_shown(field['name'])}".lstrip(".")
        is_unknown = what.startswith("Object contains")
        return InvalidRequest(f"{'unrecognized' if is_unknown else 'missing'} field: {name}", param=name)
    name = path.lstrip(".")
    value = _value(tree, path)
    got = f", got {value}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
    expected = what.replace("`", "").replace("Expected", "expected").replace(", got ", ", not ")
    return InvalidRequest(f"{name or 'the body'}: {expected}{got}", param=name or None)


def _value(tree: Any, path: str) -> Any:
    """What stands at msgspec's path, None where it can't say (it doesn't name keys of free dictionaries)."""
    for key, index in _STEP.findall(path):
        try:
            tree = tree[key] if key else tree[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
