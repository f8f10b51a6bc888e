"""Pieces of an answer that nobody reads along.

Enters: `Delta`s in order. Leaves: fewer, that say the same. Always true: only neighbours of one choice that are plain
text become one. Next: `upstream_generation.py`.
"""

from hitsend.core.request import Delta


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of plain text as one: where nobody reads along, every piece only costs."""
    found: list[Delta] = []
    texts: list[str] = []
    for delta in deltas:
        is_plain = bool(delta.text) and not (delta.reasoning or delta.tool_calls or delta.logprobs or delta.token_ids)
        is_plain = is_plain and delta.finish_reason is None
        if texts and not (is_plain and delta.index == found[-1].index):
            found[-1] = Delta(found[-1].index, "".join(texts))
            texts = []
        if not is_plain:
            found.append(delta)
            continue
        if not texts:
            found.append(delta)
        texts.append(delta.text)
    if texts:
        found[-1] = Delta(found[-1].index, "".join(texts))
    return found
