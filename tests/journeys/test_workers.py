"""`hitsend serve --workers 4` on a real model: one engine, one set of limits, one bill, whichever process answers."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.journeys.test_kills import TALKATIVE, holds, rows
from tests.served import MANY, Served, serving, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM = 4
WORDS = (
    *("--workers", str(NUM), "--set", "engine.num_slots=8", "--set", "engine.context=1024"),
    *("--set", "engine.max_waiting=1000", "--set", "engine.wait_timeout_s=300"),
)
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(*WORDS) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, int]]:
    """One with prices and keys, its administrator's key, and how many tokens "Hi" is."""
    data = tmp_path_factory.mktemp("keyed")
    config = data / "hitsend.toml"
    config.write_text('[[prices]]\nmodel = "*"\ninput = 1.0\noutput = 1.0\n')
    with serving(*WORDS, "--config", str(config), data=data) as server:
        prompt = server.chat("Hi", max_tokens=1)["usage"]["prompt_tokens"]
        yield server, make_key(data, "--name", "admin", "--role", "admin"), prompt


def open_stream(served: Served, request_id: str, max_tokens: int = 250) -> Any:
    """A stream that won't end by itself for a while, read up to its first text."""
    body = {"model": "smollm2-135m", "messages": HELLO, "stream": True, "max_tokens": max_tokens}
    raw = json.dumps(body | {"logit_bias": TALKATIVE}).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id}
    answer = urllib.request.urlopen(
        urllib.request.Request(served.url + "/v1/chat/completions", raw, headers), timeout=60
    )
    while b'"content":"' not in (line := answer.readline()):
        assert line, "the stream ended before its first text"
    return answer


def metric(text: str, name: str, **labels: str) -> float:
    """A sample's value, summed over all that have these labels."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        has = dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")) if found else {}
        if found and all(has.get(key) == value for key, value in labels.items()):
            total += float(found[2])
    return total


def make_key(data: Path, *words: str) -> str:
    command = [sys.executable, "-m", "hitsend", "keys", "create", "--data", str(data), "--json", *words]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    return str(json.loads(done.stdout)["key"])


async def ask_many(url: str, key: str, number: int, **fields: Any) -> Counter[int]:
    """So many requests at once, each on a connection of its own; the statuses."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "smollm2-135m", "messages": HELLO, "max_tokens": 1} | fields
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:

        async def one() -> int:
            async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
                told = await answer.read()
                assert answer.status in {200, 429}, told
                return answer.status

        return Counter(await asyncio.gather(*(one() for _ in range(number))))


