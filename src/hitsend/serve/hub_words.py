"""The words between the supervisor and its gateway processes.

Enters: nothing. Leaves: structs, their codecs, and the channel that a frame's first byte names. Always true: every
struct is tagged and typed, no pickle anywhere; the engine's and the quota's words are their own (`engine/shared.py`,
`engine/shared_embedder.py`, `access/shared.py`) and pass through here unread. Next: `hub.py`.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from hitsend.core.seen import Seen
from hitsend.serve.engine.protocol import EngineState
from hitsend.serve.usage.elsewhere import Elsewhere
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.processes import ProcessTime
from hitsend.settings import Settings

ENGINE, QUOTA, EMBEDDER, HOUSE = b"e", b"q", b"m", b"h"
"""Channels: one byte in front of every message."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first word to a gateway."""

    settings: Settings
    embedding_model: str | None


class AskFigures(msgspec.Struct, frozen=True, tag="ask_figures"):
    """Answered by `Figures`."""

    number: int


class AskRecord(msgspec.Struct, frozen=True, tag="ask_record"):
    """Answered by `Record`."""

    number: int
    request_id: str


class AskSeen(msgspec.Struct, frozen=True, tag="ask_seen"):
    """Answered by `SeenThere`: the open requests, of that key alone if one is given."""

    number: int
    key_id: str | None


class SeenThere(msgspec.Struct, frozen=True, tag="seen_there"):
    """Open requests of one gateway, or of all others together."""

    number: int
    seen: tuple[Seen, ...]


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """A client chose this request id, at another gateway."""

    request_id: str


class Totals(msgspec.Struct, frozen=True, tag="totals"):
    """The answer to `AskTotals`; `engine` is the embedded one; `metrics` is the text of `/metrics`, where it was asked
    for."""

    number: int
    engine: EngineState | None
    gateways: "tuple[Figures, ...]"
    quota_holds_open: int
    levels_kept: int
    embedder: dict[str, Any] | None
    metrics: bytes | None


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """This gateway listens; `model` is the first that it serves."""

    model: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It can't start; `message` is a ConfigError's."""

    message: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """One request, for the metrics."""

    figures: RequestFigures


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """One HTTP answer, for the metrics."""

    route: str
    status: int
    seconds: float


class Brought(msgspec.Struct, frozen=True, tag="brought"):
    """Tokens that a request brought back from an upstream, for the metrics."""

    engine: str
    num_tokens: int


class AskTotals(msgspec.Struct, frozen=True, tag="ask_totals"):
    """Answered by `Totals`. `metrics`: in which form they are wanted, None: not at all."""

    number: int
    metrics: Literal["metrics", "openmetrics"] | None


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """What one gateway has of its own; `upstreams` go by the engine's name."""

    number: int
    pid: int
    holds_open: int
    backlog: int
    records_dropped: int
    processes: tuple[ProcessTime, ...] = ()
    elsewhere: Elsewhere = Elsewhere()
    upstreams: dict[str, EngineState] = {}


class Record(msgspec.Struct, frozen=True, tag="record"):
    """A flight record, or nothing."""

    number: int
    body: bytes | None


ToGateway = Hello | AskFigures | AskRecord | AskSeen | Remember | Totals | Record | SeenThere
Reply = Figures | Record | SeenThere
"""What a gateway says when it was asked."""
FromGateway = Serving | Failed | Ended | Answered | Brought | AskTotals | AskRecord | AskSeen | Remember | Reply


def upstreams_of(gateways: Iterable[Figures]) -> dict[str, EngineState]:
    """Of all of them together: one that can be asked somewhere can be asked."""
    found: dict[str, EngineState] = {}
    for name, one in (pair for each in gateways for pair in each.upstreams.items()):
        before = found.get(name)
        found[name] = one if before is None else _together(before, one)
    return found


def _together(one: EngineState, other: EngineState) -> EngineState:
    return msgspec.structs.replace(
        one,
        is_ready=one.is_ready or other.is_ready,
        running=one.running + other.running,
        slots_total=one.slots_total + other.slots_total,
        slots_used=one.slots_used + other.slots_used,
    )


encode = msgspec.msgpack.Encoder().encode
to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
