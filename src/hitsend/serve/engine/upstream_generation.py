"""One job at an upstream, from the first attempt to the last byte.

Enters: a job and the server that was chosen for it. Leaves: the upstream's own words as `Delta`s, and what is billed.
Always true: a request is repeated at most once, only while nothing of an answer had come; a stream that ends before
every choice did is an error, never a stop; closing it closes its connection at once, in whatever phase; the server's
breaker is told once per attempt how it went. Next: `openai_wire.py`.
"""

from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from hitsend.core.errors import ContextLengthExceeded, EngineFailed, EngineTimeout, ServeError
from hitsend.core.events import Answered, FirstToken, Sent, Streamed
from hitsend.core.request import Delta, Request, Usage
from hitsend.serve.engine.breaker import Outcome
from hitsend.serve.engine.hedge import Asked, Asking, first_to_speak, spoken
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.lenient_wire import LenientReader
from hitsend.serve.engine.openai_body import encode_body, headers_of, path_of
from hitsend.serve.engine.openai_wire import ChunkReader, UpstreamSaid
from hitsend.serve.engine.protocol import EngineEvent, Job, Produced
from hitsend.serve.engine.refusals import Refusal, broken, has_choices, known, meant, refusal_of, streamless
from hitsend.serve.engine.replicas import Replica
from hitsend.serve.engine.schema_calls import CallsReader, is_forced
from hitsend.serve.engine.terms import Terms
from hitsend.serve.engine.upstream import UpstreamAnswer

if TYPE_CHECKING:
    from hitsend.serve.engine.openai import OpenAIEngine

MAX_WHOLE_BYTES = 16 * 1024 * 1024
"""Of an answer that is no stream."""


