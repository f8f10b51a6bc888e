"""A real redis-server or valkey-server of its own for tests: a free loopback port, a temp folder, nothing on disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.served import free_port

START_S = 20
OVERRIDE = "HITSEND_TEST_VALKEY"
"""Path of the server to test against, where it isn't the first one that is found."""

NO_SERVER = "NO redis-server OR valkey-server ON THIS MACHINE: limits over several gateways are NOT tested"


class Server:
    """One server; `restart` brings it back empty on the same port."""

    def __init__(self, program: str, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        self._log = (folder / "server.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(port=self.port, decode_responses=True)

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(redis.RedisError):
                self.client.ping()
                return
            time.sleep(0.02)
        raise RuntimeError("the server did not come up:\n" + Path(self._log.name).read_text()[-2000:])

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait for it; everything in it is gone."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.client.close()
        self._log.close()


@contextlib.contextmanager
def valkey_server() -> Iterator[Server]:
    """Runs for the block; skips the test, loudly, where no server is installed."""
    program = os.environ.get(OVERRIDE) or shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip(NO_SERVER)
    with tempfile.TemporaryDirectory(prefix="hitsend-valkey-") as folder:
        server = Server(program, Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()
