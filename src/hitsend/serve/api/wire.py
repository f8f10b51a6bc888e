"""What all dialects read in the same way.

Enters: parts of a body. Leaves: checked values in hitsend's own words. Always true: counts are checked on the raw
document, before anything is typed or copied, and values of a wrong type count nothing here, because the typed reading
refuses them. Next: `turns.py`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck
from hitsend.core.request import ToolChoice
from hitsend.serve.api import strict_json
from hitsend.settings import AccessSettings

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Counted = tuple[str, str, int]
"""The limit's name in the settings, the field that is to blame, how much of it there is."""


def decode(body: bytes, limits: AccessSettings) -> tuple[dict[str, Any], tuple[LimitCheck, ...]]:
    """The body as an object, and the limits tested on the way. Raises InvalidRequest."""
    tree, depth = strict_json.decode(body, limits.max_json_depth)
    if not isinstance(tree, dict):
        raise InvalidRequest("the body: expected object")
    checks = (
        LimitCheck("max_body_bytes", len(body), limits.max_body_bytes),
        LimitCheck("max_json_depth", depth, limits.max_json_depth),
    )
    return tree, checks


def check_counts(counted: Iterable[Counted], limits: AccessSettings) -> tuple[LimitCheck, ...]:
    """Raises InvalidRequest with field, value, limit and the setting's name; returns what passed and isn't zero."""
    checks = []
    for name, field, value in counted:
        limit = getattr(limits, name)
        if value > limit:
            raise InvalidRequest(f"{field}: {value}, limit {limit} (access.{name})", param=field)
        if value:
            checks.append(LimitCheck(name, value, limit))
    return tuple(checks)


def listed(value: Any) -> list[Any]:
    """The value, if it is an array."""
    return value if isinstance(value, list) else []


def number(value: Any) -> int:
    """The value, if it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def longest(values: Iterable[Any]) -> int:
    """Characters of the longest text among them."""
    return max((len(value) for value in values if isinstance(value, str)), default=0)


def choose_model(asked: str | None, default: str | None, warnings: list[str]) -> str:
    """The model's name; adds a warning when it had to be guessed. Raises InvalidRequest."""
    model = asked or default
    if model is None:
        raise InvalidRequest("missing field: model", param="model")
    if asked is None:
        warnings.append(f"model: not given, {model} was used")
    return model


def read_stops(stops: Iterable[str] | None, field: str) -> tuple[str, ...]:
    """Stop strings without repetitions. Raises InvalidRequest for an empty one."""
    found = tuple(dict.fromkeys(stops or ()))
    if "" in found:
        raise InvalidRequest(f"{field}: an empty string would stop everything", param=field)
    return found


def refuse(wire: msgspec.Struct, fields: Iterable[str]) -> None:
    """Raises InvalidRequest for the first of these fields that was given."""
    for field in fields:
        if getattr(wire, field) not in (None, [], False):
            raise InvalidRequest(f"{field} is not supported", param=field)


def habits(wire: msgspec.Struct, fields: Iterable[str]) -> list[str]:
    """A warning for each of these fields that was given: clients send them by habit, and they change nothing."""
    return [f"{field}: accepted without effect" for field in fields if getattr(wire, field) is not None]


def thinking_switch(effort: str | None, field: str) -> dict[str, Any]:
    """What the template is told about thinking for an effort. Raises InvalidRequest for one that nobody knows.

    The effort itself goes along in the request: engines elsewhere may know that and nothing of templates.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(f"{field} is not one of {', '.join(EFFORTS)}", param=field)
    return {"enable_thinking": effort != "none"}


def check_choice(choice: ToolChoice, names: Iterable[str]) -> ToolChoice:
    """A constraint that can't be kept is never ignored. Raises InvalidRequest."""
    known = set(names)
    if choice.mode == "required" and not known:
        raise InvalidRequest("tool_choice: a call is required, but there are no tools", param="tool_choice")
    for name in choice.names:
        if name not in known:
            raise InvalidRequest(f"tool_choice: the function {name[:64]!r} is not found in tools", param="tool_choice")
    return choice


def check_names(names: Iterable[str]) -> None:
    """Tools go by their name, so it has to be one. Raises InvalidRequest."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if not 0 < len(name) <= 128:
            text = f"tools[{index}].name: {len(name)} characters, limit 1..128"
            raise InvalidRequest(text, param=f"tools[{index}].name")
        if name in seen:
            raise InvalidRequest(f"tools[{index}].name is used twice", param=f"tools[{index}].name")
        seen.add(name)
