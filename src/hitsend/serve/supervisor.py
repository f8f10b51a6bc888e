"""`hitsend serve`: one process that serves, or one above several that do.

Enters: settings. Leaves: when everything has stopped. Always true: with one worker nothing here runs; a gateway that
ends is started again, at once when it had served for a while, else with growing pauses, and its socket waits for the
next one; a stop signal drains all gateways before the engine is stopped; when this process dies, gateways and engine
end by themselves. Next: `hub.py`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from functools import partial
from typing import Any

import uvloop

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve import app
from hitsend.serve.child import Child, ChildExit
from hitsend.serve.children import find_weights, models_dir, worker_config
from hitsend.serve.embed import find_embedder
from hitsend.serve.engine.embedder import Embedder
from hitsend.serve.engine.models import NO_MODEL, ModelFile
from hitsend.serve.hub import Hub, hub_of
from hitsend.serve.hub_words import Failed, Hello, Serving
from hitsend.serve.listener import SETTLE_S, announce, listen_beside, listen_several, url_of
from hitsend.serve.logs import set_up_logs
from hitsend.serve.pools import build_pools
from hitsend.settings import PooledSettings, Settings
from hitsend.settings_source import Loaded

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
PATIENCE_S = 2.0
"""Longest pause in which connections may wait for the next gateway."""
STEADY_S = 10.0
"""A gateway that has served for so long is started again at once."""

logger = logging.getLogger(__name__)


def serve(loaded: Loaded) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when it can't start."""
    settings = loaded.settings
    if settings.server.workers == 1:
        app.serve(loaded)
        return
    set_up_logs(settings.log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_supervise(settings))


async def _supervise(settings: Settings) -> None:
    server = settings.server
    pooled = [one.name for one in settings.engines if isinstance(one, PooledSettings)]
    if pooled:
        raise ConfigError(
            f"server.workers: {server.workers} processes can't share models that come and go, and engines[{pooled[0]}] "
            "is of kind embedded: one process serves those (server.workers = 1), or leave them out"
        )
    sockets = listen_several(server.host, server.port, server.workers)
    try:
        found = None if settings.engine.model == NO_MODEL else await asyncio.to_thread(find_weights, settings)
        config = None if found is None else worker_config(settings, found)
        await build_pools(settings, config, models_dir(settings), SystemClock())  # only judges them
        embedder = await asyncio.to_thread(find_embedder, settings.engine, models_dir(settings))
        await Crew(settings, found, embedder, sockets).run()
    finally:
        for each in sockets:
            each.close()


class Crew:
    """The gateway processes, one per socket."""

    def __init__(
        self, settings: Settings, found: ModelFile | None, embedder: Embedder | None, sockets: list[socket.socket]
    ) -> None:
        self._settings = settings
        self._found = found
        self._embedder = embedder
        self._sockets = sockets
        self._children: dict[int, Child] = {}
        self._serving_since: dict[int, float] = {}
        self._model = ""
        self._is_stopping = asyncio.Event()
        self._all_serve: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """From start to end. Raises ConfigError or EngineUnavailable when it can't start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        async with hub_of(self._settings, self._found, self._embedder, self._heard) as hub:
            starting = loop.create_task(hub.start(), name="models start")
            keepers = [loop.create_task(self._keep(hub, slot), name=f"gateway {slot}") for slot in range(self._number)]
            try:
                await self._until_stopped(starting)
            finally:
                await self._stop(keepers)
                starting.cancel()
                await asyncio.wait({starting})

    @property
    def _number(self) -> int:
        return len(self._sockets)

    async def _until_stopped(self, starting: "asyncio.Task[None]") -> None:
        stopping = asyncio.ensure_future(self._is_stopping.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {starting, self._all_serve}
            while waiting and not stopping.done():
                unending: set[asyncio.Future[Any]] = {stopping}
                done, _ = await asyncio.wait(unending | waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in waiting & done:
                    each.result()
                waiting -= done
            if not stopping.done():
                announce(self._model, url_of(self._sockets[0]))
                await stopping
        finally:
            stopping.cancel()

    def _signalled(self, number: int) -> None:
        self._is_stopping.set()
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for child in self._children.values():
            if child.pid is not None:
                os.kill(child.pid, number)

    async def _stop(self, keepers: list["asyncio.Task[None]"]) -> None:
        """Let the gateways end what they do, then make them go."""
        self._is_stopping.set()
        for each in self._sockets:
            each.close()
        if not self._all_serve.done():
            self._all_serve.cancel()
        self._pass_on(signal.SIGTERM)
        patience_s = self._settings.server.drain_s + SETTLE_S + 5.0
        _, late = await asyncio.wait(keepers, timeout=patience_s)
        for child in self._children.values():
            logger.error("a gateway did not end within %.0f s and is killed", patience_s)
            child.kill()
        if late:
            await asyncio.wait(late)

    async def _keep(self, hub: Hub, slot: int) -> None:
        """One gateway process after the other, until the end."""
        failures = 0
        while not self._is_stopping.is_set():
            how = await self._live(hub, slot)
            if self._is_stopping.is_set():
                break
            since = self._serving_since.pop(slot, None)
            is_steady = since is not None and asyncio.get_running_loop().time() - since >= STEADY_S
            failures = 1 if is_steady else failures + 1
            logger.error("gateway %d ended (%s)", slot, how)
            if since is None and not self._all_serve.done():
                self._all_serve.set_exception(ConfigError(f"a gateway process ended while it started ({how})"))
                break
            if failures > 1:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 2, 10))
                await self._pause(slot, pause_s)

    async def _pause(self, slot: int, pause_s: float) -> None:
        """Let a while pass; in a long one the socket is closed, so that the kernel sends nobody there to wait."""
        host, port = self._sockets[slot].getsockname()[:2]
        if pause_s > PATIENCE_S:
            self._sockets[slot].close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._is_stopping.wait()
        if pause_s > PATIENCE_S and not self._is_stopping.is_set():
            self._sockets[slot] = listen_beside(host, port)

    async def _live(self, hub: Hub, slot: int) -> str:
        """One gateway process from its start to its end; tells how it ended."""
        ended: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()
        listening = self._sockets[slot].fileno()
        child = Child(
            ["-m", "hitsend.serve.gateway", "--listen", str(listening)],
            on_message=partial(hub.receive, slot),
            on_exit=ended.set_result,
            inherits=(listening,),
            shows_stderr=True,
        )
        try:
            await child.start()
        except OSError as error:
            return f"it can't be started: {error}"
        self._children[slot] = child
        if self._is_stopping.is_set():  # the signal went to those that were there before it
            child.kill()
        hub.join(slot, child)
        hub.tell(slot, Hello(self._settings, hub.embedding_model))
        try:
            end = await ended
            return f"process {end.pid}, {end.how}"
        finally:
            del self._children[slot]
            hub.leave(slot)

    def _heard(self, slot: int, word: Serving | Failed) -> None:
        if isinstance(word, Serving):
            self._model = word.model
            self._serving_since[slot] = asyncio.get_running_loop().time()
            if len(self._serving_since) == self._number and not self._all_serve.done():
                self._all_serve.set_result(None)
        elif self._all_serve.done():
            logger.error("gateway %d can't start: %s", slot, word.message)
        else:
            self._all_serve.set_exception(ConfigError(word.message))
