"""The flight records that are being written, and what becomes of them when they close.

Enters: request ids and callers; later the closed flights. Leaves: records for the store, figures for the metrics, and
answers about open and closed requests alike. Always true: a flight is closed once; closing neither waits nor fails; an
open flight can be looked at any time. Next: `api/`.
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from hitsend.core import events as ev
from hitsend.core.clock import Clock
from hitsend.core.errors import Ended, LimitError
from hitsend.core.record import Flight
from hitsend.core.request import Principal
from hitsend.core.shown import as_json
from hitsend.serve.usage import elsewhere
from hitsend.serve.usage import figures as counted
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.objectives import outcome
from hitsend.serve.usage.record_search import EVERY, Percentiles, RecordFilter, place_of
from hitsend.serve.usage.records import RecordStore, RecordSummary
from hitsend.settings import RecordSettings, SloSettings

_log = logging.getLogger("hitsend.request")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, version 00."""

UNSERVED = "none"
"""The model label of requests that named no served model: what a client typed never becomes a label."""


Observer = Callable[[RequestFigures], None]
"""Who else wants to know what every ended request did."""


class Traces(Protocol):
    """Who makes spans of requests: `usage/tracing.py`, where the settings ask for it."""

    def begin(self, flight: Flight, traceparent: str | None) -> str:
        """It has arrived; returns what to hand on."""
        ...

    def end(self, flight: Flight) -> None:
        """It is closed."""
        ...


