"""Clients that hang up, at ten points of a request's life, again and again: nothing stays behind, and the bill is
right."""

import contextlib
import json
import re
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.served import TIMES, Served, serving, until

pytestmark = [pytest.mark.model, pytest.mark.slow]

LONG = "Tell me a very long story about " + "a river and a stone and " * 60


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two slots, so that queueing is easy; a small pause limit, so that a slow reader is paused soon."""
    with serving(
        *("--set", "engine.num_slots=2", "--set", "engine.context=2048", "--set", "engine.check_every_step=true"),
        *("--set", "stream.pause_tokens=16", "--set", "stream.ping_s=0.2", "--set", "engine.step_tokens=64"),
        *("--set", "record.ring=5000"),
    ) as server:
        yield server


class Caller:
    """One client on a raw socket."""

    def __init__(
        self, served: Served, *, stream: bool, max_tokens: int = 400, text: str = "Tell a story.", n: int = 1
    ) -> None:
        self.request_id = f"gone-{uuid.uuid4().hex}"
        where = urlsplit(served.url)
        self.socket = socket.create_connection((str(where.hostname), int(where.port or 0)), timeout=30)
        bias = {"2": -100, "0": -100}  # without its end tokens the model talks until max_tokens
        body = {"model": served.model, "messages": [{"role": "user", "content": text}], "stream": stream}
        self.body = json.dumps(body | {"max_tokens": max_tokens, "logit_bias": bias, "n": n}).encode()
        self.received = b""

    def send_head(self) -> None:
        """The request's head, announcing the body."""
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: {self.request_id}\r\nContent-Length: {len(self.body)}\r\n\r\n"
        self.socket.sendall(head.encode())

    def send(self) -> None:
        """The whole request."""
        self.send_head()
        self.socket.sendall(self.body)

    def read_until(self, pattern: bytes, times: int = 1) -> None:
        """Read until the pattern has been seen so often."""
        while len(re.findall(pattern, self.received)) < times:
            data = self.socket.recv(65536)
            assert data, f"the server closed early: {self.received[-300:]!r}"
            self.received += data

    def reset(self) -> None:
        """Hang up with a reset (RST)."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Hang up with FIN."""
        self.socket.close()


def _state_is(served: Served, good: Callable[[dict[str, Any]], bool]) -> None:
    state = until(served.state, good)
    assert good(state), state


@contextlib.contextmanager
def _full(served: Served) -> Iterator[None]:
    """Both slots busy for the length of the block."""
    others = [Caller(served, stream=True, max_tokens=1900) for _ in range(2)]
    for other in others:
        other.send()
    _state_is(served, lambda s: s["running"] == 2)
    try:
        yield
    finally:
        for other in others:
            other.close()
        served.wait_idle()


def in_the_head(served: Served) -> str:
    """Before the body was sent."""
    caller = Caller(served, stream=True)
    caller.send_head()
    caller.reset()
    return caller.request_id


def right_after_sending(served: Served) -> str:
    """Before anything came back."""
    caller = Caller(served, stream=True)
    caller.send()
    caller.reset()
    return caller.request_id


def queued_stream(served: Served) -> str:
    """While it waits for a slot, streaming."""
    with _full(served):
        caller = Caller(served, stream=True)
        caller.send()
        _state_is(served, lambda s: s["waiting"] == 1)
        caller.close()
        _state_is(served, lambda s: s["waiting"] == 0)
    return caller.request_id


def queued_whole(served: Served) -> str:
    """While it waits for a slot, not streaming."""
    with _full(served):
        caller = Caller(served, stream=False)
        caller.send()
        _state_is(served, lambda s: s["waiting"] == 1)
        caller.reset()
        _state_is(served, lambda s: s["waiting"] == 0)
    return caller.request_id


def prefilling(served: Served) -> str:
    """While its prompt goes through the model."""
    caller = Caller(served, stream=True, text=LONG * 4)
    caller.send()
    _state_is(served, lambda s: s["running"] == 1)
    caller.reset()
    return caller.request_id


def after_the_first_token(served: Served) -> str:
    """In the stream, at its first token, by FIN."""
    caller = Caller(served, stream=True)
    caller.send()
    caller.read_until(rb'"content":"[^"]')
    caller.close()
    return caller.request_id


