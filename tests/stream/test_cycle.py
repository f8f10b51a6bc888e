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
        self.data = b""

    def write(self, data):
        self.data += data

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
