"""Limits of a chat request that need no tokens: counted before anything is typed or copied.

Enters: the body as JSON values. Leaves: every limit that was tested, with value and limit. Always true: a value of a
wrong type counts nothing here; `ChatBody` refuses it. Next: `chat_tools.py`.
"""

from typing import Any

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck
from hitsend.serve.api.chat_tools import check_bytes
from hitsend.settings import AccessSettings


def check_limits(tree: Any, limits: AccessSettings) -> tuple[LimitCheck, ...]:
    """Count everything that has a limit. Raises InvalidRequest that names the field, its value and the limit."""
    body = tree if isinstance(tree, dict) else {}
    messages = _list(body.get("messages"))
    parts = [
        (f"messages[{index}].content[{number}]", part)
        for index, message in enumerate(messages)
        if isinstance(message, dict)
        for number, part in enumerate(_list(message.get("content")))
    ]
    images = [where for where, part in parts if isinstance(part, dict) and part.get("type") == "image_url"]
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else _list(body.get("stop"))
    counted = (
        ("max_messages", "messages", len(messages)),
        ("max_content_parts", "messages", len(parts)),
        ("max_images", images[0] if images else "messages", len(images)),
        ("max_tools", "tools", len(_list(body.get("tools")))),
        ("max_stop", "stop", len(stops)),
        ("max_stop_chars", "stop", max((len(stop) for stop in stops if isinstance(stop, str)), default=0)),
        ("max_n", "n", _number(body.get("n"))),
        ("max_tokens", "max_tokens", _number(body.get("max_tokens"))),
        ("max_tokens", "max_completion_tokens", _number(body.get("max_completion_tokens"))),
        ("max_metadata", "metadata", len(body["metadata"]) if isinstance(body.get("metadata"), dict) else 0),
    )
    checks = []
    for name, field, value in counted:
        limit = getattr(limits, name)
        if value > limit:
            raise InvalidRequest(f"{field}: {value}, limit {limit} (access.{name})", param=field)
        if value:
            checks.append(LimitCheck(name, value, limit))
    return (*checks, *check_bytes(_list(body.get("tools")), limits))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
