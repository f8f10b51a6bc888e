"""One job at an upstream, from the first attempt to the last byte.

Enters: a job and the server that was chosen for it. Leaves: the upstream's own words as `Delta`s, and what is billed.
Always true: a request is repeated at most once, only while nothing of an answer had come; a stream that ends before
every choice did is an error, never a stop; closing it closes its connection at once, in whatever phase; the server's
breaker is told once per attempt how it went; a prompt that is counted beside the upstream's work is known before the
first word is passed on, by the count or by the upstream. Next: `openai_wire.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from hitsend.core.errors import ContextLengthExceeded, EngineFailed, EngineTimeout, ServeError
from hitsend.core.events import Answered, FirstToken, PromptCounted, Sent, Streamed
from hitsend.core.request import Delta, Usage
from hitsend.core.route_events import Hedged
from hitsend.serve.engine.breaker import Outcome
from hitsend.serve.engine.hedge import Lost, first_to_speak
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.lenient_wire import LenientReader
from hitsend.serve.engine.merged import merged
from hitsend.serve.engine.openai_body import encode_body, headers_of, path_of
from hitsend.serve.engine.openai_wire import ChunkReader, UpstreamSaid
from hitsend.serve.engine.opening import Opened, ending
from hitsend.serve.engine.protocol import EngineEvent, Job, Produced
from hitsend.serve.engine.refusals import Refusal, broken, meant
from hitsend.serve.engine.replicas import Replica
from hitsend.serve.engine.schema_calls import CallsReader, is_forced
from hitsend.serve.engine.upstream import UpstreamAnswer

if TYPE_CHECKING:
    from hitsend.serve.engine.openai import OpenAIEngine


UNDISTURBED_S = 0.02
"""How long an upstream has a request before its prompt is counted, unless its head comes before: until then it would do
both in one thread, and the answer come later for it. Kinds whose first chunk tells it are asked only if it doesn't."""
LATE_BILL_S = 0.1
"""How long a bill is waited for behind the end of an answer that had none."""
LATE_END_S = 1.0
"""How long [DONE] or the connection's end is waited for, once everything else has come: some send neither."""


