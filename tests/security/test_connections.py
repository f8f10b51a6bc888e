"""A bound on open connections, over real sockets: who is let go, who still gets in, and that places come back."""

import asyncio
import contextlib
import json
import socket
from functools import partial

import pytest

from hitsend.serve.stream import doors as doors_module
from hitsend.serve.stream.connection import Connection
from hitsend.serve.stream.doors import EXTRA, Doors
from tests.edge import Edge
from tests.security.sockets import answers, say, serving

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}"
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


@contextlib.asynccontextmanager
async def crowded(doors, number):
    """The server, and so many connections that say nothing, all of which it has seen."""
    async with serving(Edge().app, partial(Connection, doors=doors)) as port, contextlib.AsyncExitStack() as stack:
        for _ in range(number):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
        while doors.num_open < number:
            await asyncio.sleep(0.01)
        yield port, stack


def refused(raw):
    (answer,) = answers(raw)
    assert answer.status == 503
    assert answer.header(b"retry-after") == b"1"
    assert answer.header(b"connection") == b"close"
    error = json.loads(answer.body)["error"]
    assert error["code"] == "server_overloaded"
    assert "server.max_connections" in error["message"]


async def test_beyond_the_limit_only_operators_are_served_and_places_come_back():
    doors = Doors(5)
    async with asyncio.timeout(20), crowded(doors, 5) as (port, stack):
        refused(await say(port, CHAT))
        (answer,) = answers(await say(port, HEALTH))
        assert answer.status == 200
        (answer,) = answers(
            await say(port, b"GET /admin/keys HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        )
        assert answer.status not in (503, 400)
        await stack.aclose()
        while doors.num_open:
            await asyncio.sleep(0.01)
        (answer,) = answers(await say(port, HEALTH))
        assert answer.status == 200


async def test_what_comes_beyond_those_is_closed_before_it_says_anything():
    doors = Doors(3)
    async with asyncio.timeout(20), crowded(doors, 3 + EXTRA) as (port, _):
        for words in (b"", HEALTH, CHAT, b"A" * 100_000):
            refused(await say(port, words))
        assert doors.num_open == 3 + EXTRA
        assert doors.num_refused == 4


@pytest.mark.slow  # the second that a refused client has
async def test_a_flood_of_refused_connections_leaves_nothing_open():
    doors = Doors(1)
    async with asyncio.timeout(30), crowded(doors, 1 + EXTRA) as (port, _):
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(doors_module.MOST_LINGERING + 40)]
        for each in idle:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        for each in idle:
            with contextlib.suppress(ConnectionResetError):
                while await loop.sock_recv(each, 65536):
                    pass
            each.close()
        while doors.num_lingering:
            await asyncio.sleep(0.01)
        assert doors.num_open == 1 + EXTRA


async def test_an_address_has_its_own_bound():
    doors = Doors(100, most_per_address=2)
    async with asyncio.timeout(20), crowded(doors, 2) as (port, _):
        refused(await say(port, HEALTH))
        elsewhere = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        elsewhere.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(elsewhere, HEALTH)
        raw = b""
        while piece := await loop.sock_recv(elsewhere, 65536):
            raw += piece
        elsewhere.close()
        (answer,) = answers(raw)
        assert answer.status == 200


def test_counts_are_exact_and_addresses_are_forgotten():
    doors = Doors(2, most_per_address=2)
    assert [doors.enter(address) for address in ("a", "a", "a", "b")] == ["served", "served", "refused", "extra"]
    for address in ("a", "b", "a"):
        doors.leave(address)
    assert doors.num_open == 0
    assert not doors._by_address
    with pytest.raises(KeyError):
        doors.leave("a")
