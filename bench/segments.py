"""Do a record's segments add up, whatever became of the request: mixed requests on the real model, and what recording
costs.

Usage: python -m bench.segments [--requests 500] [--concurrency 24]
Streamed and whole, several choices, stop strings, tools, refusals, requests that are cut off at some instant, some that
fail: for each, the sum of the segments and of the explained causes against the wall time. Exits with 1 when one is more
than 1 % off. Prints the largest difference, and the edge's CPU as a share of the run: recording is a part of it.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import psutil

from bench.client import body, prompt
from tests.served import Served, serving, until

OFF = 0.01
"""What a sum may differ by, as a share of the wall time; and half a microsecond for each rounded part."""


def payload(model: str, rng: random.Random) -> dict[str, Any]:
    """One of many kinds."""
    asked = body(model, prompt(rng, rng.randint(5, 120)), rng.randint(1, 40))
    if rng.random() < 0.4:
        del asked["stream"], asked["stream_options"]
    more: list[dict[str, Any]] = [
        {},
        {"n": rng.randint(2, 3)},
        {"stop": ["the"]},
        {"logprobs": True, "top_logprobs": 3},
        {"temperature": 1.5, "seed": rng.randint(0, 99)},
        {"response_format": {"type": "json_object"}},
        {"max_tokens": 100_000},
        {"temperature": "hot"},
    ]
    return asked | rng.choices(more, [8, 2, 2, 1, 2, 1, 1, 1])[0]


async def one(
    session: aiohttp.ClientSession, served: Served, asked: dict[str, Any], name: str, cut_s: float | None
) -> None:
    """Send it; hang up after `cut_s`."""
    headers = {"x-request-id": name}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(cut_s):
            async with session.post(f"{served.url}/v1/chat/completions", json=asked, headers=headers) as answer:
                await answer.read()


async def all_of_them(served: Served, num: int, concurrency: int) -> None:
    """So many at once, one in six cut off."""
    rng, model = random.Random(7), served.model
    waiting = [
        (f"seg-{number}", payload(model, rng), rng.random() * 2 if rng.random() < 1 / 6 else None)
        for number in range(num)
    ]

    async def worker(session: aiohttp.ClientSession) -> None:
        while waiting:
            name, asked, cut_s = waiting.pop()
            await one(session, served, asked, name, cut_s)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))


def off(record: dict[str, Any], explained: dict[str, Any]) -> float:
    """The larger difference of the two sums, as a share of the wall time."""
    wall = record["wall_ms"]
    sums = (sum(part["ms"] for part in record["segments"]), sum(cause["ms"] for cause in explained["causes"]))
    return max(max(0.0, abs(each - wall) - 0.01) / wall for each in sums)


def judge(served: Served, num: int) -> tuple[Counter[str], float, int]:
    """Endings, the largest difference, and how many requests left no record (cut off before they were read)."""
    endings: Counter[str] = Counter()
    worst, missing = 0.0, 0
    for number in range(num):
        try:
            record = served.record(f"seg-{number}")
            explained = served.get(f"/inspect/requests/seg-{number}/explain")
        except OSError:
            missing += 1
            continue
        endings[record["error"]["code"] if record["error"] else record["finish_reason"]] += 1
        worst = max(worst, off(record, explained))
    return endings, worst, missing


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=24)
    asked = parser.parse_args()
    sizes = ("--set", "engine.num_slots=16", "--set", "engine.context=512", "--set", "record.ring=5000")
    with serving(*sizes) as served:
        edge = psutil.Process(served.process.pid)
        before, began = sum(edge.cpu_times()[:2]), time.perf_counter()
        asyncio.run(all_of_them(served, asked.requests, asked.concurrency))
        wall_s, cpu_s = time.perf_counter() - began, sum(edge.cpu_times()[:2]) - before
        served.wait_idle(60)
        until(lambda: served.state()["writes_waiting"], lambda left: left == 0)
        endings, worst, missing = judge(served, asked.requests)
    print(f"{asked.requests} requests, {missing} without a record: {dict(endings.most_common())}")
    print(f"largest difference between a sum and the wall time: {worst:.4%}")
    print(f"edge: {cpu_s / asked.requests * 1000:.1f} ms of CPU a request, {cpu_s / wall_s:.1%} of a core, all of it")
    if worst > OFF:
        sys.exit(1)


if __name__ == "__main__":
    main()
