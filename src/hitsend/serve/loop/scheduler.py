"""Who takes part in the next step: a short list of rules over a budget of tokens.

There is no prefill phase and no decode phase: computed tokens catch up with known tokens. Each rule looks at who waits
and who runs, and adds shares to the plan until its tokens are spent:

0. `bring_prefixes`          whoever waited for a prompt that somebody else computes gets it (`seats.py`).
1. `hold_cells_for_decodes`  whoever decodes needs a cell for its next token. Where none is free (unified mode only), a
   victim gives up its cache and is computed again later: the paused first, then the youngest, whatever its tier.
   The oldest one is never a victim of another, so it ends, then the next one does: preemption can't go on for ever.
   A sequence alone on the engine ends at its limit before it could run out of cells.
2. `let_sit_out`             while a prompt of somebody within its share is pending, those that had more than theirs
   lately (`shares.py`) sit the step out: the newcomer's first token waits for its own prompt, not for their batch.
3. `share_with_decodes`      one token each, the least recently served first, leaving some tokens for prompts.
4. `pace_prompts`            how much of what is left prompts may have (`pace.py`), so that decodes keep their pace.
5. `admit_urgent`            the head of the queue (`queue.py`), if it is due before all that its own tenant computes: a
   short prompt needn't wait for the end of a long one.
6. `share_with_prefills`     the next chunk of prompts (or of what a preemption dropped), of whoever had least lately
   first, then by when they are due; those over their share compute a small part of the budget per step, so that nobody
   waits for a long one, and idle work (lines of batches) no more than `IDLE_TOKENS`. Of several choices of one prompt
   one computes it; those that have a place by its end get a copy (see `step.py`).
7. `admit_waiting`           the head of the queue, if it can begin now and its known tokens and a reserve fit. Nobody
   overtakes a head that doesn't fit yet. The last free slots aren't for those over their share.

Enters: a `Roster`. Leaves: a `StepPlan`. Always true: a plan never has more tokens than its budget, nor a sequence
twice, and nothing here calls the decoder but `seats.py`, which brings what is cached. Next: `gaps.py`.
"""

from collections.abc import Callable

from hitsend.core.lifecycle import State
from hitsend.core.request import IDLE_TIER
from hitsend.serve.loop.pace import PIECE
from hitsend.serve.loop.promises import can_keep, is_crowded, late_tokens
from hitsend.serve.loop.roster import CHUNK_STEP, Admission, Preemption, Roster, StepPlan
from hitsend.serve.loop.sequence import Sequence

PREFILL_SHARE = 8
"""One part in so many of the budget is kept for prompts when decodes alone could fill it."""

IDLE_TOKENS = 2 * CHUNK_STEP
"""Of idle work's prompts in one step: whoever comes meanwhile waits for a short step, not for a full one."""


def bring_prefixes(roster: Roster, plan: StepPlan) -> None:
    """Nobody computes what somebody else computes just now, or has computed."""
    roster.seats.follow(roster.running, plan.at)


def hold_cells_for_decodes(roster: Roster, plan: StepPlan) -> None:
    """Oldest first, so that a victim never has had its turn."""
    decoding = [each for each in roster.running if each.is_decoding and not each.is_paused]
    for sequence in sorted(decoding, key=lambda each: each.arrival):
        while sequence.slot is not None and not roster.seats.hold_next(sequence.slot, plan.at):
            _preempt(roster, plan, max(roster.running, key=lambda each: (each.is_paused, each.arrival)))


def let_sit_out(roster: Roster, plan: StepPlan) -> None:
    """Nobody is over their share for long without getting anything: what they had counts less and less."""
    head = roster.waiting.head(plan.at)
    has_prompt = head is not None and not roster.is_over(head, plan.at) and roster.can_admit(head, plan.at)
    plan.is_for_others = has_prompt or any(
        each.has_prompt and not roster.is_over(each, plan.at) for each in roster.running
    )


def share_with_decodes(roster: Roster, plan: StepPlan) -> None:
    """A budget of one token alternates between decodes and prompts."""
    head = roster.waiting.head(plan.at)
    has_prefill = any(not each.is_decoding and not each.is_paused for each in roster.running)
    kept = 0
    if has_prefill or (head is not None and roster.can_admit(head, plan.at)):
        kept = plan.budget // PREFILL_SHARE if plan.budget >= PREFILL_SHARE else plan.step % 2
    decoding = [each for each in roster.running if each.is_decoding and not each.is_paused]
    if plan.is_for_others:
        decoding = [each for each in decoding if not roster.is_over(each, plan.at)]
    room = plan.tokens_left - kept
    if len(decoding) > room:
        decoding.sort(key=lambda each: each.last_step)
    for sequence in decoding[: max(room, 0)]:
        plan.share(sequence, 1)
        if sequence.first_at is None:
            sequence.first_at = plan.at


