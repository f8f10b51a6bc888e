"""kill -9 of the engine's child and of the server itself: nothing lost, nothing billed twice, nothing left held."""

import json
import os
import signal
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.served import TIMES, Served, serving, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

WORDS = ("--set", "engine.num_slots=4", "--set", "engine.context=1024")
TALKATIVE = {"2": -100, "0": -100}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server of its own: its engine gets killed."""
    with serving(*WORDS) as server:
        yield server


def rows(data: Path) -> dict[str, dict[str, Any]]:
    """The ledger by request id, read past the server. Fails on two rows for one request."""
    with sqlite3.connect(f"file:{data / 'hitsend.sqlite3'}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        found = [dict(row) for row in connection.execute("SELECT * FROM ledger")]
    by_id = {row["request_id"]: row for row in found}
    assert len(by_id) == len(found)
    return by_id


def holds(data: Path) -> int:
    """How many holds stand in the database."""
    with sqlite3.connect(f"file:{data / 'hitsend.sqlite3'}?mode=ro", uri=True) as connection:
        return int(connection.execute("SELECT count(*) FROM holds").fetchone()[0])


def open_stream(served: Served, request_id: str, max_tokens: int = 900) -> Any:
    """A stream that won't end by itself for a while, read up to its first text."""
    body = {"model": served.model, "messages": [{"role": "user", "content": "Tell a story."}], "stream": True}
    raw = json.dumps(body | {"max_tokens": max_tokens, "logit_bias": TALKATIVE}).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id}
    answer = urllib.request.urlopen(
        urllib.request.Request(served.url + "/v1/chat/completions", raw, headers), timeout=60
    )
    while True:
        line = answer.readline()
        assert line, "the stream ended before its first text"
        if line.startswith(b"data: {") and (json.loads(line[6:])["choices"] or [{}])[0]["delta"].get("content"):
            return answer


def test_the_engine_dies_again_and_again(served: Served) -> None:
    """Each time the streams get one error frame, what they were sent is billed once, and the next request is served."""
    fds = None
    for number in range(TIMES):
        ids = [f"killed-{number}-{index}" for index in range(3)]
        with ThreadPoolExecutor(3) as pool:
            streams = list(pool.map(lambda request_id: open_stream(served, request_id), ids))
        pid = served.state()["engine"]["pid"]
        os.kill(pid, signal.SIGKILL)
        for answer in streams:
            rest = answer.read()
            answer.close()
            frames = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
            assert b"[DONE]" not in rest
            assert json.loads(frames[-1][6:])["error"]["code"] == "engine_failed"
            assert b'"finish_reason":"' not in rest
        state = until(served.state, lambda state: state["engine"]["is_ready"], 30)
        assert state["engine"]["restarts"] == number + 1
        assert state["engine"]["pid"] != pid
        assert served.chat("Are you back?", max_tokens=4)["usage"]["completion_tokens"] >= 1
        assert not served.wait_idle()["holds_open"]
        for request_id in ids:
            record = served.record(request_id)
            row = rows(served.data)[request_id]
            assert record["state"] == "failed"
            assert row["reason"] == "engine_failed"
            sampled = sum(event["num_tokens"] for event in record["events"] if event["type"] == "choice_finished")
            assert row["completion_tokens"] == sampled >= 1
        fds = fds or (served.num_fds() if number == 2 else None)
    assert fds is not None
    assert until(served.num_fds, lambda num: num <= fds) <= fds


def test_the_server_dies_between_hold_and_settlement(tmp_path: Path) -> None:
    """After the restart every hold has ended in one row, flagged and unbilled; the dead server left no child."""
    ids = [f"orphan-{index}" for index in range(3)]
    with serving(*WORDS, data=tmp_path) as first:
        answers = [open_stream(first, request_id) for request_id in ids]
        child = first.state()["engine"]["pid"]
        assert holds(tmp_path) == 3
        first.kill()
        for answer in answers:
            answer.close()
        assert until(lambda: Path(f"/proc/{child}").exists(), lambda exists: not exists) is False
    assert holds(tmp_path) == 3
    with serving(*WORDS, data=tmp_path) as second:
        assert second.wait_idle()["holds_open"] == 0
        found = rows(tmp_path)
        for request_id in ids:
            assert found[request_id]["reason"] == "recovered_after_crash"
            assert found[request_id]["cost_microusd"] == 0
            assert found[request_id]["is_estimate"]
        assert holds(tmp_path) == 0
        answer = second.chat("And now?", max_tokens=4)
        assert rows(tmp_path)[answer["hitsend"]["request_id"]]["completion_tokens"] >= 1
        status, refused, _ = second.post("/v1/chat/completions", b"{}")
        assert status == 400, refused


def test_a_stop_signal_lets_short_answers_end_and_settles_those_it_cuts_off(tmp_path: Path) -> None:
    """After `drain_s` whoever still runs gets one error frame, and its row before the process ends."""
    ids = [f"drained-{index}" for index in range(3)]
    with serving(*WORDS, "--set", "server.drain_s=1", data=tmp_path) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request_id: open_stream(server, request_id), ids))
        child = server.state()["engine"]["pid"]
        server.process.send_signal(signal.SIGTERM)
        for rest in pool.map(lambda answer: answer.read(), answers):
            frames = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
            assert json.loads(frames[-1][6:])["error"]["code"] == "shutting_down"
            assert b"[DONE]" not in rest
            assert b'"finish_reason":"' not in rest
        assert server.process.wait(20) == 0
    assert holds(tmp_path) == 0
    found = rows(tmp_path)
    assert {found[request_id]["reason"] for request_id in ids} == {"shutting_down"}
    assert all(found[request_id]["completion_tokens"] >= 1 for request_id in ids)
    assert not Path(f"/proc/{child}").exists()


def test_a_stopped_engine_turns_health_red_and_waking_it_turns_it_green(served: Served) -> None:
    pid = served.state()["engine"]["pid"]
    stream = open_stream(served, "stopped-1", 300)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: _status(served, "/healthz"), lambda status: status == 503, 12) == 503
        assert _status(served, "/readyz") == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    assert until(lambda: _status(served, "/healthz"), lambda status: status == 200, 12) == 200
    assert b"[DONE]" in stream.read()
    stream.close()


def _status(served: Served, path: str) -> int:
    try:
        with urllib.request.urlopen(served.url + path, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code
