"""Rarely used ways to reshape a row: DRY, locally typical sampling, XTC.

Enters: float32 logits, or weights (probabilities up to a common factor, 0 for what is out already). Leaves: the same
with penalties, or with more zeros. Always true: nothing here runs, or costs anything, for a request that doesn't ask
for it; at least one token stays; tokens tied with the last one kept are kept; the work per token is bounded by the
sequence's length or the row's. Next: `step.py`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.rows import Row

MAX_REPEAT = 64
"""Tokens of a repeat that are counted. At DRY's usual base of 1.75 a repeat half as long is already out of reach."""

MAX_PENALTY = 1e6
"""Far beyond any logit, and still a number in float32."""


class Repeats:
    """DRY ("don't repeat yourself"): a token that would go on with a repeat of earlier text costs, the longer the more.

    With m the length of the longest earlier passage that equals the end of the text and was followed by token t, and
    m >= dry_allowed_length, t loses dry_multiplier * dry_base ** (m - dry_allowed_length). Passages hold no breaker.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Iterable[int], breaker_ids: frozenset[int]) -> None:
        self._multiplier = params.dry_multiplier
        self._base = params.dry_base
        self._allowed = params.dry_allowed_length
        self._breakers = breaker_ids
        known = np.fromiter(prompt_token_ids, dtype=np.intp)
        self._size = known.size
        self._ids = np.concatenate([known, np.zeros(64, dtype=np.intp)])

    def add(self, token_id: int) -> None:
        """A token was added to the text."""
        if self._size == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._ids[self._size] = token_id
        self._size += 1

    def penalise(self, row: Row) -> None:
        """Lower the logits of what would go on with a repeat, in place."""
        ids = self._ids[: self._size]
        last = self._size - 1
        ends = np.arange(last)
        lengths: dict[int, int] = {}
        for length in range(1, min(MAX_REPEAT, last) + 1):
            wanted = ids[last - length + 1]
            if int(wanted) in self._breakers:
                break
            ends = ends[ends >= length - 1]
            ends = ends[ids[ends - length + 1] == wanted]
            if not ends.size:
                break
            if length >= self._allowed:
                lengths.update(dict.fromkeys(ids[ends + 1].tolist(), length))
        for token, length in lengths.items():
            row[token] -= np.float32(min(MAX_PENALTY, self._multiplier * self._base ** (length - self._allowed)))


def without_atypical(weights: Row, typical_p: float) -> Row:
    """Keep the tokens whose surprise is closest to the expected one, until they have the share `typical_p`.

    The heaviest of those kept weighs 1 again.
    """
    shares = weights.astype(np.float64) / float(weights.sum(dtype=np.float64))
    alive = np.flatnonzero(shares)
    surprise = -np.log(shares[alive])
    distance = np.abs(surprise - float((shares[alive] * surprise).sum()))
    order = np.argsort(distance, kind="stable")
    last = min(int(np.searchsorted(shares[alive][order].cumsum(), typical_p)), alive.size - 1)
    kept = alive[distance <= distance[order[last]]]
    result = np.zeros_like(weights)
    result[kept] = weights[kept] / weights[kept].max()
    return result


def without_top_choices(weights: Row, threshold: float) -> Row:
    """XTC: of the tokens with at least the share `threshold`, only the lightest stays."""
    edge = threshold * float(weights.sum(dtype=np.float64))
    top = weights[(weights >= edge) & (weights > 0)]
    if top.size < 2:
        return weights
    return np.where(weights > top.min(), np.float32(0), weights)


class Breakers:
    """Which tokens contain a text; remembered, because most requests ask for the same texts."""

    def __init__(self, token_bytes: Sequence[bytes], remembered: int = 64) -> None:
        self._all = np.frombuffer(b"".join(token_bytes), dtype=np.uint8)
        self._starts = np.cumsum([0, *map(len, token_bytes)])
        self._remembered = remembered
        self._found: dict[str, frozenset[int]] = {}

    def find(self, texts: Iterable[str]) -> frozenset[int]:
        """Tokens that contain one of the texts whole. A text that no token contains breaks nothing."""
        return frozenset().union(*map(self._containing, texts))

    def _containing(self, text: str) -> frozenset[int]:
        if text not in self._found:
            if len(self._found) >= self._remembered:
                self._found.clear()
            self._found[text] = self._search(text.encode())
        return self._found[text]

    def _search(self, needle: bytes) -> frozenset[int]:
        # All places, overlapping ones too: one across two tokens must not hide one inside the second. Milliseconds for
        # 150,000 tokens, whatever the text: this runs between two steps.
        places = np.flatnonzero(self._all[: max(0, self._all.size - len(needle) + 1)] == needle[0])
        for offset in range(1, len(needle)):
            places = places[self._all[places + offset] == needle[offset]]
        first = np.searchsorted(self._starts, places, side="right") - 1
        return frozenset(first[places + len(needle) <= self._starts[first + 1]].tolist())
