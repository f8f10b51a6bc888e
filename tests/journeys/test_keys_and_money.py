"""Keys made and revoked beside a running server, and what a priced answer costs, in answer, record and ledger."""

import json
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served, serving, until

pytestmark = pytest.mark.model


def hitsend(*words: str) -> Any:
    """Run a command; its stdout as JSON."""
    ran = subprocess.run(
        [sys.executable, "-m", "hitsend", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def ask(served: Served, key: str | None, **fields: Any) -> tuple[int, Any]:
    """A small chat request with a key."""
    body = {"model": "priced", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5} | fields
    status, answer, _ = served.post("/v1/chat/completions", body, key)
    return status, answer


def test_keys_and_money(tmp_path: Path) -> None:
    prices = json.dumps([{"model": "priced", "input": 0.45, "output": 3.2, "id": "test-price"}])
    words = ("--set", "engine.alias=priced", "--set", f"prices={prices}", "--set", "engine.num_slots=2")
    with serving(*words, "--set", "engine.context=512", data=tmp_path) as served:
        assert ask(served, None)[0] == 200
        served.wait_idle()

        alice = hitsend("keys", "create", "--name", "alice", "--org", "acme", "--json", "--data", str(tmp_path))
        bob = hitsend("keys", "create", "--name", "bob", "--json", "--data", str(tmp_path))
        assert until(lambda: ask(served, None)[0], lambda status: status == 401, 4) == 401
        assert until(lambda: ask(served, bob["key"])[0], lambda status: status == 200, 4) == 200

        whole = ask(served, alice["key"], seed=3)[1]
        assert whole["usage"]["total_tokens"] > 0
        prompt, completion = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
        expected = (prompt * 450_000 + completion * 3_200_000 + 500_000) // 1_000_000
        assert whole["hitsend"]["cost_microusd"] == expected

        own = served.get("/inspect/requests", alice["key"])["requests"]
        assert [entry["name"] for entry in own] == ["alice"]
        record = json.loads(json.dumps(served.get(f"/inspect/requests/{own[0]['request_id']}", alice["key"])))
        assert record["ledger"]["price_id"] == "test-price"
        assert record["ledger"]["org_name"] == "acme"
        assert record["ledger"]["cost_microusd"] == expected

        spent = served.get("/inspect/usage?by=key", alice["key"])
        assert [part["of"]["key"] for part in spent["parts"]] == ["alice"]
        assert sum(kind["cost_microusd"] for kind in spent["kinds"]) == spent["totals"]["cost_microusd"] == expected
        assert served.get("/inspect/requests?name=bob", alice["key"])["requests"] == []

        text = (tmp_path / "server.log").read_text() + json.dumps(record)
        assert alice["key"] not in text
        assert alice["key"].rpartition("_")[2][:12] not in text

        usage = hitsend("usage", "--json", "--data", str(tmp_path))
        by_name = {entry["name"]: entry["totals"] for entry in usage["by_caller"]}
        assert by_name["alice"]["cost_microusd"] == expected
        assert usage["totals"]["cost_microusd"] == sum(totals["cost_microusd"] for totals in by_name.values())
        subprocess.run(
            [sys.executable, "-m", "hitsend", "keys", "revoke", alice["id"], "--data", str(tmp_path)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        assert until(lambda: ask(served, alice["key"])[0], lambda status: status == 401, 4) == 401
        assert ask(served, bob["key"])[0] == 200


def test_streamed_or_not_one_price(served: Served) -> None:
    """Case acc-stream-price: three ways to ask, three equal rows."""
    fields = {"temperature": 0, "max_tokens": 9}
    body = {"model": served.model, "messages": [{"role": "user", "content": "Nine tokens, please."}]} | fields
    ids = []
    for index, way in enumerate(({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": False}})):
        request_id = f"price-{index}-{uuid.uuid4().hex}"
        headers = {"content-type": "application/json", "x-request-id": request_id}
        asked = urllib.request.Request(served.url + "/v1/chat/completions", json.dumps(body | way).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()
        ids.append(request_id)
    served.wait_idle()
    rows = [served.record(request_id)["ledger"] for request_id in ids]
    counted = [(row["prompt_tokens"], row["completion_tokens"], row["cost_microusd"], row["price_id"]) for row in rows]
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][1] > 0
