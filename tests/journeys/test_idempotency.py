"""The same key many times against real servers: one run and one row, also over two gateways and a kill -9."""

import contextlib
import json
import sqlite3
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.served import serving, until

pytestmark = pytest.mark.model


def ask(served, key, **fields):
    """Status, headers and raw body."""
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 20} | fields
    headers = {"content-type": "application/json", "idempotency-key": key}
    request = urllib.request.Request(served.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers), refused.read()


def num_rows(served, where="1"):
    with contextlib.closing(sqlite3.connect(served.data / "hitsend.sqlite3")) as connection:
        return connection.execute(f"SELECT COUNT(*) FROM ledger WHERE {where}").fetchone()[0]


@pytest.mark.parametrize("stream", [False, True])
def test_50_at_once_over_two_gateways_are_one_run_and_one_row(tmp_path, stream):
    small = ("--set", "engine.num_slots=4", "--set", "engine.context=512")
    with serving(*small, data=tmp_path) as one, serving(*small, data=tmp_path) as two:
        key = uuid.uuid4().hex
        with ThreadPoolExecutor(50) as pool:
            got = list(pool.map(lambda n: ask((one, two)[n % 2], key, stream=stream, seed=1), range(50)))
        statuses = [status for status, _, _ in got]
        assert set(statuses) <= {200, 409}
        ran = [body for status, headers, body in got if status == 200 and "idempotent-replayed" not in headers]
        assert len(ran) == 1
        assert num_rows(one) == 1
        for served in (one, two):
            status, headers, body = ask(served, key, stream=stream, seed=1)
            assert (status, headers["idempotent-replayed"]) == (200, "true")
            assert body.replace(b": ping\n\n", b"") == ran[0].replace(b": ping\n\n", b"")
            assert ask(served, key, stream=stream, seed=2)[0] == 422
        assert num_rows(one) == 1


def test_a_gateway_that_was_killed_leaves_its_key_free():
    key = uuid.uuid4().hex
    bias = {"2": -100, "0": -100}
    with serving("--set", "engine.num_slots=2") as first, ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(ask, first, key, max_tokens=1500, logit_bias=bias)
        until(lambda: first.state()["running"], bool)
        first.kill()
        with contextlib.suppress(OSError):
            hanging.result()
        with serving("--set", "engine.num_slots=2", data=first.data) as second:
            status, headers, _ = ask(second, key, max_tokens=5)
            assert (status, "idempotent-replayed" in headers) == (200, False)
            assert num_rows(second, "cost_microusd >= 0 AND reason != 'recovered_after_crash'") == 1
