"""Which engine answers a request to a route, and why. Pure: the same inputs make the same choice.

Enters: the route's table, facts of the request, figures of every target, the clock. Leaves: a `Decision`: targets in
the order in which they are asked, the reason in words, and what was known of each. Always true: what can't serve the
request isn't in the order; one whose breaker is open comes last; shares depend on the request's id alone, so a request
that is sent again goes the same way; nothing that a client writes names an engine. Next: `targets.py`.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec

from hitsend.settings import CanarySettings, RouteSettings

DAY_MINUTES = 24 * 60
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


class RequestFacts(msgspec.Struct, frozen=True):
    """What a rule may look at. `prompt_tokens` are estimated from bytes, `output_tokens` the most that is asked for.

    `budget_left`: the share left of the caller's tightest budget, None without one or where no rule wants it.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    wants_thinking: bool = False
    budget_left: float | None = None


class Observed(msgspec.Struct, frozen=True):
    """One answer of a target, or its failure. `at`: the clock's seconds; `ttft_s` None where no token came."""

    at: float
    is_ok: bool
    ttft_s: float | None = None


class TargetFacts(msgspec.Struct, frozen=True):
    """One target as it stands. `name` as the settings write it, `model` what it serves; `unable`: why it can't serve
    this request; prices in pico-USD per token. `observed`: its answers on this route, oldest first.
    """

    name: str
    model: str
    engine: str
    is_ready: bool = True
    unable: str | None = None
    input_picousd: int = 0
    output_picousd: int = 0
    observed: tuple[Observed, ...] = ()


class Candidate(msgspec.Struct, frozen=True):
    """What was known of a target when it was chosen or not. `cost_microusd`: this prompt and the longest answer."""

    name: str
    model: str
    engine: str
    is_ready: bool
    unable: str | None
    cost_microusd: float
    ttft_ms: float | None
    num_observed: int
    error_share: float | None


class Decision(msgspec.Struct, frozen=True):
    """`order` are names of targets; empty where none can serve the request. `facts`: what was known of that."""

    route: str
    strategy: str
    order: tuple[str, ...]
    reason: str
    candidates: tuple[Candidate, ...]
    facts: RequestFacts


class Moment(msgspec.Struct, frozen=True):
    """`now`: the clock's seconds; `minute`: of the UTC day; `rolled_back`: why the canary is over, if it is."""

    now: float
    minute: int
    rolled_back: str | None = None


_Chosen = tuple[Sequence[TargetFacts], str]


def decide(facts: RequestFacts, route: RouteSettings, targets: Mapping[str, TargetFacts], moment: Moment) -> Decision:
    """The order in which targets are asked. `targets` has one for each of `route.engines`."""
    listed = [targets[name] for name in route.engines]
    able = [one for one in listed if one.unable is None]
    refused = [one for one in listed if one.unable is not None]
    order, reason = _RULES[route.strategy](facts, route, able, moment) if able else ([], "no engine can serve it")
    if able and refused and route.strategy != "cascade":
        reason += f" ({', '.join(f'{one.name} cannot: {one.unable}' for one in refused)})"
    away = [one for one in order if not one.is_ready]
    if away and len(away) < len(order) and not order[0].is_ready:
        reason += f"; {order[0].name} is left alone now, so it comes last"
    order = sorted(order, key=lambda one: not one.is_ready)
    names = tuple(one.name for one in order)
    if not route.falls_back and route.strategy != "cascade":
        names = names[:1]
    shown = tuple(_candidate(one, facts, route, moment) for one in listed)
    return Decision(route.model, route.strategy, names, reason, shown, facts)


