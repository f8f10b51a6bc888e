"""One engine's child for several gateway processes.

Enters: each gateway's commands, the child's reports. Leaves: every report at the gateway whose request it names, as the
child wrote it. Always true: a request belongs to the gateway that submitted it, nobody else's command touches it; when
a gateway is gone, its requests are aborted; a command that was meant for a child that has died since reaches no other
child; pulses go to everybody, so that all know how the engine is. Next: `keeper.py`.

    gateway:     EmbeddedEngine ── RemoteLine ──┐
    gateway:     EmbeddedEngine ── RemoteLine ──┴── SharedEngine ── ChildKeeper ── child
"""

import asyncio
import struct
from collections.abc import Callable

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import EngineFailed, EngineUnavailable, InvalidRequest, ServeError, from_code
from hitsend.serve.engine.keeper import ChildKeeper, OnDown, OnReport
from hitsend.serve.engine.startup import encode
from hitsend.serve.loop.messages import (
    Abort,
    Command,
    Done,
    EngineFacts,
    Pulse,
    Report,
    StepReport,
    WasAdmitted,
    WasPreempted,
    WasQueued,
    refused,
)
from hitsend.settings import AdapterSettings, EngineSettings

Send = Callable[[bytes], object]

_CHILD = struct.Struct("!I")
"""In front of each command: which child it is meant for, by the number of restarts before it."""


class EngineUp(msgspec.Struct, frozen=True, tag="up"):
    """A child is ready."""

    facts: EngineFacts
    pid: int | None
    restarts: int


class EngineDown(msgspec.Struct, frozen=True, tag="down"):
    """The child is gone; its requests fail with this."""

    code: str
    message: str


class _Submitted(msgspec.Struct, frozen=True, tag="submit"):
    """What must be known of a `Submit` to pass it on."""

    request_id: str
    seeds: tuple[int, ...]


