"""The two ways of asking: so many at once (closed loop), or at times fixed beforehand (open loop).

Enters: conversations, and what sends one ask. Leaves: samples, added as they end, so that what was measured until an
interruption is there. Always true: an open loop sends at its times however slow the answers are, and each sample counts
from its time; beyond `most_open` at once it says `client_limit` instead of waiting, since waiting would be omission;
both loops end, by count or by duration, and then by the timeout of what still runs. Next: `strain.py`.
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from hitsend.load.client import Clock
from hitsend.load.sample import Sample
from hitsend.load.workload import Ask

MOST_OPEN = 8192
ERROR_PAUSE_S = 0.05
"""After an error a worker of a closed loop waits: a server that is gone would else be asked thousands of times."""
KEPT_TEXTS = 50
"""Answers of a stage whose text is kept, for checking the server's usage."""


class Asks(Protocol):
    """One conversation; `Conversation` of `workload.py`."""

    def ask(self, answer: str | None = None) -> Ask | None:
        """The next turn, None when it is over."""
        ...


Send = Callable[[Ask, float, int], Awaitable[Sample]]
Start = Callable[[int], Asks]


class Stage:
    """One level's run: the samples, and the instants at which things began and ended.

    `send` and `start` say how to ask and what; `now` is the clock whose zero is the stage's start.
    """

    def __init__(
        self,
        send: Send,
        start: Start,
        *,
        now: Clock = time.perf_counter,
        seen: Callable[[], None] | None = None,
        most_open: int = MOST_OPEN,
    ) -> None:
        self.samples: list[Sample] = []
        self.num_asked = 0
        self.num_open = 0
        self.wall_s = 0.0
        self.sending_s = 0.0
        """How long new requests were sent; what follows is waiting for the last answers."""
        self._send, self._start, self._now = send, start, now
        self._seen = seen or _nothing
        self._most_open = most_open
        self._zero_s = now()

    def begin(self) -> float:
        """The stage's zero: now, on the clock. The client's `start_s` must be it."""
        self._zero_s = self._now()
        return self._zero_s

    async def closed(
        self, concurrency: int, *, requests: int | None, duration_s: float | None, think_s: float = 0.0
    ) -> None:
        """`concurrency` workers, each with one request in flight, until the count or the duration is reached."""
        numbers = iter(range(10**9))

        def is_over() -> bool:
            too_many = requests is not None and self.num_asked >= requests
            return too_many or (duration_s is not None and self._at() >= duration_s)

        async def worker() -> None:
            while not is_over():
                conversation = self._start(next(numbers))
                answer: str | None = None
                while not is_over() and (ask := conversation.ask(answer)) is not None:
                    sample = await self._one(ask, None)
                    if (pause_s := think_s or ERROR_PAUSE_S * (sample.outcome == "error")) > 0:
                        await asyncio.sleep(pause_s)
                    if sample.outcome != "ok":
                        break
                    answer = sample.content

        await self._all([asyncio.ensure_future(worker()) for _ in range(concurrency)])

    async def open(self, times_s: list[float], *, think_s: float = 0.0) -> None:
        """A conversation at each of the times; its later turns follow its answers."""

        async def converse(conversation: Asks, first: Ask, at_s: float) -> None:
            ask: Ask | None = first
            while ask is not None:
                sample = await self._one(ask, at_s)
                ask = conversation.ask(sample.content) if sample.outcome == "ok" else None
                at_s = sample.done_s + think_s
                if ask is not None and think_s:
                    await asyncio.sleep(think_s)

        running: set[asyncio.Future[None]] = set()
        try:
            for number, at_s in enumerate(times_s):
                conversation = self._start(number)  # made before its time, so that making it delays nothing
                ask = conversation.ask()
                if (wait_s := at_s - self._at()) > 0:
                    await asyncio.sleep(wait_s)
                if ask is None:
                    continue
                if len(running) >= self._most_open:
                    self._refuse(at_s)
                    continue
                task = asyncio.ensure_future(converse(conversation, ask, at_s))
                running.add(task)
                task.add_done_callback(running.discard)
                if wait_s <= 0 and number % 16 == 0:
                    await asyncio.sleep(0)  # late: let what has come be read all the same
        finally:
            await self._all(list(running))

    async def _all(self, tasks: list[asyncio.Future[None]]) -> None:
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.wall_s = self._at()

    async def _one(self, ask: Ask, intended_s: float | None) -> Sample:
        number = self.num_asked
        self.num_asked += 1
        self.num_open += 1
        sent_s = self._at()
        self.sending_s = max(self.sending_s, sent_s)
        intended_s = sent_s if intended_s is None else intended_s
        try:
            sample = await self._send(ask, intended_s, number)
        except asyncio.CancelledError:
            nothing = array("d")
            self.samples.append(Sample("interrupted", intended_s, sent_s, self._at(), nothing, number, ask.turn))
            raise
        finally:
            self.num_open -= 1
        self._keep(sample)
        return sample

    def _keep(self, sample: Sample) -> None:
        if len(self.samples) >= KEPT_TEXTS or sample.outcome != "ok":
            self.samples.append(msgspec.structs.replace(sample, text="", content=""))
        else:
            self.samples.append(sample)
        self._seen()

    def _refuse(self, at_s: float) -> None:
        detail = f"{self._most_open} requests open at once: more are not opened"
        number, now_s = self.num_asked, self._at()
        self.num_asked += 1
        self.samples.append(
            Sample("error", at_s, now_s, now_s, array("d"), number, error="client_limit", detail=detail)
        )

    def _at(self) -> float:
        return self._now() - self._zero_s


def _nothing() -> None:
    return
