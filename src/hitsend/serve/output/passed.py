"""A choice whose text comes ready from its engine: only its end is watched. The sister of `assemble.py`.

Enters: deltas. Leaves: nothing. Always true: tokens are counted by the engine, so none of them is discarded here. Next:
`../stream/sse.py`.
"""

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta


class PassedChoice:
    """What bill and record ask of a choice."""

    is_finished = False
    """Whether its end was found in the text: never here, the engine finds it."""
    num_tokens = 0
    num_reasoning_tokens = 0
    faults: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None

    def take(self, delta: Delta) -> None:
        """See one delta go by."""
        self.finish_reason = delta.finish_reason or self.finish_reason
