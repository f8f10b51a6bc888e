"""What a plan says, in both its forms.

Enters: a document and its text. Leaves: one of them on stdout, both to whoever called. Always true: the text is made
from the document, so a reader and a program are told the same; the page shows what the terminal prints, because it
calls the same commands. Next: `plan_page.py`.
"""

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """`document` is what `--json` prints; `lines` is the text."""

    document: dict[str, Any]
    lines: list[str]


def give(document: dict[str, Any], lines: list[str], *, as_json: bool) -> Answer:
    """Print one of the two."""
    print(msgspec.json.encode(document).decode() if as_json else "\n".join(lines))
    return Answer(document, lines)
