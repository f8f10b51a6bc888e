"""The embedded engine, edge's side: owns the child process, hands jobs to it and its reports to the jobs.

Enters: jobs, and reports from the child. Leaves: generations and figures. Always true: when the child dies, every
running generation gets exactly one `EngineFailed` and keeps its counts, nothing of the dead child is left in any
figure, and another child is started at once, then with growing pauses while children die without having done any
work; meanwhile `generate` refuses with `EngineUnavailable`. One child at a time. Next: `generation.py`.
"""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    ServerOverloaded,
    ShuttingDown,
)
from hitsend.serve.child import Child, ChildExit, ChildGone
from hitsend.serve.engine.generation import BatchTotals, EmbeddedGeneration
from hitsend.serve.engine.protocol import EngineState, Job, StepFigures
from hitsend.serve.engine.startup import LoadFailed, WorkerConfig, encode, report_decoder
from hitsend.serve.loop.messages import (
    Command,
    Done,
    EngineFacts,
    Pulse,
    Ready,
    Report,
    Row,
    Shutdown,
    StepReport,
    Submit,
    WasAdmitted,
    WasPreempted,
    WasQueued,
)
from hitsend.serve.loop.shares import Path, most_waiting, path_of
from hitsend.settings import EngineSettings

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HANG_FACTOR = 8
"""A child that proved no progress for this many times `progress_timeout_s` hangs for good and is killed."""

_SEED_MASK = 2**63 - 1
_log = logging.getLogger(__name__)


class _Figures(msgspec.Struct):
    """The child's last word about itself."""

    running: int = 0
    waiting: int = 0
    cells_used: int = 0
    slots_used: int = 0
    preemptions_total: int = 0
    check: str | None = None
    has_worked: bool = False
    step_ended_at: float | None = None


