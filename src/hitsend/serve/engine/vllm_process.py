"""A `vllm serve` of our own: started with the engine, watched, started again when it dies, stopped with the engine.

Enters: a command and the line to where it listens. Leaves: a server that answers `/health`. Always true: it is started
only by the settings, without a shell; it and what it starts are one process group, which is what gets the signals; a
restart waits longer each time, up to a minute; what it writes goes to our stderr. If this process is killed without a
chance to stop it, it stays. Next: `openai.py`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from hitsend.core.errors import ConfigError, EngineUnavailable
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.upstream import UpstreamLine

_log = logging.getLogger(__name__)

LOOK_S = 0.25
STOP_S = 15.0
LONGEST_PAUSE_S = 60.0


class VllmProcess:
    """`start`, `stop`; in between it is kept running."""

    def __init__(self, command: Sequence[str], line: UpstreamLine, *, start_timeout_s: float) -> None:
        self._command = tuple(command)
        self._line = line
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """While it runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self) -> None:
        """Returns when it answers. Raises ConfigError where it can't be started or ends, EngineUnavailable in time."""
        try:
            process = await self._spawn()
        except OSError as error:
            text = f"engines.serve_command: {self._command[0]} can't be started ({error.strerror})"
            raise ConfigError(text) from error
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._answers():
                    if process.returncode is not None:
                        raise ConfigError(f"engines.serve_command: it ended with status {process.returncode}")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            text = f"vLLM did not answer within {self._start_timeout_s} s (engines.serve_start_timeout_s)"
            raise EngineUnavailable(text) from error
        self._watching = asyncio.create_task(self._watch(), name="vllm")

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to whoever is left of its group after a while. Safe to call twice."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        process, self._process = self._process, None
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            _log.warning("vLLM did not stop within %s s and is killed", STOP_S)
        finally:  # also when the wait is cancelled by a second signal
            self._signal(process, signal.SIGKILL)
        await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
        )
        return self._process

    async def _answers(self) -> bool:
        try:
            answer = await self._line.get("/health")
        except LineFailed:
            return False
        answer.close()
        return answer.status == 200

    async def _watch(self) -> None:
        pause_s = 1.0
        clock = asyncio.get_running_loop().time
        while self._process is not None:
            since, process = clock(), self._process
            status = await process.wait()
            self._signal(process, signal.SIGKILL)  # what it left behind would hold the GPU's memory
            pause_s = 1.0 if clock() - since > LONGEST_PAUSE_S else min(LONGEST_PAUSE_S, pause_s * 2)
            _log.error("vLLM ended with status %d, and is started again in %.0f s", status, pause_s)
            await asyncio.sleep(pause_s)
            self.restarts += 1
            with contextlib.suppress(OSError):
                await self._spawn()

    @staticmethod
    def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
