"""Goodput: requests a second that kept both promises, hitsend beside llama-server, at the same open loop of arrivals.

Usage: python -m bench.goodput [--rates 0.4,0.7,1.0] [--seconds 60] [--rounds 1] [--ttft 2.0] [--tpot 0.1]
       [--native] [--layout NAME,NAME] [--json FILE]
Requests come at random instants (Poisson) whatever became of the ones before, so that a slow server can't slow its own
load. The mix: 70 % short (48 to 200 prompt tokens, 32 to 96 out), 25 % medium (300 to 600, 64 to 128), 5 % long (1,500
to 2,500, 32 to 64). Good is a request whose first token came within `--ttft` seconds after the instant at which it was
due to be sent, and each further one within `--tpot` on average. All servers get the same requests at the same
instants, one after the other. Prints goodput per rate, and the ratio at the rate where llama-server's is highest.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

from bench import serving
from bench.serving import PEER, bundled_gguf, llama_server, machine, native_llama_server, ours

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


def measure(target: tuple[str, str], coming: list[Arrival], seed: int, asked: argparse.Namespace) -> dict[str, float]:
    """One run against one server, by `hitsend load` replaying a trace."""
    url, model = target
    lines = [{"at_s": at, "input_tokens": prompt, "output_tokens": output} for at, prompt, output in coming]
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.jsonl")
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [
            sys.executable,
            "-m",
            "hitsend",
            "load",
            "--url",
            url,
            "--trace",
            str(trace),
            "--replay",
            "1",
            "--json",
        ]
        words += ["--slo-ttft", f"{asked.ttft}s", "--slo-tpot", f"{1000 * asked.tpot}ms", "--seed", str(seed)]
        words += ["--warmup", "0", "--fresh-connections", "--timeout", "600", *(["--model", model] if model else [])]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=asked.seconds + 900)
    if ran.returncode:
        raise SystemExit(f"the client failed against {url}:\n{ran.stderr[-2000:]}")
    level = json.loads(ran.stdout)["targets"][0]["levels"][0]
    ttft, tpot = level["ttft_ms"], level["tpot_ms"]
    return {
        "goodput": level["goodput_share"] * len(coming) / asked.seconds,
        "good_percent": 100 * level["goodput_share"],
        "ttft_p50_ms": ttft["p50"],
        "ttft_p90_ms": ttft["p90"],
        "tpot_p50_ms": tpot["p50"],
        "tpot_p90_ms": tpot["p90"],
    }


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """All rates and rounds, the servers taking turns."""
    serving.CONTEXT = CONTEXT
    threads = os.cpu_count() or 1
    rates = [float(rate) for rate in asked.rates.split(",")]
    layouts = (asked.layout or "as-shipped").split(",")
    with ExitStack() as stack:
        targets: list[tuple[str, tuple[str, str]]] = []
        for layout in layouts:
            own = ours(stack, bundled_gguf(), threads, layout, native=asked.native, is_only=True)
            targets += [(f"hitsend {layout}", each[:2]) for each in own.values()]
        peer = (native_llama_server if asked.native else llama_server)(bundled_gguf(), threads)
        targets.append((PEER, stack.enter_context(peer)))
        runs: dict[float, dict[str, list[dict[str, float]]]] = {r: {name: [] for name, _ in targets} for r in rates}
        for _, target in targets:
            measure(target, [Arrival(0.0, 100, 8)], 7, asked)
        for number in range(asked.rounds):
            for rate in rates:
                for name, target in targets if number % 2 == 0 else reversed(targets):
                    # no prompt is ever sent twice to one server, which may keep old ones
                    seed = 1000 * number + int(100 * rate)
                    found = measure(target, arrivals(rate, asked.seconds, number), seed, asked)
                    runs[rate][name].append(found)
                    told = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
                    print(f"{rate:g}/s {name}: {told}", file=sys.stderr, flush=True)
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
    peak, by = max(result["medians"].items(), key=lambda item: item[1][PEER]["goodput"])
    theirs = by[PEER]["goodput"]
    if theirs:
        ratios = ", ".join(f"{name} {by[name]['goodput'] / theirs:.2f}" for name in by if name != PEER)
        print(f"\nratio at {peak:g} requests/s, where llama-server's goodput is highest: {ratios}")
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
    parser.add_argument("--native", action="store_true", help="both on what `make native native-server` compiled")
    parser.add_argument("--layout", help="hitsend in these layouts, with commas (as-shipped is one)")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    result = run(asked)
    show(result, asked.ttft, asked.tpot)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
