"""A job whose model isn't in memory yet: its place in the queue, and then the real generation.

Enters: a job, and later the engine that can run it. Leaves: the events of both, as one generation. Always true: until
it begins it holds nothing but its place, and leaving gives that back at once; its deadline counts from its arrival, so
what the loading took is not waited again; that it was queued is told once. Next: `generation.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import ServeError, ServerOverloaded
from hitsend.core.events import ModelLoaded, Queued, Released
from hitsend.serve.engine.protocol import Engine, EngineEvent, Generation, Job, Produced


class WaitingGeneration:
    """See `protocol.Generation`. `on_left` is told once when it leaves, or is made to leave, before it began."""

    def __init__(self, job: Job, clock: Clock, queued: Queued, on_left: Callable[["WaitingGeneration"], None]) -> None:
        self.job = job
        self._clock = clock
        self._on_left = on_left
        self._events: deque[EngineEvent] = deque([queued])
        self._inner: Generation | None = None
        self._iterator: AsyncIterator[EngineEvent] | None = None
        self._error: ServeError | None = None
        self._is_closed = False
        self._has_left = False
        self._wake = asyncio.Event()
        self._deadline_at = queued.at + job.deadline_s
        self._timer = asyncio.get_running_loop().call_later(job.deadline_s, self._expire)

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self

    async def __anext__(self) -> EngineEvent:
        while not self._events:
            if self._iterator is not None:
                event = await anext(self._iterator)
                if not isinstance(event, Queued):
                    return event
            elif self._is_closed:
                raise StopAsyncIteration
            elif self._error is not None:
                raise self._error
            else:
                self._wake.clear()
                await self._wake.wait()
        return self._events.popleft()

    async def end_choice(self, choice: int) -> None:
        """Stop one choice whose end was found in its text. Does not wait."""
        if self._inner is not None:
            await self._inner.end_choice(choice)

    async def aclose(self) -> None:
        """Leave the queue, or cancel what runs and wait until the engine has released it. Safe to call twice."""
        if self._inner is not None:
            await self._inner.aclose()
            return
        self._is_closed = True
        self._leave()

    @property
    def produced(self) -> Produced:
        """Counts so far; final after `aclose()`."""
        return Produced(0, (0,) * self.job.n) if self._inner is None else self._inner.produced

    def begin(self, engine: Engine, loaded: ModelLoaded) -> None:
        """Its model is there."""
        self._timer.cancel()
        left_s = max(0.0, self._deadline_at - self._clock.now())
        try:
            self._inner = engine.generate(msgspec.structs.replace(self.job, deadline_s=left_s))
        except ServeError as error:
            self.fail(error)
            return
        self._iterator = aiter(self._inner)
        self._events.append(loaded)
        self._wake.set()

    def fail(self, error: ServeError) -> None:
        """It will never begin."""
        self._error = self._error or error
        self._leave()

    def _expire(self) -> None:
        waited = f"Waited longer than {self.job.deadline_s:g} s for the model to be loaded."
        self.fail(ServerOverloaded(waited, retry_after_s=1.0))

    def _leave(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._timer.cancel()
        self._events.append(Released(self._clock.now(), 0))
        self._wake.set()
        self._on_left(self)
