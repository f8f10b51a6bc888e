"""plan/roofline.py, terms.py, fit.py, speed.py, speed_check.py, calibrate.py: known points, measured rows, any load."""

import json
import math
import re
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.plan.calibrate import Point, factors_of, moved, read_points
from hitsend.plan.compare import Goal, cheapest_rental, compare, layouts
from hitsend.plan.constants import speed_facts
from hitsend.plan.fit import fit_terms, predicted
from hitsend.plan.hardware import find_gpu
from hitsend.plan.measured import read_measured
from hitsend.plan.roofline import Layout, floor_s, ridge_point, shape_of, touched_share
from hitsend.plan.speed import (
    SpeedQuestion,
    expected_tokens,
    plan_speed,
    speculation_factor,
)
from hitsend.plan.speed_check import coverage, judge, rows_of, score
from hitsend.plan.speed_fit import fit
from tests.plan.asked import DATA, FACTS, answer, known

SAMPLE = DATA / "speed_sample.csv"
H100, H200 = find_gpu("H100", FACTS), find_gpu("H200", FACTS)


def ask(model="Llama-3.1-70B", gpu=H200, **more):
    return SpeedQuestion(checkpoint=known(model), gpu=gpu, **{"weights": "fp8"} | more)


@pytest.fixture(scope="module")
def measured():
    rows, refused = rows_of(read_measured(SAMPLE), FACTS)
    assert refused == []
    return rows


def test_held_out_rows_are_planned_within_the_limits(measured):
    judged = judge(measured, speed_facts())
    assert all(row.is_held_out for row in judged)
    assert sum(row.beats_floor for row in judged) == 0
    found = {one.what: one for one in score(judged, speed_facts().published)}
    assert found["TPOT"].rows > 200
    assert found["TPOT"].median <= 0.12
    assert found["TPOT, calibrated by one point"].median <= 0.08
    assert found["TTFT"].median <= 0.25
    near = "calibrated by one within two octaves of its load"
    assert found[f"TPOT, {near}"].median <= 0.08
    assert found[f"TTFT, {near}"].median < 0.75 * found["TTFT"].median
    assert 0.7 <= coverage(measured, judged, speed_facts()) <= 0.9


def test_a_fit_sees_only_its_half_of_the_rows(measured):
    """The sample is all of the judged half, so there is nothing to fit to."""
    assert fit(measured, source="", as_of="").groups == {}


def test_constants_are_found_again():
    rows = [{"a": float(i % 7 + 1), "b": float(i % 5), "c": 1.0} for i in range(70)]
    times = [2 * row["a"] + 0.5 * row["b"] for row in rows]
    # one measurement in ten is three times too long
    broken = [value * (3 if number % 10 == 0 else 1) for number, value in enumerate(times)]
    found = fit_terms(rows, broken)
    assert (
        statistics.median(abs(predicted(row, found) / time - 1) for row, time in zip(rows, times, strict=True)) < 0.02
    )
    assert all(constant >= 0 for constant in found.values())


def test_ridge_points_of_the_literature():
    names = {"H100_SXM": "H100", "H200": "H200", "L4": "L4", "RTX4090": "4090", "MI300X": "MI300X"}
    for name, gpu in names.items():
        card = find_gpu(gpu, FACTS)
        ridge = float(ridge_point(card.bf16_flops or 0, card.bandwidth_bytes_per_s))
        assert ridge == pytest.approx(answer("ridge")[name], rel=0.01)


def test_the_weight_floor_of_a_70b_model():
    told = answer("decode-floor-70b")
    floor = floor_s(shape_of(known("Llama-3.1-70B"), "fp8"), Layout(), H200) * 1e3
    assert floor == pytest.approx(told["ms"], rel=0.01)
    assert floor < min(told["measured_trtllm_c4_ms"], told["measured_vllm_c4_ms"])


@pytest.mark.parametrize("name", list(answer("spec-expected")))
def test_expected_tokens_of_a_pass(name):
    accept, drafts = (float(part.split("=")[1]) for part in name.split(","))
    assert expected_tokens(accept, int(drafts)) == pytest.approx(answer("spec-expected")[name], abs=1e-4)