class Flights:
    """Open flights by request id, in front of the store of closed ones."""

    def __init__(
        self,
        store: RecordStore,
        metrics: counted.Observer,
        clock: Clock,
        settings: RecordSettings,
        also: Observer,
        *,
        objectives: SloSettings,
        traces: Traces | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._settings = settings
        self._also = also
        self._objectives = objectives
        self._traces = traces
        self._open: dict[str, Flight] = {}

    def open(self, request_id: str, principal: Principal, traceparent: str | None = None) -> Flight:
        """Begin a record. A good `traceparent` is handed on, as it is where nobody traces here."""
        settings = self._settings
        flight = Flight(request_id, self._clock, keep_text=settings.text, max_steps=settings.max_steps)
        flight.principal = principal
        self._open[request_id] = flight
        if self._traces is not None:
            flight.traceparent = self._traces.begin(flight, traceparent)
        elif traceparent is not None and _TRACEPARENT.fullmatch(traceparent):
            flight.traceparent = traceparent
        return flight

    def close(self, flight: Flight) -> None:
        """Stop its clock, store it, count it."""
        flight.close()
        self._open.pop(flight.request_id, None)
        self._store.put(summary(flight), flight.pack())
        ended = figures(flight)
        ended = msgspec.structs.replace(ended, outcome=outcome(ended, self._objectives))
        self._metrics.observe_request(ended)
        self._also(ended)
        if self._traces is not None:
            self._traces.end(flight)
        if _log.isEnabledFor(logging.INFO):
            _log.info(*_line(ended, flight), extra={"request": partial(_entry, ended, flight)})

    @property
    def num_open(self) -> int:
        """Requests that are under way."""
        return len(self._open)

    async def get(self, request_id: str) -> bytes | None:
        """A record's JSON: of an open flight as it stands, of a closed one from the store."""
        flight = self._open.get(request_id)
        if flight is not None:
            return as_json(flight.pack())
        return await self._store.get(request_id)

    async def list(
        self, limit: int, *, key_id: str | None = None, wanted: RecordFilter = EVERY
    ) -> tuple[RecordSummary, ...]:
        """The newest that are wanted, newest first, open ones included; only that key's, if given."""
        flying = [one for one in map(summary, self.under_way(key_id)) if wanted.has(one)]
        flying.sort(key=place_of, reverse=True)
        return (*flying, *await self._store.list(limit, key_id=key_id, wanted=wanted))[:limit]

    async def percentiles(self, *, key_id: str | None = None, wanted: RecordFilter = EVERY) -> Percentiles:
        """Of the ended ones. Raises StorageFailed."""
        return await self._store.percentiles(key_id=key_id, wanted=wanted)

    def under_way(self, key_id: str | None = None) -> tuple[Flight, ...]:
        """Those that are open in this process; only that key's, if given."""
        return tuple(f for f in self._open.values() if key_id is None or f.principal.key_id == key_id)


def summary(flight: Flight) -> RecordSummary:
    """One line about it."""
    first = flight.first_token_at
    return RecordSummary(
        request_id=flight.request_id,
        received_at=flight.received_wall,
        state=str(flight.state),
        finish_reason=flight.finish_reason,
        error_code=flight.error.code if flight.error else None,
        model=flight.model,
        key_id=flight.principal.key_id,
        key_name=flight.principal.name,
        wall_ms=round(flight.wall_ms, 3),
        prompt_tokens=flight.usage.prompt_tokens,
        completion_tokens=flight.usage.completion_tokens,
        cost_microusd=flight.cost_microusd,
        ttft_ms=None if first is None else round((first - flight.received_at) * 1000.0, 3),
    )


def figures(flight: Flight) -> RequestFigures:
    """What the metrics count of a closed flight."""
    spent = flight.segments()
    kinds: dict[type, ev.Event] = {}  # the first of each kind
    endings: list[ev.ChoiceFinished] = []
    outside: list[ev.Event] = []
    for event in flight.events():
        kinds.setdefault(type(event), event)
        if isinstance(event, ev.ChoiceFinished):
            endings.append(event)
        elif isinstance(event, elsewhere.KINDS):
            outside.append(event)
    cancelled = cast("ev.Cancelled | None", kinds.get(ev.Cancelled))
    has_queued, has_row = ev.Queued in kinds, ev.Settled in kinds
    first, gaps = flight.first_token_at, flight.token_gaps_s
    return RequestFigures(
        model=flight.model or UNSERVED,
        wall_s=flight.wall_ms / 1000.0,
        queue_s=spent["wait"] / 1000.0 if has_queued else None,
        prefill_s=(spent["prefill_own"] + spent["prefill_shared"]) / 1000.0 if first is not None else None,
        decode_s=(spent["decode_own"] + spent["decode_shared"]) / 1000.0 or None,
        ttft_s=None if first is None else first - flight.received_at,
        tpot_s=sum(gaps) / len(gaps) if gaps else None,
        gaps_s=tuple(gaps),
        finish_reasons=tuple(event.finish_reason for event in endings),
        error_code=flight.error.code if flight.error else None,
        cancelled_during=cancelled.during if cancelled else None,
        prompt_tokens=flight.usage.prompt_tokens,
        completion_tokens=flight.usage.completion_tokens,
        cached_tokens=flight.usage.cached_tokens,
        reasoning_tokens=flight.usage.reasoning_tokens,
        discarded_tokens=sum(event.num_discarded_tokens for event in endings),
        cost_microusd=flight.cost_microusd,
        has_row=has_row,
        request_id=flight.request_id,
        refused_by=flight.error.refused_by if isinstance(flight.error, LimitError) else None,
        segments_s=tuple(ms / 1000.0 for ms in spent.values()),
        calls=elsewhere.calls_of(outside, has_left=isinstance(flight.error, Ended)),
        course=elsewhere.course_of(outside, is_ok=flight.error is None),
    )


def _entry(ended: RequestFigures, flight: Flight) -> dict[str, Any]:
    """The log's line in parts. No text of the request, no key: who called by name."""
    return {
        "request_id": flight.request_id,
        "trace_id": flight.traceparent[3:35] if flight.traceparent else None,
        "caller": flight.principal.name,
        "model": flight.model,
        "engine": flight.engine,
        "state": str(flight.state),
        "finish_reason": flight.finish_reason,
        "error": ended.error_code,
        "wall_ms": round(ended.wall_s * 1000.0, 1),
        "ttft_ms": None if ended.ttft_s is None else round(ended.ttft_s * 1000.0, 1),
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "completion_tokens": ended.completion_tokens,
        "cost_microusd": ended.cost_microusd,
    }


def _line(ended: RequestFigures, flight: Flight) -> tuple[Any, ...]:
    """The same for a person: a format and its values."""
    how = ended.error_code or flight.finish_reason or str(flight.state)
    first = "-" if ended.ttft_s is None else f"{ended.ttft_s * 1000.0:.0f} ms"
    return (
        "%s %s %s: %s, %.0f ms (first token %s), %d + %d tokens, %d micro-USD",
        *(flight.request_id, flight.principal.name, flight.model or UNSERVED, how, ended.wall_s * 1000.0, first),
        *(ended.prompt_tokens, ended.completion_tokens, ended.cost_microusd),
    )