def in_mid_stream(served: Served) -> str:
    """In the stream, after ten tokens, by RST."""
    caller = Caller(served, stream=True)
    caller.send()
    caller.read_until(rb'"content":"[^"]', 10)
    caller.reset()
    return caller.request_id


def whole_in_mid_decode(served: Served) -> str:
    """Not streaming, while it decodes."""
    caller = Caller(served, stream=False)
    caller.send()
    _state_is(served, lambda s: s["running"] == 1)
    time.sleep(0.1)
    caller.close()
    return caller.request_id


def two_choices(served: Served) -> str:
    """In a stream of two choices."""
    caller = Caller(served, stream=True, n=2)
    caller.send()
    caller.read_until(rb'"index":1,"delta":\{"content":"[^"]', 2)
    caller.reset()
    return caller.request_id


def half_closed(served: Served) -> str:
    """It closes its sending half and stops reading."""
    caller = Caller(served, stream=True)
    caller.send()
    caller.read_until(rb'"content":"[^"]', 3)
    caller.socket.shutdown(socket.SHUT_WR)
    served.wait_idle()
    caller.close()
    return caller.request_id


POINTS = [
    in_the_head,
    right_after_sending,
    queued_stream,
    queued_whole,
    prefilling,
    after_the_first_token,
    in_mid_stream,
    whole_in_mid_decode,
    two_choices,
    half_closed,
]


def _counter(served: Served, name: str, **labels: str) -> float:
    """A counter's value, summed over all series that have these labels."""
    lines = re.findall(rf"^{name}(?:{{(.*)}})? ([0-9.e+]+)$", served.text("/metrics"), re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for found, value in lines if all(one in found for one in wanted))


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_nothing_stays_behind_and_the_bill_is_what_was_produced(served: Served, point: Callable[[Served], str]) -> None:
    for _ in range(2):  # the database's pool opens its connections when they are first needed
        point(served)
    served.wait_idle()
    fds = served.num_fds()
    for _ in range(TIMES):
        request_id = point(served)
        _is_at_rest(served)
        if point not in (in_the_head, right_after_sending):  # these may have ended before there was anything to bill
            _is_billed_as_produced(served, request_id)
    assert until(served.num_fds, lambda num: num <= fds) <= fds


def _is_at_rest(served: Served) -> None:
    state = served.wait_idle(10)
    left = {name: state[name] for name in ("running", "waiting", "cells_used", "slots_used", "holds_open")}
    assert not any(left.values()), left
    assert state["engine"]["check"] is None


def _is_billed_as_produced(served: Served, request_id: str) -> None:
    record = until(lambda: served.record(request_id), lambda r: r["ledger"] is not None)
    assert record["state"] == "cancelled", record["state"]
    assert record["ledger"]["reason"] == "client_gone"
    sampled = sum(event["num_tokens"] for event in record["events"] if event["type"] == "choice_finished")
    assert record["ledger"]["completion_tokens"] == sampled == record["usage"]["completion_tokens"]
    assert sampled < 800, "it ran to its end"
    assert record["cells"]["held"] == 0 or record["cells"]["after"] == 0


def test_all_that_the_engine_sampled_is_billed_or_discarded(served: Served) -> None:
    """After all that: the engine's own counter equals what the ledger billed and what was computed for nobody."""
    served.chat("Count to ten.", max_tokens=30, stop=["two"])
    served.wait_idle()

    def counted() -> tuple[float, float]:
        billed = _counter(served, "hitsend_tokens_billed_total", kind="completion")
        discarded = _counter(served, "hitsend_tokens_discarded_total")
        return _counter(served, "hitsend_tokens_output_total"), billed + discarded

    # a record closes, and is counted, when its connection is done with: after stream.stall_s at the latest
    engine, ledger = until(counted, lambda both: both[0] == both[1], 45)
    assert engine == ledger > 0


def test_many_hang_up_at_once_and_one_stays(served: Served) -> None:
    """Batch-mates of those who leave are served to their end."""
    callers = [Caller(served, stream=True) for _ in range(12)]
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(served.chat, "Say hello.", max_tokens=16, temperature=0)
        for caller in callers:
            caller.send()
        for caller in callers:
            caller.reset()
        answer = staying.result()
    assert answer["usage"]["completion_tokens"] >= 1