class OpenAIGeneration:
    """A job at an upstream: see `protocol.Generation`."""

    def __init__(self, job: Job, engine: "OpenAIEngine", replica: Replica) -> None:
        assert job.chat is not None
        terms = engine.terms
        self._job = job
        self._engine = engine
        self._replica = replica
        self._ticket = replica.enter()
        self._now = engine.clock.now
        self._path = path_of(job.chat, terms)
        self._headers = headers_of(job.chat, terms)
        self._body = encode_body(job.chat, job.max_tokens, terms)
        self._merges = not job.chat.stream
        self._prompts = job.chat.prompts
        self._reader = _reader_of(job, job.chat, terms, merges=self._merges)
        self._events: deque[EngineEvent] = deque()
        self._answer: UpstreamAnswer | None = None
        self._answered_at: float | None = None
        self._error: ServeError | None = None
        self._outcome: Outcome = "left"
        self._has_reached = False
        self._is_hedged = False
        self._has_first = False
        self._is_over = False
        self._num_bytes = 0

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
        is_all = len(counts) == 1 or self._engine.terms.profile.bills_choices
        # who left after the end had come with its bill took nothing from it
        is_over = self._outcome == "ok" or self._reader.is_finished
        is_final = self._reader.is_used_up and is_over and is_all
        if is_final and given is not None:
            usage = given
        else:
            prompt = self._job.num_prompt_estimated if self._has_reached else 0
            seen = given or Usage()
            usage = Usage(
                seen.prompt_tokens or prompt,
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
            if self._merges and outcome == "left" and (unread := self._answer.unread()):
                self._num_bytes += len(unread)
                self._reader.feed(unread)  # it came, so it counts, though nobody gets it
            self._answer.close()
        if self._answered_at is not None:
            self._events.append(
                Streamed(
                    self._answered_at, self._now(), self._num_bytes, self._reader.num_pieces, is_whole=outcome == "ok"
                )
            )
        self._replica.leave(self._ticket, outcome)
        self._engine.left(self)

    async def _open(self) -> None:
        """Ask, at most twice."""
        is_again = False
        while self._answer is None and not self._is_over:
            self._events.append(Sent(self._now(), 2 if is_again else 1))
            self._has_reached = True
            answer, refusal = await self._asked(may_hedge=not is_again)
            status = None if answer is None else answer.status
            if self._was_ended(answer):
                return
            if refusal is None:
                self._answer, self._answered_at = answer, self._now()
                self._events.append(Answered(self._answered_at, status, "ok"))
                return
            self._has_reached = isinstance(refusal.error, EngineTimeout)  # else it did no work
            may_repeat = refusal.may_repeat and not (is_again or self._is_hedged)
            will_retry = may_repeat and self._engine.retries.take()
            self._events.append(Answered(self._now(), status, refusal.error.code, will_retry))
            is_again = True
            if will_retry:
                self._go_elsewhere(refusal)
            elif not self._is_over:
                self._error = refusal.error
                self._end(refusal.outcome)
            if refusal.closed_s is not None:
                self._engine.close_for(refusal.closed_s)

    def _was_ended(self, answer: UpstreamAnswer | None) -> bool:
        """Whether it was ended while it asked; then it knows why, and needs no answer."""
        if self._is_over and answer is not None:
            answer.close()
        return self._is_over

    async def _asked(self, *, may_hedge: bool) -> Asked:
        """One attempt; or two at once, where the settings say so and the first server is silent."""
        after_s = self._engine.settings.hedge_after_s
        if not (after_s and may_hedge):
            return await self._ask(self._replica)
        other: list[tuple[Replica, int]] = []

        def second() -> Asking | None:
            replica = self._engine.another(self._replica)
            if replica is self._replica or not self._engine.retries.take():
                return None
            self._is_hedged = True
            other.append((replica, replica.enter()))
            self._events.append(Sent(self._now(), 2))
            return spoken(self._ask(replica))

        try:
            heard = await first_to_speak(spoken(self._ask(self._replica)), second, after_s)
        except BaseException:
            for replica, ticket in other:
                replica.leave(ticket, "left")
            raise
        for replica, ticket in other:
            if self._is_over or heard.number == 0:  # ended meanwhile: its own place is given back already
                replica.leave(ticket, "left" if self._is_over else heard.outcomes[1])
            else:
                self._replica.leave(self._ticket, heard.outcomes[0])
                self._replica, self._ticket = replica, ticket
        return heard.asked

    async def _ask(self, replica: Replica) -> Asked:
        """Ask one server."""
        name, profile, wall = self._engine.name, self._engine.terms.profile, self._engine.clock.wall()
        answer: UpstreamAnswer | None = None
        try:
            answer = await replica.line.post(self._path, self._body, self._job.traceparent, headers=self._headers)
            refusal = await refusal_of(answer, name, profile, wall=wall)
            if refusal is None and answer.content_type != "text/event-stream":
                answer.whole = await answer.read_whole(MAX_WHOLE_BYTES) or b""
                refusal = known(answer.whole, name, profile, wall=wall)
                if refusal is None and not (profile.is_lenient or has_choices(answer.whole)):
                    refusal = streamless(name)
            if refusal is not None and isinstance(refusal.error, ContextLengthExceeded):
                refusal.error.param = "prompt" if self._prompts else "messages"  # some name a field of their own
        except LineFailed as failure:
            is_unanswered = failure.is_unanswered and answer is None
            return None, Refusal(broken(failure, name), may_repeat=is_unanswered)
        return answer, refusal

    def _go_elsewhere(self, refusal: Refusal) -> None:
        """The second attempt is another server's, where there is another."""
        other = self._engine.another(self._replica)
        if other is not self._replica:
            self._replica.leave(self._ticket, refusal.outcome)
            self._replica = other
            self._ticket = other.enter()

    async def _read(self, answer: UpstreamAnswer) -> None:
        if answer.whole is not None:
            self._num_bytes += len(answer.whole)
            self._took(self._reader.feed_whole(answer.whole), is_at_end=True)
            return
        try:
            data = await answer.read(is_patient=self._merges and self._has_first)
        except LineFailed as failure:
            self._stop_short(broken(failure, self._engine.name))
            return
        self._num_bytes += len(data)
        # an answer that surely wasn't cut may lack the empty line behind its last event
        ending = b"\n\n" if answer.is_framed else b""
        self._took(self._reader.feed(data or ending), is_at_end=not data)

    def _took(self, deltas: list[Delta], *, is_at_end: bool) -> None:
        if deltas:
            self._take(deltas)
        if self._reader.fault is not None:
            self._stop_at(self._reader.fault)
        elif self._reader.is_done or is_at_end:
            if self._reader.is_finished:
                self._end("ok")
            else:
                self._stop_short(EngineFailed(f"The upstream {self._engine.name} ended its answer before its end."))

    def _take(self, deltas: list[Delta]) -> None:
        first = None if self._has_first else next((delta for delta in deltas if not delta.prompt_ids), None)
        if first is not None:
            self._has_first = True
            self._events.append(FirstToken(self._now(), first.index))
        if self._merges:
            deltas = merged(deltas)
        last = deltas.pop()
        self._events.extend(msgspec.structs.replace(delta, has_more=True) for delta in deltas)
        self._events.append(last)

    def _stop_at(self, fault: Exception) -> None:
        """An error code that its profile knows means inside of an answer what it means in place of one."""
        name, engine = self._engine.name, self._engine
        refusal = None
        if isinstance(fault, UpstreamSaid):
            refusal = meant(fault.said, name, engine.terms.profile, wall=engine.clock.wall())
        if refusal is None:
            self._stop_short(EngineFailed(f"The upstream {name} sent {fault}."))
            return
        if refusal.closed_s is not None:
            engine.close_for(refusal.closed_s)
        if not any(self._reader.counts) and self._reader.usage is None:
            self._has_reached = isinstance(refusal.error, EngineTimeout)  # else it did no work
        self._stop_short(refusal.error, refusal.outcome)

    def _stop_short(self, error: ServeError, outcome: Outcome = "failed") -> None:
        if self._is_over:  # it was ended meanwhile, and knows why
            return
        # an end that came whole but for its closing words is an end
        if self._reader.is_finished and not isinstance(error, EngineTimeout):
            self._end("ok")
            return
        self._error = error
        self._end(outcome)


def _reader_of(job: Job, request: Request, terms: Terms, *, merges: bool) -> ChunkReader:
    profile = terms.profile
    if profile.is_lenient:
        return LenientReader(job.n, job.max_tokens)
    if is_forced(request, terms):
        return CallsReader(job.n, skips_null=profile.skips_null)
    return ChunkReader(job.n, merges=merges, skips_null=profile.skips_null)


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of plain text as one: where nobody reads along, every piece only costs."""
    found: list[Delta] = []
    texts: list[str] = []
    for delta in deltas:
        is_plain = bool(delta.text) and not (delta.reasoning or delta.tool_calls or delta.logprobs or delta.token_ids)
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
