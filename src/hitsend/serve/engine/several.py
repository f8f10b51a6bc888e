"""Several prompts of one request, as one generation.

Enters: a job with more than one prompt. Leaves: a `Generation` whose choices are numbered through: choice i of prompt k
is number k * n + i. Always true: a job with one prompt is passed through untouched; the parts are submitted together
and end together, so that one failing ends them all; what only makes sense once per request (that it was queued, that
everything was released) is told once; counts are sums. Next: `generation.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from hitsend.core.events import Admitted, FirstToken, ModelLoaded, Preempted, PrefixMatched, Queued, Released
from hitsend.serve.engine.protocol import (
    ChoiceDone,
    Engine,
    EngineEvent,
    Generation,
    Job,
    Produced,
    PromptScored,
    Tokens,
)


def admit_all(engine: Engine, job: Job) -> None:
    """Ask `Engine.admit` about the longest prompt with the choices of all. Raises what it raises."""
    if not job.more_prompts:
        engine.admit(job)
        return
    longest = max(job.prompt_token_ids, *job.more_prompts, key=len)
    engine.admit(msgspec.structs.replace(job, prompt_token_ids=longest, n=job.num_choices, more_prompts=()))


def generate_all(engine: Engine, job: Job) -> Generation:
    """Submit the job, in as many parts as it has prompts. Raises what `Engine.generate` raises."""
    return SeveralGenerations(engine, split(job)) if job.more_prompts else engine.generate(job)


def split(job: Job) -> tuple[Job, ...]:
    """One job per prompt. Choice i of the whole keeps the seed `sampling.seed + i`."""
    return tuple(
        msgspec.structs.replace(
            job,
            request_id=job.request_id if number == 0 else f"{job.request_id}/{number}",
            prompt_token_ids=ids,
            sampling=msgspec.structs.replace(job.sampling, seed=job.sampling.seed + number * job.n),
            more_prompts=(),
        )
        for number, ids in enumerate((job.prompt_token_ids, *job.more_prompts))
    )


class SeveralGenerations:
    """See `protocol.Generation`. The jobs are submitted when it is built."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._n = jobs[0].n
        # Nothing is awaited between these: if one is refused, the engine is gone, and with it those before.
        self._parts: list[Generation] = [engine.generate(job) for job in jobs]
        self._iterators = [aiter(part) for part in self._parts]
        self._running = set(range(len(jobs)))
        self._waiting: dict[int, asyncio.Task[EngineEvent | None]] = {}
        self._ready: deque[EngineEvent] = deque()
        self._num_unreleased = len(jobs)
        self._told_once: set[type[EngineEvent]] = set()
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self

    async def __anext__(self) -> EngineEvent:
        while not self._ready:
            if not self._running:
                raise StopAsyncIteration
            if self._is_closed:
                number = min(self._running)
                self._take(number, await anext(self._iterators[number], None))
            else:
                await self._wait()
        return self._ready.popleft()

    async def end_choice(self, choice: int) -> None:
        """Stop one choice whose end was found in its text. Does not wait."""
        await self._parts[choice // self._n].end_choice(choice % self._n)

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the engine has released it. Safe to call twice."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, {}
        for task in waiting.values():
            task.cancel()
        if waiting:
            await asyncio.wait(waiting.values())
        for number, task in waiting.items():
            if not task.cancelled() and task.exception() is None:
                self._take(number, task.result())
        await asyncio.gather(*(part.aclose() for part in self._parts))

    @property
    def produced(self) -> Produced:
        """Counts so far, all prompts together; final after `aclose()`."""
        counts = [part.produced for part in self._parts]
        outputs = tuple(tokens for count in counts for tokens in count.output_tokens)
        cached = sum(count.cached_tokens for count in counts)
        return Produced(sum(count.prompt_tokens for count in counts), outputs, cached_tokens=cached)

    async def _wait(self) -> None:
        """Until one of the parts has something to tell. Raises what that part raises."""
        for number in self._running - self._waiting.keys():
            self._waiting[number] = asyncio.ensure_future(_next(self._iterators[number]))
        await asyncio.wait(self._waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        for number in sorted(self._waiting):
            if self._waiting[number].done():
                self._take(number, self._waiting.pop(number).result())

    def _take(self, number: int, event: EngineEvent | None) -> None:
        if event is None:
            self._running.discard(number)
        elif isinstance(event, Queued | ModelLoaded):
            if type(event) not in self._told_once:
                self._told_once.add(type(event))
                self._ready.append(event)
        elif isinstance(event, Released):
            self._num_unreleased -= 1
            if self._num_unreleased == 0:
                self._ready.append(event)
        elif isinstance(event, Tokens | PromptScored | ChoiceDone | Admitted | PrefixMatched | Preempted | FirstToken):
            self._ready.append(msgspec.structs.replace(event, choice=number * self._n + event.choice))
        else:
            self._ready.append(event)


async def _next(events: AsyncIterator[EngineEvent]) -> EngineEvent | None:
    return await anext(events, None)
