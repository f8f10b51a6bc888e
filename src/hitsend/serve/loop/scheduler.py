"""Who takes part in the next step: a short list of rules over a budget of tokens.

There is no prefill phase and no decode phase: computed tokens catch up with known tokens. Each rule looks at who waits
and who runs, and adds shares to the plan until its tokens are spent:

1. `hold_cells_for_decodes`  whoever decodes needs a cell for its next token. Where none is free (unified mode only), a
   victim gives up its cache and is computed again later: the paused first, then the youngest, whatever its tier.
   The oldest one is never a victim of another, so it ends, then the next one does: preemption can't go on for ever.
   A sequence alone on the engine ends at its limit before it could run out of cells.
2. `share_with_decodes`      one token each, the least recently served first, leaving some tokens for prompts.
3. `share_with_prefills`     the next chunk of prompts (or of what a preemption dropped), in the order of admission. Of
   several choices of one prompt one computes it; those that have a place by its end get a copy (see `step.py`).
4. `admit_waiting`           while tokens are left: the head of the queue, if its known tokens and a reserve fit. Nobody
   overtakes a head that doesn't fit yet. The preempted come first, then by (tier, arrival); smaller numbers first.

Enters: a `Roster`. Leaves: a `StepPlan`. Always true: a plan never has more tokens than its budget, nor a sequence
twice, and nothing here calls the decoder. Next: `sampler.py`.
"""

from bisect import insort
from collections.abc import Callable

import msgspec

from hitsend.core.lifecycle import State
from hitsend.serve.loop.kv import CellPool
from hitsend.serve.loop.prompt_scores import SCORED_TOKENS
from hitsend.serve.loop.sequence import Sequence

PREFILL_SHARE = 8
"""One part in so many of the budget is kept for prompts when decodes alone could fill it."""

CHUNK_STEP = 64
"""Chunks of a prompt end at multiples of this: libllama's attention works in tiles of as many tokens, and a prompt
whose cuts depended on its neighbours would have other last bits beside them than alone (see `engine/calls.py`)."""


class LoopLimits(msgspec.Struct, frozen=True):
    """The loop's settings: tokens per step, cells beyond the known tokens at admission, choices in the queue.

    `check_every_step` compares the books with the sequences after every step.
    """

    step_tokens: int = 512
    reserve_tokens: int = 64
    max_waiting: int = 256
    check_every_step: bool = False


class Share(msgspec.Struct, frozen=True):
    """One sequence's part in a step: its next `num_tokens` known tokens, of which `is_last` says that none is left.

    `scored`: the positions whose logits say how likely the prompt's next token was.
    """

    sequence: Sequence
    num_tokens: int
    is_decode: bool
    is_last: bool
    scored: range


class Admission(msgspec.Struct, frozen=True):
    """A sequence that got its place, and the free cells before it did."""

    sequence: Sequence
    slot: int
    cells_free: int
    cells_reserved: int


class Preemption(msgspec.Struct, frozen=True):
    """A sequence that lost its place: the slot it had, and how many of its tokens were computed."""

    sequence: Sequence
    slot: int
    num_computed_tokens: int


class Move(msgspec.Struct, frozen=True):
    """A whole sequence's cache goes to another slot."""

    source: int
    target: int


