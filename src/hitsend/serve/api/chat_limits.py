"""Limits of a chat request that need no tokens: counted before anything is typed or copied.

Enters: the body as JSON values. Leaves: every limit that was tested, with value and limit. Always true: a value of a
wrong type counts nothing here; `ChatBody` refuses it. Next: `chat_tools.py`.
"""

from typing import Any

from hitsend.core.events import LimitCheck
from hitsend.serve.api.chat_tools import check_bytes
from hitsend.serve.api.wire import check_counts, listed, longest, number
from hitsend.settings import AccessSettings


def check_limits(tree: Any, limits: AccessSettings) -> tuple[LimitCheck, ...]:
    """Count everything that has a limit. Raises InvalidRequest that names the field, its value and the limit."""
    body = tree if isinstance(tree, dict) else {}
    messages = listed(body.get("messages"))
    parts = [
        (f"messages[{index}].content[{number}]", part)
        for index, message in enumerate(messages)
        if isinstance(message, dict)
        for number, part in enumerate(listed(message.get("content")))
    ]
    images = [where for where, part in parts if isinstance(part, dict) and part.get("type") == "image_url"]
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else listed(body.get("stop"))
    counted = (
        ("max_messages", "messages", len(messages)),
        ("max_content_parts", "messages", len(parts)),
        ("max_images", images[0] if images else "messages", len(images)),
        ("max_tools", "tools", len(listed(body.get("tools")))),
        ("max_stop", "stop", len(stops)),
        ("max_stop_chars", "stop", longest(stops)),
        ("max_n", "n", number(body.get("n"))),
        ("max_tokens", "max_tokens", number(body.get("max_tokens"))),
        ("max_tokens", "max_completion_tokens", number(body.get("max_completion_tokens"))),
        ("max_metadata", "metadata", len(body["metadata"]) if isinstance(body.get("metadata"), dict) else 0),
    )
    return (*check_counts(counted, limits), *check_bytes(listed(body.get("tools")), limits))
