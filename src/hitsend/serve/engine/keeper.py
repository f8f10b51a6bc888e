"""The embedded engine's child process: started, watched, restarted.

Enters: what to load, and commands. Leaves: the child's reports, in order, and one call when it died. Always true: one
child at a time; when it dies, whoever is attached is told once, and another child is started at once, then with growing
pauses while children die without having done any work; a child that proves no progress for `HANG_FACTOR` times
`progress_timeout_s` is killed, and so is one whose model file was written to (it is mapped, so the child would compute
with what is there now); no child serves that has other words than the one before. Next: `worker.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError, EngineFailed, EngineUnavailable, ServeError
from hitsend.core.vocabulary import OTHER_FILE
from hitsend.serve.child import Child, ChildExit, ChildGone
from hitsend.serve.engine.startup import LoadFailed, WorkerConfig, encode, report_decoder
from hitsend.serve.loop.messages import Command, EngineFacts, Ready, Report, Shutdown, StepReport
from hitsend.settings import AdapterSettings, EngineSettings

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HANG_FACTOR = 8
"""A child that proved no progress for this many times `progress_timeout_s` hangs for good and is killed."""

_log = logging.getLogger(__name__)

OnReport = Callable[[Report, bytes], None]
"""A report, and the frame body that it was."""
OnDown = Callable[[ServeError], None]
_Written = tuple[tuple[int, int], int, int]


class EngineLine(Protocol):
    """The way to the engine's child: `ChildKeeper` in the process that owns it, `shared.py` in every other."""

    @property
    def facts(self) -> EngineFacts | None:
        """What is loaded; None before the first start-up finished."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether commands reach a child that has loaded its model."""
        ...

    @property
    def pid(self) -> int | None:
        """The child, while it runs."""
        ...

    @property
    def restarts(self) -> int:
        """Times that it was started again."""
        ...

    @property
    def progress_at(self) -> float:
        """When it last proved that it lives (`Clock.now()`)."""
        ...

    def attach(self, on_report: OnReport, on_down: OnDown) -> None:
        """Who gets the reports, and what a generation fails with when the child died. Call once, before `start`."""
        ...

    async def start(self) -> None:
        """Return when the child can serve. Raises ConfigError or EngineUnavailable."""
        ...

    async def stop(self) -> None:
        """Let go of it. Safe to call twice."""
        ...

    def send(self, command: Command) -> bool:
        """False when the child is gone; `on_down` tells, or has told."""
        ...


