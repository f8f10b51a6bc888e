"""Nine honest principals, alone and beside one that sends a hundred times its share, on the real model.

Usage: python -m bench.isolation [--seconds 60] [--part 0.5] [--json FILE]
The machine's capacity is measured first; a share is a tenth of it, in requests/s. Honest ones send `--part` of a share
each, at random instants; the flood sends a hundred shares and takes every refusal. Prints the honest ones' TTFT and
refusals both times, and what the flood got.
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
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp

from bench.client import body, prompt
from bench.serving import START_S, bundled_gguf, free_port, machine, percentile

HONEST, TIMES = 9, 100
PROMPT_WORDS, OUTPUT_TOKENS = 110, 64
CALIBRATION = 16
"""Requests at once, by which the capacity is measured."""


@contextmanager
def served() -> Iterator[tuple[str, list[str]]]:
    """A server with ten keys, each of an organisation of its own. Yields address and secrets, the flood's last."""
    hitsend = [sys.executable, "-m", "hitsend"]
    with tempfile.TemporaryDirectory() as data:
        keys = []
        for number in range(HONEST + 1):
            words = ["keys", "create", "--name", f"p{number}", "--org", f"org{number}", "--data", data, "--json"]
            made = subprocess.run([*hitsend, *words], capture_output=True, text=True, check=True, timeout=START_S)
            keys.append(json.loads(made.stdout)["key"])
        port = free_port()
        words = ["serve", "--model", bundled_gguf(), "--port", str(port), "--data", data]
        words += ["--set", "engine.context=1024", "--set", "engine.alias=bench"]
        process = subprocess.Popen([*hitsend, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_healthy(url)
            yield url, keys
        finally:
            process.terminate()
            process.wait(30)


def wait_healthy(url: str) -> None:
    """`/healthz` is the one route that needs no key."""
    for _ in range(START_S * 10):
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/healthz"):  # noqa: S310  # our own loopback server
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} did not become ready in {START_S} s")


async def one(session: aiohttp.ClientSession, url: str, key: str, text: str) -> tuple[str, float]:
    """One streamed request: how it ended, and the ms to its first text (or to its refusal)."""
    sent = time.perf_counter()
    first = None
    headers = {"authorization": f"Bearer {key}"}
    payload = body("bench", text, OUTPUT_TOKENS)
    async with session.post(f"{url}/v1/chat/completions", json=payload, headers=headers) as response:
        if response.status != 200:
            return str(response.status), (time.perf_counter() - sent) * 1000
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return str(chunk["error"]["code"]), (time.perf_counter() - sent) * 1000
            if first is None and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = time.perf_counter()
    return "ok", ((first or time.perf_counter()) - sent) * 1000


class Traffic:
    """Open-loop senders; `ended` collects what became of their requests, by who sent them."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended: list[tuple[str, str, float]] = []

    async def send(self, name: str, key: str, per_s: float, seconds: float) -> None:
        """At random instants, waiting for no answer."""
        rng = random.Random(name)
        until = time.perf_counter() + seconds
        while True:
            pause_s, left_s = rng.expovariate(per_s), until - time.perf_counter()
            await asyncio.sleep(max(0.0, min(pause_s, left_s)))
            if pause_s >= left_s:
                return
            task = asyncio.create_task(self._one(name, key, prompt(rng, PROMPT_WORDS)), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, name: str, key: str, text: str) -> None:
        how, ms = await one(self._session, self._url, key, text)
        self.ended.append((name, how, ms))

    async def finish(self) -> None:
        """Wait for the honest ones' answers; who floods hangs up."""
        while honest := [task for task in self._tasks if task.get_name() != "flood"]:
            await asyncio.wait(honest)
        flood = list(self._tasks)
        for task in flood:
            task.cancel()
        if flood:
            await asyncio.wait(flood)


async def capacity(session: aiohttp.ClientSession, url: str, key: str) -> float:
    """Requests/s of a full machine."""
    rng = random.Random(7)
    await one(session, url, key, prompt(rng, PROMPT_WORDS))
    started = time.perf_counter()
    await asyncio.gather(*(one(session, url, key, prompt(rng, PROMPT_WORDS)) for _ in range(CALIBRATION)))
    return CALIBRATION / (time.perf_counter() - started)


async def measure(url: str, keys: list[str], seconds: float, part: float) -> dict[str, Any]:
    """Capacity, then the honest ones alone, then beside the flood."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        share = await capacity(session, url, keys[0]) / (HONEST + 1)
        found: dict[str, Any] = {"share_per_s": share}
        print(f"a share: {share:.3f} requests/s; the honest send {part:g} of it, the flood {TIMES}", flush=True)
        for name in ("alone", "beside"):
            traffic = Traffic(session, url)
            senders = [traffic.send(f"honest{i}", keys[i], part * share, seconds) for i in range(HONEST)]
            if name == "beside":
                senders.append(traffic.send("flood", keys[-1], TIMES * share, seconds))
            await asyncio.gather(*senders)
            await traffic.finish()
            found[name] = row = summary(traffic.ended)
            print(
                f"{name:7} {row['requests']:4} honest requests, {row['not_served']} not served,"
                f" TTFT p50 {row['ttft_p50_ms']:.0f} ms, p95 {row['ttft_p95_ms']:.0f} ms",
                flush=True,
            )
    return found


def summary(ended: list[tuple[str, str, float]]) -> dict[str, Any]:
    """The honest ones' TTFT and endings, and the flood's."""
    honest = [each for each in ended if each[0] != "flood"]
    ttft = sorted(ms for _, how, ms in honest if how == "ok")
    refusals = sorted(ms for name, how, ms in ended if name == "flood" and how == "503")
    return {
        "requests": len(honest),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p95_ms": percentile(ttft, 0.95),
        "not_served": sum(how != "ok" for _, how, _ in honest),
        "flood": dict(Counter(how for name, how, _ in ended if name == "flood")),
        "refusal_p50_ms": percentile(refusals, 0.5) if refusals else None,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--part", type=float, default=0.5)
    parser.add_argument("--json")
    given = parser.parse_args()
    with served() as (url, keys):
        found = asyncio.run(measure(url, keys, given.seconds, given.part))
    found["machine"] = machine(os.cpu_count() or 1)
    alone, beside = found["alone"], found["beside"]
    print(f"p95 beside / alone: {beside['ttft_p95_ms'] / alone['ttft_p95_ms']:.2f}; the flood: {beside['flood']}")
    if given.json:
        with pathlib.Path(given.json).open("w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