class _Aborted(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class _Paused(msgspec.Struct, frozen=True, tag="pause"):
    request_id: str


class _Resumed(msgspec.Struct, frozen=True, tag="resume"):
    request_id: str


_heading = msgspec.msgpack.Decoder(_Submitted | _Aborted | _Paused | _Resumed)
_news = msgspec.msgpack.Decoder(Report | EngineUp | EngineDown)


class _Owned(msgspec.Struct):
    """A request at the engine. `gateway` is None when that one is gone."""

    gateway: int | None
    num_open: int


class SharedEngine:
    """The owner's side: an `EngineLine` for the owner's own engine, which sees all reports and has no requests."""

    def __init__(
        self,
        settings: EngineSettings,
        model_path: str,
        clock: Clock,
        *,
        model: str,
        adapters: tuple[AdapterSettings, ...] = (),
    ) -> None:
        self._keeper = ChildKeeper(settings, model_path, clock, model=model, adapters=adapters, on_up=self._went_up)
        self._keeper.attach(self._receive, self._went_down)
        self._clock = clock
        self._gateways: dict[int, Send] = {}
        self._owned: dict[str, _Owned] = {}
        self._on_report: OnReport = lambda _report, _body: None
        self._on_down: OnDown = lambda _error: None

    @property
    def facts(self) -> EngineFacts | None:
        """What is loaded."""
        return self._keeper.facts

    @property
    def is_ready(self) -> bool:
        """Whether the child can serve."""
        return self._keeper.is_ready

    @property
    def pid(self) -> int | None:
        """The child, while it runs."""
        return self._keeper.pid

    @property
    def restarts(self) -> int:
        """Times that it was started again."""
        return self._keeper.restarts

    @property
    def progress_at(self) -> float:
        """When it last proved that it lives."""
        return self._keeper.progress_at

    def attach(self, on_report: OnReport, on_down: OnDown) -> None:
        """Who else sees everything."""
        self._on_report, self._on_down = on_report, on_down

    async def start(self) -> None:
        """Load the model. Raises ConfigError or EngineUnavailable."""
        await self._keeper.start()

    async def stop(self) -> None:
        """End the child."""
        await self._keeper.stop()

    def send(self, command: Command) -> bool:
        """A command of the owner's own."""
        return self._keeper.send(command)

    def join(self, gateway: int, send: Send) -> None:
        """Another gateway: `send` takes what it is to be told."""
        self._gateways[gateway] = send
        if self._keeper.is_ready and self._keeper.facts is not None:
            send(encode(EngineUp(self._keeper.facts, self._keeper.pid, self._keeper.restarts)))

    def leave(self, gateway: int) -> None:
        """It is gone: nobody waits for its requests any more."""
        self._gateways.pop(gateway, None)
        for request_id, owned in self._owned.items():
            if owned.gateway == gateway:
                owned.gateway = None
                self._keeper.send(Abort(request_id))

    def receive(self, gateway: int, framed: bytes) -> None:
        """A command of a gateway's. Raises msgspec.ValidationError or struct.error for what is none."""
        body = framed[_CHILD.size :]
        command = _heading.decode(body)
        if _CHILD.unpack_from(framed) != (self._keeper.restarts,):
            return  # its child died, and the gateway is told so by what is on the way to it
        owned = self._owned.get(command.request_id)
        if isinstance(command, _Submitted):
            self._submit(gateway, command, body, owned)
        elif owned is not None and owned.gateway == gateway:
            self._keeper.send_body(body)

    def _submit(self, gateway: int, submit: _Submitted, body: bytes, owned: _Owned | None) -> None:
        error: ServeError | None = None
        if owned is not None:
            error = InvalidRequest(f"Request id {submit.request_id} is running already.")
        elif not self._keeper.send_body(body):
            error = EngineUnavailable("The engine is starting or restarting.", retry_after_s=1.0)
        if error is None:
            self._owned[submit.request_id] = _Owned(gateway, len(submit.seeds))
            return
        for choice in range(len(submit.seeds)):
            self._tell(gateway, encode(refused(submit.request_id, choice, self._clock.now(), error)))

    def _went_up(self) -> None:
        if self._keeper.facts is not None:
            self._tell_all(encode(EngineUp(self._keeper.facts, self._keeper.pid, self._keeper.restarts)))

    def _went_down(self, error: ServeError) -> None:
        self._owned.clear()
        self._on_down(error)
        self._tell_all(encode(EngineDown(error.code, error.message)))

    def _receive(self, report: Report, body: bytes) -> None:
        self._on_report(report, body)
        if isinstance(report, StepReport):
            names = {row.request_id for row in report.rows} | {done.request_id for done in report.done}
            owners = {owned.gateway for name in names if (owned := self._owned.get(name)) is not None}
            for done in report.done:
                self._end(done)
            for gateway in owners:
                self._tell(gateway, body)
        elif isinstance(report, Pulse):
            self._tell_all(body)
        elif isinstance(report, WasQueued | WasAdmitted | WasPreempted | Done):
            owned = self._owned.get(report.request_id)
            if isinstance(report, Done):
                self._end(report)
            if owned is not None:
                self._tell(owned.gateway, body)

    def _end(self, done: Done) -> None:
        owned = self._owned.get(done.request_id)
        if owned is not None:
            owned.num_open -= 1
            if owned.num_open <= 0:
                del self._owned[done.request_id]

    def _tell(self, gateway: int | None, body: bytes) -> None:
        send = self._gateways.get(gateway) if gateway is not None else None
        if send is not None:
            send(body)

    def _tell_all(self, body: bytes) -> None:
        for send in tuple(self._gateways.values()):
            send(body)


class RemoteLine:
    """A gateway's side: see `EngineLine`. `send` hands a frame to the owner, False when that is gone."""

    def __init__(self, settings: EngineSettings, clock: Clock, send: Callable[[bytes], bool]) -> None:
        self._start_timeout_s = settings.start_timeout_s
        self._clock = clock
        self._send = send
        self._up: EngineUp | None = None
        self._facts: EngineFacts | None = None
        self._restarts = 0
        self._came_up = asyncio.Event()
        self._progress_at = clock.now()
        self._on_report: OnReport = lambda _report, _body: None
        self._on_down: OnDown = lambda _error: None

    @property
    def facts(self) -> EngineFacts | None:
        """What is loaded."""
        return self._facts

    @property
    def is_ready(self) -> bool:
        """Whether the child could serve when it was last heard of."""
        return self._up is not None

    @property
    def pid(self) -> int | None:
        """The child, while it runs."""
        return self._up.pid if self._up is not None else None

    @property
    def restarts(self) -> int:
        """Times that the child was started again."""
        return self._restarts

    @property
    def progress_at(self) -> float:
        """When it was last heard of."""
        return self._progress_at

    def attach(self, on_report: OnReport, on_down: OnDown) -> None:
        """Who gets the reports."""
        self._on_report, self._on_down = on_report, on_down

    async def start(self) -> None:
        """Wait until the child can serve. Raises EngineUnavailable."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._came_up.wait()
        except TimeoutError:
            raise EngineUnavailable(f"The engine did not start within {self._start_timeout_s:g} s.") from None

    async def stop(self) -> None:
        """Send nothing more. The child belongs to somebody else."""
        self._up = None

    def send(self, command: Command) -> bool:
        """False when the child, or the process that owns it, is gone."""
        return self._up is not None and self._send(_CHILD.pack(self._up.restarts) + encode(command))

    def receive(self, body: bytes) -> None:
        """What the owner tells. Raises msgspec.ValidationError."""
        news = _news.decode(body)
        self._progress_at = self._clock.now()
        if isinstance(news, EngineUp):
            self._up, self._facts, self._restarts = news, news.facts, news.restarts
            self._came_up.set()
        elif isinstance(news, EngineDown):
            self._up = None
            self._on_down(from_code(news.code, news.message))
        else:
            self._on_report(news, body)

    def lose(self) -> None:
        """The owner is gone, and the child with it."""
        self._up = None
        self._on_down(EngineFailed("The process that owns the engine ended while it ran this request."))
