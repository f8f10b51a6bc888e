"""Arithmetic on one row of logits or weights, fast on vocabularies of 150,000 tokens.

Enters: float32 rows. Leaves: places, edges and counts. Always true: what is exact by definition is computed exactly, by
shortcuts over columns and blocks where a row is long; nothing here knows of requests. Next: `filters.py`.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
Sums = NDArray[np.float64]

COLUMNS = 1024
"""A long row is looked at as a matrix of this width, so that column maxima or sums stand for it."""

HEAD_WEIGHT = 3e-5
"""top_p first looks among the tokens that weigh more than this share of the best one: on SmolLM2's own logits at
temperature 1, 98 % of the nuclei of 0.95 lie there, among 60 to 6,000 tokens, and finding their edge takes half the
time that sorting the whole row takes.
"""

BLOCK = 256
"""Sorted weights are summed in blocks first: running sums are the slowest thing that numpy does here."""


def largest(row: Row, k: int) -> Ids:
    """Ids, rising, of the k largest values and of all that tie with the smallest of them; 0 < k <= row.size.

    k of the column maxima lie at or above the k-th of them, so it bounds the k-th value of the row from below, and
    only the few values above that bound have to be partitioned: about 5 times faster than partitioning the row.
    """
    if k <= COLUMNS // 4 and row.size >= 8 * COLUMNS:
        whole = row.size - row.size % COLUMNS
        maxima = row[:whole].reshape(-1, COLUMNS).max(axis=0)
        bound = np.partition(maxima, COLUMNS - k)[COLUMNS - k]
        ids = np.flatnonzero(row >= bound)
    else:
        ids = np.arange(row.size)
    values = row[ids]
    edge = np.partition(values, values.size - k)[values.size - k]
    return cast("Ids", ids[values >= edge])


class Counts:
    """How often each token occurred, as two arrays that grow without being rebuilt for every token."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        ids, counts = np.unique(np.fromiter(token_ids, dtype=np.intp), return_counts=True)
        self._places = {int(token): place for place, token in enumerate(ids)}
        self._ids = np.concatenate([ids, np.zeros(64, dtype=np.intp)])
        self._counts = np.concatenate([counts.astype(np.float64), np.zeros(64)])

    @property
    def ids(self) -> Ids:
        """Each token that occurred, once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Sums:
        """How often, in the order of `ids`."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """It occurred once more."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1.0


def weigh(values: Row, peak: float, temperature: float) -> Row:
    """Probabilities up to a common factor, in place; the best one weighs exactly 1."""
    values -= np.float32(peak)
    values /= np.float32(temperature)
    return cast("Row", np.exp(values, out=values))


def nucleus_edge(weights: Row, top_p: float) -> float:
    """The weight of the last token that is needed, in falling order, to reach the share `top_p` of all weight."""
    needed = top_p * float(weights.sum())
    if weights.size > COLUMNS:
        head = weights[np.flatnonzero(weights >= np.float32(HEAD_WEIGHT))]
        if float(head.sum()) >= needed:
            weights = head
    falling = np.sort(weights)[::-1]
    sums = np.add.reduceat(falling, np.arange(0, falling.size, BLOCK)).astype(np.float64)
    cumulative = sums.cumsum()
    place = min(int(np.searchsorted(cumulative, needed)), sums.size - 1)
    block = falling[place * BLOCK : (place + 1) * BLOCK]
    within = needed - float(cumulative[place] - sums[place])
    last = min(int(np.searchsorted(block.astype(np.float64).cumsum(), within)), block.size - 1)
    return float(block[last])


def _pick(cumulative: Sums, uniform: float) -> int:
    """Where the uniform falls; never on a weight of zero, whatever rounding does at the upper end."""
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return place if place < cumulative.size else int(np.searchsorted(cumulative, cumulative[-1]))


def draw_place(weights: Row, uniform: float) -> int:
    """Draw one place; in a long row first a column, then a token in it: running sums over all of it would cost more."""
    if weights.size <= COLUMNS:
        return _pick(weights.astype(np.float64).cumsum(), uniform)
    whole = weights.size - weights.size % COLUMNS
    columns = weights[:whole].reshape(-1, COLUMNS).sum(axis=0)
    sums = np.concatenate([columns, weights[whole:]]).astype(np.float64)
    cumulative = sums.cumsum()
    place = _pick(cumulative, uniform)
    if place >= COLUMNS:
        return whole + place - COLUMNS
    within = float(uniform * cumulative[-1] - (cumulative[place] - sums[place])) / float(sums[place])
    column = weights[place:whole:COLUMNS].astype(np.float64).cumsum()
    return place + COLUMNS * _pick(column, min(max(within, 0.0), 1.0))
