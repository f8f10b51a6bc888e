"""Goodput: requests a second that kept both promises, hitsend beside llama-server, at the same open loop of arrivals.

Usage: python -m bench.goodput [--rates 0.4,0.7,1.0] [--seconds 60] [--rounds 1] [--ttft 2.0] [--tpot 0.1] [--json FILE]
Requests come at random instants (Poisson) whatever became of the ones before, so that a slow server can't slow its own
load. The mix: 70 % short (48 to 200 prompt tokens, 32 to 96 out), 25 % medium (300 to 600, 64 to 128), 5 % long (1,500
to 2,500, 32 to 64). Good is a request whose first token came within `--ttft` seconds after the instant at which it was
due to be sent, and each further one within `--tpot` on average. Both servers get the same requests at the same
instants, one after the other. Prints goodput per rate, and the ratio at the rate where llama-server's is highest.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import sys
from statistics import median
from typing import Any, NamedTuple

import aiohttp

from bench import serving
from bench.client import body, fit_words, one, prompt
from bench.serving import bundled_gguf, hitsend, llama_server, machine, percentile

CONTEXT = 2816
"""As many as the default KV budget gives each of the slots."""

MIX = ((0.70, (48, 200), (32, 96)), (0.25, (300, 600), (64, 128)), (0.05, (1500, 2500), (32, 64)))
"""(share, prompt tokens from and to, output tokens from and to)"""


class Arrival(NamedTuple):
    """A request: seconds after the start, prompt tokens, output tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process of the mix."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        _, prompts, outputs = rng.choices(MIX, [share for share, _, _ in MIX])[0]
        found.append(Arrival(at_s, rng.randint(*prompts), rng.randint(*outputs)))
        at_s += rng.expovariate(rate)
    return found


async def open_loop(target: tuple[str, str], coming: list[Arrival], seed: int) -> list[dict[str, Any]]:
    """Send each at its instant; a failure is a request that wasn't good."""
    url, model = target
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        fixed = 128 - await fit_words(session, url, model, 128)
        rng = random.Random(seed)
        payloads = [body(model, prompt(rng, each.prompt_tokens - fixed), each.output_tokens) for each in coming]
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def send(arrival: Arrival, payload: dict[str, Any]) -> dict[str, Any]:
            await asyncio.sleep(max(0.0, begin + arrival.at_s - loop.time()))
            late_ms = 1000 * (loop.time() - begin - arrival.at_s)
            try:
                answer = await one(session, url, payload)
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as failure:
                return {"failed": type(failure).__name__}
            return answer | {"ttft_ms": answer["ttft_ms"] + late_ms}

        return await asyncio.gather(*map(send, coming, payloads))


def judged(answers: list[dict[str, Any]], seconds: float, ttft_ms: float, tpot_ms: float) -> dict[str, float]:
    """Goodput and what it is made of."""
    whole = [each for each in answers if "failed" not in each]
    good = [each for each in whole if each["ttft_ms"] <= ttft_ms and (each["tpot_ms"] or 0.0) <= tpot_ms]
    ttft = sorted(each["ttft_ms"] for each in whole) or [0.0]
    tpot = sorted(each["tpot_ms"] or 0.0 for each in whole) or [0.0]
    return {
        "goodput": len(good) / seconds,
        "good_percent": 100 * len(good) / max(1, len(answers)),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p90_ms": percentile(ttft, 0.9),
        "tpot_p50_ms": percentile(tpot, 0.5),
        "tpot_p90_ms": percentile(tpot, 0.9),
        "failed": float(len(answers) - len(whole)),
    }


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """All rates and rounds, the servers taking turns."""
    serving.CONTEXT = CONTEXT
    gguf, threads = bundled_gguf(), os.cpu_count() or 1
    rates = [float(rate) for rate in asked.rates.split(",")]
    runs: dict[float, dict[str, list[dict[str, float]]]] = {r: {"hitsend": [], "llama-server": []} for r in rates}
    with hitsend(gguf, threads) as ours, llama_server(gguf, threads) as peer:
        targets = [("hitsend", ours[:2]), ("llama-server", peer)]
        for _, target in targets:
            asyncio.run(open_loop(target, arrivals(1.0, 3.0, 7), 7))
        for number in range(asked.rounds):
            for rate in rates:
                for name, target in targets if number % 2 == 0 else reversed(targets):
                    # no prompt is ever sent twice to one server, which may keep old ones
                    coming = arrivals(rate, asked.seconds, number)
                    answers = asyncio.run(open_loop(target, coming, 1000 * number + int(100 * rate)))
                    runs[rate][name].append(judged(answers, asked.seconds, 1000 * asked.ttft, 1000 * asked.tpot))
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    medians = {
        rate: {
            name: {key: median(one_run[key] for one_run in all_runs) for key in all_runs[0]}
            for name, all_runs in by.items()
        }
        for rate, by in runs.items()
    }
    return {"machine": machine(threads), "seconds": asked.seconds, "rounds": asked.rounds, "medians": medians}


def show(result: dict[str, Any], ttft_s: float, tpot_s: float) -> None:
    """The table and the ratio, as Markdown."""
    print(
        f"TTFT <= {ttft_s:g} s and TPOT <= {1000 * tpot_s:g} ms; {result['seconds']:g} s a run; {result['machine']}\n"
    )
    print("| requests/s | server | good/s | good | TTFT p50 / p90 ms | TPOT p50 / p90 ms |\n|---|---|---|---|---|---|")
    for rate, by in result["medians"].items():
        for name, m in by.items():
            ttft, tpot = (f"{m[f'{of}_p50_ms']:.0f} / {m[f'{of}_p90_ms']:.0f}" for of in ("ttft", "tpot"))
            print(f"| {rate:g} | {name} | {m['goodput']:.2f} | {m['good_percent']:.0f} % | {ttft} | {tpot} |")
    peak, by = max(result["medians"].items(), key=lambda item: item[1]["llama-server"]["goodput"])
    ours, theirs = by["hitsend"]["goodput"], by["llama-server"]["goodput"]
    if theirs:
        print(f"\nratio at {peak:g} requests/s, where llama-server's goodput is highest: {ours / theirs:.2f}")
    else:
        print("\nllama-server kept no promise at any rate: the machine is too busy, or the rates are too high")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="0.4,0.7,1.0,1.4")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    result = run(asked)
    show(result, asked.ttft, asked.tpot)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
