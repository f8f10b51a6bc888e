"""Where each message's content stands in a rendered prompt.

Enters: the text, and the same rendered with anchors inside the contents. Leaves: (message, start, end) in characters.
Always true: where the anchors changed what the template printed, there are no spans. Next: `prompt.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hitsend.serve.chat.marks import Marks, common_end, common_start


def anchored_message(message: dict[str, Any], at: int | None, index: int, anchor: str) -> dict[str, Any]:
    """The message with its number between two anchors, at that place of its content."""
    if at is None:
        return message
    content = message["content"]
    return message | {"content": f"{content[:at]}{anchor}{index}{anchor}{content[at:]}"}


def find_spans(
    text: str, anchored: str, messages: Sequence[Mapping[str, Any]], anchors: Sequence[int | None], marks: Marks
) -> list[tuple[int, int, int]]:
    """Where each content stands in the text. Nothing where the anchors changed what the template printed."""
    pattern = re.compile(f"{marks.anchor}(\\d+){marks.anchor}")
    if pattern.sub("", anchored) != text:
        return []
    found: dict[int, tuple[int, int, int]] = {}
    removed = 0
    for match in pattern.finditer(anchored):
        index, at = int(match.group(1)), match.start() - removed
        removed += len(match.group())
        content, inside = messages[index]["content"].replace(marks.end, ""), anchors[index] or 0
        before = common_end(text[max(0, at - inside) : at], content[:inside])
        behind = common_start(text[at : at + len(content) - inside], content[inside:])
        found.setdefault(index, (index, at - before, at + behind))
    return sorted(found.values())
