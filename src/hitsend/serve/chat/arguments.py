"""A call's arguments in a prompt: on the wire they are JSON in a text, templates want to look into them.

Enters: tool calls of the history. Leaves: the same with their arguments as objects that print as JSON. Always true:
what is no object, or nested too deeply to be walked through, stays the text that it is; half of a character that a
model escaped is U+FFFD. Next: `tool_prompt.py`.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hitsend.core.request import Message

MAX_DEPTH = 64
"""As of bodies (`access.max_json_depth`)."""


class Arguments(dict[str, Any]):
    """An object to templates that look into it, JSON to those that print it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: Any) -> str:
        return str(self) + str(other)

    def __radd__(self, other: Any) -> str:
        return str(other) + str(self)


def with_parsed_arguments(calls: Any) -> Any:
    """Tool calls whose `arguments` are an object: on the wire they are JSON in a text."""
    return _with_arguments(calls, str, _parsed)


def escaped_calls(messages: Sequence[Message]) -> list[Any]:
    """Those whose arguments hold escapes, as what they mean: more texts than those that can be seen."""
    calls = [call for message in messages for call in message.fields.get("tool_calls") or ()]
    return list(with_parsed_arguments([call for call in calls if "\\u" in call["function"]["arguments"]]))


def with_printable_arguments(calls: Any) -> Any:
    """Tool calls whose objects print as JSON."""
    return _with_arguments(calls, dict, Arguments)


def _with_arguments(calls: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    if not isinstance(calls, list | tuple):
        return calls
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), kind):
            found.append(call | {"function": function | {"arguments": change(function["arguments"])}})
        else:
            found.append(call)
    return found


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments or "{}")
        if "\\ud" in arguments.lower():
            value = json.loads(_without_halves(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not _is_deep(value) else arguments


def _is_deep(value: Any) -> bool:
    """Deeper than what walks through it would bear: then it stays the text that it is."""
    layer, depth = [value], 0
    while layer and depth <= MAX_DEPTH:
        layer = [each for one in layer for each in (one.values() if isinstance(one, dict) else one)]
        layer, depth = [each for each in layer if isinstance(each, dict | list)], depth + 1
    return bool(layer)


def _without_halves(text: str) -> str:
    """Models escape halves of surrogate pairs, and clients send them back; no prompt has a token for one."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
