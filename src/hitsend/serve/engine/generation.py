"""One job on the embedded engine, seen from the edge: reports in, events out.

Enters: reports of the loop that name this job. Leaves: the events of `protocol.py`, in order. Always true: no task
and no thread per generation (reports are folded in where they arrive, one deque and one flag wake the reader); a
choice whose end was found in its text gives no further events, only counts; tokens that nobody reads pause the job
long before they could fill the memory. Next: `worker.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal, NamedTuple

from hitsend.core.clock import Clock
from hitsend.core.drafts import Drafted
from hitsend.core.errors import EngineFailed, ServeError, from_code
from hitsend.core.events import Admitted, FirstToken, Paused, Preempted, PrefixMatched, Queued, Released, Resumed, Step
from hitsend.core.lifecycle import FinishReason
from hitsend.serve.engine.protocol import ChoiceDone, EngineEvent, Job, Produced, PromptScored, Tokens
from hitsend.serve.loop.messages import (
    Abort,
    Command,
    Done,
    Pause,
    Resume,
    Row,
    StepReport,
    WasAdmitted,
    WasMatched,
    WasPreempted,
    WasQueued,
)


class BatchTotals(NamedTuple):
    """What all rows of a step add up to."""

    prefill_tokens: int
    decode_tokens: int
    sequences: int


class EmbeddedGeneration:
    """A running job: see `protocol.Generation`. After `aclose()` it can still be iterated for what was left unread."""

    def __init__(self, job: Job, clock: Clock, pause_tokens: int, send: Callable[[Command], object]) -> None:
        self.job = job
        self._clock = clock
        self._pause_tokens = pause_tokens
        self._send = send
        self._events: deque[EngineEvent] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._released = asyncio.Event()
        self._error: ServeError | None = None
        self._open = set(range(job.n))
        self._silent: set[int] = set()
        self._waiting = set(range(job.n))
        self._computed = [0] * job.n
        self._cached = [0] * job.n
        self._outputs = [0] * job.n
        self._unread = 0
        self._is_paused = False
        self._is_closed = False
        self._has_first = False

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self

    async def __anext__(self) -> EngineEvent:
        while not self._events:
            error, self._error = self._error, None
            if error is not None and not self._is_closed:
                raise error
            if self.is_over or self._is_closed:
                raise StopAsyncIteration
            await self._until_woken()
        event = self._events.popleft()
        if isinstance(event, Tokens):
            self._unread -= len(event.sampled)
            if self._is_paused and self._unread <= self._pause_tokens // 2:
                self._is_paused = False
                self._emit(Resumed(self._clock.now()))
                self._send(Resume(self.job.request_id))
        return event

    @property
    def is_over(self) -> bool:
        """Whether the engine holds nothing for it any more."""
        return not self._open

    @property
    def num_waiting(self) -> int:
        """Choices that have not been admitted yet, as far as the edge knows."""
        return len(self._waiting)

    @property
    def produced(self) -> Produced:
        """Counts so far; final after `aclose()`."""
        furthest = max(range(self.job.n), key=lambda i: (self._cached[i] + self._computed[i], self._computed[i]))
        return Produced(self._computed[furthest], tuple(self._outputs), cached_tokens=self._cached[furthest])

    async def end_choice(self, choice: int) -> None:
        """Stop one choice whose end was found in its text. Does not wait."""
        self._silence(choice)
        if choice in self._open:
            self._send(Abort(self.job.request_id, choice))

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the engine has released it. Safe to call twice.

        A step under way has to end first, however slow the machine is: its tokens count. An engine that hangs is killed
        by its keeper in the end, and that releases everything.
        """
        if self._open and not self._is_closed:
            self._send(Abort(self.job.request_id))
        self._is_closed = True
        self._wake()
        if self._open:
            await self._released.wait()

    # What follows is called by the engine's side as reports arrive.

    def fail(self, error: ServeError) -> None:
        """The engine is gone: nothing more will come."""
        self._error = self._error or error
        self._open.clear()
        self._waiting.clear()
        self._released.set()
        self._wake()

    def queued(self, report: WasQueued) -> None:
        """It waits."""
        self._emit(Queued(report.at, report.num_waiting, report.num_running))

    def admitted(self, report: WasAdmitted) -> None:
        """One choice got its place."""
        self._waiting.discard(report.choice)
        self._emit(Admitted(report.at, report.choice, report.slot, report.cells_free, report.cells_reserved))

    def matched(self, report: WasMatched) -> None:
        """One choice's prompt was looked up in the prefix cache."""
        num_prompt_tokens = len(self.job.prompt_token_ids)
        self._cached[report.choice] = report.num_usable
        self._emit(
            PrefixMatched(
                at=report.at,
                choice=report.choice,
                prompt_tokens=num_prompt_tokens,
                matched_tokens=report.num_matched,
                cached_tokens=report.num_usable,
                source=report.source or None,
                limited_by=report.limit or None,
                differs_at=report.position,
                cached_token_id=report.known_token_id,
                prompt_token_id=report.token_id,
            )
        )

    def preempted(self, report: WasPreempted) -> None:
        """One choice lost it."""
        self._waiting.add(report.choice)
        self._emit(Preempted(report.at, report.choice, report.num_computed_tokens))

    def stepped(self, report: StepReport, rows: list[Row], batch: BatchTotals) -> None:
        """It took part in a step."""
        if self.is_over:
            return
        prefill_tokens = decode_tokens = 0
        drafts: tuple[Drafted, ...] = ()
        for row in rows:
            prefill_tokens += row.prefill_tokens
            decode_tokens += row.decode_tokens
            if row.drafted is not None:
                drafts += (row.drafted,)
        self._emit(
            Step(
                step=report.step,
                started_at=report.started_at,
                ended_at=report.ended_at,
                prefill_tokens=prefill_tokens,
                decode_tokens=decode_tokens,
                batch_prefill_tokens=batch.prefill_tokens,
                batch_decode_tokens=batch.decode_tokens,
                batch_sequences=batch.sequences,
                drafts=drafts,
            )
        )
        for row in rows:
            self._count(row, report.ended_at)
        if self._unread > self._pause_tokens and not self._is_paused and not self._is_closed:
            self._is_paused = True
            self._emit(Paused(self._clock.now()))
            self._send(Pause(self.job.request_id))

    def done(self, report: Done, cells_used: int) -> None:
        """One choice ended and its cells are free."""
        if report.choice not in self._open:
            return
        self._open.discard(report.choice)
        self._waiting.discard(report.choice)
        self._computed[report.choice] = report.num_prompt_tokens_computed
        self._outputs[report.choice] = report.num_output_tokens
        self._cached[report.choice] = report.num_cached_tokens
        if not self._open:
            self._emit(Released(report.at, cells_used))
            self._released.set()
        if report.choice in self._silent or self._is_closed:
            self._wake()
        elif report.reason in {FinishReason.STOP, FinishReason.LENGTH}:
            reason: Literal["stop", "length"] = "stop" if report.reason == FinishReason.STOP else "length"
            self._emit(ChoiceDone(report.choice, reason))
        else:
            self._broke(report)

    def _broke(self, report: Done) -> None:
        """A choice ended in an error: that is the request's end, so the other choices go too."""
        message = report.message or "The engine ended the request without a reason."
        code = report.code or EngineFailed.code
        self._error = self._error or from_code(code, message, retry_after_s=report.retry_after_s)
        if self._open:
            self._send(Abort(self.job.request_id))
            self._silent |= self._open
        self._wake()

    def _count(self, row: Row, at: float) -> None:
        most = len(self.job.prompt_token_ids) - self._cached[row.choice]
        self._computed[row.choice] = min(most, self._computed[row.choice] + row.prefill_tokens)
        self._outputs[row.choice] += len(row.sampled)
        if row.scored and not self._is_closed:
            self._emit(PromptScored(row.choice, row.scored))
        if not row.sampled or row.choice in self._silent or self._is_closed:
            return
        if not self._has_first:
            self._has_first = True
            self._emit(FirstToken(at, row.choice))
        self._unread += len(row.sampled)
        self._emit(Tokens(row.choice, row.sampled))

    def _silence(self, choice: int) -> None:
        """No more events of this choice, those unread included."""
        self._silent.add(choice)
        kept = [e for e in self._events if not (isinstance(e, Tokens | ChoiceDone) and e.choice == choice)]
        if len(kept) < len(self._events):
            self._events = deque(kept)
            self._unread = sum(len(event.sampled) for event in kept if isinstance(event, Tokens))

    def _emit(self, event: EngineEvent) -> None:
        self._events.append(event)
        self._wake()

    async def _until_woken(self) -> None:
        """For the one who reads: with a token a step for everybody, an Event of asyncio's costs more than the rest."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
