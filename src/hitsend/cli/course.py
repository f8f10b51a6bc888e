"""The way of one request through a route, or past a silent server, in lines.

Enters: a record's JSON. Leaves: text, nothing for a request to no route that had one server. Always true: pure; what
each engine that was given up cost stands beside what of it the caller pays. Next: `inspect/web/route.js`, which draws
the same for a browser.
"""

from collections.abc import Callable, Iterator
from typing import Any

Money = Callable[[int], str]
INDENT = "         "


def course(record: dict[str, Any], money: Money) -> list[str]:
    """Engines considered, engines asked, drafts judged, copies sent. `money`: micro-dollars as text."""
    events = record["events"]
    left = [f"hedge    {_left(event)}" for event in events if event["type"] == "hedged"]
    return [*_routed(record, events, money), *left]


def _left(event: dict[str, Any]) -> str:
    which, after_ms = "first" if event["was_first"] else "second", event["at_ms"] - event["started_ms"]
    return f"the server asked {which} was left after {after_ms:.1f} ms: {event['request_id']}"


def _routed(record: dict[str, Any], events: list[dict[str, Any]], money: Money) -> list[str]:
    turns = [at for at, event in enumerate(events) if event["type"] == "routed" and event.get("route")]
    if not turns:
        return []
    first = events[turns[0]]
    lines = [f"route    {first['route']}: {first['reason']}"]
    lines += [f"{INDENT}{_candidate(one, money)}" for one in first.get("candidates") or ()]
    for at, until in zip(turns, [*turns[1:], len(events)], strict=True):
        lines += [f"{INDENT}{line}" for line in _turn(record, events[at], events[at + 1 : until], money)]
    for event in events:
        if event["type"] == "shadowed":
            to = f"as {event['request_id']}" if event["request_id"] else "not sent: too many ran"
            lines.append(f"{INDENT}copy to {event['model']}: {to}")
    return lines


def _candidate(one: dict[str, Any], money: Money) -> str:
    if one["unable"]:
        return f"- {one['name']} can't: {one['unable']}"
    ready = "" if one["is_ready"] else ", left alone after failures"
    first = "" if one["ttft_ms"] is None else f", first token {one['ttft_ms']:.0f} ms"
    failed = f", {one['error_share']:.1%} of {one['num_observed']} failed" if one["num_observed"] else ""
    return f"- {one['name']} can: at most {money(round(one['cost_microusd']))}{first}{failed}{ready}"


def _turn(record: dict[str, Any], turn: dict[str, Any], own: list[dict[str, Any]], money: Money) -> Iterator[str]:
    for event in own:
        if event["type"] == "judged":
            verdict = "; ".join(f"{rule} {words}" for rule, words in event["verdicts"].items())
            said = "accepted" if event["accepted"] else "rejected"
            yield f"   draft of {event['model']} {said}: {verdict}; judge {money(event['judge_microusd'])}"
    sent = sum(event["type"] == "sent" for event in own)
    words = [f"sent {sent} times"] if sent > 1 else []
    words += [_refusal(event) for event in own if event["type"] == "answered" and event["reason"] != "ok"]
    gone = next((event for event in own if event["type"] == "abandoned"), None)
    if gone is not None:
        cost = f"{money(gone['cost_microusd'])}, {money(gone['billed_microusd'])} of it billed"
        words.append(f"given up after {gone['at_ms']:.1f} ms, {gone['code']}: {gone['message']} ({cost})")
    elif record["error"]:
        words.append(str(record["error"]["code"]))
    else:
        words.append("answered" if record["state"] == "finished" else str(record["state"]))
    yield f"{turn['attempt']}. {turn['model']} on {turn['engine']}: {'; '.join(words)}"


def _refusal(event: dict[str, Any]) -> str:
    again = ", asked again" if event["will_retry"] else ""
    return f"{event['status'] or 'no answer'} {event['reason']}{again}"
