"""The choice itself: no sockets, no server."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.router import (
    Moment,
    Observed,
    RequestFacts,
    TargetFacts,
    canary_fault,
    decide,
    is_within,
    share_of,
)
from hitsend.serve.engine.targets import Targets
from hitsend.settings import CanarySettings, CascadeSettings, RouteSettings
from hitsend.settings_source import load

NAMES = ("a", "b", "c")
STRATEGIES = (
    "fallback",
    "weighted",
    "cheapest",
    "fastest",
    "prompt_length",
    "thinking",
    "budget",
    "time_of_day",
    "canary",
    "cascade",
)


def route(strategy="fallback", **fields):
    return RouteSettings(**{"model": "auto", "engines": NAMES, "strategy": strategy} | fields)


def target(name, **fields):
    return TargetFacts(**{"name": name, "model": f"m-{name}", "engine": f"e-{name}"} | fields)


def facts(**fields):
    return RequestFacts(**{"request_id": "r", "prompt_tokens": 100, "output_tokens": 50} | fields)


def order(rule, given_facts=None, targets=None, **moment):
    found = {name: target(name) for name in rule.engines} | (targets or {})
    return decide(given_facts or facts(), rule, found, Moment(**{"now": 1000.0, "minute": 0} | moment)).order


observations = st.lists(
    st.builds(
        Observed,
        at=st.floats(0, 1000),
        is_ok=st.booleans(),
        ttft_s=st.none() | st.floats(0.001, 10),
    ),
    max_size=30,
).map(tuple)
targets_drawn = st.fixed_dictionaries(
    {
        name: st.builds(
            TargetFacts,
            name=st.just(name),
            model=st.just(f"m-{name}"),
            engine=st.just(f"e-{name}"),
            is_ready=st.booleans(),
            unable=st.none() | st.just("too long"),
            input_picousd=st.integers(0, 10**9),
            output_picousd=st.integers(0, 10**9),
            observed=observations,
        )
        for name in NAMES
    }
)
facts_drawn = st.builds(
    RequestFacts,
    request_id=st.text(min_size=1, max_size=20),
    prompt_tokens=st.integers(0, 10**6),
    output_tokens=st.integers(0, 10**5),
    wants_thinking=st.booleans(),
    budget_left=st.none() | st.floats(0, 1),
)
moments = st.builds(
    Moment, now=st.floats(1000, 2000), minute=st.integers(0, 1439), rolled_back=st.none() | st.just("slow")
)
tables = st.sampled_from(STRATEGIES).map(
    lambda strategy: route(
        strategy,
        engines=NAMES[:2] if strategy == "canary" else NAMES,
        weights={"a": 0.0, "b": 3.0},
        prompt_tokens={"a": 10, "b": 1000},
        budget_left={"a": 0.5, "b": 0.2},
        hours={"a": "22:00-06:00"},
    )
)


@settings(max_examples=60)
@given(tables, facts_drawn, targets_drawn, moments)
def test_every_engine_that_can_is_in_the_order_once_and_no_other(rule, asked, targets, moment):
    decision = decide(asked, rule, targets, moment)
    able = [name for name in rule.engines if targets[name].unable is None]
    assert sorted(decision.order) == sorted(able)
    readiness = [targets[name].is_ready for name in decision.order]
    assert readiness == sorted(readiness, reverse=True)
    assert decision.reason
    assert [one.name for one in decision.candidates] == list(rule.engines)
    assert decide(asked, rule, targets, moment) == decision


@settings(max_examples=40)
@given(facts_drawn, targets_drawn, moments)
def test_none_that_can_and_is_there_is_cheaper_than_the_cheapest(asked, targets, moment):
    rule = route("cheapest")
    decision = decide(asked, rule, targets, moment)
    costs = {one.name: one.cost_microusd for one in decision.candidates}
    ready = [name for name in decision.order if targets[name].is_ready]
    if ready:
        assert costs[ready[0]] == min(costs[name] for name in ready)


@pytest.mark.parametrize("weights", [{"a": 9.0, "b": 1.0, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": 2.0}])
def test_shares_over_many_ids_are_the_weights(weights):
    rule = route("weighted", weights=weights)
    seen = Counter(order(rule, facts(request_id=f"req_{number}"))[0] for number in range(10_000))
    for name, weight in weights.items():
        assert seen[name] / 10_000 == pytest.approx(weight / sum(weights.values()), abs=0.02)


def test_a_share_is_the_requests_own():
    assert share_of("x", "auto") == share_of("x", "auto")
    assert share_of("x", "auto") != share_of("x", "other")


def test_the_fastest_of_late_and_what_is_not_measured_first():
    fast, slow = ((Observed(990.0, is_ok=True, ttft_s=ttft),) for ttft in (0.1, 0.5))
    targets = {"a": target("a", observed=slow), "b": target("b", observed=fast)}
    assert order(route("fastest"), targets=targets) == ("c", "b", "a")
    targets["c"] = target("c", observed=(Observed(10.0, is_ok=True, ttft_s=0.01),))  # long ago: measured again
    assert order(route("fastest"), targets=targets)[0] == "c"
    targets["c"] = target("c", observed=(Observed(999.0, is_ok=False),))
    assert order(route("fastest"), targets=targets) == ("b", "a", "c"), "who only fails isn't asked to be measured"
    targets["c"] = target("c", observed=(Observed(10.0, is_ok=False),))
    assert order(route("fastest"), targets=targets)[0] == "c", "that is forgotten"


@pytest.mark.parametrize(("tokens", "first"), [(10, "a"), (11, "b"), (1001, "c")])
def test_by_prompt_length(tokens, first):
    rule = route("prompt_length", prompt_tokens={"a": 10, "b": 1000})
    assert order(rule, facts(prompt_tokens=tokens))[0] == first


@pytest.mark.parametrize(("wants", "first"), [(True, "c"), (False, "a")])
def test_by_thinking(wants, first):
    assert order(route("thinking"), facts(wants_thinking=wants))[0] == first
    assert order(route("thinking", thinking_engine="b"), facts(wants_thinking=wants))[0] == ("b" if wants else "a")


@pytest.mark.parametrize(("left", "first"), [(None, "a"), (0.9, "a"), (0.3, "b"), (0.0, "c")])
def test_by_budget(left, first):
    rule = route("budget", budget_left={"a": 0.5, "b": 0.2})
    assert order(rule, facts(budget_left=left))[0] == first


@pytest.mark.parametrize(("minute", "first"), [(23 * 60, "a"), (5 * 60 + 59, "a"), (6 * 60, "b"), (12 * 60, "b")])
def test_by_time_of_day(minute, first):
    assert order(route("time_of_day", hours={"a": "22:00-06:00"}), minute=minute)[0] == first


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_hours_and_the_rest_of_the_day_share_no_minute(minute, first, last):
    def clock(at):
        return f"{at // 60:02}:{at % 60:02}"

    mine = is_within(minute, f"{clock(first)}-{clock(last)}")
    if first == last:
        assert mine
    else:
        assert mine is not is_within(minute, f"{clock(last)}-{clock(first)}")


def seen(num, *, failed=0, ttft_s=0.1):
    return tuple(Observed(1.0, number >= failed, ttft_s if number >= failed else None) for number in range(num))


def test_a_canary_is_judged_by_errors_and_time_once_there_is_enough_to_tell():
    rule = CanarySettings(least=20)
    assert canary_fault(rule, seen(20), seen(20)) is None
    assert canary_fault(rule, seen(20), seen(19, failed=19)) is None
    assert canary_fault(rule, seen(19), seen(20, failed=20)) is None
    assert "failed" in canary_fault(rule, seen(20), seen(20, failed=2))
    assert canary_fault(rule, seen(20, failed=2), seen(20, failed=2)) is None
    assert "first token" in canary_fault(rule, seen(20), seen(20, ttft_s=0.2))
    assert canary_fault(rule, seen(20), seen(20, ttft_s=0.14)) is None


class Engine:
    """As much of one as a name needs."""

    def __init__(self, name):
        self.name = name


ENGINES = {"a": Engine("e-a"), "b": Engine("e-b"), "c": Engine("both"), "d": Engine("both")}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "a"}, "name of a model"),
        ({"engines": ()}, "at least one"),
        ({"engines": ("a", "a")}, "at least one"),
        ({"engines": ("e-a", "a")}, "twice"),
        ({"engines": ("nobody",)}, "no served model"),
        ({"engines": ("both",)}, "several models"),
        ({"engines": ("a", "b"), "weights": {"z": 1.0}}, "not in engines"),
        ({"engines": ("a", "b"), "hours": {"a": "9-17"}}, "HH:MM"),
        ({"engines": ("a",), "strategy": "canary"}, "between two"),
        ({"engines": ("a", "b"), "strategy": "cascade"}, "at least one of"),
        ({"engines": ("a", "b"), "cascade": CascadeSettings(regex="(")}, "regex"),
        ({"engines": ("a",), "shadow": "nobody"}, "no served model"),
    ],
)
def test_a_route_that_cannot_work_stops_the_start(fields, said):
    with pytest.raises(ConfigError, match=said):
        Targets((RouteSettings(**{"model": "auto", "engines": ("a",)} | fields),), ENGINES)


def test_names_are_served_models_or_engines_that_serve_one():
    targets = Targets((RouteSettings(model="auto", engines=("e-a", "b", "c")),), ENGINES)
    assert targets.models["auto"] == {"e-a": "a", "b": "b", "c": "c"}


def test_the_settings_file_has_them_as_tables(tmp_path):
    file = tmp_path / "hitsend.toml"
    file.write_text(
        '[[routes]]\nmodel = "auto"\nengines = ["a", "b"]\nstrategy = "weighted"\nweights = { a = 9, b = 1 }\n'
        "cascade = { min_logprob = -0.4 }\n"
    )
    (found,) = load(file).settings.routes
    assert (found.weights, found.cascade.min_logprob) == ({"a": 9, "b": 1}, -0.4)