class EmbeddedEngine:
    """See `protocol.Engine`. `model_path` is a GGUF file; `pause_tokens` is `StreamSettings.pause_tokens`.

    `on_step` is told every step, for the metrics.
    """

    takes: Literal["tokens"] = "tokens"
    gives: Literal["tokens"] = "tokens"
    is_local = True

    def __init__(
        self,
        settings: EngineSettings,
        model_path: str,
        clock: Clock,
        *,
        name: str = "embedded",
        model: str,
        pause_tokens: int,
        on_step: Callable[[StepFigures], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._config = WorkerConfig(model, model_path, settings)
        self._clock = clock
        self._name = name
        self._pause_tokens = pause_tokens
        self._on_step = on_step
        self._child: Child | None = None
        self._facts: EngineFacts | None = None
        self._generations: dict[str, EmbeddedGeneration] = {}
        self._figures = _Figures()
        self._progress_at = clock.now()
        self._is_ready = False
        self._is_stopping = False
        self._gone = asyncio.Event()
        self._started: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._restarts = 0
        self._failures = 0

    @property
    def name(self) -> str:
        """Its name in settings, records and rows."""
        return self._name

    @property
    def facts(self) -> EngineFacts:
        """What is loaded. Raises EngineUnavailable before the first start-up finished."""
        if self._facts is None:
            raise self._unavailable()
        return self._facts

    async def start(self) -> None:
        """Load the model; returns when it can serve. Raises ConfigError with the reason, or EngineUnavailable."""
        await self._launch()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="engine keeper")

    async def stop(self) -> None:
        """End everything, wait for the child, return. Safe to call twice."""
        self._is_stopping = True
        self._is_ready = False
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        for generation in self._take_generations():
            generation.fail(ShuttingDown("The server is shutting down."))
        if self._child is not None:
            with contextlib.suppress(ChildGone):
                self._child.send(encode(Shutdown()))
            await self._child.stop()

    def admit(self, job: Job) -> None:
        """Refuse at once what can never fit; and, when the queue is full, who has the most waiting in it."""
        if not self._is_ready:
            raise self._unavailable()
        num_prompt_tokens, limit = len(job.prompt_token_ids), self.facts.cells_per_slot
        if not job.prompt_token_ids or job.n < 1 or job.max_tokens < 1:
            raise InvalidRequest(
                f"{num_prompt_tokens} prompt tokens, n {job.n}, max_tokens {job.max_tokens}: at least 1 each."
            )
        if num_prompt_tokens + job.max_tokens > limit:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt_tokens} tokens and up to {job.max_tokens} were asked for: together "
                f"{num_prompt_tokens + job.max_tokens}, more than the {limit} that one request can have here.",
                param="messages",
            )
        most = self._settings.max_waiting + self.facts.num_slots
        if job.n > most:
            raise InvalidRequest(f"n: {job.n} choices, but only {most} can run and wait here at all.", param="n")
        waiting = sum(generation.num_waiting for generation in self._generations.values())
        places = most - self._figures.slots_used
        if waiting + job.n > places and self._must_yield(job):
            raise ServerOverloaded(
                f"The queue is full: {waiting} waiting, {job.n} more, room for {places}.", retry_after_s=1.0
            )

    def _must_yield(self, job: Job) -> bool:
        """As the loop will find; somebody else makes room there otherwise."""
        waiting: Counter[Path] = Counter()
        for generation in self._generations.values():
            waiting[path_of(generation.job.tenant)] += generation.num_waiting
        path = path_of(job.tenant)
        return most_waiting(waiting, path, job.n) == path

    def generate(self, job: Job) -> EmbeddedGeneration:
        """Submit the job. Raises what `admit` raises, and EngineUnavailable while the child is down."""
        self.admit(job)
        if job.request_id in self._generations:
            raise InvalidRequest(f"Request id {job.request_id} is running already.")
        seeds = tuple((job.sampling.seed + choice) & _SEED_MASK for choice in range(job.n))
        submit = Submit(
            job.request_id,
            job.prompt_token_ids,
            job.sampling,
            seeds,
            job.max_tokens,
            job.deadline_s,
            tier=job.tier,
            tenant=job.tenant,
            constraint=job.constraint,
        )
        if not self._send(submit):
            raise self._unavailable()
        generation = EmbeddedGeneration(job, self._clock, self._pause_tokens, self._send)
        self._generations[job.request_id] = generation
        return generation

    def state(self) -> EngineState:
        """Figures of this moment."""
        figures, facts = self._figures, self._facts
        return EngineState(
            is_ready=self._is_ready,
            pid=self._child.pid if self._child is not None else None,
            restarts=self._restarts,
            running=figures.running,
            waiting=figures.waiting,
            cells_total=facts.num_cells if facts is not None else 0,
            cells_used=figures.cells_used,
            slots_total=facts.num_slots if facts is not None else self._settings.num_slots,
            slots_used=figures.slots_used,
            preemptions_total=figures.preemptions_total,
            progress_age_s=max(0.0, self._clock.now() - self._progress_at),
            check=figures.check,
        )

    # The child's life

    async def _launch(self) -> None:
        """Start a child and wait for its first word."""
        self._started = asyncio.get_running_loop().create_future()
        self._gone.clear()
        self._progress_at = self._clock.now()
        child = Child(
            ["-m", "hitsend.serve.engine.worker", self._config.name], on_message=self._receive, on_exit=self._exited
        )
        self._child = child
        try:
            await child.start()
            with contextlib.suppress(ChildGone):
                child.send(encode(self._config))
            await asyncio.wait_for(asyncio.shield(self._started), self._settings.start_timeout_s)
        except TimeoutError:
            raise EngineUnavailable(f"The engine did not start within {self._settings.start_timeout_s:g} s.") from None
        finally:
            self._started.cancel()
            if not self._is_ready:
                child.kill()
                await child.stop(grace_s=0.0)

    async def _keep(self) -> None:
        """Restart the child whenever it is gone, kill it when it hangs."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), 1.0)
            if self._gone.is_set():
                await self._restart()
                continue
            age_s = self._clock.now() - self._progress_at
            if self._child is not None and age_s > HANG_FACTOR * self._settings.progress_timeout_s:
                _log.error("the engine proved no progress for %.0f s and is killed", age_s)
                self._child.kill()
                await self._gone.wait()

    async def _restart(self) -> None:
        if self._failures > 1:
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 2, 10)))
        self._restarts += 1
        try:
            await self._launch()
        except (ConfigError, EngineUnavailable, OSError) as failure:
            _log.error("the engine could not be restarted: %s", failure)

    def _exited(self, end: ChildExit) -> None:
        was_ready, self._is_ready = self._is_ready, False
        self._gone.set()
        self._failures = 1 if self._figures.has_worked else self._failures + 1
        self._figures = _Figures()
        if self._started is not None and not self._started.done():
            said = " | ".join(end.lines[-5:]) or "it said nothing"
            self._started.set_exception(ConfigError(f"the engine's process ended while loading ({end.how}): {said}"))
        for generation in self._take_generations():
            generation.fail(EngineFailed(f"The engine's process ended ({end.how}) while it ran this request."))
        if was_ready and not self._is_stopping:
            _log.error("the engine's process %d ended (%s): %s", end.pid, end.how, " | ".join(end.lines[-5:]))

    def _take_generations(self) -> list[EmbeddedGeneration]:
        taken = list(self._generations.values())
        self._generations.clear()
        return taken

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable("The engine is starting or restarting; try again in a moment.", retry_after_s=1.0)

    # Messages

    def _send(self, command: Command) -> bool:
        """False when the child is gone: its exit, which is on its way, tells the generations."""
        if self._child is None or not self._is_ready:
            return False
        try:
            self._child.send(encode(command))
        except ChildGone:
            return False
        return True

    def _receive(self, body: bytes) -> None:
        try:
            report = report_decoder.decode(body)
        except msgspec.DecodeError:
            _log.exception("the engine's process sent something that is no report")
            if self._child is not None:
                self._child.kill()
            return
        self._progress_at = self._clock.now()
        if isinstance(report, Ready | LoadFailed):
            self._answered(report)
        elif isinstance(report, StepReport):
            self._stepped(report)
        elif isinstance(report, Pulse):
            self._pulsed(report)
        else:
            self._told(report)

    def _answered(self, report: Ready | LoadFailed) -> None:
        if self._started is None or self._started.done():
            return
        if isinstance(report, LoadFailed):
            self._started.set_exception(ConfigError(report.message))
            return
        self._facts = report.facts
        self._is_ready = True
        self._started.set_result(None)

    def _pulsed(self, pulse: Pulse) -> None:
        figures = self._figures
        figures.running, figures.waiting = pulse.num_running, pulse.num_waiting
        figures.cells_used, figures.slots_used = pulse.cells_used, pulse.slots_used
        figures.preemptions_total, figures.check = pulse.preemptions_total, pulse.check

    def _stepped(self, report: StepReport) -> None:
        figures = self._figures
        figures.has_worked = True
        figures.running, figures.waiting = report.num_running, report.num_waiting
        figures.cells_used, figures.slots_used = report.cells_used, report.num_running
        batch = BatchTotals(
            sum(row.prefill_tokens for row in report.rows),
            sum(row.decode_tokens for row in report.rows),
            len(report.rows),
        )
        self._on_step(
            StepFigures(
                prefill_tokens=batch.prefill_tokens,
                decode_tokens=batch.decode_tokens,
                output_tokens=sum(len(row.sampled) for row in report.rows),
                step_s=report.ended_at - (figures.step_ended_at or report.started_at),
                decode_s=report.decode_s,
            )
        )
        # what lies between two steps is the loop's own time, unless there was nothing to do
        figures.step_ended_at = report.ended_at if report.num_running else None
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        for row in report.rows:
            rows[row.request_id].append(row)
        for request_id, own in rows.items():
            generation = self._generations.get(request_id)
            if generation is not None:
                generation.stepped(report, own, batch)
        for done in report.done:
            self._told(done)

    def _told(self, report: Report) -> None:
        if not isinstance(report, WasQueued | WasAdmitted | WasPreempted | Done):
            return
        generation = self._generations.get(report.request_id)
        if generation is None:
            return
        if isinstance(report, WasQueued):
            generation.queued(report)
        elif isinstance(report, WasAdmitted):
            generation.admitted(report)
        elif isinstance(report, WasPreempted):
            generation.preempted(report)
        else:
            generation.done(report, self._figures.cells_used)
            if generation.is_over:
                del self._generations[report.request_id]
