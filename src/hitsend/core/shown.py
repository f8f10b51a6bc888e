"""A flight record as it is kept, and as it is shown.

Enters: what a `Flight` knows. Leaves: the bytes that are stored, and out of them the record's JSON. Always true: what
is stored are the facts alone, because every request is stored and few are looked at; they are read by their names, so
that a record of an earlier version is shown too; bytes that aren't packed facts are JSON already and stay as they are.
Next: `request.py`.
"""

from operator import itemgetter
from typing import Any

import msgspec

from hitsend.core.limits import LevelUse

_IN_MS = {"started_at": "started_ms", "ended_at": "ended_ms"}
_CARRIED = ("cost_microusd", "engine", "model", "trace_id", "principal")
_OUTPUTS = (
    *("output_text", "output_reasoning", "output_token_ids"),
    *("output_tokens", "output_tool_calls", "prompt_token_ids"),
)
_WITH_LIMITS = ("parsed", "fitted", "limits_checked")
_PACKED = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
"""First bytes of a msgpack map. No JSON begins with one, nor does what zlib made."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def pack(kept: dict[str, Any]) -> bytes:
    """The facts in short."""
    try:
        return _encoder.encode(kept)
    except OverflowError:  # a number that a client chose: JSON has no bounds
        return msgspec.json.encode(whole(kept))


def as_json(body: bytes) -> bytes:
    """The record's JSON, given what `pack` made."""
    return msgspec.json.encode(_shown(_decoder.decode(body))) if body[:1] and body[0] in _PACKED else body


def whole(kept: dict[str, Any]) -> dict[str, Any]:
    """The record as JSON values."""
    found: dict[str, Any] = _shown(msgspec.to_builtins(kept))
    return found


def _shown(kept: dict[str, Any]) -> dict[str, Any]:
    events, since = [_spelt(event) for event in kept["events"]], kept["received_at"]
    usage = kept["usage"]
    record: dict[str, Any] = {
        "request_id": kept["request_id"],
        "state": kept["state"],
        "finish_reason": kept["finish_reason"],
        "error": kept["error"],
        "received_at": kept["received_wall"],
        "wall_ms": round(kept["wall_ms"], 4),
        "segments": [{"name": name, "ms": round(ms, 4)} for name, ms in kept["segments"].items()],
        "events": sorted(map(_event, kept["at"], events, [since] * len(events)), key=itemgetter("at_ms")),
        "steps_dropped": kept["steps_dropped"],
        "usage": usage | {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]},
        **{name: kept.get(name) for name in _CARRIED},
        "layout": _last(events, "routed", "layout"),
        "sampling": _last(events, "fitted", "sampling"),
        "sampling_sources": _last(events, "fitted", "sources"),
        "limits": [one for event in events if event["type"] in _WITH_LIMITS for one in event["limits"]],
        "cells": _cells(events, kept["cells_total"]),
        "drafts": kept.get("drafts"),
        "ledger": kept["ledger"],
    }
    return record | {name: kept[name] for name in _OUTPUTS if name in kept}


def _spelt(event: dict[str, Any]) -> dict[str, Any]:
    """Limits of levels are stored level by level, in short; earlier versions stored them as they are shown."""
    if event["type"] != "limits_checked" or not event["limits"] or isinstance(event["limits"][0], dict):
        return event
    uses = msgspec.convert(event["limits"], list[LevelUse])
    return event | {"limits": [msgspec.to_builtins(check) for use in uses for check in use.checks()]}


def _event(at: float, event: dict[str, Any], since: float) -> dict[str, Any]:
    """With instants in ms since arrival. An event that says when it happened is shown at that moment."""
    built: dict[str, Any] = {"type": event["type"], "at_ms": 0.0}
    for name, value in event.items():
        if name in _IN_MS:
            built[_IN_MS[name]] = _ms(value, since)
        elif name not in ("at", "type"):
            built[name] = value
    happened = event.get("ended_at", event.get("at"))
    built["at_ms"] = _ms(at if happened is None else happened, since)
    return built


def _ms(at: float, since: float) -> float:
    return round((at - since) * 1000.0, 4)


def _last(events: list[dict[str, Any]], kind: str, field: str) -> Any:
    """Of the last event of that kind; records of earlier versions may not have it."""
    return next((event.get(field) for event in reversed(events) if event["type"] == kind), None)


def _cells(events: list[dict[str, Any]], total: int | None) -> dict[str, int | None]:
    before: int | None = None
    after: int | None = None
    held = 0
    for event in events:
        if event["type"] == "admitted":
            held += event["cells_reserved"]
            if before is None and total is not None:
                before = total - event["cells_free"]
        elif event["type"] == "released":
            after = event["cells_used"]
    return {"before": before, "held": held, "after": after}
