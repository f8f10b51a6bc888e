"""Who waits and who runs, what they have of the cache, and one step's plan while the rules write it.

Enters: sequences. Leaves: a `Roster`, and the `StepPlan` of each step. Always true: who runs has a slot and cells, who
waits has none; a plan never has more tokens than its budget. Next: `scheduler.py`, the rules.
"""

import msgspec

from hitsend.core.lifecycle import State
from hitsend.core.request import IDLE_TIER
from hitsend.serve.loop.pace import PIECE, Pace
from hitsend.serve.loop.prompt_scores import SCORED_TOKENS
from hitsend.serve.loop.queue import WaitingQueue
from hitsend.serve.loop.seats import Seats
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.shares import Shares

CHUNK_STEP = 64
"""Chunks of a prompt end at multiples of this: libllama's attention works in tiles of as many tokens, and a prompt
whose cuts depended on its neighbours would have other last bits beside them than alone (see `engine/calls.py`)."""

YIELD_S = 60.0
"""For so long the prompts of idle work make way for all others; nothing starves."""

KEPT_SHARE = 4
"""One slot, and one cell, in so many is kept free of tenants that are over their share: a newcomer finds a place."""


WATERMARK = 32
"""One cell in so many stays free at admission where slots share them: who runs can grow for a while before somebody
has to give up its place."""


class LoopLimits(msgspec.Struct, frozen=True):
    """The loop's settings: tokens per step, cells beyond the known tokens at admission, choices in the queue.

    `check_every_step` compares the books with the sequences after every step. Who waits and gets nothing goes up a tier
    every `aging_s`. `tpot_target_s`, `ttft_target_s`, `piece`: see `pace.py`. `prefix_cache_bytes` hold saved prefixes,
    0: none is kept; `prefix_disk_bytes` those on disk; prompts go on at multiples of `prefix_step`; `prefix_answers`:
    from decoded tokens, too.
    """

    step_tokens: int = 512
    reserve_tokens: int = 64
    max_waiting: int = 256
    check_every_step: bool = False
    aging_s: float = 10.0
    tpot_target_s: float = 0.1
    ttft_target_s: float = 2.0
    prefix_cache_bytes: int = 0
    prefix_step: int = CHUNK_STEP
    prefix_answers: bool = True
    prefix_disk_bytes: int = 0
    piece: int = PIECE


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

    def __init__(self, seats: Seats, limits: LoopLimits) -> None:
        self.seats = seats
        self.kv = seats.kv
        self.reserve_tokens = limits.reserve_tokens
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares, limits.aging_s)
        self.pace = Pace(limits.tpot_target_s, limits.ttft_target_s, piece=limits.piece)
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
        slot = self.seats.take(sequence, cells, at, self.running)
        sequence.admit(slot, at)
        self.seats.begin(sequence, at)
        return slot

    def drop(self, sequence: Sequence, at: float, *, is_kept: bool = False) -> int | None:
        """Out of queue or slot, wherever it is; returns the slot that became free, where `is_kept` leaves its cells."""
        if sequence.slot is None:
            self.waiting.remove(sequence, at)
            self.seats.forget(sequence)
            return None
        self._out(sequence, at)
        return self.seats.leave(sequence, at, is_kept=is_kept)

    def preempt(self, sequence: Sequence, at: float) -> int:
        """Out of its slot, which is returned, and back into the queue."""
        self._out(sequence, at)
        slot = self.seats.park(sequence, at)
        sequence.preempt()
        self.waiting.add(sequence, at)
        return slot

    def _out(self, sequence: Sequence, at: float) -> None:
        self.running.remove(sequence)
        self._long.discard(sequence.arrival)
        self.shares.run(sequence.path, -1, at)

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
        if kv.is_shared and self.running and kv.num_free_cells - cells < kv.num_cells // WATERMARK:
            return False
        takes_kept = (
            kv.num_free_slots <= kv.num_slots // KEPT_SHARE or kv.num_free_cells - cells < kv.num_cells // KEPT_SHARE
        )
        may_take_all = not self.running or sequence.state is State.PREEMPTED
        return may_take_all or not takes_kept or not self.is_over(sequence, at)

    def is_long(self, sequence: Sequence) -> bool:
        """Whether it had a long prompt to compute when it began, or would have now."""
        return sequence.arrival in self._long or self.pace.is_long(sequence.num_pending_tokens)

    def order(self, sequence: Sequence, at: float) -> tuple[tuple[float, ...], float]:
        """Prompts go by what each tenant had lately, and within a tenant by when they are due; for a while, idle work
        comes after all others."""
        came, tokens = sequence.arrived_at, sequence.num_pending_tokens
        is_lost = self.pace.is_too_full(len(self.running)) or self.pace.is_lost(came, tokens, at)
        due_at = self.pace.due_at(came, tokens, is_lost=is_lost)
        yields = sequence.tier >= IDLE_TIER and at - sequence.arrived_at < YIELD_S
        return (float(yields), *self.shares.order(sequence.path, at)), due_at

    def is_over(self, sequence: Sequence, at: float) -> bool:
        """Whether its tenant had more than its share lately, and nobody within theirs waits for what it computes."""
        is_over = self.shares.is_over
        return is_over(sequence.path, at) and not any(
            each.leader is sequence and not is_over(each.path, at) for each in self.running
        )


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
        self.is_for_others = self.has_prompts = False
        self.admissions: list[Admission] = []
        self.preemptions: list[Preemption] = []

    @property
    def num_idle_tokens(self) -> int:
        """Prompt tokens of idle work in it."""
        idle = (share for share in self.shares if share.sequence.tier >= IDLE_TIER and not share.is_decode)
        return sum(share.num_tokens for share in idle)

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
