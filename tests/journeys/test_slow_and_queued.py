"""Clients that read slowly, requests that wait, queues that are full, deadlines that pass: on the real model."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from hitsend.testing import check_stream
from tests.served import Served, serving, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

TALKATIVE = {"2": -100, "0": -100}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One slot, a short queue, short times."""
    with serving(
        *("--set", "engine.num_slots=1", "--set", "engine.context=4096", "--set", "engine.max_waiting=2"),
        *("--set", "engine.wait_timeout_s=4", "--set", "stream.ping_s=0.3", "--set", "stream.stall_s=2"),
        *("--set", "stream.pause_tokens=8"),
    ) as server:
        yield server


def connect(served: Served, fields: dict[str, Any], request_id: str) -> socket.socket:
    """Send a chat request on a socket with the smallest receive buffer there is; nothing is read."""
    where = urlsplit(served.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.settimeout(30)
    client.connect((str(where.hostname), int(where.port or 0)))
    body = {"model": served.model, "messages": [{"role": "user", "content": "Tell a story."}], "stream": True} | fields
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {request_id}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return client


def read_all(client: socket.socket) -> bytes:
    """Everything until the stream has ended (its last chunk), head included."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = client.recv(65536)
        if not piece:
            break
        data += piece
    return data


def test_a_client_that_never_reads_is_paused_then_cut_off(served: Served) -> None:
    """Alternatives make the chunks large, so that the kernel's buffers fill before the answer ends."""
    fields = {"max_tokens": 3000, "logit_bias": TALKATIVE, "logprobs": True, "top_logprobs": 20}
    client = connect(served, fields, "never-reads")
    record = until(
        lambda: served.record("never-reads") if served.state()["running"] == 0 else {"state": "running"},
        lambda record: record["state"] == "cancelled" and record["ledger"] is not None,  # its row comes a commit later
        90,
    )
    client.close()
    assert record["state"] == "cancelled", record["state"]
    kinds = [event["type"] for event in record["events"]]
    assert "paused" in kinds
    spent = {part["name"]: part["ms"] for part in record["segments"]}
    assert spent["client_wait"] > 1000
    assert sum(spent.values()) == pytest.approx(record["wall_ms"], rel=0.01)
    assert record["ledger"]["completion_tokens"] < 3000


def test_pings_come_while_a_request_waits_and_its_answer_is_whole(served: Served) -> None:
    first = connect(served, {"max_tokens": 200, "logit_bias": TALKATIVE}, "goes-first")
    until(served.state, lambda state: state["running"] == 1)
    second = connect(served, {"max_tokens": 3, "logit_bias": TALKATIVE}, "waits")
    time.sleep(1)
    first.close()
    raw = read_all(second)
    second.close()
    body = unchunk(raw.partition(b"\r\n\r\n")[2])
    seen = check_stream(body)
    assert seen.num_pings >= 1
    assert seen.finish_reasons == {0: "length"}


def unchunk(data: bytes) -> bytes:
    """Undo HTTP's chunked encoding."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body += data[:length]
        data = data[length + 2 :]
    return body


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(served: Served) -> None:
    running = connect(served, {"max_tokens": 3000, "logit_bias": TALKATIVE}, "hogs")
    until(served.state, lambda state: state["running"] == 1)
    waiting = [connect(served, {"max_tokens": 3}, f"in-line-{index}") for index in range(2)]
    until(served.state, lambda state: state["waiting"] == 2)
    body = {"model": served.model, "messages": [{"role": "user", "content": "Me too."}]}
    status, answer, headers = served.post("/v1/chat/completions", body)
    assert status == 503
    assert answer["error"]["code"] == "server_overloaded"
    assert float(headers["retry-after"]) >= 1
    # nobody may wait for ever: those in line are told after wait_timeout_s, in the stream that has begun
    for client in waiting:
        raw = read_all(client)
        assert b"server_overloaded" in raw
        assert b"[DONE]" not in raw
        client.close()
    running.close()
    assert served.wait_idle()["holds_open"] == 0
    for index in range(2):
        record = served.record(f"in-line-{index}")
        assert record["ledger"]["completion_tokens"] == 0
        assert record["ledger"]["prompt_tokens"] == 0


def test_nobody_starves_behind_a_request_that_never_fits(served: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        giant = {"model": served.model, "messages": [{"role": "user", "content": "word " * 5000}]}
        refused = pool.submit(served.post, "/v1/chat/completions", giant)
        small = pool.submit(served.chat, "Hi.", max_tokens=2)
        assert refused.result()[0] == 400
        assert small.result()["usage"]["completion_tokens"] >= 0
