"""The whole server, with the bundled model, on PostgreSQL: hold, settle, usage, keys, an outage, kill -9."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.drills.crashes import ledger
from tests.journeys.test_kills import WORDS, open_stream
from tests.postgres import Postgres, postgres
from tests.served import Served, serving, until

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def server(postgres_server: Postgres) -> Iterator[Postgres]:
    with postgres(is_durable=True) as own:
        yield own


def command(url: str, *words: str) -> str:
    environment = {"HITSEND__USAGE__URL": url} | {k: v for k, v in os.environ.items() if not k.startswith("HITSEND")}
    done = subprocess.run(
        [sys.executable, "-m", "hitsend", *words], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def status(served: Served, path: str) -> int:
    try:
        with urllib.request.urlopen(served.url + path, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_from_the_first_start_over_an_outage_to_a_kill_and_the_next_start(server: Postgres) -> None:
    url = server.url()
    words = (*WORDS, "--set", f"usage.url={url}")
    with serving(*words) as first:
        answer = first.chat("Hello", max_tokens=4)
        assert status(first, "/readyz") == 200
        server.immediate()
        assert until(lambda: status(first, "/readyz"), lambda found: found == 503, 30) == 503
        assert status(first, "/healthz") == 200
        refused, said, _ = first.post(
            "/v1/chat/completions", {"model": first.model, "messages": [{"role": "user", "content": "x"}]}
        )
        assert (refused, said["error"]["code"]) == (503, "storage_failed")
        server.start()
        assert until(lambda: status(first, "/readyz"), lambda found: found == 200, 30) == 200
        assert first.chat("Hello again", max_tokens=4)["usage"]["completion_tokens"] >= 1
        stream = open_stream(first, "orphan")
        assert asyncio.run(ledger(url))[1] == 1
        first.kill()
        stream.close()
    with serving(*words) as second:
        rows, holds = asyncio.run(ledger(url))
        by_id = {row["request_id"]: row for row in rows}
        assert holds == 0
        assert by_id["orphan"]["reason"] == "recovered_after_crash"
        assert by_id[answer["hitsend"]["request_id"]]["completion_tokens"] == answer["usage"]["completion_tokens"]
        report = json.loads(command(url, "usage", "--json"))
        assert report["totals"]["requests"] == len(rows)
        assert report["totals"]["cost_microusd"] == sum(row["cost_microusd"] for row in rows)
        key = json.loads(command(url, "keys", "create", "--name", "n", "--json"))
        assert until(lambda: status(second, "/v1/models"), lambda found: found == 401) == 401
        assert second.get("/v1/models", key=key["key"])["data"]
        assert json.loads(command(url, "keys", "list", "--json"))[0]["id"] == key["id"]