class _Try:
    """One server of several that are asked at once."""

    def __init__(self, replica: Replica, ticket: int, began_at: float) -> None:
        self.replica = replica
        self.ticket = ticket
        self.began_at = began_at
        self.opened: Opened | None = None


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
        self._reader = self._new_reader()
        self._events: deque[EngineEvent] = deque()
        self._answer: UpstreamAnswer | None = None
        self._opening: list[UpstreamAnswer] = []
        self._answered_at: float | None = None
        self._error: ServeError | None = None
        self._outcome: Outcome = "left"
        self._has_reached = False
        self._is_hedged = False
        self._has_first = False
        self._is_over = False
        self._num_bytes = 0
        self._num_prompt_tokens = job.num_prompt_estimated
        self._counting: asyncio.Task[None] | None = None
        self._is_taken_in = asyncio.Event()

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
            prompt = self._num_prompt_tokens if self._has_reached else 0
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
        await self._until_counted()
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
        for answer in self._opening:
            answer.close()
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
        """Ask, at most twice, until the first word of an answer is there."""
        is_again = False
        while self._answer is None and not self._is_over:
            self._events.append(Sent(self._now(), 2 if is_again else 1))
            self._has_reached = True
            if not self._engine.terms.profile.begins_with_usage:
                self._count(UNDISTURBED_S)
            opened = await self._asked(may_hedge=not is_again)
            answer, refusal = opened.answer, opened.refusal
            if self._was_ended(answer):
                return
            self._reader = opened.reader
            status = None if answer is None else answer.status
            if refusal is None:
                self._answer, self._answered_at, self._num_bytes = answer, opened.answered_at, opened.num_bytes
                self._events.append(Answered(self._answered_at, status, "ok"))
                self._took(opened.deltas, is_at_end=opened.is_at_end)
                await self._until_counted()
                return
            self._has_reached = isinstance(refusal.error, EngineTimeout)  # else it did no work
            may_repeat = refusal.may_repeat and not (is_again or self._is_hedged)
            will_retry = may_repeat and self._engine.retries.take()
            self._events.append(Answered(self._now(), status, refusal.error.code, will_retry))
            is_again = True
            if will_retry:
                self._go_elsewhere(refusal)
            else:
                self._error = refusal.error
                self._end(refusal.outcome)
            if refusal.closed_s is not None:
                self._engine.close_for(refusal.closed_s)

    def _count(self, after_s: float) -> None:
        """Have the prompt counted, if nobody has yet: when the upstream has taken it in, or after that time."""
        counting = self._job.counting
        if counting is None or self._counting is not None:
            return

        async def counted() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await self._is_taken_in.wait()
            known = await counting()
            if known is not None:
                self._num_prompt_tokens = known
                self._events.append(PromptCounted(self._now(), known))

        self._counting = asyncio.create_task(counted())

    async def _until_counted(self) -> None:
        """Wait for what is billed where the upstream tells nothing; else nobody needs it any more."""
        is_needed = self._has_reached and not (self._reader.usage or Usage()).prompt_tokens
        if is_needed:
            self._count(0.0)
            self._is_taken_in.set()
        if self._counting is None or self._counting.done():
            return
        if not is_needed:
            self._counting.cancel()
        await asyncio.wait({self._counting})

    def _was_ended(self, answer: UpstreamAnswer | None) -> bool:
        """Whether it was ended while it asked; then it knows why, and needs no answer."""
        if self._is_over and answer is not None:
            answer.close()
        return self._is_over

    async def _asked(self, *, may_hedge: bool) -> Opened:
        """One attempt; or two at once, where the settings say so and the first server is silent."""
        after_s = self._engine.settings.hedge_after_s
        if not (after_s and may_hedge):
            return await self._ask(self._replica)
        tries = [_Try(self._replica, self._ticket, self._now())]

        async def ask(one: _Try) -> Opened:
            one.opened = await self._ask(one.replica)
            return one.opened

        def second() -> Coroutine[Any, Any, Opened] | None:
            replica = self._engine.another(self._replica)
            if replica is self._replica or not self._engine.retries.take():
                return None
            self._is_hedged = True
            tries.append(_Try(replica, replica.enter(), self._now()))
            self._events.append(Sent(self._now(), 2))
            return ask(tries[1])

        chosen = 0
        try:
            chosen = await first_to_speak(ask(tries[0]), second, after_s)
        finally:
            self._leave_other(tries, chosen)
        opened = tries[chosen].opened
        assert opened is not None
        return opened

    def _leave_other(self, tries: list[_Try], chosen: int) -> None:
        """Of two that were asked, one goes on; what the other may have cost gets a row of its own."""
        if len(tries) == 1:
            return
        mine, other = tries[chosen], tries[1 - chosen]
        refusal = None if other.opened is None else other.opened.refusal
        if self._is_over:  # the first one's place was given back then
            tries[1].replica.leave(tries[1].ticket, "left")
        else:
            other.replica.leave(other.ticket, "left" if refusal is None else refusal.outcome)
            self._replica, self._ticket = mine.replica, mine.ticket
        if other.opened is not None and not other.opened.may_have_worked:
            return
        seen = Usage() if other.opened is None else other.opened.usage
        usage = msgspec.structs.replace(seen, prompt_tokens=seen.prompt_tokens or self._num_prompt_tokens)
        assert self._job.chat is not None
        lost = Lost(self._job.chat, usage, other.began_at)
        self._events.append(Hedged(other.began_at, self._now(), lost.request_id, chosen == 1))
        self._engine.on_lost(lost)

    async def _ask(self, replica: Replica) -> Opened:
        """Ask one server."""
        name, profile, wall = self._engine.name, self._engine.terms.profile, self._engine.clock.wall()
        opened = Opened(self._new_reader())
        try:
            answer = await replica.line.post(self._path, self._body, self._job.traceparent, headers=self._headers)
        except LineFailed as failure:
            opened.refusal = Refusal(broken(failure, name), may_repeat=failure.is_unanswered)
            return opened
        opened.answered_at = self._now()
        self._is_taken_in.set()
        self._opening.append(answer)
        try:
            await opened.read(answer, name, profile, wall)
        finally:
            self._opening.remove(answer)
        if opened.refusal is not None and isinstance(opened.refusal.error, ContextLengthExceeded):
            opened.refusal.error.param = "prompt" if self._prompts else "messages"  # some name a field of their own
        return opened

    def _new_reader(self) -> ChunkReader:
        job, terms = self._job, self._engine.terms
        assert job.chat is not None
        profile = terms.profile
        if profile.is_lenient:
            return LenientReader(job.n, job.max_tokens)
        if is_forced(job.chat, terms):
            return CallsReader(job.n, skips_null=profile.skips_null)
        return ChunkReader(job.n, merges=self._merges, skips_null=profile.skips_null)

    def _go_elsewhere(self, refusal: Refusal) -> None:
        """The second attempt is another server's, where there is another."""
        other = self._engine.another(self._replica)
        if other is not self._replica:
            self._replica.leave(self._ticket, refusal.outcome)
            self._replica = other
            self._ticket = other.enter()

    async def _read(self, answer: UpstreamAnswer) -> None:
        if self._reader.is_done or self._reader.is_over:
            await self._read_rest(answer)
            self._end("ok")
            return
        try:
            data = await answer.read(is_patient=self._merges and self._has_first)
        except LineFailed as failure:
            self._stop_short(broken(failure, self._engine.name))
            return
        self._num_bytes += len(data)
        self._took(self._reader.feed(data or ending(answer)), is_at_end=not data)

    async def _read_rest(self, answer: UpstreamAnswer) -> None:
        """Behind [DONE] some write their bill. An answer that ends is waited for no longer."""
        reader = self._reader
        try:
            async with asyncio.timeout(LATE_BILL_S if reader.is_done else LATE_END_S):
                while not ((reader.is_done and reader.is_used_up) or reader.fault) and (data := await answer.read()):
                    self._num_bytes += len(data)
                    reader.feed(data)
        except (TimeoutError, LineFailed):
            pass  # it was whole without it

    def _took(self, deltas: list[Delta], *, is_at_end: bool) -> None:
        if is_at_end and self._answer is not None:
            deltas = deltas + self._reader.close(is_sure=self._answer.is_framed)
        if deltas:
            self._take(deltas)
        if self._reader.fault is not None:
            self._stop_at(self._reader.fault)
        elif self._reader.is_done or is_at_end:
            if self._reader.is_finished:
                if is_at_end or self._reader.is_used_up:
                    self._end("ok")  # else what came is passed on first
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
        if self._reader.is_finished:
            if ends := self._reader.close():
                self._take(ends)
            self._end("ok")
            return
        self._error = error
        self._end(outcome)
