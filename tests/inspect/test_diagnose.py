"""Every rule has a recorded window that it holds for, and others that it doesn't; thresholds say where they come from.

`recorded/hitsend-*.txt` were kept by `python -m tests.inspect.induced --record` from the real engine;
those of other servers are written with the names in their documentation.
"""

import re
from pathlib import Path

import msgspec
import pytest

from hitsend.cli.diagnose import parsed
from hitsend.inspect.baseline import Baseline
from hitsend.inspect.diagnose import diagnose
from hitsend.inspect.readings import Figures, figures_of
from hitsend.inspect.rules import RULES
from hitsend.inspect.scrapes import Sample, Scrape, Window
from tests.inspect.induced import BETWEEN, CROWDED, SCENARIOS
from tests.inspect.induced import OTHERS as OTHERS_USED

RECORDED = Path(__file__).parent / "recorded"
OTHERS = {
    "vllm-healthy": "healthy",
    "vllm-kv-full": "kv_memory_bound",
    "vllm-queue": "queue_bound",
    "vllm-preempting": "preemption",
    "vllm-long-prompts": "long_prefills",
    "vllm-long-answers-slow": "decode_bound",
    "vllm-prompts": "prefill_bound",
    "vllm-cache-missed": "prefix_cache_missing",
    "sglang-healthy": "healthy",
    "sglang-queue": "queue_bound",
    "sglang-retracting": "preemption",
    "sglang-kv-full": "kv_memory_bound",
    "sglang-prompts": "prefill_bound",
    "sglang-wide": "decode_bound",
    "llama-healthy": "healthy",
    "llama-idle": "idle",
    "llama-queue": "queue_bound",
    "llama-prompts": "prefill_bound",
    "llama-slow-answers": "decode_bound",
}
OWN = {f"hitsend-{scenario.name}": scenario.expected for scenario in SCENARIOS}
EXPECTED = OWN | OTHERS
STILL_THERE = {"too_little", "idle", "healthy", "unclear"}


def figures(name):
    before, after = (parsed(text, name) for text in (RECORDED / f"{name}.txt").read_text().split(BETWEEN))
    clocks = [scrape.total("hitsend_scraped_at_seconds") for scrape in (before, after)]
    found = figures_of(Window([before, after], 10.0 if None in clocks else clocks[1] - clocks[0]))
    assert found is not None
    return found


def crowded(name):
    """Whether others computed on the machine while it was recorded: then threads did wait, whatever else was made."""
    head = (RECORDED / f"{name}.txt").read_text().split("\n", 1)[0]
    return head.startswith(OTHERS_USED) and float(head.removeprefix(OTHERS_USED)) > CROWDED


def test_every_recording_is_expected_and_every_expectation_is_recorded():
    assert {path.stem for path in RECORDED.glob("*.txt")} == set(EXPECTED)
    assert len(set(OWN.values()) - STILL_THERE) >= 12


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_the_bottleneck_is_named(name, expected):
    now = figures(name)
    if crowded(name) and expected != "engine_starved":
        now = msgspec.structs.replace(now, threads_waiting=0.1)
    found = diagnose(now)
    assert found.verdict == expected, [finding.name for finding in found.findings]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_holds_for_one_recording_and_not_for_a_healthy_one(rule):
    held = {name for name in EXPECTED if rule(figures(name), None) is not None}
    assert any(EXPECTED[name] == rule.__name__ for name in held), held
    healthy = {name for name in held if EXPECTED[name] in STILL_THERE}
    if rule.__name__ == "engine_starved":
        healthy = {name for name in healthy if not crowded(name)}
        assert not any(rule(msgspec.structs.replace(figures(name), threads_waiting=0.1), None) for name in EXPECTED)
    assert not healthy


@pytest.mark.parametrize("name", [name for name, verdict in EXPECTED.items() if verdict not in STILL_THERE])
def test_a_finding_rests_on_numbers_that_passed_their_thresholds(name):
    for finding in diagnose(figures(name)).findings:
        passed = [each for each in finding.evidence if each.relation]
        assert passed
        for each in passed:
            assert each.source == "default"
            assert each.value >= each.threshold if each.relation == ">=" else each.value <= each.threshold
        assert finding.change
        assert finding.effect
        assert finding.measure


