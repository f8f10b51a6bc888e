"""One set of counters for several gateway processes.

Enters: a gateway's asks. Leaves: what the owner's `Quota` says to each, with the same errors. Always true: only the
owner counts, so the gateways together never let more through than one would; a reservation belongs to the gateway that
took it and ends with it; whoever was told that a reservation ended finds its place free, through whichever gateway it
asks next. Next: `memory.py`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import msgspec

from hitsend.core.errors import LimitError, RateLimitExceeded, ServeError, StorageFailed, from_code
from hitsend.core.limits import Level, RateWindows
from hitsend.serve.access.quota import Ask, Quota, Used

Send = Callable[[bytes], object]

WARY_S = 5.0
"""How long after a refusal the owner is asked before a caller's next request is read."""

MOST_WARY = 1000
"""Callers of whom that is remembered."""


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """`Quota.reserve`."""

    number: int
    ask: Ask


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """`Quota.preview`."""

    number: int
    ask: Ask


class Shed(msgspec.Struct, frozen=True, tag="shed"):
    """`Quota.shed`; answered by `Granted` without windows."""

    number: int
    levels: tuple[Level, ...]


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """`Quota.settle`; answered by `Granted` without windows."""

    number: int
    request_id: str
    used: Used


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """It is done."""

    number: int
    windows: RateWindows = RateWindows()


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """A ServeError, on its way to another process."""

    number: int
    code: str
    message: str
    param: str | None
    retry_after_s: float | None
    windows: RateWindows | None
    refused_by: tuple[str, str] | None = None


_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(Reserve | Preview | Shed | Settle)
_answered = msgspec.msgpack.Decoder(Granted | Refusal)


