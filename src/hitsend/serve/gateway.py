"""One gateway process of several: `app.py`'s server, with what it shares behind a line to the supervisor.

    python -m hitsend.serve.gateway --listen N --fd N

Enters: an inherited listening socket, an inherited line, and the settings as the first word on it. Leaves: when it is
stopped by SIGTERM, or the line closed. Always true: it has a text child, a ledger and records of its own, on the same
database as all others; it ends by itself when the supervisor is gone, its requests settled. Next: `link.py`.
"""

import asyncio
import os
import socket
import sys
from functools import partial
from typing import Any

import msgspec
import uvloop

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError, ServeError
from hitsend.core.record import Flight
from hitsend.core.seen import Seen, seen
from hitsend.serve.api.exchange import RequestIds
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import GatherFor, Records, RecordSummary, Services
from hitsend.serve.app import built
from hitsend.serve.engine.protocol import EngineState
from hitsend.serve.hub_words import Failed, Figures, Hello, Remember, Serving
from hitsend.serve.link import Link
from hitsend.serve.listener import check_exposure, server_of
from hitsend.serve.logs import set_up_logs
from hitsend.serve.usage.processes import read_processes
from hitsend.serve.usage.record_search import EVERY, Percentiles, RecordFilter

MAX_SEEN = 1000
"""Open requests that one process tells the others of, the oldest first."""


def main(arguments: list[str]) -> None:
    """Serve until told to stop."""
    line, listening = (int(arguments[arguments.index(name) + 1]) for name in ("--fd", "--listen"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(line, listening))


async def _work(descriptor: int, listening: int) -> None:
    link = await Link.open(descriptor)
    hello = await link.hello()
    if hello is None:
        return
    set_up_logs(hello.settings.log)
    try:
        with socket.socket(fileno=listening) as opened:
            serving = asyncio.ensure_future(_serve(link, hello, opened))
            link.on_lost = serving.cancel  # while it starts: afterwards it is told to drain
            if link.is_lost:
                serving.cancel()
            await asyncio.wait({serving})
            if not serving.cancelled():
                serving.result()
    except (ConfigError, ServeError) as error:
        link.tell(Failed(str(error)))
        await asyncio.sleep(0)


async def _serve(link: Link, hello: Hello, listening: socket.socket) -> None:
    settings = hello.settings
    async with built(settings, shared=link.shared(hello, SystemClock())) as own:
        check_exposure(own)
        services = joined(own, link)
        ids = RequestIds(on_given=lambda request_id: link.tell(Remember(request_id)))
        link.on_remember = ids.remember
        server = server_of(Routes(services, ids), settings, lambda: link.tell(Serving(services.models()[0].id)))
        link.on_lost = lambda: setattr(server, "should_exit", True)
        await server.serve(sockets=[listening])


def joined(own: Services, link: Link) -> Services:
    """The services of this process, showing the figures and the records of all."""
    link.answers = _Own(own)
    return msgspec.structs.replace(
        own,
        records=_Records(own.records, link),
        state=lambda: link.state(own.state()),
        render_metrics=link.metrics,
        observe_http=link.observe_http,
        gather=partial(_gather, own, link),
        seen_elsewhere=link.seen_elsewhere,
    )


async def _gather(own: Services, link: Link, what: GatherFor) -> None:
    """This process's own first: the database is everybody's."""
    await own.gather(what)
    await link.gather(what)


class _Own:
    """What this process alone has; see `link.Answers`."""

    def __init__(self, own: Services) -> None:
        self._own = own

    def figures(self, number: int) -> Figures:
        """Its own figures."""
        now = self._own.state()
        mine = read_processes(("edge", os.getpid()), ("text", now["text"]["pid"]))
        counts = (now["holds_open"], now["writes_waiting"], now["records_dropped"])
        upstreams = {name: _upstream(one) for name, one in now["upstreams"].items()}
        elsewhere = self._own.elsewhere()
        return Figures(number, os.getpid(), *counts, processes=mine, elsewhere=elsewhere, upstreams=upstreams)

    async def record(self, request_id: str) -> bytes | None:
        """A flight record that it has."""
        return await self._own.records.get(request_id)

    def seen(self, key_id: str | None) -> tuple[Seen, ...]:
        """Its open requests, the oldest first."""
        oldest = sorted(self._own.records.under_way(key_id), key=lambda flight: flight.received_at)
        return tuple(map(seen, oldest[:MAX_SEEN]))


def _upstream(now: dict[str, Any]) -> EngineState:
    return EngineState(
        is_ready=now["is_ready"],
        pid=None,
        restarts=0,
        running=now["running"],
        waiting=0,
        cells_total=0,
        cells_used=0,
        slots_total=now["slots_total"],
        slots_used=now["running"],
        preemptions_total=0,
        progress_age_s=0.0,
    )


class _Records:
    """Flight records: those of this process and of the database, else whoever has it."""

    def __init__(self, own: Records, link: Link) -> None:
        self._own = own
        self._link = link

    async def get(self, request_id: str) -> bytes | None:
        """A record's JSON."""
        return await self._own.get(request_id) or await self._link.record(request_id)

    async def list(
        self, limit: int, *, key_id: str | None = None, wanted: RecordFilter = EVERY
    ) -> tuple[RecordSummary, ...]:
        """The newest; of those that are open, only this process's."""
        return await self._own.list(limit, key_id=key_id, wanted=wanted)

    async def percentiles(self, *, key_id: str | None = None, wanted: RecordFilter = EVERY) -> Percentiles:
        """Of the database's, so of all processes."""
        return await self._own.percentiles(key_id=key_id, wanted=wanted)

    def under_way(self, key_id: str | None = None) -> tuple[Flight, ...]:
        """Those that are open in this process."""
        return self._own.under_way(key_id)


if __name__ == "__main__":
    main(sys.argv[1:])
