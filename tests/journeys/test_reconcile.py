"""The books of a real server agree after all kinds of endings, and a changed row is found out."""

import json
import sqlite3
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.served import serving, until

pytestmark = pytest.mark.model


def reconcile(*words):
    ran = subprocess.run(
        [sys.executable, "-m", "hitsend", "reconcile", *words, "--json"], check=False, capture_output=True, timeout=120
    )
    return ran.returncode, json.loads(ran.stdout)


def hang_up(served):
    """Read the beginning of a long stream, then leave."""
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "stream": True, "max_tokens": 500}
    request = urllib.request.Request(
        served.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read(300)


def test_ledger_engine_and_metrics_agree_and_a_changed_row_does_not():
    with serving("--set", "engine.num_slots=4", "--set", "engine.context=1024") as served:
        served.chat("warm up", max_tokens=3)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(served.chat, f"Say {n}.", max_tokens=5 + n, n=1 + n % 3) for n in range(6)]
            asked += [pool.submit(served.chat, "List.", max_tokens=30, stop=["e"]), pool.submit(hang_up, served)]
            busy = served.get("/admin/reconcile")
            for one in asked:
                one.result()
        assert busy["drifted"] == []
        served.post("/v1/chat/completions", {"messages": [], "max_tokens": 1})
        served.wait_idle()
        found = until(lambda: served.get("/admin/reconcile"), lambda found: found["is_at_rest"])
        assert found["is_at_rest"]
        assert found["drifted"] == []
        relations = {check["name"]: (check["relation"], check["left"]) for check in found["checks"]}
        assert relations["metrics_requests"] == ("=", 9)
        assert relations["tokens_sampled"][0] == "="
        assert relations["tokens_sampled"][1] > 40
        assert relations["prompt_tokens_computed"][1] > 100
        assert reconcile("--url", served.url)[0] == 0
        assert reconcile("--data", str(served.data))[0] == 0
        with sqlite3.connect(served.data / "hitsend.sqlite3") as connection:
            connection.execute("DROP TRIGGER ledger_no_update")
            connection.execute("UPDATE ledger SET completion_tokens = completion_tokens + 1 WHERE seq = 2")
        connection.close()
        status, found = reconcile("--url", served.url)
        assert status == 1
        assert {"metrics_completion_tokens", "tokens_sampled", "records_differ"} <= set(found["drifted"])
        status, found = reconcile("--data", str(served.data))
        assert (status, found["drifted"]) == (1, ["records_differ"])
