"""Slots of a step brought together: libllama wants the streams of a batch to be neighbours.

Enters: a `StepPlan` that the rules have written. Leaves: the moves to make, and the plan's shares sorted by slot.
Always true: nobody's tokens change, and a slot that is held by somebody who doesn't take part stays where it is.
Next: `batch.py`.
"""

import msgspec

from hitsend.serve.loop.roster import Roster, StepPlan


class Move(msgspec.Struct, frozen=True):
    """A whole sequence's cache goes to another slot."""

    source: int
    target: int


def close_gaps(roster: Roster, plan: StepPlan) -> list[Move]:
    """Bring the slots of this step's sequences together and sort its shares by slot; returns the moves to make.

    With separate streams libllama wants the slots of a batch to be contiguous: a gap slows every step down, a move
    costs one copy, once. Gaps held by somebody who doesn't take part (a paused sequence) stay. In unified mode gaps
    cost nothing and nothing is moved. Whoever has no cache yet only gets another number.
    """
    moves: list[Move] = []
    by_slot = {share.sequence.held_slot: share.sequence for share in plan.shares}
    if by_slot and not roster.kv.is_shared:
        for gap in range(min(by_slot), max(by_slot)):
            last = max(by_slot)
            if gap < last and roster.kv.is_free(gap):
                roster.seats.vacate(gap, plan.at)
                sequence = by_slot.pop(last)
                by_slot[gap] = sequence
                roster.kv.move(last, gap)
                sequence.slot = gap
                roster.seats.moved(sequence)
                if sequence.num_computed_tokens:
                    moves.append(Move(last, gap))
    plan.shares.sort(key=lambda share: share.sequence.held_slot)
    return moves
