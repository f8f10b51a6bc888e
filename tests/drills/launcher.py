"""Runs servers that kill themselves at a named point. Reads orders on stdin, answers on stdout, a JSON line each.

Everything is imported once; each order forks, so that a start takes milliseconds. The server itself is the real one
from settings to socket, built by `app.built`; what is watched from outside are its statements (SQLAlchemy's events),
its flight's events, and the messages that it sends to its socket.

    {"url": ..., "data": ..., "point": "hold durable" | null, "real": false}  ->  {"pid": ..., "port": ...}

With "of_batches": n, the point is passed by lines of batches, and the n-th one to pass it takes the server along.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import time
import warnings
from typing import Any

import msgspec
import uvicorn
import uvloop
from sqlalchemy import event
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.dialects.sqlite import aiosqlite
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool

from hitsend.core import events as ev
from hitsend.serve.api.routes import Routes
from hitsend.serve.app import built
from hitsend.serve.children import start_children
from hitsend.serve.database import migrate, postgres
from hitsend.serve.database.at_once import AtOnce
from hitsend.serve.database.sqlite import SqliteThread
from hitsend.serve.stream.connection import Connection
from hitsend.settings_source import load
from tests.drills.scripted import scripted

PRELOADED = (migrate, postgres, asyncpg, aiosqlite)
"""What a start would import late."""

DOOMED = "doomed-"
"""Requests whose id begins so are the ones during which the server dies."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STATEMENTS = {"INSERT INTO holds": "hold", "INSERT INTO ledger": "settlement", "INSERT INTO records": "record"}
_OF_BATCHES = {"INSERT INTO batch_lines": "answer", "INSERT INTO files": "ending"}
_EVENTS = {ev.Reserved: "hold acknowledged", ev.Admitted: "admitted", ev.FirstToken: "first token"}