def test_the_figures_add_up_over_all_processes(served: Served) -> None:
    """Whoever is asked, the ledger, the engine's counters and the metrics say the same; ids are nobody's twice."""
    answers = [served.chat("Hi", max_tokens=3, n=2) for _ in range(20)]
    ids = [answer["hitsend"]["request_id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    served.wait_idle()
    found = rows(served.data)
    for _ in range(NUM):
        text = served.text("/metrics")
        billed = sum(row["prompt_tokens"] for row in found.values())
        produced = sum(row["completion_tokens"] for row in found.values())
        discarded = sum(row["discarded_tokens"] for row in found.values())
        assert metric(text, "hitsend_tokens_billed_total", kind="prompt") == billed
        assert metric(text, "hitsend_tokens_computed_total", phase="prefill") == billed
        assert metric(text, "hitsend_tokens_billed_total", kind="completion") == produced
        assert metric(text, "hitsend_tokens_output_total") == produced + discarded
        assert metric(text, "hitsend_http_requests_total", route="/v1/chat/completions", code="200") == len(found)
        assert metric(text, "hitsend_holds_open") == 0
        spent = metric(text, "hitsend_request_seconds_sum")
        assert metric(text, "hitsend_segment_seconds_total") == pytest.approx(spent, rel=0.01)

    def processes(text: str) -> dict[str, float]:
        return {name: metric(text, "hitsend_processes", process=name) for name in ("edge", "text", "engine")}

    # a gateway that is slow to answer is left out of one look
    text = until(lambda: served.text("/metrics"), lambda text: processes(text)["edge"] == NUM)
    assert processes(text) == {"edge": NUM, "text": NUM, "engine": 1}
    assert metric(text, "hitsend_process_cpu_seconds_total", process="edge") > 0
    # fresh connections went to several processes, and each has the record of every request
    assert all(served.record(request_id)["state"] == "finished" for request_id in ids)


def test_a_clients_own_id_is_used_once_over_all_processes(served: Served) -> None:
    shown = []
    for _ in range(6):
        raw = json.dumps({"model": served.model, "messages": HELLO, "max_tokens": 1}).encode()
        headers = {"content-type": "application/json", "x-request-id": "again"}
        with urllib.request.urlopen(
            urllib.request.Request(served.url + "/v1/chat/completions", raw, headers), timeout=60
        ) as answer:
            shown.append(answer.headers["x-request-id"])
    assert shown[0] == "again"
    assert len(set(shown)) == len(shown)


def test_whoever_is_asked_shows_what_runs_in_all_of_them(served: Served) -> None:
    names = {f"live-{number}" for number in range(6)}
    streams = [open_stream(served, name) for name in sorted(names)]
    asked = set()
    for _ in range(60):  # the kernel chooses who answers: from two of them on, somebody told of what wasn't its own
        frame = json.loads(served.text("/inspect/live?frames=1").partition("data: ")[2].partition("\n")[0])
        assert names <= {one["request_id"] for one in frame["requests"]}
        assert frame["num_requests"] >= len(names)
        asked.add(frame["pid"])
        if len(asked) > 1:
            break
    assert len(asked) > 1
    for answer in streams:
        answer.close()
    served.wait_idle()


def test_a_killed_gateway_is_nobody_elses_loss(served: Served) -> None:
    """Its streams end, what it held is given back and closed unbilled; the others' go on; another one takes its
    place."""
    pids = {gateway["pid"] for gateway in served.state()["gateways"]}
    assert len(pids) == NUM
    streams = {f"mid-{number}": open_stream(served, f"mid-{number}") for number in range(6)}
    with sqlite3.connect(f"file:{served.data / 'hitsend.sqlite3'}?mode=ro", uri=True) as connection:
        owners = dict(connection.execute("SELECT request_id, owner FROM holds").fetchall())
    by_pid: dict[int, list[str]] = {}
    for request_id, owner in owners.items():
        by_pid.setdefault(int(owner.split(":")[2]), []).append(request_id)
    victim, lost = min(by_pid.items(), key=lambda item: len(item[1]))
    assert victim in pids
    os.kill(victim, signal.SIGKILL)
    for request_id, answer in streams.items():
        if request_id in lost:
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert b"[DONE]" not in answer.read()
    state = until(served.state, lambda now: now["running"] == len(streams) - len(lost), 10)
    assert state["running"] == len(streams) - len(lost)
    for request_id, answer in streams.items():
        if request_id not in lost:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        answer.close()
    state = served.wait_idle()
    assert (state["cells_used"], state["quota_holds_open"], state["holds_open"]) == (0, 0, 0)
    after = until(served.state, lambda now: len({g["pid"] for g in now["gateways"]} - {victim}) == NUM, 30)
    assert {gateway["pid"] for gateway in after["gateways"]} > pids - {victim}
    assert until(lambda: holds(served.data), lambda number: number == 0, 30) == 0
    found = rows(served.data)
    assert {found[request_id]["reason"] for request_id in lost} == {"recovered_after_crash"}
    assert all(found[request_id]["reason"] == "length" for request_id in streams if request_id not in lost)
    assert after["engine"]["restarts"] == 0


def test_a_dead_engine_is_one_error_for_each_and_comes_back_for_all(served: Served) -> None:
    streams = [open_stream(served, f"engine-{number}") for number in range(6)]
    pid = served.state()["engine"]["pid"]
    os.kill(pid, signal.SIGKILL)
    for answer in streams:
        frames = [line for line in answer.read().split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(frames[-1][6:])["error"]["code"] == "engine_failed"
        answer.close()
    assert until(served.state, lambda now: now["engine"]["is_ready"], 30)["engine"]["restarts"] == 1
    for _ in range(NUM * 2):
        assert served.chat("Back?", max_tokens=1)["usage"]["completion_tokens"] == 1
    assert served.wait_idle()["holds_open"] == 0


async def test_limits_admit_what_fits_over_all_processes(keyed: tuple[Served, str, int]) -> None:
    """Many requests at once: as many pass as one process would let through, whatever limit it is."""
    server, admin, prompt = keyed
    keys = {
        "money": make_key(server.data, "--name", "money", "--usd-day", f"{(prompt + 1) * 30 / 1e6:.6f}"),
        "requests": make_key(server.data, "--name", "requests", "--rpm", "20"),
        "tokens": make_key(server.data, "--name", "tokens", "--input-tpm", str(prompt * 20)),
        "parallel": make_key(server.data, "--name", "parallel", "--parallel", "3"),
    }
    await asyncio.sleep(2.0)  # by then every process knows them
    seen = {}
    for name, key in keys.items():
        started_at = time.monotonic()
        seen[name] = await ask_many(server.url, key, MANY)
        if name in {"requests", "tokens"}:
            refilled = 20 * (time.monotonic() - started_at) / 60
            assert 20 <= seen[name][200] <= 20 + refilled
    assert seen["money"][200] == 30
    assert all(sum(statuses.values()) == MANY for statuses in seen.values())
    found = [row for row in rows(server.data).values() if row["key_name"] == "parallel"]
    assert len(found) == seen["parallel"][200]
    assert most_at_once([(row["created_at"], row["settled_at"]) for row in found]) == 3
    state = server.get("/inspect/state", admin)
    assert (state["quota_holds_open"], state["holds_open"], state["cells_used"]) == (0, 0, 0)


async def test_keys_count_everywhere_within_two_seconds(keyed: tuple[Served, str, int]) -> None:
    server, admin, _ = keyed
    key = make_key(server.data, "--name", "short-lived")
    await asyncio.sleep(2.0)
    assert await statuses(server.url, key) == {200}
    listed = server.get("/admin/keys", admin)["data"]
    key_id = next(each["id"] for each in listed if each["name"] == "short-lived")
    headers = {"authorization": f"Bearer {admin}"}
    path = f"{server.url}/admin/keys/{key_id}"
    async with aiohttp.ClientSession(headers=headers) as session, session.delete(path) as answer:
        assert answer.status == 200
    await asyncio.sleep(2.0)
    assert await statuses(server.url, key) == {401}


def test_a_stop_signal_drains_all_processes_before_the_engine(tmp_path: Path) -> None:
    with serving(*WORDS, "--set", "server.drain_s=1", data=tmp_path) as server:
        state = server.state()
        pids = [state["engine"]["pid"], *(gateway["pid"] for gateway in state["gateways"])]
        names = [f"drained-{number}" for number in range(6)]
        answers = [open_stream(server, name, 900) for name in names]
        server.process.send_signal(signal.SIGTERM)
        for answer in answers:
            frames = [line for line in answer.read().split(b"\n") if line.startswith(b"data: ")]
            assert json.loads(frames[-1][6:])["error"]["code"] == "shutting_down"
        assert server.process.wait(30) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    found = rows(tmp_path)
    assert {found[name]["reason"] for name in names} == {"shutting_down"}
    assert all(found[name]["completion_tokens"] >= 1 for name in names)
    assert holds(tmp_path) == 0


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """The engine ends with it; the gateways end their requests, settle them, and go."""
    with serving(*WORDS, data=tmp_path) as server:
        state = server.state()
        pids = [state["engine"]["pid"], *(gateway["pid"] for gateway in state["gateways"])]
        answers = [open_stream(server, f"left-{number}", 900) for number in range(4)]
        server.kill()
        for answer in answers:
            assert b"[DONE]" not in answer.read()
        assert until(lambda: [p for p in pids if Path(f"/proc/{p}").exists()], lambda left: not left, 20) == []
    found = rows(tmp_path)
    assert {found[f"left-{number}"]["reason"] for number in range(4)} == {"engine_failed"}
    assert holds(tmp_path) == 0


def test_nothing_outlives_a_supervisor_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hitsend", "serve", "--workers", "2", "--port", "0", "--data", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        pids = until(lambda: children.read_text().split(), lambda found: len(found) == 3, 30)
        # by now they have their settings, and wait for the engine
        until(lambda: [p for p in pids if Path(f"/proc/{p}/task/{p}/children").read_text()], bool, 30)
    finally:
        process.kill()
        process.wait(10)
    assert until(lambda: [p for p in pids if Path(f"/proc/{p}").exists()], lambda left: not left, 20) == []


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hitsend", "serve", "--workers", "2", "--port", "0", "--data", str(tmp_path)]
    done = subprocess.run([*command, "--host", "0.0.0.0"], check=False, capture_output=True, timeout=60, text=True)
    assert done.returncode != 0
    assert "no API key exists" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_embed_with_one_model(tmp_path: Path) -> None:
    words = ("--workers", "2", "--set", "engine.num_slots=1", "--set", "engine.context=256")
    with serving(*words, "--set", "engine.embedding_model=all-minilm-l6-v2", data=tmp_path) as server:
        before = server.state()["embedder"]
        seen = []
        for number in range(12):
            status, answer, _ = server.post("/v1/embeddings", {"input": [f"text {number % 2}", "a second one"]})
            assert status == 200, answer
            seen.append([each["embedding"] for each in answer["data"]])
        assert all(vectors == seen[number % 2] for number, vectors in enumerate(seen))
        status, answer, _ = server.post("/v1/embeddings", {"input": "far too long " * 500})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert server.state()["embedder"]["pid"] == before["pid"]
        os.kill(before["pid"], signal.SIGKILL)
        after = until(server.state, lambda now: now["embedder"]["is_ready"] and now["embedder"]["restarts"] == 1, 30)
        assert after["embedder"]["restarts"] == 1
        statuses = {server.post("/v1/embeddings", {"input": "back?"})[0] for _ in range(6)}
        assert statuses == {200}
        assert server.wait_idle()["holds_open"] == 0
        counts = Counter(row["reason"] for row in rows(tmp_path).values())
        assert counts == {"stop": 18}


def most_at_once(spans: list[tuple[float, float]]) -> int:
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


async def statuses(url: str, key: str) -> set[int]:
    """Of as many fresh connections as reach every process, all but surely."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one() -> int:
            async with session.get(url + "/v1/models", headers={"authorization": f"Bearer {key}"}) as answer:
                return answer.status

        return set(await asyncio.gather(*(one() for _ in range(60))))