def share_of(request_id: str, route: str) -> float:
    """A number in [0, 1) that belongs to this request on this route."""
    digest = hashlib.blake2b(f"{route}\0{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def ttft_s(observed: Sequence[Observed], since: float = float("-inf")) -> float | None:
    """The median time to the first token since then; None: nothing measured."""
    found = [one.ttft_s for one in observed if one.ttft_s is not None and one.at >= since]
    return median(found) if found else None


def error_share(observed: Sequence[Observed]) -> float | None:
    """Failures among the answers; None: there were none."""
    return sum(not one.is_ok for one in observed) / len(observed) if observed else None


def canary_fault(rule: CanarySettings, stable: Sequence[Observed], canary: Sequence[Observed]) -> str | None:
    """Why the canary has to be rolled back, or None: it does no worse, or there is too little to tell."""
    errors, usual = error_share(canary), error_share(stable)
    if errors is None or usual is None or min(len(canary), len(stable)) < rule.least:
        return None
    if errors > usual + rule.more_errors:
        return f"{errors:.0%} of {len(canary)} failed, of the stable one's {len(stable)} {usual:.0%}"
    mine, theirs = ttft_s(canary), ttft_s(stable)
    if mine is not None and theirs is not None and mine > theirs * rule.slower:
        return f"first token after {mine * 1000:.0f} ms, at the stable one {theirs * 1000:.0f} ms (medians)"
    return None


def minutes_of(hours: str) -> tuple[int, int]:
    """`22:00-06:00` as minutes of the day. Raises ValueError."""
    found = _HOURS.fullmatch(hours)
    if found is None:
        raise ValueError(f"{hours!r}: expected HH:MM-HH:MM (UTC)")
    first, last = int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])
    return first, last


def is_within(minute: int, hours: str) -> bool:
    """Whether that minute is one of these; the end isn't, and equal ends mean the whole day."""
    first, last = minutes_of(hours)
    return (minute - first) % DAY_MINUTES < ((last - first) % DAY_MINUTES or DAY_MINUTES)


def _candidate(one: TargetFacts, facts: RequestFacts, route: RouteSettings, moment: Moment) -> Candidate:
    first = ttft_s(one.observed, moment.now - route.figures_window_s)
    return Candidate(
        name=one.name,
        model=one.model,
        engine=one.engine,
        is_ready=one.is_ready,
        unable=one.unable,
        cost_microusd=_picousd(one, facts) / 1e6,
        ttft_ms=None if first is None else round(first * 1000, 3),
        num_observed=len(one.observed),
        error_share=error_share(one.observed),
    )


def _picousd(one: TargetFacts, facts: RequestFacts) -> int:
    return facts.prompt_tokens * one.input_picousd + facts.output_tokens * one.output_picousd


def _first(chosen: TargetFacts, able: Sequence[TargetFacts]) -> list[TargetFacts]:
    return [chosen, *(one for one in able if one is not chosen)]


