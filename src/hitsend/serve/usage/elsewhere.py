"""What the metrics are told of upstreams and routes: what each request did there, and how it is with them now.

Enters: a flight's events. Leaves: structs of figures. Always true: engines and routes by their names in the settings,
servers by their place in an engine's list, so nothing that a client typed and no address becomes a label. Next:
`upstream_metrics.py`.
"""

from collections.abc import Iterable

import msgspec

from hitsend.core import events as ev
from hitsend.core.route_events import Abandoned, Judged

LEFT = "left"
CUT = "cut"
OK = "ok"


class UpstreamCall(msgspec.Struct, frozen=True):
    """One attempt at an upstream. `outcome`: `ok`, `cut` (begun, and not whole), `left` (by the client), or the code of
    the error that the upstream's refusal became."""

    engine: str
    outcome: str
    will_retry: bool = False
    first_token_s: float | None = None


class Course(msgspec.Struct, frozen=True):
    """One request's way through a route. `given_up`: engine and code; `drafts`: engine and whether it was accepted."""

    route: str
    chosen: str
    answered: str | None
    given_up: tuple[tuple[str, str], ...] = ()
    drafts: tuple[tuple[str, bool], ...] = ()


class ServerNow(msgspec.Struct, frozen=True):
    """One server of an engine. `breaker`: 0 closed, 1 half open, 2 open. What its own `/metrics` have is None where it
    doesn't tell, or hasn't of late; `age_s`: since it was read."""

    number: int
    breaker: int
    num_openings: int
    age_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    preemptions: int | None = None


class UpstreamNow(msgspec.Struct, frozen=True):
    """One engine elsewhere. `retries_left`: second attempts that it may make at once."""

    engine: str
    in_flight: int
    retries_left: float
    servers: tuple[ServerNow, ...]


class RouteNow(msgspec.Struct, frozen=True):
    """One route. `canary_share`: None where it has none, 0 when that was rolled back. `copies`: outcome to number."""

    route: str
    canary_share: float | None
    is_rolled_back: bool
    copies: dict[str, int]


class Elsewhere(msgspec.Struct, frozen=True):
    """All of this process. `neurons_micro`: of the UTC day, used and held, and what the account may use."""

    upstreams: tuple[UpstreamNow, ...] = ()
    routes: tuple[RouteNow, ...] = ()
    neurons_micro: tuple[int, int] | None = None


_OF_UPSTREAMS = (ev.Routed, ev.Sent, ev.Answered, ev.Streamed, ev.FirstToken)
KINDS = (*_OF_UPSTREAMS, Abandoned, Judged)
"""Events that these figures are made of."""


def calls_of(events: Iterable[ev.Event], *, has_left: bool) -> tuple[UpstreamCall, ...]:
    """Every attempt. `has_left`: the client did, so what isn't whole is its doing."""
    attempts: list[_Attempt] = []
    engine = ""
    for event in events:
        if isinstance(event, ev.Routed):
            engine = event.engine
        elif isinstance(event, ev.Sent):
            attempts.append(_Attempt(engine, event.at))
        elif attempts and attempts[-1].engine == engine:
            attempts[-1].take(event)
    return tuple(attempt.call(has_left=has_left) for attempt in attempts)


class _Attempt:
    """One of them, while its events are read."""

    def __init__(self, engine: str, sent_at: float) -> None:
        self.engine = engine
        self._sent_at = sent_at
        self._answer: ev.Answered | None = None
        self._first_s: float | None = None
        self._is_whole = False

    def take(self, event: ev.Event) -> None:
        """What came of it."""
        if isinstance(event, ev.Answered):
            self._answer = event
        elif isinstance(event, ev.Streamed):
            self._is_whole = event.is_whole
        elif isinstance(event, ev.FirstToken) and self._first_s is None:
            self._first_s = event.at - self._sent_at

    def call(self, *, has_left: bool) -> UpstreamCall:
        """Whatever it was in the end."""
        answer = self._answer
        if answer is None:
            return UpstreamCall(self.engine, LEFT)
        outcome = answer.reason if answer.reason != OK else OK if self._is_whole else LEFT if has_left else CUT
        return UpstreamCall(self.engine, outcome, answer.will_retry, self._first_s)


def course_of(events: Iterable[ev.Event], *, is_ok: bool) -> Course | None:
    """None for a request to no route."""
    routed = [event for event in events if isinstance(event, ev.Routed) and event.route is not None]
    if not routed or not routed[0].candidates or routed[0].route is None:
        return None
    return Course(
        routed[0].route,
        routed[0].engine,
        routed[-1].engine if is_ok else None,
        tuple((event.engine, event.code) for event in events if isinstance(event, Abandoned)),
        tuple((event.engine, event.accepted) for event in events if isinstance(event, Judged)),
    )
