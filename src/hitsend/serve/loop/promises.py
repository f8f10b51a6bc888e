"""Who can still keep its targets: decodes that are worth holding prompts back for, and prompts that are worth a hurry.

Enters: sequences, and the pace's targets. Leaves: a yes or no, and numbers of tokens. Always true: nothing is changed
here. Next: `scheduler.py`.
"""

from itertools import chain

from hitsend.core.request import IDLE_TIER
from hitsend.serve.loop.pace import PIECE
from hitsend.serve.loop.roster import Roster, StepPlan
from hitsend.serve.loop.sequence import Sequence


def can_keep(roster: Roster, sequence: Sequence, at: float) -> bool:
    """Whether a decode can still keep both targets."""
    first_at = sequence.first_at
    return first_at is not None and roster.pace.can_keep(sequence.arrived_at, first_at, sequence.num_output_tokens, at)


def is_crowded(roster: Roster, plan: StepPlan) -> bool:
    """Whether a crowd of short prompts has a place or finds one, or did and most decodes are what is left of it. Those
    over their share and idle work are no part of it. To be asked when the decodes have their shares."""
    number, tokens, free = 0, 0, roster.kv.num_free_slots
    for sequence in chain((each for each in roster.running if each.has_prompt), roster.waiting):
        free -= sequence.slot is None
        if free < 0:
            break
        is_out = sequence.is_paused or sequence.tier >= IDLE_TIER or roster.is_long(sequence)
        if not is_out and not roster.is_over(sequence, plan.at):
            number += 1
            tokens += sequence.num_pending_tokens
    can = sum(can_keep(roster, share.sequence, plan.at) for share in plan.shares)
    return roster.pace.crowds(number, tokens, is_lost=2 * can <= len(plan.shares) > 0)


def late_tokens(roster: Roster, plan: StepPlan, prompts: list[Sequence]) -> int:
    """What short prompts that are late, but not too late, have to compute, of those within their share; no more than
    the step has, and no less than a piece: somebody else's prompt may have its turn, and mustn't be cut finer."""
    if not any(roster.pace.is_late(each.arrived_at, plan.at) for each in prompts):
        return 0
    tokens = 0
    for sequence in chain((each for each in roster.running if each.has_prompt), roster.waiting):
        left, is_out = sequence.num_pending_tokens, sequence.is_paused or roster.is_long(sequence)
        if is_out or roster.is_over(sequence, plan.at):
            continue
        came, pace = sequence.arrived_at, roster.pace
        if pace.is_late(came, plan.at) and not pace.is_lost(came, left, plan.at):
            tokens += left
        if tokens >= plan.tokens_left:
            break
    return min(max(tokens, PIECE), plan.tokens_left) if tokens else 0