class Reaper:
    """Ends this process when the point it waits for is passed by a doomed request."""

    def __init__(self, point: str | None, of_batches: int | None = None) -> None:
        self._point = point
        self._num_left = of_batches or 1
        self._is_near = False
        self._mark = DOOMED if of_batches is None else "batch_"
        self._statements = _STATEMENTS if of_batches is None else _STATEMENTS | _OF_BATCHES
        self._written: tuple[str, Any] | None = None

    def tell(self, point: str) -> None:
        if self._is_near and point == self._point:
            self._num_left -= 1
            if self._num_left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """What the last life left has been cleared up."""
        self._is_near = True

    def watch_statements(self) -> None:
        event.listen(Engine, "before_cursor_execute", self._before)
        event.listen(Engine, "after_cursor_execute", self._after)
        event.listen(Engine, "commit", self._on_commit)
        event.listen(Pool, "checkin", self._on_checkin)

    def watch_what_is_written_at_once(self) -> None:
        """In every second life; in the others all goes through the writer."""
        opened, write = AtOnce._opened, SqliteThread.write_at_once

        def write_or_not(thread: SqliteThread, statement: str, values: Any) -> bool | None:
            thread._is_log_moved = False  # these servers are too young for a log that is in use
            return write(thread, statement, values) if os.getpid() % 2 else None

        SqliteThread.write_at_once = write_or_not
        AtOnce._opened = lambda at_once: _AtOnce(opened(at_once), self)

    def watching(self, app: Any) -> Any:
        """The ASGI application, and what it sends to a doomed request."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            name = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode()
            if not name.startswith(DOOMED):
                await app(scope, receive, send)
                return
            self._is_near = True
            num = 0

            async def told(message: Any) -> None:
                nonlocal num
                is_body = message["type"] == "http.response.body"
                is_last = is_body and b"[DONE]" in message.get("body", b"")
                if is_last:
                    self.tell("response unsent")
                await send(message)
                num += is_body
                if num == 5:
                    self.tell("mid-stream")
                if is_last:
                    await asyncio.sleep(0.01)  # the bytes leave
                    self.tell("response sent")

            self.tell("arrived")
            await app(scope, receive, told)

        return watched

    def pipeline(self, run: Any) -> Any:
        """The pipeline, with the flight's events heard."""

        def watched(request: Any, flight: Any) -> Any:
            return run(request, _Heard(flight, self) if request.request_id.startswith(DOOMED) else flight)

        return watched

    def _before(self, connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if (name := self.written_by(statement, parameters)) is not None:
            self.tell(f"{name} unwritten")

    def _after(self, connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if (name := self.written_by(statement, parameters)) is not None:
            self.tell(f"{name} written")
            self._written = (name, connection.connection.dbapi_connection)

    def written_by(self, statement: str, parameters: Any) -> str | None:
        for begin, name in self._statements.items():
            if statement.startswith(begin) and self._mark in repr(parameters):
                return name
        return None

    def _on_commit(self, connection: Any) -> None:
        if self._written is not None and connection.connection.dbapi_connection is self._written[1]:
            self.tell(f"{self._written[0]} uncommitted")

    def _on_checkin(self, dbapi_connection: Any, *_: Any) -> None:
        """The connection that wrote comes back; those of readers say nothing."""
        if self._written is not None and dbapi_connection is self._written[1]:
            name, self._written = self._written[0], None
            self.tell(f"{name} durable")


class _AtOnce:
    """A connection for one statement made at once; it passes the points of one that the writer makes."""

    def __init__(self, connection: Any, reaper: Reaper) -> None:
        self._connection = connection
        self._reaper = reaper
        self._written: str | None = None

    def execute(self, statement: str, values: Any = ()) -> Any:
        name, is_commit = self._reaper.written_by(statement, values), statement == "COMMIT"
        self._tell(name, "unwritten")
        self._tell(self._written if is_commit else None, "uncommitted")
        done = self._connection.execute(statement, values)
        self._tell(name, "written")
        self._tell(self._written if is_commit else None, "durable")
        self._written = name
        return done

    def _tell(self, name: str | None, point: str) -> None:
        if name is not None:
            self._reaper.tell(f"{name} {point}")


class _Heard:
    """A flight that says what is recorded in it."""

    def __init__(self, flight: Any, reaper: Reaper) -> None:
        object.__setattr__(self, "_flight", flight)
        object.__setattr__(self, "_reaper", reaper)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flight, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._flight, name, value)

    def record(self, event: ev.Event) -> None:
        self._flight.record(event)
        if isinstance(event, ev.Settled):
            self._reaper.tell("settlement acknowledged")
        elif type(event) in _EVENTS:
            self._reaper.tell(_EVENTS[type(event)])


async def serve(order: dict[str, Any], say: int) -> None:
    flags = {"usage.url": order["url"], "server.data_dir": order["data"], "usage.hold_lease_s": "2"}
    flags |= {"prices": '[{"model":"*","input":0.45,"output":3.2}]', "engine.context": "512", "engine.num_slots": "4"}
    flags |= {"engine.alias": "scripted", "batches.slots_share": "0.035"}  # two lines at a time
    reaper = Reaper(order["point"], order.get("of_batches"))
    reaper.watch_statements()
    reaper.watch_what_is_written_at_once()
    start = start_children if order["real"] else scripted(reaper.tell)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with built(load(flags=flags).settings, start) as whole:
            if order.get("of_batches"):
                reaper.arm()
            services = msgspec.structs.replace(whole, pipeline=reaper.pipeline(whole.pipeline))
            app = reaper.watching(Routes(services))
            config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", access_log=False, log_config=None)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server._serve(sockets=[listening]))
            os.write(say, json.dumps({"pid": os.getpid(), "port": listening.getsockname()[1]}).encode() + b"\n")
            await stopped.wait()
            server.should_exit = True
            await serving


def reap(pid: int) -> bool:
    """Whether it ended by itself within a while; if not, it is ended now."""
    for _ in range(2000):
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main() -> None:
    """One order after the other; a fork for each. They end with this process at the latest."""
    say = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            os.write(say, json.dumps({"ended": reap(order["reap"])}).encode() + b"\n")
            continue
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(order, say))
            os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