class Roster:
    """Who waits (in the order of the queue), who runs (in the order of admission), and the cells that they share."""

    def __init__(self, kv: CellPool, reserve_tokens: int) -> None:
        self.kv = kv
        self.reserve_tokens = reserve_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def enqueue(self, sequence: Sequence) -> None:
        """Into its place in the queue."""
        insort(self.waiting, sequence, key=lambda each: each.queue_key)

    def drop(self, sequence: Sequence) -> int | None:
        """Out of queue or cells, wherever it is; returns the slot that became free."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return None
        self.running.remove(sequence)
        self.kv.release(sequence.slot)
        return sequence.slot

    def next_waiting(self) -> Sequence | None:
        """The head of the queue; the paused don't queue."""
        return next((sequence for sequence in self.waiting if not sequence.is_paused), None)

    def cells_for(self, sequence: Sequence) -> int:
        """Cells that it must find free to be admitted."""
        return sequence.cells_to_admit(self.reserve_tokens, self.kv.max_sequence_tokens)

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether slot and cells are there now."""
        return self.kv.can_take(self.cells_for(sequence))


class StepPlan:
    """What one step will do, while the rules write it."""

    def __init__(self, step: int, at: float, num_tokens: int) -> None:
        self.step = step
        self.at = at
        self.budget = num_tokens
        self.tokens_left = num_tokens
        self.scores_left = SCORED_TOKENS
        self.shares: list[Share] = []
        self.admissions: list[Admission] = []
        self.preemptions: list[Preemption] = []

    def share(self, sequence: Sequence, num_tokens: int) -> None:
        """Give it that many tokens of the budget."""
        is_last = num_tokens == sequence.num_pending_tokens
        scored = sequence.places_to_score(num_tokens)
        self.shares.append(Share(sequence, num_tokens, sequence.is_decoding, is_last, scored))
        self.tokens_left -= num_tokens
        self.scores_left -= len(scored)


def hold_cells_for_decodes(roster: Roster, plan: StepPlan) -> None:
    """Oldest first, so that a victim never has had its turn."""
    decoding = [each for each in roster.running if each.is_decoding and not each.is_paused]
    for sequence in sorted(decoding, key=lambda each: each.arrival):
        while sequence.slot is not None and not roster.kv.hold_next(sequence.slot):
            _preempt(roster, plan, max(roster.running, key=lambda each: (each.is_paused, each.arrival)))


def share_with_decodes(roster: Roster, plan: StepPlan) -> None:
    """A budget of one token alternates between decodes and prompts."""
    head = roster.next_waiting()
    has_prefill = any(not each.is_decoding and not each.is_paused for each in roster.running)
    kept = 0
    if has_prefill or (head is not None and roster.can_admit(head)):
        kept = plan.budget // PREFILL_SHARE if plan.budget >= PREFILL_SHARE else plan.step % 2
    decoding = [each for each in roster.running if each.is_decoding and not each.is_paused]
    room = plan.tokens_left - kept
    if len(decoding) > room:
        decoding.sort(key=lambda each: each.last_step)
    for sequence in decoding[: max(room, 0)]:
        plan.share(sequence, 1)


def share_with_prefills(roster: Roster, plan: StepPlan) -> None:
    """As much as is left, first come first served."""
    for sequence in roster.running:
        if plan.tokens_left < 1:
            return
        if not (sequence.is_decoding or sequence.is_paused or sequence.waits_for_sibling):
            num_tokens = _chunk(plan, sequence)
            if num_tokens:
                plan.share(sequence, num_tokens)


def admit_waiting(roster: Roster, plan: StepPlan) -> None:
    """A place is only given to somebody who can begin in this step, or who waits for a sibling's prompt or for its turn
    to be scored: such a one holds up nobody behind it."""
    while True:
        sequence = roster.next_waiting()
        if sequence is None or not roster.can_admit(sequence):
            return
        is_follower = sequence.waits_for_sibling or (sequence.is_scoring and plan.scores_left < CHUNK_STEP)
        num_tokens = 0 if is_follower or plan.tokens_left < 1 else _chunk(plan, sequence)
        if not num_tokens and not is_follower:
            return
        cells, free = roster.cells_for(sequence), roster.kv.num_free_cells
        roster.waiting.remove(sequence)
        roster.running.append(sequence)
        slot = roster.kv.take(cells)
        sequence.admit(slot, plan.at)
        plan.admissions.append(Admission(sequence, slot, free, cells))
        if num_tokens:
            plan.share(sequence, num_tokens)


Rule = Callable[[Roster, StepPlan], None]

RULES: tuple[Rule, ...] = (hold_cells_for_decodes, share_with_decodes, share_with_prefills, admit_waiting)


def schedule(roster: Roster, plan: StepPlan) -> StepPlan:
    """Apply the rules in order; the roster already is as the plan says when this returns."""
    for rule in RULES:
        rule(roster, plan)
    return plan


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
                sequence = by_slot.pop(last)
                by_slot[gap] = sequence
                roster.kv.move(last, gap)
                sequence.slot = gap
                if sequence.num_computed_tokens:
                    moves.append(Move(last, gap))
    plan.shares.sort(key=lambda share: share.sequence.held_slot)
    return moves


def _chunk(plan: StepPlan, sequence: Sequence) -> int:
    """How much of a prompt fits; 0 where the next multiple of CHUNK_STEP doesn't and another prompt has its turn."""
    start, left = sequence.num_computed_tokens, plan.tokens_left
    if sequence.is_scoring:
        left = min(left, max(0, plan.scores_left))
    if sequence.num_pending_tokens <= left:
        return sequence.num_pending_tokens
    whole = (start + left) // CHUNK_STEP * CHUNK_STEP - start
    if whole > 0:
        return whole
    has_prefill = any(not share.is_decode for share in plan.shares)
    return 0 if has_prefill else left


def _preempt(roster: Roster, plan: StepPlan, victim: Sequence) -> None:
    num_computed_tokens = victim.num_computed_tokens
    slot = roster.drop(victim)
    if slot is None or victim.state is not State.RUNNING:
        raise LookupError(f"{victim.request_id}/{victim.choice} is {victim.state} and can't be preempted")
    victim.preempt()
    roster.enqueue(victim)
    plan.preemptions.append(Preemption(victim, slot, num_computed_tokens))
