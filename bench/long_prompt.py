"""One long prompt among decodes: what it does to the gaps between their tokens, hitsend beside llama-server.

Usage: python -m bench.long_prompt [--rounds 3] [--prompt 4000] [--decodes 8] [--native] [--layout NAME] [--json FILE]
Each wave: so many answers decode for `--alone` seconds, then the long prompt comes, and the wave ends with its first
token. Gaps are between pieces of text as the client sees them. Prints, per server, p50 and p99 of the gaps alone and
beside the prompt, the ratios, and when the prompt's first token came; medians over the waves, servers taking turns.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import sys
import time
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import aiohttp

from bench import serving
from bench.client import body, prompt
from bench.serving import both, machine, percentile

SLOTS, CONTEXT = 16, 4608
"""Room for the prompt in each slot, within the default KV budget."""

DECODED, OUTPUT_TOKENS, TEMPLATE = 96, 3000, 20
"""Tokens of the decodes' prompts, more than any of them will say, and those that the template adds."""


class Stream:
    """One streamed answer: the instants at which text came."""

    def __init__(self) -> None:
        self.instants: list[float] = []
        self.begun = asyncio.Event()

    async def run(self, session: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> None:
        """Until its end, or until it is cancelled."""
        async with session.post(f"{url}/v1/chat/completions", json=payload) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {") and _has_text(json.loads(line[6:])):
                    self.instants.append(time.perf_counter())
                    self.begun.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Ms between pieces, of those that ended within that time."""
        return [1000 * (b - a) for a, b in pairwise(self.instants) if start <= b <= end]


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ()))


async def wave(target: tuple[str, str], seed: int, asked: argparse.Namespace) -> dict[str, float]:
    """The decodes alone, then beside the long prompt."""
    rng = random.Random(seed)
    url, model = target
    # closed connections are how llama-server learns of clients that left
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        decodes, long = [Stream() for _ in range(asked.decodes)], Stream()
        # at temperature 0 a small model soon says the same again and again, which a server may guess
        payloads = [body(model, prompt(rng, DECODED), OUTPUT_TOKENS) | {"temperature": 1} for _ in decodes]
        tasks = [asyncio.ensure_future(each.run(session, url, p)) for each, p in zip(decodes, payloads, strict=True)]
        await _until(tasks, *(each.begun.wait() for each in decodes))
        start = time.perf_counter()
        await asyncio.sleep(asked.alone)
        sent = time.perf_counter()
        whole = body(model, prompt(rng, asked.prompt - TEMPLATE), 4)
        tasks.append(asyncio.ensure_future(long.run(session, url, whole)))
        await _until(tasks, long.begun.wait())
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    alone = sorted(gap for each in decodes for gap in each.gaps(start, sent))
    beside = sorted(gap for each in decodes for gap in each.gaps(sent, end))
    named = {"alone": alone, "beside": beside}
    found = {f"{name}_p{p}_ms": percentile(gaps, p / 100) for name, gaps in named.items() for p in (50, 99)}
    return found | {"ratio_p99": found["beside_p99_ms"] / found["alone_p99_ms"], "ttft_s": end - sent}


async def _until(tasks: list[asyncio.Task[None]], *waits: Any) -> None:
    """All of these have happened. Raises where an answer ended before, or failed."""
    waiting = asyncio.gather(*waits)
    done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    if waiting in done:
        return
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    for task in done:
        task.result()
    raise RuntimeError("an answer ended before the wave did")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """All waves, the servers taking turns."""
    serving.SLOTS, serving.CONTEXT = SLOTS, CONTEXT
    threads = os.cpu_count() or 1
    rows: dict[str, list[dict[str, float]]] = {}
    with both(threads, asked.layout, native=asked.native) as (ours, peer):
        targets = [("hitsend", ours), ("llama-server", peer)]
        for number in range(asked.rounds):
            for name, target in targets if number % 2 == 0 else reversed(targets):
                found = asyncio.run(wave(target, number, asked))
                rows.setdefault(name, []).append(found)
                told = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
                print(f"{name}: {told}", file=sys.stderr, flush=True)
    medians = {name: {key: median(row[key] for row in waves) for key in waves[0]} for name, waves in rows.items()}
    return {"machine": machine(threads), "medians": medians, "runs": rows}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--alone", type=float, default=5.0)
    parser.add_argument("--native", action="store_true", help="both on what `make native native-server` compiled")
    parser.add_argument("--layout", help="hitsend with its weights in this layout")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    result = run(asked)
    print(f"{asked.prompt} tokens among {asked.decodes} decodes, {asked.rounds} waves, medians; {result['machine']}\n")
    print("| server | gaps alone p50 / p99 ms | beside it | p99 | the prompt's first token |\n|---|---|---|---|---|")
    for name, m in result["medians"].items():
        alone, beside = (f"{m[f'{when}_p50_ms']:.0f} / {m[f'{when}_p99_ms']:.0f}" for when in ("alone", "beside"))
        print(f"| {name} | {alone} | {beside} | {m['ratio_p99']:.2f} x | {m['ttft_s']:.1f} s |")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