@pytest.mark.parametrize("name", list(answer("spec-speedup")))
def test_speculation_with_free_passes(name):
    accept, drafts, cost = (float(part.split("=")[1]) for part in name.split(","))
    assert speculation_factor(accept, int(drafts), cost) == pytest.approx(answer("spec-speedup")[name], abs=1e-4)


def test_multi_token_prediction_of_one_draft():
    low, high = answer("spec-dsv3-mtp")["tokens_per_step"]
    assert (expected_tokens(0.85, 1), expected_tokens(0.9, 1)) == (pytest.approx(low), pytest.approx(high))


def test_speculation_helps_alone_and_costs_where_computing_bounds():
    """Measured: 1.5 x at one request a second, 0.71 x at many (worked example spec-vllm-highqps)."""

    def gain(batch):
        plain, drafted = (plan_speed(ask(layout=Layout(tp=4), batch=batch, drafts=n, accept=0.5)) for n in (0, 4))
        return plain.tpot_ms.value / drafted.tpot_ms.value

    assert gain(1) > 1.4
    assert gain(512) < gain(1) * 0.8


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 200),
    entry=st.integers(16, 16_000),
    leave=st.integers(2, 4000),
    tp=st.sampled_from((1, 2, 4, 8)),
    model=st.sampled_from(("Llama-3.1-8B", "gpt-oss-120b", "Qwen3.8-27B")),
)
def test_more_work_never_takes_less_time(batch, entry, leave, tp, model):
    question = ask(model, weights=None if model == "gpt-oss-120b" else "fp8", layout=Layout(tp=tp))
    question = msgspec.structs.replace(question, batch=batch, input=entry, output=leave)
    plan = plan_speed(question)
    assert plan.tpot_ms.value >= plan.floor_ms
    assert plan.tpot_ms.low <= plan.tpot_ms.value <= plan.tpot_ms.high
    more = plan_speed(msgspec.structs.replace(question, batch=batch + 1))
    assert more.tpot_ms.value >= plan.tpot_ms.value - 1e-9
    hit = plan_speed(msgspec.structs.replace(question, prefix_hit=0.5))
    assert hit.tpot_ms.value <= plan.tpot_ms.value + 1e-9
    if plan.ttft_ms is not None and hit.ttft_ms is not None:
        assert hit.ttft_ms.value <= plan.ttft_ms.value + 1e-9
    if not plan.queues and not more.queues and plan.ttft_ms is not None and more.ttft_ms is not None:
        assert more.ttft_ms.value >= plan.ttft_ms.value


@pytest.mark.parametrize(
    ("gpu", "weights", "tokens_per_s"),
    [
        ("3090", "gguf:Q4_K_M", 111.74),
        ("3090", "bf16", 46.51),
        ("4090", "gguf:Q4_K_M", 127.74),
        ("4090", "bf16", 54.34),
    ],
)
def test_an_engine_that_was_never_fitted(gpu, weights, tokens_per_s):
    """llama.cpp, Llama-3-8B, one sequence (XiongjieDai/GPU-Benchmarks-on-LLM-Inference at aa72e0e)."""
    card = find_gpu(gpu, FACTS)
    plan = plan_speed(ask("Llama-3.1-8B", card, engine="llama.cpp", weights=weights, input=1, output=1024))
    assert not plan.is_fitted
    assert plan.tpot_ms.low < 1000 / tokens_per_s < plan.tpot_ms.high
    assert plan.tpot_ms.value == pytest.approx(1000 / tokens_per_s, rel=0.2)


def test_what_queues_gets_no_first_token():
    plan = plan_speed(ask(batch=64, input=8192, output=1024))
    assert plan.queues
    assert plan.ttft_ms is None
    assert plan.running == plan.capacity < 64


def test_experts_are_read_once_each():
    shape = shape_of(known("gpt-oss-120b"), None)
    assert touched_share(shape, 1) == pytest.approx(4 / 128)
    assert touched_share(shape, 10_000) == pytest.approx(1)
    assert touched_share(shape_of(known("Llama-3.1-8B"), None), 64) == 0


