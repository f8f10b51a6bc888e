"""Who takes part in the next step: a short list of rules over a budget of tokens.

There is no prefill phase and no decode phase: computed tokens catch up with known tokens. Each rule looks at who waits
and who runs, and adds shares to the plan until its tokens are spent:

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
   waits for a long one. Of several choices of one prompt one computes it; those that have a place by its end get a copy
   (see `step.py`).
7. `admit_waiting`           the head of the queue, if it can begin now and its known tokens and a reserve fit. Nobody
   overtakes a head that doesn't fit yet. The last free slots aren't for those over their share.

Enters: a `Roster`. Leaves: a `StepPlan`. Always true: a plan never has more tokens than its budget, nor a sequence
twice, and nothing here calls the decoder. Next: `gaps.py`.
"""

from collections.abc import Callable
from itertools import chain

import msgspec

from hitsend.core.lifecycle import State
from hitsend.serve.loop.kv import CellPool
from hitsend.serve.loop.pace import LONG_TOKENS, Pace
from hitsend.serve.loop.prompt_scores import SCORED_TOKENS
from hitsend.serve.loop.queue import WaitingQueue
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.shares import Shares

PREFILL_SHARE = 8
"""One part in so many of the budget is kept for prompts when decodes alone could fill it."""

CHUNK_STEP = 64
"""Chunks of a prompt end at multiples of this: libllama's attention works in tiles of as many tokens, and a prompt
whose cuts depended on its neighbours would have other last bits beside them than alone (see `engine/calls.py`)."""


KEPT_SHARE = 4
"""One slot, and one cell, in so many is kept free of tenants that are over their share: a newcomer finds a place."""


class LoopLimits(msgspec.Struct, frozen=True):
    """The loop's settings: tokens per step, cells beyond the known tokens at admission, choices in the queue.

    `check_every_step` compares the books with the sequences after every step. Whoever waits and gets nothing goes up a
    tier every `aging_s`. `tpot_target_s` and `ttft_target_s`: see `pace.py`.
    """

    step_tokens: int = 512
    reserve_tokens: int = 64
    max_waiting: int = 256
    check_every_step: bool = False
    aging_s: float = 10.0
    tpot_target_s: float = 0.1
    ttft_target_s: float = 2.0


class Share(msgspec.Struct, frozen=True):
    """One sequence's part in a step: its next `num_tokens` known tokens, of which `is_last` says that none is left.

    `scored`: the positions whose logits say how likely the prompt's next token was. `draft`: tokens that may follow
    (see `verify.py`), computed as well.
    """

    sequence: Sequence
    num_tokens: int
    is_decode: bool
    is_last: bool
    scored: range
    draft: tuple[int, ...] = ()


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


class Roster:
    """Who waits, who runs (in the order of admission), the cells that they share, and who got how much of it lately."""

    def __init__(self, kv: CellPool, limits: LoopLimits) -> None:
        self.kv = kv
        self.reserve_tokens = limits.reserve_tokens
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares, limits.aging_s)
        self.pace = Pace(limits.tpot_target_s, limits.ttft_target_s)
        self.running: list[Sequence] = []
        self._long: set[int] = set()

    def admit(self, sequence: Sequence, at: float) -> int:
        """From the queue to a slot, which is returned."""
        cells = self.cells_for(sequence)
        self.waiting.remove(sequence, at)
        self.running.append(sequence)
        self.shares.run(sequence.path, 1, at)
        if self.is_long(sequence):
            self._long.add(sequence.arrival)
        slot = self.kv.take(cells)
        sequence.admit(slot, at)
        return slot

    def drop(self, sequence: Sequence, at: float) -> int | None:
        """Out of queue or cells, wherever it is; returns the slot that became free."""
        if sequence.slot is None:
            self.waiting.remove(sequence, at)
            return None
        self.running.remove(sequence)
        self._long.discard(sequence.arrival)
        self.shares.run(sequence.path, -1, at)
        self.kv.release(sequence.slot)
        return sequence.slot

    def pause(self, sequence: Sequence, at: float, *, is_paused: bool) -> None:
        """The paused keep their place, but have no turn."""
        is_queued = sequence.slot is None
        if is_queued:
            self.waiting.remove(sequence, at)
        sequence.is_paused = is_paused
        if is_queued:
            self.waiting.add(sequence, at)

    def cells_for(self, sequence: Sequence) -> int:
        """Cells that it must find free to be admitted."""
        return sequence.cells_to_admit(self.reserve_tokens, self.kv.max_sequence_tokens)

    def can_admit(self, sequence: Sequence, at: float) -> bool:
        """Whether slot and cells are there now, and not kept for others."""
        cells, kv = self.cells_for(sequence), self.kv
        if not kv.can_take(cells):
            return False
        takes_kept = (
            kv.num_free_slots <= kv.num_slots // KEPT_SHARE or kv.num_free_cells - cells < kv.num_cells // KEPT_SHARE
        )
        may_take_all = not self.running or sequence.state is State.PREEMPTED
        return may_take_all or not takes_kept or not self.is_over(sequence, at)

    def is_long(self, sequence: Sequence) -> bool:
        """Whether it had a long prompt to compute when it began, or would have now."""
        return sequence.arrival in self._long or sequence.num_pending_tokens > LONG_TOKENS

    def order(self, sequence: Sequence, at: float) -> tuple[tuple[float, ...], float]:
        """Prompts go by what each tenant had lately, and within a tenant by when they are due."""
        due_at = self.pace.due_at(sequence.arrived_at, sequence.num_pending_tokens, at)
        return self.shares.order(sequence.path, at), due_at

    def is_over(self, sequence: Sequence, at: float) -> bool:
        """Whether its tenant had more than its share lately, while others want theirs."""
        return self.shares.is_over(sequence.path, at)


