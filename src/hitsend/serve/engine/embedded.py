"""The embedded engine, edge's side: hands jobs to the child and its reports to the jobs.

Enters: jobs, and reports from the child. Leaves: generations and figures. Always true: when the child dies, every
running generation gets exactly one `EngineFailed` and keeps its counts, nothing of the dead child is left in any
figure, and until the next child is ready `generate` refuses with `EngineUnavailable`. The child is started and watched
by `keeper.py`, in this process or (with several gateway processes) in another. Next: `generation.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

from hitsend.core.clock import Clock
from hitsend.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    ServeError,
    ServerOverloaded,
    ShuttingDown,
)
from hitsend.serve.engine.generation import BatchTotals, EmbeddedGeneration
from hitsend.serve.engine.keeper import ChildKeeper, EngineLine
from hitsend.serve.engine.prefix_salt import salt_of
from hitsend.serve.engine.protocol import EngineState, Job, StepFigures
from hitsend.serve.engine.told import Told
from hitsend.serve.loop.messages import (
    Done,
    EngineFacts,
    Pulse,
    Report,
    Row,
    StepReport,
    Submit,
    WasAdmitted,
    WasMatched,
    WasPreempted,
    WasQueued,
)
from hitsend.serve.loop.shares import Path, most_waiting, path_of
from hitsend.settings import AdapterSettings, EngineSettings

_SEED_MASK = 2**63 - 1


class EmbeddedEngine:
    """See `protocol.Engine`. `model_path` is a GGUF file; `pause_tokens` is `StreamSettings.pause_tokens`.

    `on_step` is told every step, for the metrics, `on_rest` whenever the last running job has ended. `line`: the way to
    a child that others use too; without it, this engine starts and keeps one of its own, with `adapters`.
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
        on_rest: Callable[[], None] = lambda: None,
        line: EngineLine | None = None,
        adapters: tuple[AdapterSettings, ...] = (),
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._name = name
        self._pause_tokens = pause_tokens
        self._on_step = on_step
        self._on_rest = on_rest
        self._line = line or ChildKeeper(settings, model_path, clock, model=model, adapters=adapters)
        self._line.attach(self._receive, self._went_down)
        self._generations: dict[str, EmbeddedGeneration] = {}
        self._figures = Told()

    @property
    def name(self) -> str:
        """Its name in settings, records and rows."""
        return self._name

    @property
    def facts(self) -> EngineFacts:
        """What is loaded. Raises EngineUnavailable before the first start-up finished."""
        facts = self._line.facts
        if facts is None:
            raise self._unavailable()
        return facts

    @property
    def num_open(self) -> int:
        """Jobs that the child has."""
        return len(self._generations)

    async def start(self) -> None:
        """Load the model; returns when it can serve. Raises ConfigError with the reason, or EngineUnavailable."""
        await self._line.start()

    async def stop(self) -> None:
        """End everything, wait for the child, return. Safe to call twice."""
        self._fail(ShuttingDown("The server is shutting down."))
        await self._line.stop()

    def admit(self, job: Job) -> None:
        """Refuse at once what can never fit; and, when the queue is full, who has the most waiting in it."""
        if not self._line.is_ready:
            raise self._unavailable()
        check_job(job, self.facts.cells_per_slot, self._most)
        self.shed(job.tenant, job.n)

    @property
    def _most(self) -> int:
        return self._settings.max_waiting + self.facts.num_slots

    def shed(self, tenant: tuple[str, ...], choices: int) -> None:
        """Refuse at once, when the queue is full, who has the most waiting in it."""
        if not self._line.is_ready:
            raise self._unavailable()
        waiting = sum(generation.num_waiting for generation in self._generations.values())
        places = self._most - self._figures.slots_used
        if waiting + choices > places and choices <= self._most and self._must_yield(tenant, choices):
            raise ServerOverloaded(
                f"The queue is full: {waiting} waiting, {choices} more, room for {places}.", retry_after_s=1.0
            )

    def _must_yield(self, tenant: tuple[str, ...], choices: int) -> bool:
        """As the loop will find; somebody else makes room there otherwise."""
        waiting: Counter[Path] = Counter()
        for generation in self._generations.values():
            waiting[path_of(generation.job.tenant)] += generation.num_waiting
        path = path_of(tenant)
        return most_waiting(waiting, path, choices) == path

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
            adapter=job.adapter,
            cache_salt=salt_of(self.facts, self._settings.prefix_cache_scope, job.tenant, job.cache_salt, job.adapter),
            boundaries=job.boundaries,
        )
        if not self._line.send(submit):
            raise self._unavailable()
        generation = EmbeddedGeneration(job, self._clock, self._pause_tokens, self._line.send)
        self._generations[job.request_id] = generation
        return generation

    def state(self) -> EngineState:
        """Figures of this moment."""
        return self._figures.state(self._line, self._settings.num_slots, self._clock.now())

    def _went_down(self, error: ServeError) -> None:
        """The child is gone, and with it everything that it had."""
        self._figures = Told()
        self._fail(error)

    def _fail(self, error: ServeError) -> None:
        taken = list(self._generations.values())
        self._generations.clear()
        for generation in taken:
            generation.fail(error)
        if taken:
            self._on_rest()

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable("The engine is starting or restarting; try again in a moment.", retry_after_s=1.0)

    def _receive(self, report: Report, _body: bytes) -> None:
        if isinstance(report, StepReport):
            self._stepped(report)
        elif isinstance(report, Pulse):
            self._figures.pulsed(report)
        else:
            self._told(report)

    def _stepped(self, report: StepReport) -> None:
        figures = self._figures
        figures.stepped(report)
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
                sequences=batch.sequences,
                running=report.num_running,
                waiting=report.num_waiting,
                cells_used=report.cells_used,
                drafts=tuple(row.drafted for row in report.rows if row.drafted is not None),
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
        if not isinstance(report, WasQueued | WasAdmitted | WasMatched | WasPreempted | Done):
            return
        generation = self._generations.get(report.request_id)
        if generation is None:
            return
        if isinstance(report, WasQueued):
            generation.queued(report)
        elif isinstance(report, WasAdmitted):
            generation.admitted(report)
        elif isinstance(report, WasMatched):
            generation.matched(report)
        elif isinstance(report, WasPreempted):
            generation.preempted(report)
        else:
            generation.done(report, self._figures.cells_used)
            if generation.is_over:
                del self._generations[report.request_id]
                if not self._generations:
                    self._on_rest()


def check_job(job: Job, limit: int, most: int) -> None:
    """Refuse what can never run where a sequence can have `limit` tokens and `most` choices can run and wait."""
    num_prompt_tokens = len(job.prompt_token_ids)
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
    if job.n > most:
        raise InvalidRequest(f"n: {job.n} choices, but only {most} can run and wait here at all.", param="n")
