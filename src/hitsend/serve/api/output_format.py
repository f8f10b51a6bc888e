"""`response_format` and `structured_outputs`: what an answer has to look like.

Enters: JSON values from a body. Leaves: an `OutputFormat`, or None for plain text. Always true: a wrong shape is a 400
that names the path of the wrong part; whether a schema or grammar can be kept is found out later, by its compiler.
Next: `chat_request.py`.
"""

from typing import Any, Literal, NoReturn, cast

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import OutputFormat

MAX_CHOICES = 10_000
MAX_GRAMMAR_CHARS = 1024 * 1024

_FIELDS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
}
_SCHEMA_FIELDS = {"name", "schema", "strict", "description"}
_KINDS = ("json", "regex", "choice", "lark")


def read_output_format(response_format: Any, structured_outputs: Any) -> OutputFormat | None:
    """At most one of the two may ask for something. Raises InvalidRequest."""
    wanted = _response_format(response_format)
    extension = _structured_outputs(structured_outputs)
    if wanted is not None and extension is not None:
        text = "structured_outputs and response_format exclude each other"
        raise InvalidRequest(text, param="structured_outputs")
    return wanted or extension


def read_json_schema(value: Any, path: str) -> OutputFormat:
    """`{name, schema, strict}`, as in `response_format.json_schema`. Raises InvalidRequest."""
    fields = _object(value, path)
    _known(fields, _SCHEMA_FIELDS, path)
    name, strict = fields.get("name"), fields.get("strict")
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        _refuse(f"{path}.name", "expected a text of 1 to 64 characters")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{path}.strict", "expected true or false")
    if fields.get("description") is not None and not isinstance(fields["description"], str):
        _refuse(f"{path}.description", "expected string")
    if "schema" not in fields:
        _refuse(f"{path}.schema", "missing field")
    return OutputFormat("json_schema", _object(fields["schema"], f"{path}.schema"), name, strict=bool(strict))


def _response_format(value: Any) -> OutputFormat | None:
    if value is None:
        return None
    fields = _object(value, "response_format")
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        _refuse("response_format.type", "expected text, json_object or json_schema")
    _known(fields, _FIELDS[kind], "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat("json_object")
    if "json_schema" not in fields:
        _refuse("response_format.json_schema", "missing field")
    return read_json_schema(fields["json_schema"], "response_format.json_schema")


def _structured_outputs(value: Any) -> OutputFormat | None:
    if value is None:
        return None
    fields = _object(value, "structured_outputs")
    _known(fields, set(_KINDS), "structured_outputs")
    given = [kind for kind in _KINDS if fields.get(kind) is not None]
    if len(given) != 1:
        _refuse("structured_outputs", f"expected one of {', '.join(_KINDS)}")
    kind, asked = given[0], fields[given[0]]
    if kind == "json":
        return OutputFormat("json_schema", _object(asked, "structured_outputs.json"))
    if kind == "choice":
        return OutputFormat("choice", _choices(asked))
    if not isinstance(asked, str) or not 0 < len(asked) <= MAX_GRAMMAR_CHARS:
        _refuse(f"structured_outputs.{kind}", f"expected a text of 1 to {MAX_GRAMMAR_CHARS} characters")
    return OutputFormat(cast("Literal['regex', 'lark']", kind), asked)


def _choices(value: Any) -> list[str]:
    path = "structured_outputs.choice"
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        _refuse(path, f"expected an array of 1 to {MAX_CHOICES} texts")
    for index, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            _refuse(f"{path}[{index}]", "expected a text that isn't empty")
    if sum(map(len, value)) > MAX_GRAMMAR_CHARS:
        _refuse(path, f"more than {MAX_GRAMMAR_CHARS} characters together")
    return list(value)


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(path, "expected object")
    return value


def _known(fields: dict[str, Any], known: set[str], path: str) -> None:
    for field in fields:
        if field not in known:
            _refuse(f"{path}.{field[:64]}", "unknown field")


def _refuse(path: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{path}: {why}", param=path)
