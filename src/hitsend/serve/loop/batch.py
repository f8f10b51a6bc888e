"""A step's shares as the arrays that a decoder takes.

Enters: shares, sorted by slot. Leaves: a `Batch`. Always true: tokens go by slot and position, each from what its
sequence already knows, its draft behind it; a batch is computed with one adapter, or with none. Next: `sampler.py`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from hitsend.serve.loop.decoder import Batch
from hitsend.serve.loop.roster import Share


def by_adapter(shares: Iterable[Share]) -> list[list[Share]]:
    """The step's shares, apart by adapter: a call of the decoder has one adapter for all of its sequences.

    Every step computes all of them, so nobody waits for another adapter's turn.
    """
    groups: dict[str | None, list[Share]] = {}
    for share in shares:
        groups.setdefault(share.sequence.adapter, []).append(share)
    return list(groups.values())


def build_batch(shares: Sequence[Share]) -> Batch:
    """The arrays for the decoder; all shares have the same adapter.

    Logits are wanted of a sequence's last known token, of those of its draft, and where a prompt is
    scored.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wants_logits: list[bool] = []
    for share in shares:
        sequence = share.sequence
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + share.num_tokens
        token_ids += sequence.token_ids[start:end]
        token_ids += share.draft
        positions += range(start, end + len(share.draft))
        slots += [sequence.held_slot] * (share.num_tokens + len(share.draft))
        wants = [False] * share.num_tokens
        wants[-1] = share.is_last
        for place in share.scored:
            wants[place - start] = True
        wants_logits += wants
        wants_logits += [True] * len(share.draft)
    return Batch(
        np.array(token_ids, dtype=np.int32),
        np.array(positions, dtype=np.int32),
        np.array(slots, dtype=np.int32),
        np.array(wants_logits, dtype=np.bool_),
        shares[0].sequence.adapter,
        has_drafts=any(share.draft for share in shares),
        borrows=True,
    )
