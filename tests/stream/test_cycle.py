"""The short way of an answer's head says what uvicorn's says, and lets no header begin a line of its own."""

import asyncio
import logging

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from hitsend.serve.stream.cycle import Cycle


class Wire:
    """Keeps what is written."""

    def __init__(self):
        self.data, self.num_writes = b"", 0

    def write(self, data):
        self.data += data
        self.num_writes += 1

    def close(self):
        self.data += b"<closed>"


def cycle_of(kind, method="POST", *, keep_alive=True):
    wire, logger = Wire(), logging.getLogger("test")
    scope = {"method": method, "type": "http"}
    made = kind(
        scope, wire, FlowControl(wire), logger, logger, False, [(b"date", b"now")], asyncio.Event(), False, keep_alive,
        lambda: None,
    )  # fmt: skip
    return made, wire


HEADS = [
    (200, [(b"content-type", b"application/json"), (b"content-length", b"2")], b"{}"),
    (200, [(b"content-type", b"text/event-stream")], b"data: x\n\n"),
    (429, [(b"content-length", b"0"), (b"retry-after", b"1")], b""),
    (400, [(b"content-length", b"2"), (b"connection", b"close")], b"{}"),
    (204, [], b""),
]


@pytest.mark.parametrize(("status", "headers", "body"), HEADS)
@pytest.mark.parametrize("keep_alive", [True, False])
async def test_an_answer_is_written_as_uvicorn_writes_it(status, headers, body, keep_alive):
    written = []
    for kind in (RequestResponseCycle, Cycle):
        cycle, wire = cycle_of(kind, keep_alive=keep_alive)
        await cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        await cycle.send({"type": "http.response.body", "body": body, "more_body": False})
        assert cycle.response_complete
        written.append(wire.data.lower())
    head, theirs = (sorted(data.partition(b"\r\n\r\n")[0].split(b"\r\n")) for data in written)
    assert head == theirs
    assert written[0].partition(b"\r\n\r\n")[2] == written[1].partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nb", b"a\rb", b"a\0", b"a\x7f", b"\r\n\r\n<html>"])
async def test_a_value_with_a_control_character_is_never_written(value):
    cycle, wire = cycle_of(Cycle)
    with pytest.raises(RuntimeError, match="control character"):
        await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", value)]})
    assert wire.data == b""


async def started_cycle():
    cycle, wire = cycle_of(Cycle)
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
    return cycle, wire


async def test_a_head_leaves_with_the_first_piece_in_one_write():
    cycle, wire = await started_cycle()
    assert wire.num_writes == 0
    for piece in (b"", b"data: 1\n\n", b"data: 2\n\n"):
        await cycle.send({"type": "http.response.body", "body": piece, "more_body": True})
    assert wire.num_writes == 2
    assert wire.data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert wire.data.count(b"x-a: b\r\n") == 1
    assert wire.data.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n")


async def test_a_head_isnt_lost_where_the_client_reads_slowly():
    cycle, wire = await started_cycle()
    cycle.flow.pause_writing()
    sending = asyncio.ensure_future(
        cycle.send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    )
    await asyncio.sleep(0)
    assert not sending.done()
    assert wire.data.endswith(b"\r\n\r\n")
    cycle.flow.resume_writing()
    await sending
    assert wire.data.count(b"x-a: b\r\n") == 1
    assert wire.data.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")


async def test_nothing_is_written_to_who_has_left():
    cycle, wire = await started_cycle()
    cycle.disconnected = True
    await cycle.send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    assert wire.num_writes == 0