def pace_prompts(roster: Roster, plan: StepPlan) -> None:
    """All of it for late short ones, beside too many decodes, or where somebody sits out; else what the pace allows."""
    is_crowd = is_crowded(roster, plan)
    head = roster.waiting.head(plan.at)
    prompts = [each for each in roster.running if each.has_prompt]
    if head is not None and roster.can_admit(head, plan.at):
        prompts.append(head)
    plan.has_prompts = bool(prompts)
    if plan.is_for_others and any(roster.is_over(each, plan.at) for each in roster.running):
        return
    if not prompts:
        return
    is_long = roster.is_long(min(prompts, key=lambda each: roster.order(each, plan.at)))
    tokens = roster.pace.tokens(plan.num_decodes, plan.tokens_left, is_long=is_long)
    if not is_long and (is_crowd or roster.pace.is_too_full(len(roster.running))):
        tokens = plan.tokens_left
    elif not is_long and not any(can_keep(roster, share.sequence, plan.at) for share in plan.shares):
        tokens = max(tokens, min(PIECE, plan.tokens_left))
    plan.prompts_left = max(tokens, late_tokens(roster, plan, prompts))


def admit_urgent(roster: Roster, plan: StepPlan) -> None:
    """Several, if several are; each is compared with those before it, too."""
    while True:
        sequence = roster.waiting.head(plan.at)
        if sequence is None or not roster.can_admit(sequence, plan.at):
            return
        own = [each for each in roster.running if each.has_prompt and each.path == sequence.path]
        due_at = roster.order(sequence, plan.at)
        if not own or any(roster.order(each, plan.at) <= due_at for each in own) or not _admit(roster, plan, sequence):
            return


def share_with_prefills(roster: Roster, plan: StepPlan) -> None:
    """As much as is left, whoever had least lately first."""
    prompts = [each for each in roster.running if each.has_prompt]
    for sequence in sorted(prompts, key=lambda each: roster.order(each, plan.at)):
        if plan.tokens_left < 1:
            return
        if all(share.sequence is not sequence for share in plan.shares):
            plan.share(sequence, _chunk(roster, plan, sequence))


def admit_waiting(roster: Roster, plan: StepPlan) -> None:
    """As many as can begin."""
    while True:
        sequence = roster.waiting.head(plan.at)
        if sequence is None or not roster.can_admit(sequence, plan.at) or not _admit(roster, plan, sequence):
            return


Rule = Callable[[Roster, StepPlan], None]

RULES: tuple[Rule, ...] = (
    bring_prefixes,
    hold_cells_for_decodes,
    let_sit_out,
    share_with_decodes,
    pace_prompts,
    admit_urgent,
    share_with_prefills,
    admit_waiting,
)


def schedule(roster: Roster, plan: StepPlan) -> StepPlan:
    """Apply the rules in order; the roster already is as the plan says when this returns."""
    for rule in RULES:
        rule(roster, plan)
    return plan


def _admit(roster: Roster, plan: StepPlan, sequence: Sequence) -> bool:
    """A place is only given to somebody who can begin in this step, or who waits for a sibling's prompt or for its turn
    to be scored: such a one holds up nobody behind it."""
    is_follower = sequence.waits_for_sibling or (sequence.is_scoring and plan.scores_left < CHUNK_STEP)
    if not is_follower and not _chunk(roster, plan, sequence):
        return False
    cells, free = roster.cells_for(sequence), roster.kv.num_free_cells
    slot = roster.admit(sequence, plan.at)
    plan.admissions.append(Admission(sequence, slot, free, cells))
    # asked again: some of its prompt may be there already, or be waited for
    plan.share(sequence, 0 if is_follower or sequence.waits_for_other else _chunk(roster, plan, sequence))
    return True


def _chunk(roster: Roster, plan: StepPlan, sequence: Sequence) -> int:
    """How much of its prompt it may compute in this step; whoever is over its share may do less."""
    left = max(0, min(plan.tokens_left, plan.prompts_left))
    if roster.is_over(sequence, plan.at):
        if plan.is_for_others:
            return 0
        so_far = sum(share.num_tokens for share in plan.shares if not share.is_decode)
        left = min(left, max(0, plan.budget // PREFILL_SHARE - so_far))
        left = left or int(so_far == 0 and min(plan.tokens_left, plan.prompts_left) > 0)
    if sequence.tier >= IDLE_TIER:
        left = min(left, max(0, IDLE_TOKENS - plan.num_idle_tokens))
    if sequence.is_scoring:
        left = min(left, max(0, plan.scores_left))
    return min(
        _fitting(sequence.num_computed_tokens, sequence.num_pending_tokens, left, plan),
        sequence.tokens_to_checkpoint,
    )


def _fitting(start: int, num_pending_tokens: int, left: int, plan: StepPlan) -> int:
    """0 where the next multiple of CHUNK_STEP doesn't fit and another prompt has its turn."""
    if num_pending_tokens <= left:
        return num_pending_tokens
    whole = (start + left) // CHUNK_STEP * CHUNK_STEP - start
    if whole > 0:
        return whole
    has_prefill = any(not share.is_decode for share in plan.shares)
    return 0 if has_prefill else left


def _preempt(roster: Roster, plan: StepPlan, victim: Sequence) -> None:
    num_computed_tokens = victim.num_computed_tokens
    if victim.state is not State.RUNNING:
        raise LookupError(f"{victim.request_id}/{victim.choice} is {victim.state} and can't be preempted")
    slot = roster.preempt(victim, plan.at)
    plan.preemptions.append(Preemption(victim, slot, num_computed_tokens))
