"""Does anything grow: mixed requests for minutes, one in ten cut off, memory and descriptors looked at in between.

Usage: python -m bench.soak [--minutes M] [--concurrency C]
Prints a line every ten seconds and the slopes of the second half; exits with 1 when the books don't agree at the end.
"""

import argparse
import asyncio
import contextlib
import random
import re
import sys
import time
from pathlib import Path

import aiohttp

from bench.client import body, prompt
from tests.served import Served, serving

WARM_UP = 0.3
"""Part of the run whose growth doesn't count: caches fill."""


def rss_mib(pid: int) -> float:
    """Resident memory of one process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def slope(points: list[tuple[float, float]]) -> float:
    """Growth per minute by least squares over (seconds, value)."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def worker(session: aiohttp.ClientSession, served: Served, until: float, rng: random.Random) -> int:
    """Ask one thing after the other; hang up on one in ten."""
    done, model = 0, served.model
    while time.monotonic() < until:
        payload = body(model, prompt(rng, rng.randint(10, 150)), rng.randint(4, 48))
        if rng.random() < 0.3:
            del payload["stream"], payload["stream_options"]
        cut_s = rng.random() * 0.4 if rng.random() < 0.1 else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(cut_s):
                async with session.post(f"{served.url}/v1/chat/completions", json=payload) as response:
                    answer = await response.read()
                    if response.status != 200:
                        raise SystemExit(f"status {response.status}: {answer.decode()[:300]}")
        done += 1
    return done


async def soak(served: Served, minutes: float, concurrency: int) -> None:
    """Load it and watch it."""
    started = time.monotonic()
    until = started + minutes * 60
    pids = {"edge": served.process.pid, "engine": served.state()["engine"]["pid"]}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in (*pids, "descriptors")}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        workers = [
            asyncio.create_task(worker(session, served, until, random.Random(seed))) for seed in range(concurrency)
        ]
        while time.monotonic() < until:
            await asyncio.sleep(10)
            at = time.monotonic() - started
            values = {name: rss_mib(pid) for name, pid in pids.items()} | {"descriptors": float(served.num_fds())}
            for name, value in values.items():
                seen[name].append((at, value))
            print(f"{at:6.0f} s  " + "  ".join(f"{name} {value:.1f}" for name, value in values.items()), flush=True)
        requests = sum(await asyncio.gather(*workers))
    print(f"{requests} requests in {minutes:g} minutes at concurrency {concurrency}")
    for name, points in seen.items():
        late = [point for point in points if point[0] > minutes * 60 * WARM_UP]
        print(f"  {name}: {points[0][1]:.1f} -> {points[-1][1]:.1f}, {slope(late):+.3f} per minute after warm-up")


def books_agree(served: Served) -> bool:
    """At rest: nothing is left, and what the engine sampled was billed or discarded."""
    state = served.wait_idle(60)
    left = {name: state[name] for name in ("running", "waiting", "cells_used", "slots_used", "holds_open")}
    text = served.text("/metrics")

    def total(name: str, label: str = "") -> float:
        return sum(
            float(value)
            for labels, value in re.findall(rf"^{name}{{(.*)}} ([0-9.e+]+)$", text, re.MULTILINE)
            if label in labels
        )

    sampled = total("hitsend_tokens_output_total")
    billed = total("hitsend_tokens_billed_total", 'kind="completion"')
    discarded = total("hitsend_tokens_discarded_total")
    print(f"  left {left}; sampled {sampled:.0f} = billed {billed:.0f} + discarded {discarded:.0f}")
    return not any(left.values()) and sampled == billed + discarded and state["engine"]["check"] is None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=12)
    given = parser.parse_args()
    with serving("--set", "engine.num_slots=16", "--set", "engine.wait_timeout_s=300") as target:
        asyncio.run(soak(target, given.minutes, given.concurrency))
        time.sleep(2)  # the last records close just after their last byte
        sys.exit(0 if books_agree(target) else 1)
