"""A gateway process's end of the line to the supervisor.

Enters: what `app.py` and the routes want from the shared parts. Leaves: frames, and what comes back. Always true:
nothing here blocks; when the line closes, whoever waits for an answer gets an error and everything that runs at the
engine fails, so that all requests end and are settled before the process does. Next: `hub.py`.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import StorageFailed
from hitsend.core.frames import frame
from hitsend.core.seen import Seen
from hitsend.serve.access.shared import RemoteQuota
from hitsend.serve.api.services import GatherFor
from hitsend.serve.child import Line
from hitsend.serve.children import Shared
from hitsend.serve.engine.models import NO_MODEL
from hitsend.serve.engine.shared import RemoteLine
from hitsend.serve.engine.shared_embedder import RemoteEmbedder
from hitsend.serve.hub_words import (
    EMBEDDER,
    ENGINE,
    HOUSE,
    QUOTA,
    Answered,
    AskFigures,
    AskRecord,
    AskSeen,
    AskTotals,
    Brought,
    Ended,
    Figures,
    FromGateway,
    Hello,
    Record,
    Remember,
    SeenThere,
    Totals,
    encode,
    to_gateway,
    upstreams_of,
)
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.metrics import CONTENT_TYPE, OPENMETRICS_TYPE


class Answers(Protocol):
    """What this process tells the others when they ask."""

    def figures(self, number: int) -> Figures:
        """Its own figures."""
        ...

    async def record(self, request_id: str) -> bytes | None:
        """A flight record that it has."""
        ...

    def seen(self, key_id: str | None) -> tuple[Seen, ...]:
        """Its open requests; only that key's, if given."""
        ...


