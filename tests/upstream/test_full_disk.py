"""A server whose disk is full: not ready, refuses what needs a row, and serves again when there is room."""

import asyncio

import pytest

from tests.limited import no_file_may_grow
from tests.upstream.conftest import gateway

pytestmark = pytest.mark.slow  # waits for sockets


async def test_a_database_that_takes_no_writes_is_not_ready_until_it_does(tmp_path, mock):
    async with gateway(tmp_path, mock) as gate:
        with no_file_may_grow(4096):
            status, body, _ = await gate.answer()
            assert (status, body["error"]["code"]) == (503, "storage_failed")
            found = await gate.get("/readyz")
            assert (found["status"], found["detail"]) == ("not ready", "the database takes no writes: disk I/O error")
            assert (await gate.get("/healthz"))["status"] == "ok"
        async with asyncio.timeout(30):
            while (await gate.get("/readyz"))["status"] != "ready":
                await asyncio.sleep(0.05)
        assert (await gate.answer())[0] == 200