class ChildKeeper:
    """See `EngineLine`. `model_path` is a GGUF file, `model` its served name; `on_up` is told of every child that is
    ready."""

    def __init__(
        self,
        settings: EngineSettings,
        model_path: str,
        clock: Clock,
        *,
        model: str,
        adapters: tuple[AdapterSettings, ...] = (),
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._config = WorkerConfig(model, model_path, settings, adapters)
        self._clock = clock
        self._on_up = on_up
        self._on_report: OnReport = lambda _report, _body: None
        self._on_down: OnDown = lambda _error: None
        self._child: Child | None = None
        self._facts: EngineFacts | None = None
        self._progress_at = clock.now()
        self._has_worked = False
        self._is_ready = False
        self._is_stopping = False
        self._gone = asyncio.Event()
        self._started: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._restarts = 0
        self._failures = 0
        self._written: _Written | None = None

    @property
    def facts(self) -> EngineFacts | None:
        """What is loaded."""
        return self._facts

    @property
    def is_ready(self) -> bool:
        """Whether a child has loaded the model and runs."""
        return self._is_ready

    @property
    def pid(self) -> int | None:
        """The child, while it runs."""
        return self._child.pid if self._child is not None else None

    @property
    def restarts(self) -> int:
        """Times that it was started again."""
        return self._restarts

    @property
    def progress_at(self) -> float:
        """When it last proved that it lives."""
        return self._progress_at

    def attach(self, on_report: OnReport, on_down: OnDown) -> None:
        """Who gets the reports."""
        self._on_report, self._on_down = on_report, on_down

    async def start(self) -> None:
        """Load the model; returns when it can serve. Raises ConfigError with the reason, or EngineUnavailable."""
        await self._launch()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="engine keeper")

    async def stop(self) -> None:
        """End the child, and wait for it."""
        self._is_stopping = True
        self._is_ready = False
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._child is not None:
            with contextlib.suppress(ChildGone):
                self._child.send(encode(Shutdown()))
            await self._child.stop()

    def send(self, command: Command) -> bool:
        """False when the child is gone: its exit, which is on its way, tells."""
        return self.send_body(encode(command))

    def send_body(self, body: bytes) -> bool:
        """The same, for a command that is encoded already."""
        if self._child is None or not self._is_ready:
            return False
        try:
            self._child.send(body)
        except ChildGone:
            return False
        return True

    async def _launch(self) -> None:
        """Start a child and wait for its first word."""
        self._started = asyncio.get_running_loop().create_future()
        self._gone.clear()
        self._progress_at = self._clock.now()
        child = Child(
            ["-m", "hitsend.serve.engine.worker", self._config.name], on_message=self._receive, on_exit=self._exited
        )
        self._child = child
        try:
            await child.start()
            with contextlib.suppress(ChildGone):
                child.send(encode(self._config))
            async with asyncio.timeout(self._settings.start_timeout_s):
                await asyncio.shield(self._started)
        except TimeoutError:
            raise EngineUnavailable(f"The engine did not start within {self._settings.start_timeout_s:g} s.") from None
        finally:
            self._started.cancel()
            if not self._is_ready:
                child.kill()
                await child.stop(grace_s=0.0)

    async def _keep(self) -> None:
        """Restart the child whenever it is gone, kill it when it hangs."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._gone.wait()
            if self._gone.is_set():
                await self._restart()
                continue
            age_s = self._clock.now() - self._progress_at
            if self._child is not None and age_s > HANG_FACTOR * self._settings.progress_timeout_s:
                _log.error("the engine proved no progress for %.0f s and is killed", age_s)
                self._child.kill()
                await self._gone.wait()
            elif self._child is not None and await self._was_written_to():
                _log.error("engine.model: %s was written to while it was served: the engine is killed", self._file)
                self._child.kill()
                await self._gone.wait()

    async def _was_written_to(self) -> bool:
        """The file that is mapped; one that was put in its place by name is another."""
        now, then = await asyncio.to_thread(_written, self._file), self._written
        return self._is_ready and now is not None and then is not None and now[0] == then[0] and now != then

    @property
    def _file(self) -> str:
        return self._config.model_path

    async def _restart(self) -> None:
        if self._failures > 1:
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 2, 10)))
        self._restarts += 1
        try:
            await self._launch()
        except (ConfigError, EngineUnavailable, OSError) as failure:
            _log.error("the engine could not be restarted: %s", failure)

    def _exited(self, end: ChildExit) -> None:
        was_ready, self._is_ready = self._is_ready, False
        self._gone.set()
        self._failures = 1 if self._has_worked else self._failures + 1
        self._has_worked = False
        if self._started is not None and not self._started.done():
            said = " | ".join(end.lines[-5:]) or "it said nothing"
            self._started.set_exception(ConfigError(f"the engine's process ended while loading ({end.how}): {said}"))
        self._on_down(EngineFailed(f"The engine's process ended ({end.how}) while it ran this request."))
        if was_ready and not self._is_stopping:
            _log.error("the engine's process %d ended (%s): %s", end.pid, end.how, " | ".join(end.lines[-5:]))

    def _receive(self, body: bytes) -> None:
        try:
            report = report_decoder.decode(body)
        except msgspec.DecodeError:
            _log.exception("the engine's process sent something that is no report")
            if self._child is not None:
                self._child.kill()
            return
        self._progress_at = self._clock.now()
        if isinstance(report, Ready | LoadFailed):
            self._answered(report)
            return
        self._has_worked = self._has_worked or isinstance(report, StepReport)
        self._on_report(report, body)

    def _answered(self, report: Ready | LoadFailed) -> None:
        if self._started is None or self._started.done():
            return
        if isinstance(report, LoadFailed):
            self._started.set_exception(ConfigError(report.message))
            return
        if self._facts is not None and self._facts.words != report.facts.words:
            self._started.set_exception(ConfigError(f"engine.model: {OTHER_FILE.format(self._file)}"))
            return
        self._facts = report.facts
        self._written = _written(self._file)
        self._is_ready = True
        self._started.set_result(None)
        self._on_up()


def _written(path: str) -> _Written | None:
    """Which file it is, how long, and when it was last written; None where there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns
