"""The loop itself: take commands, schedule, decode, sample, report.

What can't be computed (`attempt.py`) ends with `engine_failed`, like sequences whose logits are no numbers. A fatal
failure goes up: the child has to go. Choices of one request share their prompt: when one has computed it, those with a
place get a copy of its cache and sample from the same row, each with its own seed; later ones compute it again.

Enters: commands, a `Decoder`, a `Clock`. Leaves: reports. Always true: nothing here waits; `step()` hands over what is
due at once before it computes anything; each submitted choice gets exactly one `Done`; the same commands at the same
instants give the same reports. Next: `../engine/worker.py`, which drives this in the child process.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock
from hitsend.core.errors import EngineFailed, ServeError, ServerOverloaded, ShuttingDown
from hitsend.core.lifecycle import FinishReason, State
from hitsend.core.request import SampledToken
from hitsend.serve.loop.attempt import compute, refusal
from hitsend.serve.loop.decoder import Decoder, DecoderFailed
from hitsend.serve.loop.disk import Disk
from hitsend.serve.loop.filters import Breakers
from hitsend.serve.loop.gaps import close_gaps
from hitsend.serve.loop.grammar import GrammarFailed, Grammars, constraint_for
from hitsend.serve.loop.kv import CellPool
from hitsend.serve.loop.messages import (
    Abort,
    Command,
    Done,
    Pause,
    Pulse,
    Report,
    Resume,
    Row,
    StepReport,
    Submit,
    WasAdmitted,
    WasPreempted,
    WasQueued,
    refused,
)
from hitsend.serve.loop.prefix_cache import cache_for
from hitsend.serve.loop.prompt_scores import PromptScores, take_scores
from hitsend.serve.loop.roster import LoopLimits, Roster, Share, StepPlan
from hitsend.serve.loop.sampler import sample
from hitsend.serve.loop.scheduler import schedule
from hitsend.serve.loop.seats import Seats
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.shares import path_of
from hitsend.serve.loop.verify import Speculator

RETRY_AFTER_S = (1.0, 60.0)
"""Bounds of what is advised to a request that found no place."""

DISPLACED = "The queue is full, and others have less waiting: this request made room for one of theirs."

_ENDS = {FinishReason.ERROR: State.FAILED, FinishReason.CANCELLED: State.CANCELLED}


class Loop:
    """The state of one engine between two steps. `cells` in reports are held cells: filled ones and reserves."""

    def __init__(
        self,
        decoder: Decoder,
        limits: LoopLimits,
        clock: Clock,
        grammars: Grammars | None = None,
        speculator: Speculator | None = None,
        *,
        disk: Disk | None = None,
    ) -> None:
        self._decoder = decoder
        self._speculator = speculator
        self._grammars = grammars
        self._limits = limits
        self._clock = clock
        self._kv = CellPool(decoder.num_slots, decoder.num_cells, decoder.cells_per_slot)
        self._seats = Seats(decoder, self._kv, cache_for(decoder, limits, disk), clock)
        self._roster = Roster(self._seats, limits)
        self._live: dict[str, list[Sequence]] = {}
        self._breakers: Breakers | None = None
        self._outbox: list[Report] = []
        self._arrivals = 0
        self._steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._preemptions = 0
        self._mean_run_s = RETRY_AFTER_S[0]
        self._is_shut = False

    @property
    def has_work(self) -> bool:
        """Whether `step()` has something to say or to compute now.

        False also while everything that runs is paused and holds the cells that the queue needs: look again after a
        command, or within a second for the deadlines.
        """
        roster = self._roster
        if self._outbox or any(not sequence.is_paused for sequence in roster.running):
            return True
        now = self._clock.now()
        head = roster.waiting.head(now)
        return head is not None and (roster.can_admit(head, now) or bool(self._overdue(now)))

    def handle(self, command: Command) -> None:
        """Apply one command; what there is to say about it comes with the next `step()`. Unknown ids are ignored."""
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            for sequence in self._sequences(command.request_id):
                if command.choice in (None, sequence.choice):
                    self._outbox.append(self._end(sequence, FinishReason.CANCELLED))
        elif isinstance(command, Pause | Resume):
            for sequence in self._sequences(command.request_id):
                self._roster.pause(sequence, self._clock.now(), is_paused=isinstance(command, Pause))
        else:
            self._is_shut = True
            error = ShuttingDown("The engine is shutting down.")
            for sequence in [*self._roster.running, *self._roster.waiting]:
                self._outbox.append(self._end(sequence, FinishReason.ERROR, error))

    def step(self) -> list[Report]:
        """Hand over what is due at once, or else run the model once. Raises DecoderFailed where that is fatal."""
        now = self._clock.now()
        for sequence in self._overdue(now):
            self._outbox.append(self._end(sequence, FinishReason.ERROR, self._overload(sequence)))
        if self._outbox:
            reports, self._outbox = self._outbox, []
            return reports
        plan = StepPlan(self._steps, now, min(self._limits.step_tokens, self._decoder.max_batch_tokens))
        schedule(self._roster, plan)
        reports = self._announce(plan)
        if not plan.shares:
            return reports
        for move in close_gaps(self._roster, plan):
            self._decoder.move(move.source, move.target)
        if self._speculator is not None and not plan.has_prompts:
            plan.shares = self._speculator.with_drafts(plan.shares, self._kv, plan.tokens_left)
        reports.append(self._compute(plan))
        if self._limits.check_every_step:
            pulse = self.pulse()
            if pulse.check is not None:
                reports.append(pulse)
        return reports

    def pulse(self) -> Pulse:
        """Figures of this moment, with a check of the books."""
        computed = {each.held_slot: each.num_computed_tokens for each in self._roster.running}
        return Pulse(
            at=self._clock.now(),
            step=self._steps,
            num_waiting=len(self._roster.waiting),
            num_running=len(self._roster.running),
            cells_used=self._kv.num_held_cells,
            slots_used=self._kv.num_held_slots,
            prefill_tokens_total=self._prefill_tokens,
            decode_tokens_total=self._decode_tokens,
            preemptions_total=self._preemptions,
            check="; ".join([*self._kv.check(computed, self._seats.kept()), *self._seats.problems()]) or None,
            cells_cached=self._kv.num_kept_cells,
            cache_bytes=self._seats.num_saved_bytes,
            cache_disk_bytes=self._seats.on_disk[0],
            cache_disk_problem=self._seats.on_disk[1],
            num_paused=sum(each.is_paused for each in self._roster.running),
        )

    # Commands

    def _sequences(self, request_id: str) -> list[Sequence]:
        return list(self._live.get(request_id, ()))

    def _submit(self, submit: Submit) -> None:
        if submit.request_id in self._live or not submit.seeds:
            return
        now = self._clock.now()
        error = self._refusal(submit)
        sequences: list[Sequence] = []
        if error is None:
            try:
                sequences = [self._new_sequence(submit, choice, now) for choice in range(len(submit.seeds))]
                error = self._make_room(submit)
            except GrammarFailed as failed:
                error = failed.as_error()
        if error is not None:
            choices = range(len(submit.seeds))
            self._outbox.extend(refused(submit.request_id, choice, now, error) for choice in choices)
            return
        self._arrivals += len(sequences)
        self._live[submit.request_id] = sequences
        num_top = submit.sampling.prompt_logprobs
        scores = None if num_top is None else PromptScores(num_top)
        for sequence in sequences:
            sequence.siblings, sequence.scores = sequences, scores
            self._roster.waiting.add(sequence, now)
        num_waiting, num_running = len(self._roster.waiting), len(self._roster.running)
        self._outbox.append(WasQueued(submit.request_id, now, num_waiting, num_running))

    def _breaker_ids(self, submit: Submit) -> frozenset[int]:
        """Tokens over which DRY follows no repeat: those with a breaker in them, and the ends of turns."""
        if not submit.sampling.dry_multiplier:
            return frozenset()
        self._breakers = self._breakers or Breakers(self._decoder.token_bytes)
        return self._decoder.end_token_ids | self._breakers.find(submit.sampling.dry_sequence_breakers)

    def _new_sequence(self, submit: Submit, choice: int, now: float) -> Sequence:
        ends = self._decoder.end_token_ids
        return Sequence(
            submit,
            choice,
            self._arrivals + choice,
            now,
            constraint=constraint_for(submit.constraint, self._grammars, ends),
            end_token_ids=ends,
            breaker_ids=self._breaker_ids(submit),
        )

    def _refusal(self, submit: Submit) -> ServeError | None:
        if self._is_shut:
            return ShuttingDown("The engine is shutting down.")
        return refusal(submit, self._decoder, self._kv.max_sequence_tokens)

    def _make_room(self, submit: Submit) -> ServerOverloaded | None:
        """Where the queue is full, whoever has the most waiting there yields; that can be the newcomer."""
        num_waiting, places = len(self._roster.waiting), self._limits.max_waiting + self._kv.num_free_slots
        excess = num_waiting + len(submit.seeds) - places
        if excess <= 0:
            return None
        retry_after_s = self._retry_after_s()
        displaced = self._roster.waiting.displaced_by(path_of(submit.tenant), len(submit.seeds), excess)
        for sequence in displaced:
            error = ServerOverloaded(DISPLACED, retry_after_s=retry_after_s)
            self._outbox.append(self._end(sequence, FinishReason.ERROR, error))
        full = f"The queue is full: {num_waiting} waiting, {len(submit.seeds)} more, room for {places}."
        return None if displaced else ServerOverloaded(full, retry_after_s=retry_after_s)

    # One step

    def _overdue(self, now: float) -> list[Sequence]:
        waiting = self._roster.waiting
        return [s for s in waiting if s.state is State.WAITING and not s.is_paused and now > s.deadline_at]

    def _announce(self, plan: StepPlan) -> list[Report]:
        reports: list[Report] = []
        for lost in plan.preemptions:
            self._preemptions += 1
            who = lost.sequence
            reports.append(WasPreempted(who.request_id, who.choice, plan.at, lost.num_computed_tokens))
        for won in plan.admissions:
            who = won.sequence
            reports.append(
                WasAdmitted(who.request_id, who.choice, plan.at, won.slot, won.cells_free, won.cells_reserved)
            )
        return [*reports, *self._seats.take_reports()]

    def _compute(self, plan: StepPlan) -> StepReport:
        self._steps += 1
        failed: list[tuple[Share, DecoderFailed]] = []
        before = self._clock.now()
        results = compute(self._decoder, plan.shares, failed)
        decode_s = self._clock.now() - before
        self._seats.stepped(plan.shares, decode_s)
        if self._speculator is not None and len(results) == 1:
            self._speculator.observe(results[0][0], decode_s)
        if not any(share.draft for share in plan.shares):
            self._roster.pace.took(plan.num_decodes, plan.num_prefill_tokens, decode_s)
        rows: list[Row] = []
        done: list[Done] = []
        for shares, logits in results:
            self._advance(shares, logits, rows, done)
        for share, failure in failed:
            error = EngineFailed(f"The engine could not compute this request: {failure}")
            done.append(self._end(share.sequence, FinishReason.ERROR, error))
        return StepReport(
            step=self._steps,
            started_at=plan.at,
            ended_at=self._clock.now(),
            decode_s=decode_s,
            rows=tuple(rows),
            done=tuple(done),
            num_waiting=len(self._roster.waiting),
            num_running=len(self._roster.running),
            cells_used=self._kv.num_held_cells,
        )

    def _advance(self, shares: list[Share], logits: NDArray[np.float32], rows: list[Row], done: list[Done]) -> None:
        logits, scored = take_scores(shares, logits)
        now = self._clock.now()
        for share in shares:
            share.sequence.computed(share.num_tokens, self._steps)
            self._roster.shares.serve(share.sequence.path, share.num_tokens, now)
            self._kv.fill(share.sequence.held_slot, share.num_tokens)
            self._seats.advanced(share.sequence, now)
        if self._speculator is not None and any(share.draft for share in shares):
            verified = self._speculator.verify(shares, logits, self._kv, self._decoder, partial(self._accept, done))
            for share, row in zip(shares, verified, strict=True):
                self._decode_tokens += row.decode_tokens
                self._roster.shares.serve(share.sequence.path, row.decode_tokens - share.num_tokens, now)
            rows += verified
            return
        ready = [share.sequence for share in shares if share.sequence.num_pending_tokens == 0]
        followers = self._hand_on(ready)
        if followers:
            logits = np.concatenate([logits, logits[[ready.index(leader) for leader, _ in followers]]])
        samplers = [each.sampler for each in (*ready, *(follower for _, follower in followers))]
        tokens = iter(sample(logits, samplers))
        for number, share in enumerate(shares):
            sequence = share.sequence
            prefill_tokens, decode_tokens = (0, share.num_tokens) if share.is_decode else (share.num_tokens, 0)
            self._prefill_tokens += prefill_tokens
            self._decode_tokens += decode_tokens
            sampled: tuple[SampledToken, ...] = ()
            if sequence.num_pending_tokens == 0:
                sampled = self._accept(done, sequence, next(tokens))
            told = scored.get(number, ())
            rows.append(Row(sequence.request_id, sequence.choice, prefill_tokens, decode_tokens, sampled, told))
        for _, sequence in followers:
            sampled = self._accept(done, sequence, next(tokens))
            rows.append(Row(sequence.request_id, sequence.choice, 0, 0, sampled))

    def _hand_on(self, ready: list[Sequence]) -> list[tuple[Sequence, Sequence]]:
        """Copy each prompt that is complete now to the siblings that wait for it: (who computed it, who has it too)."""
        pairs = [
            (leader, follower)
            for leader in ready
            if len(leader.siblings) > 1 and leader.num_output_tokens == 0
            for follower in leader.siblings
            if follower.slot is not None and not follower.has_begun
        ]
        for leader, follower in pairs:
            self._decoder.copy(leader.held_slot, follower.held_slot)
            self._kv.fill(follower.held_slot, leader.num_computed_tokens)
            follower.copied(leader.num_computed_tokens, self._steps)
        return pairs

    def _accept(self, done: list[Done], sequence: Sequence, token: SampledToken | None) -> tuple[SampledToken, ...]:
        """Add the token, or end the sequence; returns what belongs into its output."""
        constraint = sequence.constraint
        if token is None:
            failure = constraint.failure if constraint else None
            failure = failure or EngineFailed("The model's logits are not numbers.")
            done.append(self._end(sequence, FinishReason.ERROR, failure))
            return ()
        if token.token_id in sequence.ends:
            done.append(self._end(sequence, FinishReason.STOP))
            return ()
        sequence.append(token.token_id)
        is_full = len(sequence.token_ids) >= self._kv.max_sequence_tokens
        if constraint is not None and constraint.failure is not None:
            done.append(self._end(sequence, FinishReason.ERROR, constraint.failure))
        elif constraint is not None and constraint.is_complete:
            done.append(self._end(sequence, FinishReason.STOP))
        elif is_full or sequence.num_output_tokens >= sequence.max_tokens:
            done.append(self._end(sequence, FinishReason.LENGTH))
        return (token,)

    # Endings

    def _end(self, sequence: Sequence, reason: FinishReason, error: ServeError | None = None) -> Done:
        now = self._clock.now()
        self._roster.drop(sequence, now, is_kept=reason is not FinishReason.ERROR)
        sequence.end(_ENDS.get(reason, State.FINISHED))
        siblings = self._live[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request_id]
        if sequence.admitted_at is not None:
            self._mean_run_s += (now - sequence.admitted_at - self._mean_run_s) / 8
        return Done(
            request_id=sequence.request_id,
            choice=sequence.choice,
            at=now,
            reason=reason.value,
            num_prompt_tokens_computed=sequence.num_prompt_tokens_computed,
            num_output_tokens=sequence.num_output_tokens,
            code=error.code if error else None,
            message=error.message if error else None,
            retry_after_s=error.retry_after_s if error else None,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _overload(self, sequence: Sequence) -> ServerOverloaded:
        return ServerOverloaded(
            f"Waited longer than {sequence.deadline_s:g} s for a place.", retry_after_s=self._retry_after_s()
        )

    def _retry_after_s(self) -> float:
        """When the queue of now would be served, if each place takes as long as the recent ones did on average."""
        rounds = 1 + len(self._roster.waiting) / self._decoder.num_slots
        return min(RETRY_AFTER_S[1], max(RETRY_AFTER_S[0], round(rounds * self._mean_run_s, 1)))