class StepPlan:
    """What one step will do, while the rules write it."""

    def __init__(self, step: int, at: float, num_tokens: int) -> None:
        self.step = step
        self.at = at
        self.budget = num_tokens
        self.tokens_left = num_tokens
        self.prompts_left = num_tokens
        self.num_decodes = 0
        self.scores_left = SCORED_TOKENS
        self.shares: list[Share] = []
        self.is_for_others = False
        self.admissions: list[Admission] = []
        self.preemptions: list[Preemption] = []

    def share(self, sequence: Sequence, num_tokens: int) -> None:
        """Give it that many tokens of the budget, if any."""
        if not num_tokens:
            return
        is_last = num_tokens == sequence.num_pending_tokens
        scored = sequence.places_to_score(num_tokens)
        self.shares.append(Share(sequence, num_tokens, sequence.is_decoding, is_last, scored))
        self.tokens_left -= num_tokens
        if sequence.is_decoding:
            self.num_decodes += num_tokens
        else:
            self.prompts_left -= num_tokens
        self.scores_left -= len(scored)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts."""
        return self.budget - self.tokens_left - self.num_decodes


def hold_cells_for_decodes(roster: Roster, plan: StepPlan) -> None:
    """Oldest first, so that a victim never has had its turn."""
    decoding = [each for each in roster.running if each.is_decoding and not each.is_paused]
    for sequence in sorted(decoding, key=lambda each: each.arrival):
        while sequence.slot is not None and not roster.kv.hold_next(sequence.slot):
            _preempt(roster, plan, max(roster.running, key=lambda each: (each.is_paused, each.arrival)))


def let_sit_out(roster: Roster, plan: StepPlan) -> None:
    """Nobody is over their share for long without getting anything: what they had counts less and less."""
    head = roster.waiting.head(plan.at)
    has_prompt = head is not None and not roster.is_over(head, plan.at) and roster.can_admit(head, plan.at)
    plan.is_for_others = has_prompt or any(
        _has_prompt(each) and not roster.is_over(each, plan.at) for each in roster.running
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


def pace_prompts(roster: Roster, plan: StepPlan) -> None:
    """Those that are late, and short, may have it all; the others what the pace allows."""
    head = roster.waiting.head(plan.at)
    prompts = [each for each in roster.running if _has_prompt(each)]
    if head is not None and roster.can_admit(head, plan.at):
        prompts.append(head)
    if not prompts:
        return
    first = min(prompts, key=lambda each: roster.order(each, plan.at))
    tokens = roster.pace.tokens(plan.num_decodes, plan.tokens_left, is_long=roster.is_long(first))
    plan.prompts_left = max(tokens, _late_tokens(roster, plan, prompts))


def admit_urgent(roster: Roster, plan: StepPlan) -> None:
    """Several, if several are; each is compared with those before it, too."""
    while True:
        sequence = roster.waiting.head(plan.at)
        if sequence is None or not roster.can_admit(sequence, plan.at):
            return
        own = [each for each in roster.running if _has_prompt(each) and each.path == sequence.path]
        due_at = roster.order(sequence, plan.at)
        if not own or any(roster.order(each, plan.at) <= due_at for each in own) or not _admit(roster, plan, sequence):
            return


def share_with_prefills(roster: Roster, plan: StepPlan) -> None:
    """As much as is left, whoever had least lately first."""
    prompts = [each for each in roster.running if _has_prompt(each)]
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


def _has_prompt(sequence: Sequence) -> bool:
    return not (sequence.is_decoding or sequence.is_paused or sequence.waits_for_sibling)


def _late_tokens(roster: Roster, plan: StepPlan, prompts: list[Sequence]) -> int:
    """What short prompts that are late have to compute, of those within their share; no more than the step has."""
    if not any(roster.pace.is_late(each.arrived_at, plan.at) for each in prompts):
        return 0
    tokens = 0
    for sequence in chain(filter(_has_prompt, roster.running), roster.waiting):
        is_late = roster.pace.is_late(sequence.arrived_at, plan.at) and not roster.is_long(sequence)
        if is_late and not sequence.is_paused and not roster.is_over(sequence, plan.at):
            tokens += sequence.num_pending_tokens
        if tokens >= plan.tokens_left:
            break
    return min(tokens, plan.tokens_left)


def _admit(roster: Roster, plan: StepPlan, sequence: Sequence) -> bool:
    """A place is only given to somebody who can begin in this step, or who waits for a sibling's prompt or for its turn
    to be scored: such a one holds up nobody behind it."""
    is_follower = sequence.waits_for_sibling or (sequence.is_scoring and plan.scores_left < CHUNK_STEP)
    num_tokens = 0 if is_follower else _chunk(roster, plan, sequence)
    if not num_tokens and not is_follower:
        return False
    cells, free = roster.cells_for(sequence), roster.kv.num_free_cells
    slot = roster.admit(sequence, plan.at)
    plan.admissions.append(Admission(sequence, slot, free, cells))
    plan.share(sequence, num_tokens)
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
    if sequence.is_scoring:
        left = min(left, max(0, plan.scores_left))
    return _fitting(sequence.num_computed_tokens, sequence.num_pending_tokens, left, plan)


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
    slot = roster.drop(victim, plan.at)
    if slot is None or victim.state is not State.RUNNING:
        raise LookupError(f"{victim.request_id}/{victim.choice} is {victim.state} and can't be preempted")
    victim.preempt()
    roster.waiting.add(victim, plan.at)
    plan.preemptions.append(Preemption(victim, slot, num_computed_tokens))
