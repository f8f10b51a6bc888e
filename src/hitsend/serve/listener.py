"""The HTTP server: its listening sockets, its start and its end.

Enters: the routes and the settings. Leaves: a `Server`, to be run. Always true: a taken port is known before anything
slow starts; nobody in the network is served without a key; at the end requests get `drain_s`, then are cancelled, and
are waited for until they are settled. Next: `api/routes.py`.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from functools import partial

import uvicorn

from hitsend.core.errors import ConfigError
from hitsend.serve.access.auth import is_loopback
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import Services
from hitsend.serve.stream.connection import Connection
from hitsend.serve.stream.doors import Doors
from hitsend.settings import Settings

SETTLE_S = 10.0
"""How long requests that were cut off by a stop may take to let go of the engine and to be settled."""


def check_exposure(services: Services) -> None:
    """Raises ConfigError where anybody in the network could call without a key."""
    host = services.server.host
    if not services.auth.are_keys_required and not (is_loopback(host) or host == "localhost"):
        raise ConfigError(
            f"server.host is {host}, but no API key exists: without keys only this machine may be served "
            "(127.0.0.1); make one with `hitsend keys create --name NAME`"
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything slow starts, so that a taken port is known at once."""
    return _bound(host, port, is_shared=False)


def _bound(host: str, port: int, *, is_shared: bool) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(f"server.host, server.port: can't listen on {host}:{port} ({error.strerror})") from error
    return listening


def listen_beside(host: str, port: int) -> socket.socket:
    """One more socket on an address that others of ours have too. Raises ConfigError."""
    return _bound(host, port, is_shared=True)


def listen_several(host: str, port: int, number: int) -> list[socket.socket]:
    """As many sockets on one address, between which the kernel spreads the connections. Raises ConfigError."""
    listen(host, port).close()  # any number may share the address, but not with somebody else
    first = listen_beside(host, port)
    found = [first]
    try:
        found.extend(listen_beside(host, first.getsockname()[1]) for _ in range(number - 1))
    except BaseException:
        for each in found:
            each.close()
        raise
    return found


def server_of(
    routes: Routes, settings: Settings, on_started: Callable[[], None], *, takes_signals: bool = True
) -> "Server":
    """The HTTP server, to be run with `serve(sockets=[...])`; `on_started` is told when it listens."""
    doors = Doors(settings.server.max_connections, settings.server.max_connections_per_address)
    config = uvicorn.Config(
        routes,
        http=partial(Connection, doors=doors),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, int(settings.server.drain_s)),
    )
    return Server(config, routes, on_started, takes_signals=takes_signals)


class Server(uvicorn.Server):
    """uvicorn's server, which says when it listens, and leaves signals alone where it is a guest."""

    def __init__(
        self, config: uvicorn.Config, routes: Routes, on_started: Callable[[], None], *, takes_signals: bool = True
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._takes_signals = takes_signals
        self._routes = routes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end for `drain_s`, cancel the others, and wait until those are settled too."""
        self._routes.stop()
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=SETTLE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """SIGINT and SIGTERM end a server of its own process only.

        uvicorn raises a captured signal again when it is done, which would end the process before anything is stopped.
        """
        if not self._takes_signals:
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def ended_in_order() -> Generator[None]:
    """SIGTERM cancels the calling task, as SIGINT does: what was started is stopped, also while it still starts."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    before = signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(task.cancel))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def url_of(listening: socket.socket) -> str:
    """Where that socket can be reached."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def announce(model: str, url: str) -> None:
    """Tell the person who started it."""
    body = f'{{"model":"{model}","messages":[{{"role":"user","content":"Say hello."}}]}}'
    lines = (
        f"hitsend is ready: {model} at {url}",
        f"  try:  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        f"  page: {url}/",
    )
    print(*lines, sep="\n", flush=True)  # noqa: T201  # what `hitsend serve` says to the person who started it
