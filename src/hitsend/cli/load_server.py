"""A server for one load test, where none is named and none is there.

Enters: nothing. Leaves: its address. Always true: it is a process of its own, so that the load and what is loaded don't
share an interpreter; it keeps its data in a folder that goes with it, and is stopped in any case, by the kernel (Linux)
where this process is killed. Next: `load_view.py`.
"""

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp

from hitsend.cli import CallFailed
from hitsend.cli.client import Client
from hitsend.serve.engine.libllama import die_with_parent

START_S = 120.0
STOP_S = 20.0


@asynccontextmanager
async def own_server() -> AsyncIterator[str]:
    """`hitsend serve` on a free loopback port. Raises CallFailed where it doesn't come up."""
    print("no server is there: starting one with the bundled model ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hitsend-load-") as data:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ("-m", "hitsend", "serve", "--port", str(port), "--data", data)
        null = asyncio.subprocess.DEVNULL
        # its own session: Ctrl-C is for the load test, which then stops the server
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=null,
            stdout=null,
            stderr=null,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        try:
            await _wait(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            await _stop(process)


async def _wait(process: asyncio.subprocess.Process, url: str) -> None:
    async with Client(url) as client:
        try:
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    if await client.answers() and await _is_ready(url):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise CallFailed(f"the server didn't come up within {START_S:g} s: try `hitsend serve`") from None
    raise CallFailed(f"the server ended with status {process.returncode}: `hitsend serve` says why")


async def _is_ready(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as response:
        return response.status == 200


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
