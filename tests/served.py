"""A real hitsend server in a process of its own, for tests that go over real sockets."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

START_S = 60
T = TypeVar("T")


IS_DRILL = bool(os.environ.get("HITSEND_DRILL"))
"""Whether `make drill` asks: then counts are the full ones."""

TIMES = 20 if IS_DRILL else 8
"""How often what may go wrong is made to."""

MANY = 500 if IS_DRILL else 200
"""Requests at once that race for a limit."""


class Served:
    """One running server: its address, its process, and questions to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, data: Path) -> None:
        self.process = process
        self.url = url
        self.data = data

    def get(self, path: str, key: str | None = None) -> Any:
        """The JSON that a GET answers."""
        request = urllib.request.Request(self.url + path)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def text(self, path: str) -> str:
        """The text that a GET answers."""
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers (lower case) of a POST; `body` bytes go out as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, raw, {"content-type": "application/json"})
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer), {k.lower(): v for k, v in answer.headers.items()}
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read()), {k.lower(): v for k, v in refused.headers.items()}

    def chat(self, text: str, **fields: Any) -> Any:
        """The body of a chat answer that has to succeed."""
        messages = [{"role": "user", "content": text}]
        status, answer, _ = self.post("/v1/chat/completions", {"model": self.model, "messages": messages} | fields)
        assert status == 200, answer
        return answer

    @functools.cached_property
    def model(self) -> str:
        """The name of the model that it serves, asked once."""
        return str(self.get("/v1/models")["data"][0]["id"])

    def state(self) -> dict[str, Any]:
        """`/inspect/state`."""
        return dict(self.get("/inspect/state"))

    def record(self, request_id: str) -> dict[str, Any]:
        """One flight record."""
        return dict(self.get(f"/inspect/requests/{request_id}"))

    def num_fds(self) -> int:
        """Open descriptors of the edge process, but for the database's: its pool opens them on first need."""
        links = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                links.append(str(link.readlink()))
        return sum(".sqlite3" not in link for link in links)

    def wait_idle(self, seconds: float = 15.0) -> dict[str, Any]:
        """Wait until nothing runs, waits or is held; the last state, idle or not, is for the caller to judge."""
        busy = ("running", "waiting", "cells_used", "slots_used", "holds_open")
        return until(self.state, lambda state: not any(state[name] for name in busy), seconds)

    def kill(self) -> None:
        """kill -9, and wait for it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


def until(ask: Callable[[], T], good: Callable[[T], bool], seconds: float = 15.0) -> T:
    """Ask again until the answer is good or the time is up; returns the last answer.

    Most answers need but a moment, so it asks again soon, and then ever more rarely.
    """
    deadline = time.monotonic() + seconds
    answer, pause_s = ask(), 0.005
    while not good(answer) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
        answer = ask()
    return answer


def free_port() -> int:
    """A loopback port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> set[int]:
    """Children, theirs, and so on."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def those_left(pids: set[int]) -> set[int]:
    """Of these processes, the ones that still run."""
    left: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                left.add(pid)
    return left


@contextlib.contextmanager
def serving(*words: str, data: Path | None = None) -> Iterator[Served]:
    """Run `hitsend serve WORDS` until the block ends; its output is shown when it doesn't come up."""
    with contextlib.ExitStack() as stack:
        folder = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hitsend-test-")))
        port = free_port()
        command = [sys.executable, "-m", "hitsend", "serve", "--port", str(port), "--data", str(folder), *words]
        log = stack.enter_context((folder / "server.log").open("ab"))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HITSEND")}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        served = Served(process, f"http://127.0.0.1:{port}", folder)
        try:
            _wait_ready(served)
            yield served
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(5)


def _wait_ready(served: Served) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and served.process.poll() is None:
        try:
            with urllib.request.urlopen(served.url + "/readyz", timeout=2):
                return
        except urllib.error.HTTPError as refused:
            refused.close()
            if refused.code == 401:  # it listens, and wants to know who asks
                return
            time.sleep(0.05)
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError("the server did not come up:\n" + (served.data / "server.log").read_text()[-3000:])