def test_one_measurement_moves_what_dominates_it():
    terms = {"big": 9.0, "small": 1.0}
    factors = moved(terms, {}, 20.0, noise=0.02)
    assert factors["big"] > factors["small"] > 1
    assert predicted(terms, factors) == pytest.approx(20, rel=0.03)
    assert moved(terms, {}, 10.0, noise=0.02) == pytest.approx({"big": 1.0, "small": 1.0})
    assert min(moved(terms, {}, 0.001, noise=0.02).values()) >= 0.1


def test_a_load_result_calibrates(tmp_path):
    level = {
        "mode": "closed", "concurrency": 8, "in_flight_mean": 7.9, "input_tokens_mean": 1000.0,
        "output_tokens_mean": 200.0, "cached_tokens_mean": 0.0, "is_growing": False,
        "ttft_ms": {"n": 9, "mean": 90.0, "p50": 88.0}, "tpot_ms": {"n": 9, "mean": 31.0, "p50": 30.0},
    }  # fmt: skip
    empty = level | {"tpot_ms": None}
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"kind": "hitsend.load", "version": 1, "targets": [{"levels": [level, empty]}]}))
    points = read_points(file)
    assert points == [Point(concurrency=7.9, input=1000, output=200, cached=0, ttft_ms=88, tpot_ms=30)]
    question = ask(batch=8, input=1000, output=200)
    plan = plan_speed(question, factors_of(question, points))
    assert plan.tpot_ms.value == pytest.approx(30, rel=0.05)
    file.write_text(json.dumps({"kind": "hitsend.load", "targets": [{"levels": [empty]}]}))
    with pytest.raises(ConfigError, match="no level"):
        read_points(file)


def test_copies_share_the_batch_and_stages_share_the_layers():
    single, copies = (plan_speed(ask(batch=32, replicas=n)) for n in (1, 2))
    assert copies.running == single.running / 2
    assert copies.tpot_ms.value < single.tpot_ms.value
    staged = plan_speed(ask(layout=Layout(pp=2), batch=32))
    assert staged.gpus == 2
    assert staged.capacity > single.capacity


def test_choices_say_why_and_the_goal_comes_first():
    found = compare(
        ask("DeepSeek-V3.2", batch=32), [H200], facts=FACTS, goal=Goal(None, 40), max_gpus=8, weights=["fp8"]
    )
    assert [one.is_good for one in found] == sorted((one.is_good for one in found), reverse=True)
    assert all(one.reason for one in found)
    assert any("doesn't fit" in one.why_not for one in found)
    assert any(one.layout.attention_dp for one in found)
    assert any("PP" in reason for _, _, reason in layouts(known("Qwen3-8B"), find_gpu("4090", FACTS), 2))


def test_rentals_are_found_by_the_gpus_name():
    assert cheapest_rental(H100, FACTS).usd_per_gpu_hour == "2.4024"
    assert cheapest_rental(find_gpu("MI300X", FACTS), FACTS) is None


def test_without_shapes_nothing_is_guessed():
    with pytest.raises(ConfigError, match="widths"):
        shape_of(msgspec.structs.replace(known("Llama-3.1-8B"), top=None), None)
    assert math.isfinite(plan_speed(ask("Llama-3.1-8B")).tpot_ms.high)


def _load(**level):
    return {"kind": "hitsend.load", "targets": [{"levels": [level]}]}


