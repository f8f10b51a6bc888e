"""What a server does with ten times the load that it can serve: goodput, and how fast the rest is refused.

Usage: python -m bench.overload [--seconds 8] [--engine upstream|embedded|both] [--workers N] [--json FILE]
`upstream`: `SLOTS` requests at a time of `SERVICE_S` each at a mock on loopback, so that its capacity is known and
hitsend itself is what could get in the way. `embedded`: the bundled model, whose capacity is measured first. Requests
come at random instants whatever becomes of those before them, at 0.5, 1, 2, 5 and 10 times the capacity; a request is
good when it was answered whole within `GOOD_S`. Prints per load: goodput, its share of the best one, and how long
refusals took, those apart that had a place in the queue and lost it to somebody with fewer there.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

from bench.client import body, prompt
from bench.isolation import wait_healthy
from bench.serving import bundled_gguf, free_port, machine, percentile
from hitsend.serve.loop.step import DISPLACED

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
SLOTS, SERVICE_S = 4, 0.2
GOOD_S = 20.0
PROMPT_WORDS, OUTPUT_TOKENS = 20, 8
EMBEDDED_SLOTS, EMBEDDED_WAITING = 4, 8
CALIBRATION = 24
_DISPLACED = DISPLACED.encode()


async def _answer(request: web.Request) -> web.StreamResponse:
    """A stream that takes `SERVICE_S`, but only `SLOTS` of them at a time."""
    gate: asyncio.Semaphore = request.app[_GATE]
    await request.read()
    async with gate:
        await asyncio.sleep(SERVICE_S)
    choice = {"index": 0, "delta": {"content": "word"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 20, "completion_tokens": OUTPUT_TOKENS}
    chunk = json.dumps({"id": "m", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())
    return response


_GATE = web.AppKey("gate", asyncio.Semaphore)


@asynccontextmanager
async def mock() -> AsyncIterator[str]:
    """The upstream's base URL."""
    app = web.Application()
    app[_GATE] = asyncio.Semaphore(SLOTS)
    app.router.add_post("/v1/chat/completions", _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


@contextmanager
def hitsend(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A server with ten keys of ten organisations. Yields its address and the keys."""
    with tempfile.TemporaryDirectory() as data:
        run = [sys.executable, "-m", "hitsend"]
        keys = []
        for number in range(10):
            made = subprocess.run(
                [*run, "keys", "create", "--name", f"p{number}", "--org", f"o{number}", "--data", data, "--json"],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            keys.append(json.loads(made.stdout)["key"])
        port = free_port()
        words = [*run, "serve", "--port", str(port), "--data", data, *words]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_healthy(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}", keys
        finally:
            process.terminate()
            process.wait(30)


class Load:
    """Open-loop requests. `ended`: (status, when, seconds, whether it had a place in the queue and lost it)."""

    def __init__(self, session: aiohttp.ClientSession, url: str, keys: list[str]) -> None:
        self._session, self._url, self._keys = session, url, keys
        self._rng = random.Random(11)
        self.ended: list[tuple[int, float, float, bool]] = []

    async def one(self) -> None:
        """Send one, wait for its whole answer."""
        words = body("bench", prompt(self._rng, PROMPT_WORDS), OUTPUT_TOKENS) | {"stream": False}
        words.pop("stream_options", None)
        headers = {"authorization": f"Bearer {self._rng.choice(self._keys)}"}
        sent = time.perf_counter()
        url = f"{self._url}/v1/chat/completions"
        async with self._session.post(url, json=words, headers=headers) as answer:
            is_displaced = _DISPLACED in await answer.read()
            now = time.perf_counter()
            self.ended.append((answer.status, now, now - sent, is_displaced))

    async def run(self, per_s: float, seconds: float) -> dict[str, Any]:
        """So many per second for so long; what became of them. The first third fills the queue and isn't counted."""
        self.ended = []
        tasks: set[asyncio.Task[None]] = set()
        began = time.perf_counter()
        due = 0.0
        while (due := due + self._rng.expovariate(per_s)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.add(task := asyncio.create_task(self.one()))
            task.add_done_callback(tasks.discard)
        end, since = time.perf_counter(), began + seconds / 3
        while tasks:
            await asyncio.wait(tasks)
        good = [spent for status, at, spent, _ in self.ended if status == 200 and since <= at <= end]
        refused = sorted(1000 * spent for status, _, spent, is_late in self.ended if status != 200 and not is_late)
        return {
            "offered_per_s": len(self.ended) / (end - began),
            "goodput_per_s": sum(spent <= GOOD_S for spent in good) / (end - since),
            "statuses": dict(Counter(status for status, *_ in self.ended)),
            "displaced": sum(is_displaced for *_, is_displaced in self.ended),
            "refusal_p50_ms": percentile(refused, 0.5) if refused else 0.0,
            "refusal_p99_ms": percentile(refused, 0.99) if refused else 0.0,
        }


async def measure(url: str, keys: list[str], capacity: float | None, seconds: float) -> dict[str, Any]:
    """All loads, one after the other."""
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        load = Load(session, url, keys)
        await load.one()
        if capacity is None:
            began, gate = time.perf_counter(), asyncio.Semaphore(EMBEDDED_SLOTS)

            async def through() -> None:
                async with gate:
                    await load.one()

            await asyncio.gather(*(through() for _ in range(CALIBRATION)))
            capacity = CALIBRATION / (time.perf_counter() - began)
        rows = {}
        for times in LOADS:
            await asyncio.sleep(0.5)
            rows[times] = await load.run(times * capacity, seconds)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    best = max(row["goodput_per_s"] for row in rows.values())
    for row in rows.values():
        row["share_of_best"] = row["goodput_per_s"] / best
    return {"capacity_per_s": capacity, "rows": rows}


async def of_upstream(seconds: float, workers: int) -> dict[str, Any]:
    """The server in front of the mock."""
    async with mock() as base_url:
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "c.toml"
            config.write_text(
                f'[engine]\nmodel = "{"none" if workers == 1 else bundled_gguf()}"\n[[engines]]\nname = "mock"\n'
                f'base_url = "{base_url}"\nmax_concurrent = {max(1, SLOTS // workers)}\n'
                'models = { bench = "m" }\nprices = { input = 0.5, output = 1.5 }\n'
            )
            words = ["--config", str(config), "--set", f"server.workers={workers}"]
            with hitsend(words) as (url, keys):
                return await measure(url, keys, SLOTS / SERVICE_S, seconds)


async def of_embedded(seconds: float, workers: int) -> dict[str, Any]:
    """The server with the bundled model."""
    words = ["--model", bundled_gguf(), "--set", "engine.alias=bench", "--set", "engine.context=1024"]
    words += ["--set", f"engine.num_slots={EMBEDDED_SLOTS}", "--set", f"engine.max_waiting={EMBEDDED_WAITING}"]
    with hitsend([*words, "--set", f"server.workers={workers}"]) as (url, keys):
        return await measure(url, keys, None, seconds)


def show(name: str, found: dict[str, Any]) -> None:
    """Markdown."""
    print(f"\n{name}, capacity {found['capacity_per_s']:.1f} requests/s\n")
    print("| load | offered/s | goodput/s | share of the best | refusals p50 / p99 ms | statuses | displaced |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for times, row in found["rows"].items():
        refusals = f"{row['refusal_p50_ms']:.1f} / {row['refusal_p99_ms']:.1f}"
        print(
            f"| {times:g} x | {row['offered_per_s']:.1f} | {row['goodput_per_s']:.2f} | {row['share_of_best']:.2f} "
            f"| {refusals} | {row['statuses']} | {row['displaced']} |"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--engine", choices=("upstream", "embedded", "both"), default="both")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(os.cpu_count() or 1)}
    for name, run in (("upstream", of_upstream), ("embedded", of_embedded)):
        if asked.engine in (name, "both"):
            found[name] = asyncio.run(run(asked.seconds, asked.workers))
            show(name, found[name])
    if asked.json is not None:
        with suppress(OSError):
            asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
