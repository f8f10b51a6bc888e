"""plan/logs.py: plans beside what engines logged. The records are in data/, so this needs nothing from elsewhere."""

import json
from pathlib import Path

import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.logs import compare_logs, read_logs, scores
from tests.plan.asked import DATA, FACTS

LOGS = DATA / "kv_logs.json"
LATER = DATA / "kv_logs_later.json"


@pytest.fixture(scope="module")
def rows():
    return compare_logs(read_logs(LOGS), FACTS)


@pytest.fixture(scope="module")
def later():
    return compare_logs(read_logs(LATER), FACTS)


def share(rows, test):
    (found,) = [score for score in scores(rows) if score.test == test]
    return found.ok / found.rows


def test_sizes_that_a_log_prints_come_out(rows):
    assert share(rows, "bytes") >= 0.9
    wrong = [row for row in rows if row.test == "bytes" and not row.ok and row.planned is not None]
    assert [row.id for row in wrong] == ["sglang-qwen3.x-27b-fp8kv"]


def test_pools_come_out_within_a_hundredth_given_the_bytes(rows):
    assert share(rows, "pool") >= 0.9
    assert share(rows, "solved") == 1


def test_pools_come_out_within_a_tenth_from_the_gpu_alone(rows):
    assert share(rows, "gpu") >= 0.7


def test_every_miss_is_explained(rows, later):
    assert [row.id for row in (*rows, *later) if not row.ok and row.why in ("", "not explained")] == []


def test_logs_found_after_the_planner_was_made_come_out_too(later):
    assert share(later, "bytes") >= 0.95
    assert share(later, "pool") >= 0.95
    assert share(later, "solved") == 1
    assert share(later, "gpu") >= 0.8
    assert [row.id for row in later if not row.ok and row.planned is None] == []


def test_no_log_is_recorded_twice():
    printed = [json.dumps([log["model"], log["reported"]]) for file in (LOGS, LATER) for log in read_logs(file)]
    assert len(printed) == len(set(printed))


def test_a_plan_sees_none_of_the_answers():
    """Other numbers in `reported` change what is compared and never what is planned."""
    (log,) = [log for log in read_logs(LOGS) if log["id"] == "vllm-qwen3.5-35b-a3b-fp8-h200-len10000"]
    changed = json.loads(json.dumps(log))
    changed["reported"]["gpu_kv_cache_size_tokens"] += 1_000_000
    changed["reported"]["max_concurrency"]["x"] *= 2
    before, after = (compare_logs([one], FACTS) for one in (log, changed))
    assert [row.planned for row in before] == [row.planned for row in after]
    assert all(row.ok for row in before)
    assert not any(row.ok for row in after)


def test_what_a_request_needs_is_compared_without_what_was_free():
    """vLLM's refusal alone: 36 layers x 8 heads x 256 x 2 B x 32,768 tokens."""
    log = {"engine": "vllm", "model": "Qwen/Qwen3-VL-4B-Instruct-FP8", "max_model_len": 32_768}
    (row,) = compare_logs([{**log, "reported": {"needed_gib": 4.5}}], FACTS)
    assert (row.test, row.quantity, row.planned, row.ok) == ("pool", "needed GiB", 4.5, True)
    (row,) = compare_logs([{**log, "reported": {"needed_gib": 5.5}}], FACTS)
    assert not row.ok


def test_files_that_hold_no_logs_are_refused(tmp_path):
    file = tmp_path / "logs.json"
    for content, said in (("{", "is not JSON"), ("{}", "must hold a list"), ('[{"a": 1}]', "must hold a list")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=said):
            read_logs(file)
    with pytest.raises(ConfigError, match="can't read"):
        read_logs(tmp_path / "none.json")


def test_an_unknown_engine_or_model_is_a_row_with_the_reason():
    odd = [{"engine": "tgi", "model": "Qwen3-8B"}, {"engine": "vllm", "model": "nothing known"}]
    rows = compare_logs(odd, FACTS)
    assert [row.ok for row in rows] == [False, False]
    assert "tgi" in rows[0].why
    assert "nothing known" in rows[1].why


def test_the_records_are_those_that_were_collected():
    """Where the collection is at hand: no number was changed on the way here."""
    origin = Path(__file__).parents[2].parent / "shared" / "facts" / "kv_logs.json"
    if not origin.is_file():
        pytest.skip("only beside the collection")
    theirs = {log["id"]: log["reported"] for log in json.loads(origin.read_text())["logs"]}
    assert {log["id"]: log["reported"] for log in read_logs(LOGS)} == theirs