def test_nothing_known_gives_nothing():
    nothing = Figures(server="vllm", window_s=10.0)
    assert all(rule(nothing, None) is None for rule in RULES)
    assert diagnose(nothing).verdict == "idle"


def test_one_request_is_too_little_to_tell():
    now = Figures(server="hitsend", window_s=10.0, requests=1.0, output_tokens=3.0, tpot_s=5.0, running=0.0)
    assert diagnose(now).verdict == "too_little"


def test_missed_objectives_without_a_reason_are_unclear():
    now = Figures(server="hitsend", window_s=10.0, requests=50.0, output_tokens=900.0, good_share=0.5, busy=0.2)
    assert diagnose(now).verdict == "unclear"
    assert diagnose(msgspec.structs.replace(now, good_share=0.99)).verdict == "healthy"


BASE = Baseline(source="load.json", most_per_s=100.0, tested=8.0, ttft_s=0.2, tpot_s=0.01, stall=2.0, cached_share=0.6)


def test_a_load_test_moves_the_thresholds():
    now = figures("vllm-healthy")
    assert diagnose(now).verdict == "healthy"
    (finding,) = [each for each in diagnose(now, BASE).findings if each.name == "decode_bound"]
    by_name = {each.name: each for each in finding.evidence}
    assert by_name["mean time per output token"].threshold == pytest.approx(0.015)
    assert by_name["output"].threshold == pytest.approx(80.0)
    assert "load.json" in by_name["output"].source


def test_hits_that_a_load_test_had_are_missed():
    now = Figures(server="hitsend", window_s=10.0, requests=20.0, prompt_tokens=9000.0, cached_tokens=300.0)
    assert diagnose(now).verdict == "healthy"
    assert diagnose(now, BASE).verdict == "prefix_cache_missing"
    assert diagnose(msgspec.structs.replace(now, cached_tokens=4000.0), BASE).verdict == "healthy"


def test_objectives_of_a_load_test_go_before_its_medians():
    now = figures("vllm-healthy")
    strict = msgspec.structs.replace(BASE, slo_tpot_s=0.5, most_per_s=None)
    assert diagnose(now, strict).verdict == "healthy"


def scrape(**values):
    return Scrape([Sample(name, {}, value) for name, value in values.items()])


def test_a_counter_that_began_again_counts_from_there():
    window = Window([scrape(a_total=90.0), scrape(a_total=7.0)], 1.0)
    assert window.grew("a_total") == 7.0
    assert window.grew("b_total") is None
    assert Window([scrape(), scrape(a_total=7.0)], 1.0).grew("a_total") == 7.0


def test_gauges_are_averaged_and_what_is_no_number_is_left_out():
    looks = [scrape(g=1.0), scrape(g=float("nan")), scrape(g=3.0)]
    assert Window(looks, 1.0).mean("g") == 2.0


def test_quantiles_lie_within_their_bucket():
    def buckets(*counts):
        bounds = ("0.1", "0.2", "+Inf")
        return Scrape([Sample("h_bucket", {"le": le}, count) for le, count in zip(bounds, counts, strict=True)])

    window = Window([buckets(5, 5, 5), buckets(5, 15, 15)], 1.0)
    assert window.quantile(0.5, "h") == pytest.approx(0.15)
    assert Window([buckets(0, 0, 0), buckets(0, 0, 4)], 1.0).quantile(0.99, "h") == pytest.approx(0.2)
    assert Window([buckets(5, 5, 5), buckets(5, 5, 5)], 1.0).quantile(0.5, "h") is None


def test_names_with_underscores_are_the_same_names():
    text = (RECORDED / "vllm-queue.txt").read_text().replace("vllm:", "vllm_")
    before, after = (parsed(part, "text") for part in text.split(BETWEEN))
    assert figures_of(Window([before, after], 10.0)) == figures("vllm-queue")


def test_every_rule_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs/diagnose.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {rule.__name__ for rule in RULES}
