"""What /metrics says of upstreams and routes: real sockets, and the figures alone."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hitsend import settings
from hitsend.core import events as ev
from hitsend.core.route_events import Abandoned, Judged
from hitsend.serve.usage.elsewhere import (
    Course,
    Elsewhere,
    RouteNow,
    ServerNow,
    UpstreamCall,
    UpstreamNow,
    calls_of,
    course_of,
)
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.metrics import Metrics
from hitsend.settings_upstreams import VllmSettings, WorkersAISettings
from tests.mock_upstream import mock_upstream
from tests.routes.conftest import routed
from tests.routes.test_routed import cut_after_a_word, fails, says
from tests.upstream.conftest import gateway
from tests.upstream.workers_ai import ACCOUNT, KEY, Emulator

__all__ = ["routed"]


class Found(dict):
    """By name and label values, in any order."""

    def __getitem__(self, key):
        return super().__getitem__((key[0], *sorted(key[1:])))

    def __contains__(self, key):
        return super().__contains__((key[0], *sorted(key[1:])))


def samples(text):
    families = text_string_to_metric_families(text)
    found = Found()
    for family in families:
        for sample in family.samples:
            if "_bucket" not in sample.name and "_created" not in sample.name:
                found[(sample.name.removeprefix("hitsend_"), *sorted(sample.labels.values()))] = sample.value
    return found


def test_every_attempt_is_counted_by_how_it_ended():
    whole, half = ev.Streamed(2.0, 3.0, 9, 2, is_whole=True), ev.Streamed(2.0, 3.0, 9, 2, is_whole=False)
    events = [
        ev.Routed("a", "m", ""),
        *(ev.Sent(1.0, 1), ev.Answered(1.5, 503, "engine_unavailable", will_retry=True)),
        *(ev.Sent(1.6, 2), ev.Answered(1.7, 200, "ok"), ev.FirstToken(2.6, 0), half),
        ev.Routed("b", "m", ""),
        *(ev.Sent(4.0, 1), ev.Answered(4.1, 200, "ok"), whole),
        *(ev.Sent(5.0, 1),),
    ]
    for has_left, cut in ((False, "cut"), (True, "left")):
        found = calls_of(events, has_left=has_left)
        assert [(one.engine, one.outcome, one.will_retry) for one in found] == [
            ("a", "engine_unavailable", True),
            ("a", cut, False),
            ("b", "ok", False),
            ("b", "left", False),
        ]
        assert found[1].first_token_s == pytest.approx(1.0)
    assert calls_of([ev.Routed("embedded", "m", "")], has_left=False) == ()


def test_a_course_is_what_a_route_did_with_a_request():
    candidates = ({"name": "a"},)
    events = [
        ev.Routed("a", "m", "", route="auto", candidates=candidates),
        Judged(0.0, 1.0, "a", "m", False, {}),
        Abandoned(1.0, "a", "m", "rejected", ""),
        ev.Routed("b", "n", "", route="auto", attempt=2),
    ]
    assert course_of(events, is_ok=True) == Course("auto", "a", "b", (("a", "rejected"),), (("a", False),))
    assert course_of(events, is_ok=False).answered is None
    assert course_of([ev.Routed("a", "m", "")], is_ok=True) is None
    assert course_of([ev.Routed("a", "m", "given up", route="auto")], is_ok=True) is None, "a row's own record"


def test_processes_are_added_up_and_the_worst_breaker_counts():
    metrics = Metrics()
    one = ServerNow(0, 0, 1, 0.5, 3, 4, 0.5, 7)
    other = ServerNow(0, 2, 2)
    for _ in range(2):
        metrics.set_elsewhere(
            Elsewhere(
                (UpstreamNow("a", 1, 2.5, (one,)),), (RouteNow("r", 0.1, False, {"same": 2}),), (5_000_000, 10**10)
            ),
            Elsewhere((UpstreamNow("a", 2, 1.0, (other,)),), (RouteNow("r", 0.0, True, {"same": 1}),)),
        )
    found = samples(metrics.render().decode())
    assert found["upstream_in_flight", "a"] == 3
    assert found["upstream_retries_left", "a"] == 3.5
    assert found["upstream_breaker_state", "a", "0"] == 2
    assert found["upstream_breaker_openings_total", "a", "0"] == 3
    assert (found["upstream_waiting", "a", "0"], found["upstream_load_age_seconds", "a", "0"]) == (4, 0.5)
    assert found["upstream_preemptions_total", "a", "0"] == 7
    assert (found["route_canary_share", "r"], found["route_canary_rolled_back", "r"]) == (0, 1)
    assert found["route_shadow_copies_total", "r", "same"] == 3
    assert (found[("neurons_used",)], found[("neurons_left",)]) == (5, 9_995)
    metrics.set_elsewhere(Elsewhere((UpstreamNow("a", 0, 1.0, (other,)),)))
    assert ("upstream_waiting", "a", "0") not in samples(metrics.render().decode()), "unknown is not the last known"


def test_no_text_of_a_client_becomes_a_label():
    metrics = Metrics()
    metrics.observe_request(_figures(calls=(UpstreamCall("a", "ok"),), course=Course("auto", "a", "a")))
    names = {
        label
        for name in samples(metrics.render().decode())
        if name[0].startswith(("upstream", "route"))
        for label in name[1:]
    }
    assert names == {"a", "ok", "auto"}


def _figures(**fields):
    return RequestFigures(model="m", wall_s=1.0, **fields)


@pytest.mark.slow  # a server
async def test_a_route_over_upstreams_shows_what_was_chosen_given_up_and_cut(routed):
    engine = {"a": {"retry_share": 1.0, "breaker_failures": 6}}
    async with routed(of_engine=engine, shadow="b") as gate:
        await gate.asked("whole")
        assert (await gate.compared())["num_same"] == 1
        gate.a.script = fails("503 no")
        await gate.asked("falls")
        gate.a.script = cut_after_a_word
        await gate.asked("cut", stream=True)
        await gate.idle()
        found = samples(await gate.text("/metrics"))
        assert found["upstream_requests_total", "engine-a", "ok"] == 1
        assert found["upstream_requests_total", "engine-a", "engine_unavailable"] == 2
        assert found["upstream_requests_total", "engine-a", "cut"] == 1
        assert found["upstream_retries_total", "engine-a"] == 1
        assert found["upstream_first_token_seconds_count", "engine-a"] == 2
        assert found["upstream_in_flight", "engine-a"] == 0
        assert found["upstream_breaker_state", "engine-a", "0"] == 0
        assert found["route_chosen_total", "auto", "engine-a"] == 3
        assert found["route_answered_total", "auto", "engine-a"] == 1
        assert found["route_answered_total", "auto", "engine-b"] == 1
        assert found["route_given_up_total", "auto", "engine-a", "engine_unavailable"] == 1
        assert found["route_shadow_copies_total", "auto", "same"] >= 1
        gate.a.script = fails("500 no")
        for number in range(6):
            await gate.asked(f"r{number}")
        found = samples(await gate.text("/metrics"))
        assert found["upstream_breaker_state", "engine-a", "0"] == 2
        assert found["upstream_breaker_openings_total", "engine-a", "0"] == 1


@pytest.mark.slow  # a server
async def test_a_cascade_shows_its_verdicts(routed):
    cascade = settings.CascadeSettings(regex="Hello!")
    async with routed(strategy="cascade", cascade=cascade) as gate:
        await gate.asked("good")
        gate.a.script = says("Wrong")
        await gate.asked("bad")
        await gate.idle()
        found = samples(await gate.text("/metrics"))
        assert found["route_drafts_total", "auto", "engine-a", "accepted"] == 1
        assert found["route_drafts_total", "auto", "engine-a", "rejected"] == 1
        assert found["route_given_up_total", "auto", "engine-a", "rejected"] == 1


@pytest.mark.slow  # servers
async def test_what_a_server_says_of_itself_and_the_days_neurons(tmp_path, monkeypatch):
    monkeypatch.setenv("CF_TEST_TOKEN", KEY)
    async with mock_upstream() as mock:
        emulator = Emulator()

        async def script(call):
            if call.head.startswith("GET /metrics"):
                text = "vllm:num_requests_waiting 4\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"
                await call.answer("200 OK", (text + "vllm:num_preemptions_total 7\n").encode())
            else:
                await emulator(call)

        mock.script = script
        root = mock.url.removesuffix("/v1")
        vllm = VllmSettings(name="v", base_url=root, models={"near": "x"}, prices=settings.UpstreamPrices(1.0, 1.0))
        async with gateway(tmp_path / "v", mock, vllm) as gate:
            async with asyncio.timeout(20):
                while ("upstream_waiting", "v", "0") not in (found := samples(await gate.text("/metrics"))):
                    await asyncio.sleep(0.02)
            assert (found["upstream_waiting", "v", "0"], found["upstream_running", "v", "0"]) == (4, 3)
            assert (found["upstream_kv_use", "v", "0"], found["upstream_preemptions_total", "v", "0"]) == (0.5, 7)
            assert found["upstream_load_age_seconds", "v", "0"] >= 0
        models = {"near": "@cf/qwen/qwen3.8-27b"}
        there = WorkersAISettings(name="cf", base_url=root + ACCOUNT, models=models, api_key_env="CF_TEST_TOKEN")
        async with gateway(tmp_path / "cf", mock, there) as gate:
            assert (await gate.answer())[0] == 200
            await gate.idle()
            found = samples(await gate.text("/metrics"))
            assert found[("neurons_used",)] == pytest.approx(186.3635)
            assert found[("neurons_left",)] == pytest.approx(10_000 - 186.3635)
