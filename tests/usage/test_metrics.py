import os

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hitsend.core.drafts import Drafted
from hitsend.core.segments import SEGMENTS
from hitsend.serve.engine.protocol import EngineState, StepFigures
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.metrics import MAX_MODELS, MAX_ROUTES, Metrics
from hitsend.serve.usage.processes import ProcessTime, read_processes


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def state(**changes):
    values = dict.fromkeys(EngineState.__struct_fields__, 0) | {"is_ready": True, "pid": None, "check": None}
    return EngineState(**(values | changes))


def test_a_request_shows_in_every_series():
    metrics = Metrics()
    metrics.observe_request(
        RequestFigures(
            model="m",
            wall_s=2.0,
            queue_s=0.1,
            prefill_s=0.2,
            ttft_s=0.4,
            tpot_s=0.02,
            gaps_s=(0.02, 0.02, 0.02),
            finish_reasons=("stop", "length"),
            prompt_tokens=9,
            completion_tokens=7,
            cached_tokens=3,
            discarded_tokens=2,
            cost_microusd=1735,
        )
    )
    metrics.observe_request(RequestFigures(model="m", wall_s=1.0, error_code="client_gone", cancelled_during="waiting"))
    found = samples(metrics)
    model = ("model", "m")
    for name, count in {
        "hitsend_time_to_first_token_seconds": 1,
        "hitsend_time_per_output_token_seconds": 1,
        "hitsend_inter_token_latency_seconds": 3,
        "hitsend_queue_seconds": 1,
        "hitsend_prefill_seconds": 1,
        "hitsend_request_seconds": 2,
    }.items():
        assert found[(f"{name}_count", model)] == count
    assert found[("hitsend_choices_finished_total", model, ("reason", "length"))] == 1
    assert found[("hitsend_tokens_billed_total", ("kind", "prompt"), model)] == 9
    assert found[("hitsend_tokens_billed_total", ("kind", "completion"), model)] == 7
    assert found[("hitsend_tokens_cached_total", model)] == 3
    assert found[("hitsend_tokens_discarded_total", model)] == 2
    assert found[("hitsend_cost_microusd_total", model)] == 1735
    assert found[("hitsend_request_errors_total", ("code", "client_gone"))] == 1
    assert found[("hitsend_requests_cancelled_total", ("during", "waiting"))] == 1


def test_where_requests_spent_time_adds_up_to_theirs():
    metrics = Metrics()
    spent = tuple(float(number) for number in range(len(SEGMENTS)))
    for _ in range(2):
        metrics.observe_request(RequestFigures(model="m", wall_s=sum(spent), segments_s=spent))
    found = samples(metrics)
    assert found[("hitsend_segment_seconds_total", ("model", "m"), ("segment", "wait"))] == 2 * SEGMENTS.index("wait")
    by_segment = [value for name, value in found.items() if name[0] == "hitsend_segment_seconds_total"]
    assert sum(by_segment) == found[("hitsend_request_seconds_sum", ("model", "m"))]


def test_steps_are_told_apart_by_what_was_in_them():
    metrics = Metrics()
    metrics.observe_step(StepFigures(12, 0, 1, 0.2, 0.25, sequences=2, running=2, waiting=4, cells_used=100))
    metrics.observe_step(StepFigures(0, 4, 4, 0.1, 0.5, sequences=4, running=4, waiting=0, cells_used=200))
    metrics.observe_step(StepFigures(8, 4, 4, 0.1, 1.0, sequences=5, running=5, waiting=0, cells_used=200))
    found = samples(metrics)
    engine = ("engine", "embedded")
    assert [
        found[("hitsend_phase_seconds_total", engine, ("phase", each))] for each in ("prefill", "decode", "mixed")
    ] == [
        0.25,
        0.5,
        1.0,
    ]
    assert found[("hitsend_phase_steps_total", engine, ("phase", "mixed"))] == 1
    assert found[("hitsend_step_sequences_total", engine)] == 11
    assert found[("hitsend_waiting_seconds_total", engine)] == 1.0
    assert found[("hitsend_running_seconds_total", engine)] == 0.5 + 2.0 + 5.0
    assert found[("hitsend_cell_seconds_total", engine)] == 25.0 + 300.0


