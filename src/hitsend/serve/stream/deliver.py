"""One response on its way to one client, and the watch over that client.

Enters: an async iterator of frames (or an awaitable of one body) that *is* the request's work. Leaves: ASGI messages,
and what was seen of the client: bytes, chunks, time blocked. Always true:
- the work runs in a task of its own; however it has to end, it is cancelled and its clean-up is waited for before
  `stream()` or `whole()` returns;
- a client that has gone is noticed at once in every phase, because `receive()` is watched beside the work. Starlette's
  StreamingResponse doesn't do that under ASGI >= 2.4. Under uvicorn a half-closed connection counts as gone;
- nothing is sent before the work has yielded once, so an error until then is raised to the caller, who can still choose
  a status, unless a stream has had to be pinged by then; an error after that is one error frame and the end of the
  response: no [DONE], no finish reason;
- a frame that can't be written for `stall_s` ends the request: the iterator isn't asked for more in the meantime, which
  is how a slow client's generation comes to be paused.
Next: `connection.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, MutableMapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from hitsend.core.clock import Clock
from hitsend.core.errors import ClientGone, DeadlineExceeded, Ended, ServeError, ShuttingDown
from hitsend.serve.stream import sse
from hitsend.serve.stream.course import Course, cancel_and_wait, current_task
from hitsend.settings import StreamSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
_E = TypeVar("_E", bound=Ended)


class ClientWatch(Protocol):
    """Who wants to know about the client while the response is under way (the flight record)."""

    def fail(self, error: Ended) -> None:
        """The request is about to be cancelled for this reason."""
        ...

    def client_blocked(self, started_at: float, ended_at: float) -> None:
        """A write had to wait between these instants."""
        ...


_BLOCKED_FROM_S = 0.001
"""Writes that take less didn't wait for the client: handing bytes to the socket costs some microseconds."""