class Link:
    """The line. Make one with `Link.open`."""

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: Callable[[], object] = lambda: None
        self.on_remember: Callable[[str], None] = lambda _: None
        self.answers: Answers | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._hello: asyncio.Future[Hello | None] = asyncio.get_running_loop().create_future()
        self._line: RemoteLine | None = None
        self._embedder: RemoteEmbedder | None = None
        self._early: list[bytes] | None = []
        self._quota = RemoteQuota(partial(self._send, QUOTA))
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Totals | Record | SeenThere]] = {}
        self._totals: Totals | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, descriptor: int) -> "Link":
        """Take over the inherited socket."""
        link = cls()
        ours = socket.socket(fileno=descriptor)
        ours.setblocking(False)
        link._transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: Line(link._receive, link._lose), sock=ours
        )
        return link

    async def hello(self) -> Hello | None:
        """The first word; None when the supervisor is gone already."""
        return await self._hello

    def shared(self, hello: Hello, clock: Clock) -> Shared:
        """What this process has from the supervisor. Call once."""
        settings = hello.settings.engine
        if settings.model != NO_MODEL:
            self._line = RemoteLine(settings, clock, partial(self._send, ENGINE))
        if hello.embedding_model is not None:
            timeout_s = settings.start_timeout_s
            self._embedder = RemoteEmbedder(hello.embedding_model, timeout_s, partial(self._send, EMBEDDER))
        early, self._early = self._early or [], None
        for body in early:
            self._receive(body)
        return Shared(self._line, self._quota, self, self._embedder, on_tokens=self.observe_upstream)

    def tell(self, word: FromGateway) -> None:
        """Say something; nobody hears it when the supervisor is gone."""
        self._send(HOUSE, encode(word))

    def observe_request(self, figures: RequestFigures) -> None:
        """See `metrics.Observer`."""
        self.tell(Ended(figures))

    def observe_upstream(self, engine: str, num_tokens: int) -> None:
        """See `Metrics.observe_upstream`."""
        self.tell(Brought(engine, num_tokens))

    def observe_http(self, route: str, status: int, seconds: float) -> None:
        """See `metrics.Observer`."""
        self.tell(Answered(route, status, seconds))

    async def gather(self, what: GatherFor) -> None:
        """See `Services.gather`. Raises StorageFailed when the supervisor is gone."""
        answer = await self._ask(AskTotals(next(self._numbers), None if what == "state" else what))
        if isinstance(answer, Totals):
            self._totals = answer

    def state(self, own: dict[str, Any]) -> dict[str, Any]:
        """The figures of all for `/inspect/state`, as of the last `gather`; `own` are those of this process."""
        totals = self._totals
        if totals is None:
            return own
        shown: dict[str, Any] = {} if totals.engine is None else msgspec.to_builtins(totals.engine)
        own_facts = ("is_ready", "pid", "restarts", "progress_age_s", "check")
        engine = {name: shown.pop(name) for name in own_facts if name in shown}
        upstreams = upstreams_of(totals.gateways)
        for name in ("running", "slots_total", "slots_used"):
            shown[name] = shown.get(name, 0) + sum(getattr(one, name) for one in upstreams.values())
        shown["upstreams"] = {
            name: shown_here
            | {
                each: getattr(upstreams[name], each)
                for each in ("running", "slots_total", "is_ready")
                if name in upstreams
            }
            for name, shown_here in own["upstreams"].items()
        }
        gateways = [{"pid": each.pid, "holds_open": each.holds_open} for each in totals.gateways]
        shown |= {"holds_open": sum(each.holds_open for each in totals.gateways), "gateways": gateways}
        shown.pop("num_threads", None)
        shown |= {"writes_waiting": sum(each.backlog for each in totals.gateways)}
        shown |= {"records_dropped": sum(each.records_dropped for each in totals.gateways)}
        shown |= {"quota_holds_open": totals.quota_holds_open, "levels_kept": totals.levels_kept}
        shown |= {"embedder": totals.embedder} if totals.embedder is not None else {}
        return own | shown | {"engine": own["engine"] | engine}

    def metrics(self, is_openmetrics: bool) -> tuple[str, bytes]:  # noqa: FBT001  # as `Services.render_metrics`
        """The body of `/metrics`, as of the last `gather`."""
        body = self._totals.metrics if self._totals is not None else None
        return OPENMETRICS_TYPE if is_openmetrics else CONTENT_TYPE, body or b""

    async def record(self, request_id: str) -> bytes | None:
        """A flight record that another process has."""
        answer = await self._ask(AskRecord(next(self._numbers), request_id))
        return answer.body if isinstance(answer, Record) else None

    async def seen_elsewhere(self, key_id: str | None) -> tuple[Seen, ...]:
        """See `Services.seen_elsewhere`. Raises StorageFailed when the supervisor is gone."""
        answer = await self._ask(AskSeen(next(self._numbers), key_id))
        return answer.seen if isinstance(answer, SeenThere) else ()

    async def _ask(self, question: AskTotals | AskRecord | AskSeen) -> Totals | Record | SeenThere:
        future = self._waiting[question.number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(HOUSE, encode(question)):
                raise _gone()
            answer: Totals | Record | SeenThere = await future
        finally:
            self._waiting.pop(question.number, None)
        return answer

    def _send(self, channel: bytes, body: bytes) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(frame(channel + body))
        return True

    def _receive(self, body: bytes) -> None:
        channel, rest = body[:1], body[1:]
        if channel in (ENGINE, EMBEDDER) and self._early is not None:
            self._early.append(body)
        elif channel == ENGINE and self._line is not None:
            self._line.receive(rest)
        elif channel == EMBEDDER and self._embedder is not None:
            self._embedder.receive(rest)
        elif channel == QUOTA:
            self._quota.receive(rest)
        else:
            self._heard(to_gateway.decode(rest))

    def _heard(self, word: Any) -> None:
        if isinstance(word, Hello):
            self._hello.set_result(word)
        elif isinstance(word, AskFigures):
            answers = self.answers
            self.tell(answers.figures(word.number) if answers else Figures(word.number, os.getpid(), 0, 0, 0))
        elif isinstance(word, AskSeen):
            self.tell(SeenThere(word.number, self.answers.seen(word.key_id) if self.answers else ()))
        elif isinstance(word, AskRecord):
            task = asyncio.get_running_loop().create_task(self._tell_record(word))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(word, Remember):
            self.on_remember(word.request_id)
        elif (future := self._waiting.pop(word.number, None)) is not None and not future.done():
            future.set_result(word)

    async def _tell_record(self, asked: AskRecord) -> None:
        body = None
        try:
            body = await self.answers.record(asked.request_id) if self.answers is not None else None
        finally:
            self.tell(Record(asked.number, body))

    def _lose(self) -> None:
        self.is_lost = True
        if not self._hello.done():
            self._hello.set_result(None)
        self._quota.lose()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(_gone())
        if self._line is not None:
            self._line.lose()
        if self._embedder is not None:
            self._embedder.lose()
        self.on_lost()


def _gone() -> StorageFailed:
    return StorageFailed("the process above this gateway has ended", retry_after_s=1.0)
