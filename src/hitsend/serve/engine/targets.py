"""What a route's names mean, and what was seen of each.

Enters: `[[routes]]` and the engines by the models that they serve; later how each answer went. Leaves: `Targets`, with
the last answers of every target of every route. Always true: a route's name is nobody else's; every name in it is a
served model, or an engine that serves exactly one; figures are this process's own and bounded; a canary that was rolled
back stays so until the server is started again. Next: `../routed.py`.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.router import Observed, canary_fault, error_share, minutes_of, ttft_s
from hitsend.settings import RouteSettings

KEPT = 200
"""Answers per target that are remembered."""


class Named(Protocol):
    """An engine, as far as a route knows it."""

    @property
    def name(self) -> str: ...  # noqa: D102  # as `Engine.name`


class ShadowFigures:
    """What a route's shadow came to; what was skipped was never sent. Costs in micro-USD, times in seconds, of those
    that were compared."""

    def __init__(self) -> None:
        self.num_copied = self.num_skipped = self.num_failed = self.num_compared = self.num_same = 0
        self.shadow_microusd = self.answer_microusd = 0
        self.shadow_s = self.answer_s = 0.0

    def shown(self) -> dict[str, Any]:
        """For `/inspect/state`."""
        return dict(vars(self))


class Copied(Protocol):
    """What came of a copy; `../aside.py`."""

    @property
    def text(self) -> str: ...  # noqa: D102  # as there
    @property
    def cost_microusd(self) -> int: ...  # noqa: D102
    @property
    def wall_s(self) -> float: ...  # noqa: D102
    @property
    def error(self) -> str | None: ...  # noqa: D102
    @property
    def is_refused(self) -> bool: ...  # noqa: D102


class Comparison:
    """One answer beside its copy's, whichever is there first."""

    def __init__(self, figures: ShadowFigures) -> None:
        self.figures = figures
        self._answer: tuple[str, int, float] | None = None
        self._copy: Copied | None = None

    def answered(self, text: str, cost_microusd: int, wall_s: float) -> None:
        """The client has the answer."""
        self._answer = (text, cost_microusd, wall_s)
        self._compare()

    def copied(self, copy: Copied) -> None:
        """The shadow is done."""
        if copy.is_refused:
            self.figures.num_skipped += 1
            return
        self.figures.num_copied += 1
        self.figures.num_failed += copy.error is not None
        self.figures.shadow_microusd += copy.cost_microusd
        self._copy = copy if copy.error is None else None
        self._compare()

    def _compare(self) -> None:
        if self._answer is None or self._copy is None:
            return
        text, cost, wall_s = self._answer
        figures = self.figures
        figures.num_compared += 1
        figures.num_same += text == self._copy.text
        figures.answer_microusd += cost
        figures.answer_s += wall_s
        figures.shadow_s += self._copy.wall_s