class QuotaDesk:
    """The owner's side."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._gateways: dict[int, Send] = {}
        self._holder: dict[str, int] = {}
        self._reserving: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, gateway: int, send: Send) -> None:
        """Another gateway: `send` takes its answers."""
        self._gateways[gateway] = send

    def leave(self, gateway: int) -> None:
        """It is gone. What it had reserved is given back as unused: what its requests produced isn't known here."""
        self._gateways.pop(gateway, None)
        for (asker, _), task in tuple(self._reserving.items()):
            if asker == gateway:
                task.cancel()
        for request_id, holder in tuple(self._holder.items()):
            if holder == gateway:
                self._run(self._end(gateway, request_id, Used()))

    def receive(self, gateway: int, body: bytes) -> None:
        """What a gateway asks. Raises msgspec.ValidationError for what is nothing of that kind."""
        asked = _asked.decode(body)
        if isinstance(asked, Reserve):
            key = (gateway, asked.ask.request_id)
            task = self._reserving[key] = self._run(self._reserve(gateway, asked))
            task.add_done_callback(lambda done: self._reserved(key, done))
        elif isinstance(asked, Preview):
            self._run(self._preview(gateway, asked))
        elif isinstance(asked, Shed):
            self._run(self._shed(gateway, asked))
        else:
            waiting = self._reserving.get((gateway, asked.request_id))
            if waiting is not None:  # its caller doesn't wait for it any more
                waiting.cancel()
            self._run(self._settle(gateway, asked))

    async def stop(self) -> None:
        """End what waits for the ledger. Safe to call twice."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reserved(self, key: tuple[int, str], task: "asyncio.Task[None]") -> None:
        if self._reserving.get(key) is task:
            del self._reserving[key]

    async def _reserve(self, gateway: int, asked: Reserve) -> None:
        try:
            windows = await self._quota.reserve(asked.ask)
        except ServeError as error:
            self._tell(gateway, _refusal(asked.number, error))
            return
        self._holder[asked.ask.request_id] = gateway
        self._tell(gateway, Granted(asked.number, windows))

    async def _preview(self, gateway: int, asked: Preview) -> None:
        try:
            self._tell(gateway, Granted(asked.number, await self._quota.preview(asked.ask)))
        except ServeError as error:
            self._tell(gateway, _refusal(asked.number, error))

    async def _shed(self, gateway: int, asked: Shed) -> None:
        try:
            await self._quota.shed(asked.levels)
            self._tell(gateway, Granted(asked.number))
        except ServeError as error:
            self._tell(gateway, _refusal(asked.number, error))

    async def _settle(self, gateway: int, asked: Settle) -> None:
        await self._end(gateway, asked.request_id, asked.used)
        self._tell(gateway, Granted(asked.number))

    async def _end(self, gateway: int, request_id: str, used: Used) -> None:
        if self._holder.get(request_id) == gateway:
            del self._holder[request_id]
            await self._quota.settle(request_id, used)

    def _tell(self, gateway: int, answer: Granted | Refusal) -> None:
        send = self._gateways.get(gateway)
        if send is not None:
            send(_encode(answer))


class RemoteQuota:
    """A gateway's side: see `Quota`. `send` hands a frame to the owner, False when that is gone."""

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self._send = send
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[RateWindows]] = {}
        self._refused: OrderedDict[tuple[Level, ...], float] = OrderedDict()

    async def reserve(self, ask: Ask) -> RateWindows:
        """Take it, on every level at once. Raises what the owner's quota raises, and StorageFailed when it is gone."""
        try:
            return await self._call(number := next(self._numbers), Reserve(number, ask))
        except RateLimitExceeded:
            self._note_refusal(ask.levels)
            raise
        except asyncio.CancelledError:
            # what was, or will be, taken for it goes back; the owner reads this after it
            self._send(_encode(Settle(next(self._numbers), ask.request_id, Used(requests=0))))
            raise

    async def preview(self, ask: Ask) -> RateWindows:
        """What `reserve` would return or raise now; takes nothing."""
        return await self._call(number := next(self._numbers), Preview(number, ask))

    async def shed(self, levels: Sequence[Level]) -> None:
        """See `Quota.shed`: asks the owner only for callers who were refused a moment ago."""
        found = tuple(levels)
        until = self._refused.get(found) if self._refused else None
        if until is None:
            return
        if asyncio.get_running_loop().time() >= until:
            del self._refused[found]
            return
        try:
            await self._call(number := next(self._numbers), Shed(number, found))
        except RateLimitExceeded:
            self._note_refusal(found)
            raise

    def _note_refusal(self, levels: tuple[Level, ...]) -> None:
        self._refused[levels] = asyncio.get_running_loop().time() + WARY_S
        self._refused.move_to_end(levels)
        if len(self._refused) > MOST_WARY:
            self._refused.popitem(last=False)

    async def settle(self, request_id: str, used: Used) -> None:
        """End the reservation, and know that it has ended. Never raises."""
        try:
            await self._call(number := next(self._numbers), Settle(number, request_id, used))
        except ServeError:
            return  # the owner is gone, and its counters with it

    def receive(self, body: bytes) -> None:
        """What the owner answers. Raises msgspec.ValidationError."""
        answer = _answered.decode(body)
        future = self._waiting.pop(answer.number, None)
        if future is None or future.done():
            return
        if isinstance(answer, Granted):
            future.set_result(answer.windows)
        else:
            future.set_exception(_error_of(answer))

    def lose(self) -> None:
        """The owner is gone."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(_gone())

    async def _call(self, number: int, asked: Reserve | Preview | Shed | Settle) -> RateWindows:
        if not self._send(_encode(asked)):
            raise _gone()
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            windows: RateWindows = await future
        finally:
            self._waiting.pop(number, None)
        return windows


def _gone() -> StorageFailed:
    return StorageFailed("the process that counts the limits has ended", retry_after_s=1.0)


def _refusal(number: int, error: ServeError) -> Refusal:
    windows, by = (error.windows, error.refused_by) if isinstance(error, LimitError) else (None, None)
    return Refusal(number, error.code, error.message, error.param, error.retry_after_s, windows, by)


def _error_of(refusal: Refusal) -> ServeError:
    error = from_code(refusal.code, refusal.message, param=refusal.param, retry_after_s=refusal.retry_after_s)
    if isinstance(error, LimitError):
        error.windows, error.refused_by = refusal.windows, refusal.refused_by
    return error
