"""Recorded traffic under another route table: what it would have cost, and how long it would have taken.

Enters: requests of the past, and settings with routes. Leaves: a `WhatIf`. Always true: nothing is asked of anybody; a
rule knows of a request to a route what it knew then; an answer is taken to have the tokens that it had, and costs what
they cost on that day; a model's times are the medians of what was recorded of it, None where nothing was; what other
engines had cached isn't known; budgets are not replayed, and nothing fails. Next: `engine/router.py`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from statistics import median

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.serve.engine.router import Moment, Observed, RequestFacts, TargetFacts, decide
from hitsend.serve.engine.targets import Targets
from hitsend.serve.engine.terms import kind_of
from hitsend.serve.usage.pricing import OF_BATCHES, REPEAT, Price, PriceBook, cost_microusd
from hitsend.serve.usage.traffic import Sent
from hitsend.settings import PooledSettings, PriceSettings, Settings
from hitsend.settings_upstreams import UpstreamBase

DAY_S = 86_400
NO_MODEL = "none"


class NamedEngine(msgspec.Struct, frozen=True):
    """An engine as the settings name it. `context`: tokens of prompt and answer, where they say it."""

    name: str
    is_local: bool
    context: int | None = None


class Speed(msgspec.Struct, frozen=True):
    """Medians of one model, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def wall_ms(self, completion_tokens: int) -> float:
        """For an answer of that length."""
        return self.ttft_ms + max(0, completion_tokens - 1) * self.tpot_ms


class Side(msgspec.Struct, frozen=True):
    """As it was, or as it would be. Times are medians over `num_timed` requests."""

    cost_microusd: int
    ttft_ms: float | None
    wall_ms: float | None
    num_timed: int
    by_model: dict[str, int]


class WhatIf(msgspec.Struct, frozen=True):
    """`num_routed` of the requests would go to a route; the others stay where they were."""

    num_requests: int
    num_routed: int
    before: Side
    after: Side


def what_if(sent: Sequence[Sent], settings: Settings, route: str | None = None) -> WhatIf:
    """`route`: the one that gets what was sent to no route of the table; None: that stays. Raises ConfigError."""
    engines = engines_of(settings)
    targets = Targets(settings.routes, engines)
    if route is not None and route not in targets.routes:
        raise ConfigError(f"routes: there is no {route!r}, only {', '.join(targets.routes) or 'none'}")
    prices = _Prices(settings, engines)
    speeds = speeds_of(sent)
    replay = _Replay(targets, engines, prices, speeds)
    after = [replay.model(one, one.route if one.route in targets.routes else route) for one in sent]
    costs = [
        one.cost_microusd
        if model is None or one.price_id == REPEAT  # what was paid for before would be so again
        else cost_microusd(prices.of(model, one.created_at, is_batch=_is_batch(one)), _usage(one, model))
        for one, model in zip(sent, after, strict=True)
    ]
    used = [one.model if model is None else model for one, model in zip(sent, after, strict=True)]
    timed = [
        (found.ttft_ms, found.wall_ms(one.completion_tokens))
        for one, model in zip(sent, used, strict=True)
        if (found := speeds.get(model)) is not None
    ]
    was = [(one.ttft_ms, one.wall_ms) for one in sent if one.ttft_ms is not None and one.wall_ms is not None]
    return WhatIf(
        num_requests=len(sent),
        num_routed=sum(model is not None for model in after),
        before=_side(sum(one.cost_microusd for one in sent), was, [one.model for one in sent]),
        after=_side(sum(costs), timed, used),
    )


def engines_of(settings: Settings) -> dict[str, NamedEngine]:
    """By served model, as far as the settings say it."""
    found: dict[str, NamedEngine] = {}
    if settings.engine.model != NO_MODEL:
        found[settings.engine.alias or Path(settings.engine.model).stem] = NamedEngine("embedded", is_local=True)
    for one in settings.engines:
        is_local = isinstance(one, PooledSettings)
        names = (one.aliases or (Path(one.model).stem,)) if isinstance(one, PooledSettings) else tuple(one.models)
        context = None if isinstance(one, PooledSettings) else one.context
        found |= dict.fromkeys(names, NamedEngine(one.name, is_local, context))
    for adapter in settings.adapters:
        found[adapter.name] = NamedEngine("embedded", is_local=True)
    return found