class Targets:
    """All routes. `models`: route, then name in it, to served model."""

    def __init__(self, routes: tuple[RouteSettings, ...] = (), engines: Mapping[str, Named] | None = None) -> None:
        self.engines = engines or {}
        self.routes: dict[str, RouteSettings] = {}
        self.models: dict[str, dict[str, str]] = {}
        self.rolled_back: dict[str, str] = {}
        self.shadows: dict[str, ShadowFigures] = {}
        self._judged: dict[tuple[str, str], list[int]] = {}
        self._observed: dict[tuple[str, str], deque[Observed]] = {}
        for route in routes:
            self._add(route)

    def models_of(self, route: str) -> tuple[str, ...]:
        """The served models that may answer."""
        return tuple(self.models[route][name] for name in self.routes[route].engines)

    def observed(self, route: str, name: str) -> tuple[Observed, ...]:
        """The last answers, oldest first."""
        return tuple(self._observed.get((route, name), ()))

    def observe(self, route: str, name: str, seen: Observed) -> str | None:
        """One more. Returns why the canary is rolled back, where this was what it took."""
        self._observed.setdefault((route, name), deque(maxlen=KEPT)).append(seen)
        rule = self.routes[route]
        if rule.strategy != "canary" or route in self.rolled_back:
            return None
        stable, canary = (self.observed(route, one) for one in rule.engines[:2])
        fault = canary_fault(rule.canary, stable, canary)
        if fault is not None:
            self.rolled_back[route] = fault
        return fault

    def judged(self, route: str, name: str, *, is_accepted: bool) -> None:
        """A cascade's draft was."""
        self._judged.setdefault((route, name), [0, 0])[is_accepted] += 1

    def shown(self, model: str) -> dict[str, Any]:
        """What `/v1/models` adds."""
        route = self.routes.get(model)
        return {} if route is None else {"route": route.strategy}

    def state(self) -> dict[str, Any]:
        """For `/inspect/state`."""
        return {
            name: {
                "strategy": route.strategy,
                "rolled_back": self.rolled_back.get(name),
                "engines": [self._state(name, one) for one in route.engines],
                "shadow": self.shadows[name].shown() if route.shadow is not None else None,
            }
            for name, route in self.routes.items()
        }

    def _state(self, route: str, name: str) -> dict[str, Any]:
        seen = self.observed(route, name)
        first = ttft_s(seen)
        return {
            "name": name,
            "model": self.models[route][name],
            "num_observed": len(seen),
            "error_share": error_share(seen),
            "ttft_ms": None if first is None else round(first * 1000, 3),
            "num_accepted": self._judged.get((route, name), (0, 0))[1],
            "num_rejected": self._judged.get((route, name), (0, 0))[0],
        }

    def _add(self, route: RouteSettings) -> None:
        where = f"routes[{route.model}]"
        if not route.model or route.model in self.engines or route.model in self.routes:
            raise ConfigError(f"routes.model: {route.model!r} is empty, or the name of a model or another route")
        if not route.engines or len(set(route.engines)) < len(route.engines):
            raise ConfigError(f"{where}.engines: expected at least one name, each of them once")
        named = [*route.engines, *(one for one in (route.shadow, route.cascade.judge) if one is not None)]
        self.models[route.model] = {name: self._model(name, where) for name in named}
        models = [self.models[route.model][name] for name in route.engines]
        if twice := next((one for one in models if models.count(one) > 1), None):
            raise ConfigError(f"{where}.engines: {twice} stands there twice, once by its engine's name")
        _check(route, where)
        self.routes[route.model] = route
        self.shadows[route.model] = ShadowFigures()

    def _model(self, name: str, where: str) -> str:
        if name in self.engines:
            return name
        of_engine = [model for model, engine in self.engines.items() if engine.name == name]
        if len(of_engine) == 1:
            return of_engine[0]
        known = ", ".join(of_engine or self.engines)
        text = "serves several models, name one" if of_engine else "is no served model and no engine"
        raise ConfigError(f"{where}.engines: {name!r} {text}: {known}")


def _check(route: RouteSettings, where: str) -> None:
    """Raises ConfigError for what can't work."""
    named: dict[str, Iterable[str]] = {"weights": route.weights, "prompt_tokens": route.prompt_tokens}
    named |= {"budget_left": route.budget_left, "hours": route.hours}
    named |= {"thinking_engine": () if route.thinking_engine is None else (route.thinking_engine,)}
    for field, names in named.items():
        for name in names:
            if name not in route.engines:
                raise ConfigError(f"{where}.{field}: {name!r} is not in engines")
    for name, hours in route.hours.items():
        try:
            minutes_of(hours)
        except ValueError as error:
            raise ConfigError(f"{where}.hours.{name}: {error}") from error
    _check_number(route, where)


def _check_number(route: RouteSettings, where: str) -> None:
    """Of engines, and of a cascade's rules."""
    num, rule = len(route.engines), route.cascade
    if (route.strategy == "canary" and num != 2) or (route.strategy == "cascade" and num < 2):
        raise ConfigError(f"{where}.engines: canary is between two, the stable one first; a cascade needs two or more")
    rules = (rule.min_logprob, rule.regex, rule.schema, rule.judge, rule.code)
    if route.strategy == "cascade" and all(one is None for one in rules):
        raise ConfigError(f"{where}.cascade: set at least one of min_logprob, regex, schema, judge, code")
    try:
        re.compile(rule.regex or "")
    except re.error as error:
        raise ConfigError(f"{where}.cascade.regex: {error}") from error