class Delivery:
    """Sends one response. The counters are right at any time and final once `stream()` or `whole()` has returned."""

    def __init__(
        self, receive: Receive, send: Send, settings: StreamSettings, clock: Clock, watch: ClientWatch | None = None
    ) -> None:
        self._receive = receive
        self._send_message = send
        self._settings = settings
        self._clock = clock
        self._watch = watch
        self._writing = asyncio.Lock()
        self._last_write_at = clock.now()
        self._write_started_at: float | None = None
        self._deadline = clock.now() + settings.request_timeout_s
        self._has_left = self._is_ending = False
        self._last_frames = b""
        self._head: list[Header] = []
        self.has_started = False
        self.num_bytes = 0
        self.num_chunks = 0
        self.blocked_s = 0.0

    async def stream(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Iterable[Header],
        error_frame: Callable[[Exception], bytes],
    ) -> Exception | None:
        """Send frames as they come, pings in between. Returns the error that became an error frame, or None.

        Raises whatever ends the work before anything was sent, and ClientGone whenever the client left.
        """
        self._head = [*sse.HEADERS, *headers]

        async def work() -> None:
            async with aclosing(frames):
                async for frame in frames:
                    if not self.has_started:
                        await self._start(self._head)
                    await self._write(frame)
                    self._last_frames = frame

        failed: Exception | None = None
        try:
            await self._run(work(), wants_pings=True)
        except ClientGone:
            raise
        except Exception as error:
            if not self.has_started:
                raise
            failed = error  # headers are out: the only place left for it is the stream itself
            await self._within_stall(self._write(error_frame(error)))
        if not self.has_started:
            await self._within_stall(self._start(self._head))
        await self._within_stall(self._write(b"", is_last=True))
        return failed

    async def whole(self, body: Callable[[], Awaitable[bytes]], headers: Iterable[Header]) -> None:
        """Send one JSON body when it is there. Raises what the work raises (nothing was sent then), and ClientGone."""

        async def work() -> None:
            answer = await body()
            size = str(len(answer)).encode()
            await self._start([(b"content-type", b"application/json"), (b"content-length", size), *headers])
            await self._write(answer, is_last=True)

        await self._run(work(), wants_pings=False)

    async def _run(self, work: Coroutine[Any, Any, None], *, wants_pings: bool) -> None:
        """Run the work under watch. Raises what it raises, or why it was ended.

        The work has a task of its own; this one waits for the client to leave, and is interrupted by the work's end, by
        the clock, or by who stops the server.
        """
        working = asyncio.create_task(work)
        course = Course(working, current_task(), wants_pings=wants_pings)
        working.add_done_callback(course.interrupt)
        self._look_later(course)
        try:
            await self._client_leaves()
            raise self._note(self._left())
        except asyncio.CancelledError as cancelled:
            course.waiting.uncancel()
            if course.fault is not None:
                raise course.fault from None
            if not working.done():  # the client is still there and hears why
                raise self._note(ShuttingDown("the server is stopping")) from cancelled
            if course.pinging is not None:
                await self._within_stall(course.pinging)
        finally:
            course.end()
            await cancel_and_wait(*(task for task in (working, course.pinging) if task is not None))
        if working.cancelled():
            raise ServeError("the request's work was cancelled from inside")
        working.result()

    async def _client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._is_ending:  # a server says so, too, once it has the end of the answer
            await asyncio.get_running_loop().create_future()
        self._has_left = True

    def _look(self, course: Course) -> None:
        """What the clock has to say: end what is due, ping who waits, and look again when the next can be."""
        try:
            self._end_if_due(course.pinging)
        except Exception as fault:  # noqa: BLE001  # raised where the work is waited for
            course.fault = fault
            course.interrupt()
            return
        if course.pinging is not None and course.pinging.done():
            course.pinging = None
        if course.wants_pings and course.pinging is None and self._is_idle():
            course.pinging = asyncio.create_task(self._ping())
        self._look_later(course)

    async def _ping(self) -> None:
        if self._is_idle():  # a frame may have come since the clock was asked
            if not self.has_started:
                await self._start(self._head)
            await self._write(sse.PING)

    def _look_later(self, course: Course) -> None:
        due_in_s = self._due_in_s(wants_pings=course.wants_pings)
        course.timer = asyncio.get_running_loop().call_later(due_in_s, self._look, course)

    def _end_if_due(self, pinging: "asyncio.Task[None] | None") -> None:
        """Raise the reason why the work has to end now, if there is one."""
        now, settings = self._clock.now(), self._settings
        if pinging is not None and pinging.done():
            pinging.result()
        if self._write_started_at is not None and now - self._write_started_at >= settings.stall_s:
            raise self._note(self._stalled())
        if now >= self._deadline:
            limit = f"{settings.request_timeout_s:g} s (limit stream.request_timeout_s)"
            raise self._note(DeadlineExceeded(f"the answer was not finished after {limit}"))

    def _is_idle(self) -> bool:
        """Whether the client has heard nothing for so long that it needs a ping."""
        if self._write_started_at is not None:
            return False
        is_silent = self._clock.now() - self._last_write_at >= self._settings.ping_s
        return is_silent and not sse.is_end(self._last_frames)

    def _due_in_s(self, *, wants_pings: bool) -> float:
        """When to look again: never later than a stall that begins right now would be due."""
        now, settings = self._clock.now(), self._settings
        due = [self._deadline, now + settings.stall_s]
        if self._write_started_at is not None:
            due.append(self._write_started_at + settings.stall_s)
        elif wants_pings:
            due.append(self._last_write_at + settings.ping_s)
        return max(0.0, min(due) - now)

    async def _start(self, headers: list[Header]) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        self._is_ending = self._is_ending or is_last
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self.num_bytes += len(data)
        self.num_chunks += bool(data)

    async def _send(self, message: Message) -> None:
        """Hand one message to the server; waits while the client doesn't read. Raises ClientGone."""
        async with self._writing:
            started_at = self._write_started_at = self._clock.now()
            try:
                await self._send_message(message)
                if self._has_left:  # a server drops writes to nobody without a word, and without waiting
                    raise self._note(self._left())
            except OSError as error:
                raise self._note(ClientGone("the client could not be reached")) from error
            finally:
                self._write_started_at = None
                ended_at = self._last_write_at = self._clock.now()
                self.blocked_s += ended_at - started_at
                if self._watch is not None and ended_at - started_at >= _BLOCKED_FROM_S:
                    self._watch.client_blocked(started_at, ended_at)

    async def _within_stall(self, writing: Awaitable[None]) -> None:
        """Writes after the work is done: nobody watches the clock for them any more, so they carry their own limit."""
        try:
            async with asyncio.timeout(self._settings.stall_s):
                await writing
        except TimeoutError as error:
            raise self._note(self._stalled()) from error

    def _left(self) -> ClientGone:
        return ClientGone("the client closed the connection")

    def _stalled(self) -> ClientGone:
        return ClientGone(f"the client read nothing for {self._settings.stall_s:g} s (limit stream.stall_s)")

    def _note(self, why: _E) -> _E:
        """Tell the watch before the work is cancelled, so that the record shows the reason and the state it hit."""
        if self._watch is not None:
            self._watch.fail(why)
        return why