def speeds_of(sent: Sequence[Sent]) -> dict[str, Speed]:
    """Of every model of which something was timed."""
    times: dict[str, list[tuple[float, float]]] = {}
    for one in sent:
        if one.ttft_ms is not None and one.wall_ms is not None:
            gap = max(0.0, one.wall_ms - one.ttft_ms) / max(1, one.completion_tokens - 1)
            times.setdefault(one.model, []).append((one.ttft_ms, gap))
    return {
        model: Speed(median(first for first, _ in found), median(gap for _, gap in found))
        for model, found in times.items()
    }


class _Replay:
    """Decides for one request after another, as the server would have."""

    def __init__(
        self, targets: Targets, engines: Mapping[str, NamedEngine], prices: "_Prices", speeds: Mapping[str, Speed]
    ) -> None:
        self._targets = targets
        self._engines = engines
        self._prices = prices
        self._speeds = speeds

    def model(self, one: Sent, route: str | None) -> str | None:
        """The model that would answer; None: no route would be asked, or none of its engines has the context for it."""
        if route is None:
            return None
        rule, models = self._targets.routes[route], self._targets.models[route]
        found = {name: self._facts(one, route, name, models[name]) for name in rule.engines}
        moment = Moment(one.created_at, int(one.created_at % DAY_S) // 60, self._targets.rolled_back.get(route))
        order = decide(_asked(one), rule, found, moment).order
        if not order:
            return None
        name = order[0]
        speed = self._speeds.get(models[name])
        if speed is not None:
            self._targets.observe(route, name, Observed(one.created_at, is_ok=True, ttft_s=speed.ttft_ms / 1000))
        return models[name]

    def _facts(self, one: Sent, route: str, name: str, model: str) -> TargetFacts:
        engine, price = self._engines[model], self._prices.of(model, one.created_at, is_batch=_is_batch(one))
        is_too_long = engine.context is not None and one.prompt_tokens + one.completion_tokens > engine.context
        return TargetFacts(
            name,
            model,
            engine.name,
            unable=f"context {engine.context}" if is_too_long else None,
            input_picousd=price.input_picousd,
            output_picousd=price.output_picousd,
            observed=self._targets.observed(route, name),
        )


class _Prices:
    """As they were: of dated prices those of the day."""

    def __init__(self, settings: Settings, engines: Mapping[str, NamedEngine]) -> None:
        upstreams = [one for one in settings.engines if isinstance(one, UpstreamBase)]
        own = [
            PriceSettings(
                name,
                one.prices.input,
                one.prices.output,
                one.prices.cached_input,
                batch_discount=one.prices.batch_discount,
            )
            for one in upstreams
            if one.prices is not None
            for name in one.models
        ]
        elsewhere = {name: (kind_of(one), there) for one in upstreams for name, there in one.models.items()}
        book = PriceBook((*own, *settings.prices), elsewhere=elsewhere)
        self._books = {False: book, True: book.of_batches()}
        self._engines = engines
        for model, one in engines.items():
            book.find(model, is_local=one.is_local)
        self._known: dict[tuple[str, date, bool], Price] = {}

    def of(self, model: str, at: float, *, is_batch: bool) -> Price:
        """On the UTC day of that moment; today's where no list is as old."""
        key = model, datetime.fromtimestamp(at, UTC).date(), is_batch
        if key not in self._known:
            book, is_local = self._books[is_batch], self._engines[model].is_local
            try:
                found = book.find(model, is_local=is_local, on=key[1])
            except ConfigError:
                found = book.find(model, is_local=is_local)
            self._known[key] = found
        return self._known[key]


def _is_batch(one: Sent) -> bool:
    return one.price_id.endswith(OF_BATCHES)


def _asked(one: Sent) -> RequestFacts:
    """What the rule knew of it, or would have known as far as the row tells."""
    said = one.facts or {}
    return RequestFacts(
        one.request_id,
        said.get("prompt_tokens", one.prompt_tokens),
        said.get("output_tokens", one.completion_tokens),
        said.get("wants_thinking", one.wants_thinking),
        said.get("budget_left"),
    )


def _usage(one: Sent, model: str) -> Usage:
    return Usage(one.prompt_tokens, one.completion_tokens, one.cached_tokens if model == one.model else 0)


def _side(cost: int, times: Sequence[tuple[float, float]], models: Sequence[str]) -> Side:
    counts: dict[str, int] = {}
    for model in models:
        counts[model] = counts.get(model, 0) + 1
    return Side(
        cost_microusd=cost,
        ttft_ms=median(first for first, _ in times) if times else None,
        wall_ms=median(wall for _, wall in times) if times else None,
        num_timed=len(times),
        by_model=counts,
    )
