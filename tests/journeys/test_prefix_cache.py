"""The prefix cache through HTTP: what usage, record, ledger, state and metrics say, and to whom."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.journeys.test_keys_and_money import hitsend
from tests.served import Served, serving, until

pytestmark = pytest.mark.model

TEXT = "Please tell me about " + ", ".join(f"item {number}" for number in range(40))
PRICES = json.dumps([{"model": "priced", "input": 4.0, "cached_input": 1.0, "output": 8.0, "id": "test"}])


def test_what_was_not_computed_is_told_everywhere(served: Served) -> None:
    first = served.chat("Once: " + TEXT, max_tokens=6, seed=1)
    second = served.chat("Once: " + TEXT, max_tokens=6, seed=1)
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    size, cached = second["usage"]["prompt_tokens"], second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached % 64 == 0
    assert size - 64 <= cached < size
    record = until(lambda: served.record(second["hitsend"]["request_id"]), lambda each: each["ledger"] is not None)
    (matched,) = [event for event in record["events"] if event["type"] == "prefix_matched"]
    assert (matched["prompt_tokens"], matched["matched_tokens"], matched["cached_tokens"]) == (size, size, cached)
    assert matched["limited_by"] == "step"
    assert record["usage"]["cached_tokens"] == record["ledger"]["cached_tokens"] == cached
    assert sum(event["prefill_tokens"] for event in record["events"] if event["type"] == "step") == size - cached

    third = served.chat("Once: " + TEXT[:-6] + "no more", max_tokens=1)
    record = served.record(third["hitsend"]["request_id"])
    (matched,) = [event for event in record["events"] if event["type"] == "prefix_matched"]
    assert matched["cached_tokens"] <= matched["matched_tokens"] == matched["differs_at"] < size
    assert matched["cached_token_id"] != matched["prompt_token_id"]
    assert isinstance(matched["prompt_text"], str), "captured here"
    state = served.wait_idle()
    assert (state["cells_used"], state["engine"]["check"]) == (0, None)
    assert state["cells_cached"] >= cached


def test_identical_requests_that_come_together_are_computed_once(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: served.chat("Together: " + TEXT, max_tokens=3, seed=seed), range(4)))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert min(cached) == 0
    assert sorted(cached)[1] >= answers[0]["usage"]["prompt_tokens"] - 64, "all but one found all whole steps"


def test_tenants_never_hit_each_other_and_a_restart_forgets(tmp_path: Path) -> None:
    words = ("--set", "engine.alias=priced", "--set", f"prices={PRICES}", "--set", "engine.num_slots=4")
    keys = [hitsend("keys", "create", "--name", name, "--json", "--data", str(tmp_path))["key"] for name in "ab"]
    admin = hitsend("keys", "create", "--name", "c", "--role", "admin", "--json", "--data", str(tmp_path))["key"]
    with serving(*words, "--set", "engine.context=512", data=tmp_path) as served:

        def ask(key: str, **fields: object) -> dict[str, int]:
            body = {"model": "priced", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1} | fields
            status, answer, _ = served.post("/v1/chat/completions", body, key)
            assert status == 200, answer
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            picousd = (usage["prompt_tokens"] - cached) * 4 + cached + usage["completion_tokens"] * 8
            assert answer["hitsend"]["cost_microusd"] == picousd, "cached input costs a quarter"
            return int(cached)

        assert [ask(keys[0]), ask(keys[1]), ask(keys[0], cache_salt="x"), ask(keys[1], cache_salt="x")] == [0] * 4
        assert min(ask(keys[0]), ask(keys[1]), ask(keys[0], cache_salt="x")) >= 64
        assert ask(keys[0], cache_salt="y") == 0
        reconciled = hitsend("reconcile", "--json", "--data", str(tmp_path))
        assert reconciled["drifted"] == []
        state = until(lambda: served.get("/inspect/state", admin), lambda each: each["cells_cached"] > 0)
        os.kill(state["engine"]["pid"], signal.SIGKILL)
        state = until(
            lambda: served.get("/inspect/state", admin),
            lambda each: each["engine"]["restarts"] == 1 and each["engine"]["is_ready"],
            60,
        )
        assert (state["cells_cached"], state["cache_bytes"], state["cells_used"]) == (0, 0, 0)
        assert ask(keys[0]) == 0


def test_what_left_memory_comes_back_from_disk(tmp_path: Path) -> None:
    """Live cells, then memory, then a file; a broken file and another salt find nothing; a stop leaves nothing."""
    folder = tmp_path / "cache"
    words = ["--set", "engine.num_slots=1", "--set", "engine.context=512", "--set", "engine.prefix_cache_bytes=6000000"]
    words += ["--set", f"engine.prefix_cache_dir={folder}", "--set", "engine.prefix_cache_disk_bytes=30000000"]
    with serving(*words, data=tmp_path) as served:

        def ask(name: str, **fields: object) -> tuple[int, str | None, str]:
            answer = served.chat(name + TEXT, max_tokens=4, seed=1, **fields)
            record = served.record(answer["hitsend"]["request_id"])
            (matched,) = [event for event in record["events"] if event["type"] == "prefix_matched"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert matched["cached_tokens"] == cached
            return cached, matched["source"], answer["choices"][0]["message"]["content"]

        def files() -> list[Path]:
            return [each for each in folder.glob("spill-*/*") if len(each.name) == 32]

        first = [ask(name) for name in "ABC"]
        assert [cached for cached, _, _ in first] == [0, 0, 0]
        assert len(until(files, bool)) == 1
        assert served.state()["cache_disk_bytes"] > 2_000_000
        cached, source, said = ask("A", cache_salt="x")
        assert (cached, source, said) == (0, None, first[0][2])
        cached, source, said = ask("A")
        assert cached > 64
        assert (source, said) == ("disk", first[0][2])
        assert ask("A")[1] == "live"
        for path in until(files, lambda found: len(found) >= 2):
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert {(cached, said) for cached, _, said in (ask("B"), ask("C"))} <= {(0, first[1][2]), (0, first[2][2])}
        assert served.wait_idle()["engine"]["check"] is None
    assert list(folder.glob("spill-*")) == []