def _fallback(_f: RequestFacts, _r: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    return able, f"{able[0].name} is the first in order that can"


def _weighted(facts: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    weights = [route.weights.get(one.name, 1.0) for one in able]
    total, point = sum(weights), share_of(facts.request_id, route.model)
    if not total:
        return able, "all weights are 0: in order"
    reached, chosen = 0.0, able[max(range(len(able)), key=weights.__getitem__)]
    for one, weight in zip(able, weights, strict=True):
        reached += weight / total
        if point < reached:
            chosen = one
            break
    weight = route.weights.get(chosen.name, 1.0)
    others = sorted(able, key=lambda one: -route.weights.get(one.name, 1.0))
    return _first(chosen, others), f"its id falls into {chosen.name}'s share of {weight / total:.1%} (at {point:.4f})"


def _cheapest(facts: RequestFacts, _r: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    order = sorted(able, key=lambda one: _picousd(one, facts))
    tokens = f"{facts.prompt_tokens} + at most {facts.output_tokens} tokens"
    return order, f"{order[0].name} is the cheapest for {tokens}: {_picousd(order[0], facts) / 1e6:.3f} micro-USD"


def _fastest(_f: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], moment: Moment) -> _Chosen:
    since = moment.now - route.figures_window_s
    known = {one.name: ttft_s(one.observed, since) for one in able}
    failing = {one.name for one in able if error_share([seen for seen in one.observed if seen.at >= since]) == 1.0}
    # who only fails is measured by nobody's request: it comes last until that is forgotten
    order = sorted(able, key=lambda one: (one.name in failing, known[one.name] or 0.0))
    best = known[order[0].name]
    if order[0].name in failing:
        return order, f"all fail of late: {order[0].name}, the first"
    if best is None:
        return order, f"{order[0].name} has no recent time to the first token, so it is measured"
    return order, f"{order[0].name} has the shortest recent time to the first token: {best * 1000:.1f} ms (median)"


def _by_prompt_length(facts: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    for one in able:
        most = route.prompt_tokens.get(one.name)
        if most is None or facts.prompt_tokens <= most:
            limit = "any length" if most is None else f"at most {most}"
            return _first(one, able), f"the prompt of about {facts.prompt_tokens} tokens: {one.name} takes {limit}"
    return able[::-1], f"the prompt of about {facts.prompt_tokens} tokens is over every limit: {able[-1].name}"


def _by_thinking(facts: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    thinker = route.thinking_engine or route.engines[-1]
    if facts.wants_thinking:
        order = sorted(able, key=lambda one: one.name != thinker)
        return order, f"thinking is wanted: {order[0].name}"
    order = sorted(able, key=lambda one: one.name == thinker)
    return order, f"thinking isn't wanted: {order[0].name}"


def _by_budget(facts: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    left = facts.budget_left
    if left is None:
        return able, f"the caller has no budget: {able[0].name}, the first"
    for index, one in enumerate(able):
        if left >= route.budget_left.get(one.name, 0.0):
            # those before it are for callers who have more left
            return [*able[index:], *able[:index]], f"{left:.1%} of the budget is left: {one.name}"
    return able[::-1], f"{left:.1%} of the budget is left, less than any engine wants: {able[-1].name}"


def _by_time(_f: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], moment: Moment) -> _Chosen:
    clock = f"{moment.minute // 60:02}:{moment.minute % 60:02} UTC"
    for one in able:
        hours = route.hours.get(one.name)
        if hours is None or is_within(moment.minute, hours):
            return _first(one, able), f"it is {clock}: {one.name}, {hours or 'always'}"
    return able, f"it is {clock}, nobody's hours: {able[0].name}, the first"


def _canary(facts: RequestFacts, route: RouteSettings, able: Sequence[TargetFacts], moment: Moment) -> _Chosen:
    stable, canary = route.engines[:2]
    order = sorted(able, key=lambda one: one.name == canary)
    if moment.rolled_back is not None:
        return order, f"{stable}: the canary {canary} was rolled back, {moment.rolled_back}"
    if share_of(facts.request_id, route.model) < route.canary.share:
        order = sorted(able, key=lambda one: one.name != canary)
        return order, f"its id falls into the canary's share of {route.canary.share:.1%}: {order[0].name}"
    return order, f"its id is outside of the canary's share of {route.canary.share:.1%}: {order[0].name}"


def _cascade(_f: RequestFacts, _r: RouteSettings, able: Sequence[TargetFacts], _m: Moment) -> _Chosen:
    return (
        able,
        f"{able[0].name} first; what is rejected goes on to {', '.join(one.name for one in able[1:]) or 'none'}",
    )


_RULES: dict[str, Callable[[RequestFacts, RouteSettings, Sequence[TargetFacts], Moment], _Chosen]] = {
    "fallback": _fallback,
    "weighted": _weighted,
    "cheapest": _cheapest,
    "fastest": _fastest,
    "prompt_length": _by_prompt_length,
    "thinking": _by_thinking,
    "budget": _by_budget,
    "time_of_day": _by_time,
    "canary": _canary,
    "cascade": _cascade,
}