BENCH = {
    "mean_tpot_ms": 11.9, "mean_ttft_ms": 310.2, "completed": 200, "total_input_tokens": 204_800,
    "total_output_tokens": 51_200, "duration": 41.2, "max_concurrency": 32, "request_rate": "inf",
}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (BENCH | {"mean_tpot_ms": -5}, "> 0.0 - at `$.mean_tpot_ms`, it is -5"),
        (BENCH | {"completed": 0}, "> 0.0 - at `$.completed`, it is 0"),
        (BENCH | {"mean_ttft_ms": "x"}, "at `$.mean_ttft_ms`, it is x"),
        (BENCH | {"max_concurrency": True}, "at `$.max_concurrency`, it is True"),
        (BENCH | {"max_concurrency": None, "duration": None}, "max_concurrency and duration are missing"),
        (BENCH | {"total_output_tokens": 200}, "total_output_tokens is 200 of 200 requests: one token has no time"),
        ({"kind": "hitsend.load", "targets": 3}, "at `$.targets`, it is 3"),
        ({"kind": "hitsend.load", "targets": [{"levels": [{"tpot_ms": 5}]}]}, "at `$.targets[0].levels[0].tpot_ms`"),
        ({"kind": "hitsend.load", "targets": []}, "no level in it has a time per token"),
        *[
            ({name: value for name, value in BENCH.items() if name != key}, f"the key '{key}' is missing")
            for key in ("mean_tpot_ms", "mean_ttft_ms", "completed", "total_input_tokens", "total_output_tokens")
        ],
        ({"request_throughput": 4.8}, "the key 'completed' is missing"),
        (_load(tpot_ms={"p50": 12.0}), "no level in it has input_tokens_mean"),
        (_load(tpot_ms={"p50": 12.0}, input_tokens_mean=9.0), "no level in it has output_tokens_mean"),
        (_load(tpot_ms={"p50": 12.0}, input_tokens_mean=9.0, output_tokens_mean=9.0), "in_flight_mean or concurrency"),
        (_load(tpot_ms={"mean": 12.0}), "missing required field `p50`"),
        ([1], "needed is a `hitsend load --json` document"),
    ],
)
def test_a_calibration_that_can_t_be_one_is_named(tmp_path, document, said):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_points(file)


SAVED = {
    # the keys of `vllm bench serve --save-result`, in its order; --save-detailed adds the lists
    "date": "20261130-071500", "endpoint_type": "vllm", "backend": "vllm", "label": None,
    "model_id": "meta-llama/Llama-3.1-70B-Instruct", "tokenizer_id": "meta-llama/Llama-3.1-70B-Instruct",
    "num_prompts": 200, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 251.4,
    "completed": 200, "failed": 0, "total_input_tokens": 204_800, "total_output_tokens": 204_800,
    "request_throughput": 0.7955, "request_goodput": None, "output_throughput": 814.6, "total_token_throughput": 1629.3,
    "max_output_tokens_per_s": 912.0, "max_concurrent_requests": 20, "rtfx": 0.0, "mean_ttft_ms": 261.9,
    "median_ttft_ms": 240.0, "std_ttft_ms": 80.1, "p99_ttft_ms": 700.2, "mean_tpot_ms": 19.2, "median_tpot_ms": 19.3,
    "std_tpot_ms": 0.4, "p99_tpot_ms": 20.3, "mean_itl_ms": 19.2, "median_itl_ms": 18.8, "std_itl_ms": 6.0,
    "p99_itl_ms": 31.5, "mean_client_queue_time_ms": 0.0,
}  # fmt: skip


def test_what_vllm_saves_is_a_measured_load(tmp_path):
    file = tmp_path / "openai-infqps-concurrency16.json"
    expected = Point(concurrency=16, input=1024, output=1024, cached=0, ttft_ms=261.9, tpot_ms=19.2)
    detailed = SAVED | {"input_lens": [1024] * 200, "ttfts": [0.26] * 200, "itls": [[0.019] * 9] * 200, "errors": [""]}
    for document in (SAVED, detailed):
        file.write_text(json.dumps(document))
        assert read_points(file) == [expected]
    # --append-result: one run a line
    file.write_text("\n".join(json.dumps(SAVED | {"max_concurrency": many}) for many in (4, 16, 64)))
    assert [point.concurrency for point in read_points(file)] == [4, 16, 64]
    file.write_text(json.dumps(SAVED) + "\n{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_points(file)
    # all prompts at once: their first tokens waited in a queue
    file.write_text(json.dumps(SAVED | {"max_concurrency": None}))
    (point,) = read_points(file)
    assert point.ttft_ms is None


def test_without_a_limit_concurrency_is_little_s_law(tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(BENCH | {"max_concurrency": None}))
    (point,) = read_points(file)
    assert point.concurrency == pytest.approx(200 * (0.3102 + 0.0119 * 255) / 41.2)