def test_a_process_that_is_started_again_counts_on():
    metrics = Metrics()
    metrics.set_processes([ProcessTime("engine", 7, 5.0, 1.0), ProcessTime("edge", 1, 2.0, None)])
    metrics.set_processes([ProcessTime("engine", 7, 6.0, 0.5), ProcessTime("edge", 2, 1.0, None)])
    found = samples(metrics)
    assert found[("hitsend_process_cpu_seconds_total", ("process", "engine"))] == 6.0
    assert found[("hitsend_process_cpu_seconds_total", ("process", "edge"))] == 3.0
    assert found[("hitsend_process_cpu_wait_seconds_total", ("process", "engine"))] == 1.0
    assert ("hitsend_process_cpu_wait_seconds_total", ("process", "edge")) not in found


def test_processes_are_read_and_those_that_are_gone_are_left_out():
    (mine,) = read_processes(("edge", os.getpid()), ("engine", None), ("text", 2**22 + 1))
    assert mine.process == "edge"
    assert mine.cpu_s == pytest.approx(sum(os.times()[:2]), abs=0.1)


def test_the_engines_figures_are_taken_over_and_counters_never_fall():
    metrics = Metrics()
    metrics.set_engine(state(restarts=0, preemptions_total=5, running=2, waiting=3, cells_used=10, cells_total=100))
    metrics.set_engine(state(restarts=1, preemptions_total=1, slots_used=1, slots_total=4))
    metrics.observe_step(StepFigures(12, 3, 5, 0.2, 0.15))
    metrics.observe_step(StepFigures(0, 4, 4, 0.1, 0.1, (Drafted(0, 3, 1, "mtp"), Drafted(1, 1, 1, "mtp"))))
    found = samples(metrics)
    engine = ("engine", "embedded")
    assert found[("hitsend_preemptions_total", engine)] == 6
    assert found[("hitsend_engine_restarts_total", engine)] == 1
    assert found[("hitsend_engine_up", engine)] == 1
    assert found[("hitsend_requests_running", engine)] == 0
    assert found[("hitsend_slots", engine)] == 4
    assert found[("hitsend_tokens_computed_total", engine, ("phase", "prefill"))] == 12
    assert found[("hitsend_tokens_computed_total", engine, ("phase", "decode"))] == 7
    assert found[("hitsend_steps_total", engine)] == 2
    drafts = {key[1:]: count for key, count in found.items() if key[0] == "hitsend_drafts_total"}
    mtp, accepted, rejected = ("drafter", "mtp"), ("outcome", "accepted"), ("outcome", "rejected")
    first, second, third = (("position", number) for number in "123")
    places = ((accepted, first), (rejected, second), (rejected, third))
    assert [drafts[mtp, engine, *place] for place in places] == [2, 1, 1]
    assert len(drafts) == 3
    assert found[("hitsend_tokens_output_total", engine)] == 9
    assert found[("hitsend_step_seconds_total", engine, ("part", "model"))] == 0.25
    assert abs(found[("hitsend_step_seconds_total", engine, ("part", "loop"))] - 0.05) < 1e-9


def test_http_answers_by_route_and_code():
    metrics = Metrics()
    metrics.observe_http("/v1/chat/completions", 200, 0.5)
    metrics.observe_http("/v1/chat/completions", 429, 0.001)
    metrics.set_storage(holds_open=2, backlog=1, records_dropped=4)
    found = samples(metrics)
    route = ("route", "/v1/chat/completions")
    assert found[("hitsend_http_requests_total", ("code", "429"), route)] == 1
    assert found[("hitsend_http_seconds_count", route)] == 2
    assert found[("hitsend_holds_open",)] == 2
    assert found[("hitsend_records_dropped_total",)] == 4


def test_labels_are_bounded():
    metrics = Metrics()
    for number in range(10 * MAX_MODELS):
        metrics.observe_request(RequestFigures(model=f"m{number}", wall_s=1.0))
        metrics.observe_http(f"/r{number}", 404, 0.1)
    found = samples(metrics)
    models = {dict(key[1:]).get("model") for key in found if key[0] == "hitsend_request_seconds_count"}
    routes = {dict(key[1:]).get("route") for key in found if key[0] == "hitsend_http_seconds_count"}
    assert len(models) == MAX_MODELS + 1
    assert len(routes) == MAX_ROUTES + 1
    assert found[("hitsend_request_seconds_count", ("model", "other"))] == 9 * MAX_MODELS


def test_two_servers_in_one_process_share_nothing():
    one, other = Metrics(), Metrics()
    one.observe_http("/x", 200, 0.1)
    assert ("hitsend_http_seconds_count", ("route", "/x")) not in samples(other)


def test_figures_are_data():
    figures = RequestFigures(model="m", wall_s=1.0)
    assert msgspec.json.decode(msgspec.json.encode(figures), type=RequestFigures) == figures
