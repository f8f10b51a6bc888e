"""How one step is cut into calls of the library, so that a sequence's numbers don't depend on its neighbours.

Enters: the slots and positions of a batch, and the most tokens one call may have. Leaves: an order of its rows and
where to cut it. Always true: every row is in exactly one call, a sequence's rows keep their order, and (with one
stream per sequence) all sequences of a call bring the same number of tokens, in pieces that end at multiples of
`PIECE`. Measured on the pinned build: the library's attention takes another path from 64 tokens per stream on, and
cuts a batch of unequal lengths itself in ways that mix the two; cut like this, a sequence gives bit-identical logits
alone and among 31 others. One exception is out of reach: a sequence that decodes alone with more than 256 cells takes
a kernel that splits the cells between threads, and its last bits differ from those in company.
Next: `llama_decoder.py`.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PIECE = 64
"""Tokens of one query tile in the library's attention."""


BLAS_FROM = 32
"""From so many tokens of a call on a BLAS backend takes its products: it makes all weights 32-bit numbers first."""


class Calls(NamedTuple):
    """`order` lists the batch's rows as the calls take them (None: as they are); call i has `sizes[i]` of them."""

    order: NDArray[np.intp] | None
    sizes: list[int]


def cut_in_order(count: int, most: int) -> Calls:
    """As few calls as `most` allows, rows as they are: for sequences that share one stream."""
    return Calls(None, [min(most, count - at) for at in range(0, count, most)])


def cut_by_length(
    slots: NDArray[np.int32], positions: NDArray[np.int32], most: int, *, has_blas: bool = False
) -> Calls:
    """Calls of equally long pieces; `slots` is sorted, positions ascend within a slot.

    `has_blas`: decodes that are just enough for it go in two calls (measured with Q4_1, 32 at once: 340 tokens/s
    instead of 285).
    """
    starts = np.flatnonzero(np.diff(slots, prepend=-1))
    if len(starts) == len(slots):
        return cut_in_order(len(slots), _decodes(len(slots), most, has_blas=has_blas))
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    ends = [*starts[1:].tolist(), len(slots)]
    for start, end in zip(starts.tolist(), ends, strict=True):
        for rank, (at, size) in enumerate(_pieces(start, end, int(positions[start]), most)):
            groups[rank, size].append(at)
    rows: list[NDArray[np.intp]] = []
    sizes: list[int] = []
    for (_, size), places in sorted(groups.items()):
        together = _decodes(len(places), most, has_blas=has_blas) if size == 1 else max(1, most // size)
        for first in range(0, len(places), together):
            chosen = np.array(places[first : first + together], dtype=np.intp)
            rows.append((chosen[:, None] + np.arange(size)).ravel())
            sizes.append(len(chosen) * size)
    return Calls(np.concatenate(rows) if len(sizes) > 1 else None, sizes)


def _decodes(count: int, most: int, *, has_blas: bool) -> int:
    """How many single tokens go into one call."""
    return min(most, -(-count // 2)) if has_blas and BLAS_FROM <= count < 2 * BLAS_FROM - 1 else most


def _pieces(start: int, end: int, position: int, most: int) -> Iterator[tuple[int, int]]:
    """(first row, length) of one sequence's pieces: up to a multiple of PIECE, whole multiples, the rest."""
    longest = most - most % PIECE or most
    while start < end:
        left, over = end - start, position % PIECE
        whole = left - left % PIECE or left
        # What is shorter than a tile goes the same way at any position: cutting it would only make another call.
        size = min(longest, PIECE - over, left) if over and left >= PIECE else min(longest, whole)
        yield start, size
        start, position = start + size, position + size
