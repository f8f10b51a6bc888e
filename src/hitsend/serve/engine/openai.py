"""An upstream that speaks OpenAI's chat API, as an engine: takes messages, gives text.

Enters: jobs with a chat. Leaves: generations whose `Delta`s are the upstream's own words. Always true: no task per
request; a request is repeated at most once, only while nothing of an answer had come, and within the retry budget; a
stream that ends before every choice did is an error, never a stop; what is billed is the upstream's usage, else our
count, flagged; closing a generation closes its connection at once, in whatever phase. Next: `../output/`.

    what happened upstream                      what the caller gets                  breaker   tried again
    can't be reached, closed unanswered         502 engine_unavailable                failed    yes
    500, 502, 503, 504 …                        502 engine_unavailable (Retry-After)  failed    yes
    silent for stall_timeout_s                  504 engine_timeout                    failed    no: it may be working
    429                                         429 rate_limit_exceeded, Retry-After  -         no
    400, 404, 413, 422                          400 with the upstream's code          ok        no
    401, 403, 3xx, no event stream              502 engine_unavailable                failed    no
    cut, unreadable, an error in the stream     500 engine_failed, or an error event  failed    no
    too many at once, breaker open              503 server_overloaded, 502 engine_unavailable: at once, Retry-After
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import (
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    ServeError,
    ServerOverloaded,
    ShuttingDown,
)
from hitsend.core.events import Answered, FirstToken, Sent, Streamed
from hitsend.core.request import Delta, Usage
from hitsend.serve.engine.breaker import Breaker, Outcome, RetryBudget
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.openai_wire import ChunkReader, encode_body
from hitsend.serve.engine.protocol import EngineEvent, EngineState, Job, Produced
from hitsend.serve.engine.refusals import Refusal, broken, refusal_of
from hitsend.serve.engine.upstream import UpstreamAnswer, UpstreamLine
from hitsend.serve.loop.messages import EngineFacts
from hitsend.settings import UpstreamSettings


class OpenAIEngine:
    """See `protocol.Engine`. `key` is the upstream's credential; `on_tokens` is told what each request brought."""

    takes: Literal["messages"] = "messages"
    gives: Literal["text"] = "text"
    is_local = False

    def __init__(
        self,
        settings: UpstreamSettings,
        clock: Clock,
        *,
        key: str | None,
        on_tokens: Callable[[str, int], None] = lambda _name, _tokens: None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.breaker = Breaker(
            clock,
            failures=settings.breaker_failures,
            share=settings.breaker_share,
            open_s=settings.breaker_open_s,
        )
        self.retries = RetryBudget(settings.retry_share)
        self.line = UpstreamLine(
            settings.base_url,
            key,
            connect_timeout_s=settings.connect_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        self._on_tokens = on_tokens
        self._running: set[OpenAIGeneration] = set()
        self._is_stopping = False
        self._facts = _facts_of(settings)

    @property
    def name(self) -> str:
        """Its name in settings, records and rows."""
        return self.settings.name

    @property
    def facts(self) -> EngineFacts:
        """What the settings say; it has no cells."""
        return self._facts

    async def start(self) -> None:
        """Get ready. Connects to nothing: an upstream that is away now may be back when it is asked."""
        self.line.start()

    async def stop(self) -> None:
        """End everything. Safe to call twice."""
        self._is_stopping = True
        for generation in tuple(self._running):
            generation.fail(ShuttingDown("The server is shutting down."))
        await self.line.stop()

    def shed(self, _tenant: tuple[str, ...], _choices: int) -> None:
        """Refuse at once while the breaker is open, or too many run there."""
        if self._is_stopping:
            raise ShuttingDown("The server is shutting down.")
        wait_s = self.breaker.refused_s()
        if wait_s is not None:
            text = f"The upstream {self.name} fails and is left alone for {wait_s:.1f} s more."
            raise EngineUnavailable(text, retry_after_s=wait_s)
        most = self.settings.max_concurrent
        if len(self._running) >= most:
            text = f"{len(self._running)} requests run at the upstream {self.name}, limit {most} (max_concurrent)."
            raise ServerOverloaded(text, retry_after_s=1.0)

    def admit(self, job: Job) -> None:
        """`shed`, and what no upstream takes."""
        self.shed(job.tenant, job.n)
        if job.chat is None:
            raise InvalidRequest("prompts without messages can't be served by an upstream", param="prompt")

    def generate(self, job: Job) -> "OpenAIGeneration":
        """Take the job. Nothing is sent before the generation is iterated. Raises what `admit` raises."""
        self.admit(job)
        self.retries.pay_in()
        generation = OpenAIGeneration(job, self, self.breaker.enter())
        self._running.add(generation)
        return generation

    def left(self, generation: "OpenAIGeneration", ticket: int, outcome: Outcome) -> None:
        """A generation has ended: called by it, once."""
        self._running.discard(generation)
        self.breaker.leave(ticket, outcome)
        usage = generation.produced.usage
        self._on_tokens(self.name, usage.completion_tokens if usage is not None else 0)

    def state(self) -> EngineState:
        """Figures of this moment."""
        return EngineState(
            is_ready=self.breaker.refused_s() is None and not self._is_stopping,
            pid=None,
            restarts=0,
            running=len(self._running),
            waiting=0,
            cells_total=0,
            cells_used=0,
            slots_total=self.settings.max_concurrent,
            slots_used=len(self._running),
            preemptions_total=0,
            progress_age_s=0.0,
        )


class OpenAIGeneration:
    """A job at an upstream: see `protocol.Generation`."""

    def __init__(self, job: Job, engine: OpenAIEngine, ticket: int) -> None:
        assert job.chat is not None
        settings = engine.settings
        self._job = job
        self._engine = engine
        self._ticket = ticket
        self._now = engine.clock.now
        self._body = encode_body(job.chat, settings.models[job.chat.model], job.max_tokens, settings.max_tokens_field)
        self._merges = not job.chat.stream
        self._reader = ChunkReader(job.n)
        self._events: deque[EngineEvent] = deque()
        self._answer: UpstreamAnswer | None = None
        self._answered_at: float | None = None
        self._error: ServeError | None = None
        self._outcome: Outcome = "left"
        self._has_reached = False
        self._has_first = False
        self._is_over = False
        self._num_bytes = 0
        self._num_chunks = 0

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self

    async def __anext__(self) -> EngineEvent:
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_over:
                raise StopAsyncIteration
            if self._answer is None:
                await self._open()
            else:
                await self._read(self._answer)
        return self._events.popleft()

    @property
    def produced(self) -> Produced:
        """The upstream's usage; as far as it gave none, the prompt's estimate and one token per chunk that came."""
        counts, given = self._reader.counts, self._reader.usage
        is_final = given is not None and self._outcome == "ok"
        if is_final and given is not None:
            usage = given
        else:
            prompt = self._job.num_prompt_estimated if self._has_reached else 0
            seen = given or Usage()
            usage = Usage(
                max(seen.prompt_tokens, prompt),
                max(seen.completion_tokens, sum(counts)),
                seen.cached_tokens,
                seen.reasoning_tokens,
            )
        outputs = (usage.completion_tokens,) if len(counts) == 1 else tuple(counts)
        return Produced(usage.prompt_tokens, outputs, usage, is_estimate=not is_final and self._has_reached)

    async def end_choice(self, choice: int) -> None:
        """Nothing ends a choice here but the upstream, which knows the stop strings."""

    async def aclose(self) -> None:
        """Close the connection, unless the answer was read to its end. Safe to call twice."""
        self._end("left")
        self._error = None

    def fail(self, error: ServeError) -> None:
        """End it with this error."""
        if not self._is_over:
            self._error = error
            self._end("left")

    def _end(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._outcome = outcome
        if self._answer is not None:
            self._answer.close()
        if self._answered_at is not None:
            self._events.append(
                Streamed(self._answered_at, self._now(), self._num_bytes, self._num_chunks, is_whole=outcome == "ok")
            )
        self._engine.left(self, self._ticket, outcome)

    async def _open(self) -> None:
        """Ask, at most twice."""
        is_again = False
        while self._answer is None and not self._is_over:
            self._events.append(Sent(self._now(), 2 if is_again else 1))
            status: int | None = None
            self._has_reached = True
            try:
                answer = await self._engine.line.post("chat/completions", self._body, self._job.traceparent)
                status = answer.status
                refusal = await refusal_of(answer, self._engine.name)
            except LineFailed as failure:
                answer, refusal = None, Refusal(broken(failure, self._engine.name), may_repeat=failure.is_unanswered)
            if refusal is None:
                self._answer, self._answered_at = answer, self._now()
                self._events.append(Answered(self._answered_at, status, "ok"))
                return
            self._has_reached = isinstance(refusal.error, EngineTimeout)  # else it did no work
            will_retry = refusal.may_repeat and not is_again and self._engine.retries.take()
            self._events.append(Answered(self._now(), status, refusal.error.code, will_retry))
            is_again = True
            if not will_retry and not self._is_over:
                self._error = refusal.error
                self._end(refusal.outcome)

    async def _read(self, answer: UpstreamAnswer) -> None:
        try:
            data = await answer.read()
        except LineFailed as failure:
            self._stop_short(broken(failure, self._engine.name))
            return
        deltas = self._reader.feed(data)
        self._num_bytes += len(data)
        if deltas:
            self._take(deltas)
        if self._reader.fault is not None:
            self._stop_short(EngineFailed(f"The upstream {self._engine.name} sent {self._reader.fault}."))
        elif self._reader.is_done or not data:
            if self._reader.is_finished:
                self._end("ok")
            else:
                self._stop_short(EngineFailed(f"The upstream {self._engine.name} ended its answer before its end."))

    def _take(self, deltas: list[Delta]) -> None:
        self._num_chunks += len(deltas)
        if not self._has_first:
            self._has_first = True
            self._events.append(FirstToken(self._now(), deltas[0].index))
        if self._merges:
            deltas = merged(deltas)
        last = deltas.pop()
        self._events.extend(msgspec.structs.replace(delta, has_more=True) for delta in deltas)
        self._events.append(last)

    def _stop_short(self, error: ServeError) -> None:
        if self._is_over:  # it was ended meanwhile, and knows why
            return
        # an end that came whole but for its closing words is an end
        if self._reader.is_finished and not isinstance(error, EngineTimeout):
            self._end("ok")
            return
        self._error = error
        self._end("failed")


def _facts_of(settings: UpstreamSettings) -> EngineFacts:
    return EngineFacts(
        model=settings.name,
        architecture="upstream",
        library="openai",
        vocab_size=0,
        context_train=settings.context,
        num_slots=settings.max_concurrent,
        num_cells=0,
        cells_per_slot=settings.context,
        kv_mode="none",
        kv_bytes_per_cell=0,
        state_bytes_per_slot=0,
        weights_bytes=0,
        num_threads=0,
        is_hybrid=False,
    )


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of plain text as one: where nobody reads along, every piece only costs."""
    found: list[Delta] = []
    texts: list[str] = []
    for delta in deltas:
        is_plain = bool(delta.text) and not (delta.reasoning or delta.tool_calls or delta.logprobs)
        is_plain = is_plain and delta.finish_reason is None
        if texts and not (is_plain and delta.index == found[-1].index):
            found[-1] = Delta(found[-1].index, "".join(texts))
            texts = []
        if not is_plain:
            found.append(delta)
            continue
        if not texts:
            found.append(delta)
        texts.append(delta.text)
    if texts:
        found[-1] = Delta(found[-1].index, "".join(texts))
    return found
