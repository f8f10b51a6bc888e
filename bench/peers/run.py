"""hitsend beside llama-server, vLLM on the CPU and OpenVINO GenAI: same checkpoint, same threads, one interleaved run.

Usage: python -m bench.peers.run [--rounds 3] [--concurrency 1,8,32] [--minutes 11] [--long] [--native]
       [--layouts auto,bf16] [--json FILE]
Peers that `python -m bench.peers.prepare` hasn't installed are left out. hitsend runs with the weights as shipped and
with each of `--layouts` (auto: what is chosen on this machine). Servers that wait use no core. All have their prefix
caches on. A round that wouldn't end within the minutes isn't begun, so that nobody has fewer rounds than another.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from bench.peers.servers import openvino, there, vllm
from bench.serving import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TUNE_S,
    bundled_gguf,
    compiled,
    hitsend,
    llama_server,
    machine,
    measure,
    native_llama_server,
)

Target = tuple[str, str]
OURS = "hitsend"
SYSTEM, SHARED_INPUT, SHARED_OUTPUT, SHARED_AT = 512, 64, 32, 8
"""The shared-system-prompt workload: tokens of system prompt, of each question, of each answer; requests at once."""


@contextmanager
def everyone(threads: int, layouts: list[str], *, native: bool) -> Iterator[dict[str, Target]]:
    """All servers, ready; `native`: on the libllama that was compiled for this machine."""
    gguf = bundled_gguf()
    more = compiled() if native else ()
    with ExitStack() as stack:
        targets: dict[str, Target] = {OURS: stack.enter_context(hitsend(gguf, threads, *more))[:2]}
        for layout in layouts:
            own = compiled(layout) if native else ()
            laid_out = hitsend(gguf, threads, f"engine.layout={layout}", *own, start_s=TUNE_S)
            targets[f"{OURS}, layout {layout}"] = stack.enter_context(laid_out)[:2]
        targets["llama-server"] = stack.enter_context((native_llama_server if native else llama_server)(gguf, threads))
        if "vLLM" in there():
            targets["vLLM"] = stack.enter_context(vllm(threads))
        if "OpenVINO" in there():
            targets["OpenVINO"] = stack.enter_context(openvino(threads))
        yield targets


def shared(target: Target, requests: int, seed: int) -> dict[str, float]:
    """One round of the shared-system-prompt workload."""
    url, model = target
    words = [sys.executable, "-m", "hitsend", "load", "--url", url, "--concurrency", str(SHARED_AT), "--json"]
    words += ["--requests", str(requests), "--input", str(SHARED_INPUT), "--output", str(SHARED_OUTPUT)]
    words += ["--system", str(SYSTEM), "--seed", str(seed), "--warmup", "0", "--fresh-connections", "--timeout", "600"]
    words += ["--model", model] if model else []
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    if ran.returncode:
        raise SystemExit(f"the client failed against {url}:\n{ran.stderr[-2000:]}")
    level = json.loads(ran.stdout)["targets"][0]["levels"][0]
    if level["errors"]:
        raise SystemExit(f"{url} did not serve what was asked: {level['errors']}")
    ttft = level["ttft_ms"]
    return {"tokens_per_s": level["output_tokens_per_s"], "ttft_p50_ms": ttft["p50"], "ttft_p99_ms": ttft["p99"]}


def run(
    rounds: int, levels: list[int], minutes: float, layouts: list[str], *, times: int, native: bool = False
) -> dict[str, Any]:
    """Rounds until they or the minutes are over; `times` the concurrency is how many requests each measurement has."""
    threads, began = os.cpu_count() or 1, time.monotonic()
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    done = 0
    with everyone(threads, layouts, native=native) as targets:
        for target in targets.values():
            measure(target, 2, 4, 99)
        for number in range(rounds):
            turn = list(targets) if number % 2 == 0 else list(reversed(targets))
            for concurrency in levels:
                requests = times * max(3, concurrency)
                for name in turn:
                    row = measure(targets[name], concurrency, requests, 1000 * number + concurrency)
                    rows.setdefault(f"c={concurrency}", {}).setdefault(name, []).append(row)
                    print(f"c={concurrency} {name}: {row['tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
            for name in turn:
                row = shared(targets[name], times * SHARED_AT, 7 + number)
                rows.setdefault("shared system prompt", {}).setdefault(name, []).append(row)
                print(f"shared {name}: {row['tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
            done += 1
            if (time.monotonic() - began) * (done + 1) / done > 60 * minutes:
                break
    medians = {
        workload: {name: {key: median(r[key] for r in runs) for key in runs[0]} for name, runs in by.items()}
        for workload, by in rows.items()
    }
    return {"machine": machine(threads), "rounds": done, "medians": medians, "runs": rows}


def show(result: dict[str, Any]) -> None:
    """Tables and ratios, as Markdown."""
    work = f"{PROMPT_TOKENS} prompt + {OUTPUT_TOKENS} output tokens"
    other = f"{SYSTEM} shared + {SHARED_INPUT} + {SHARED_OUTPUT} at {SHARED_AT} at once"
    print(f"{work}; shared system prompt: {other}. {result['rounds']} rounds, medians; {result['machine']}\n")
    own = [name for name in next(iter(result["medians"].values())) if name.startswith(OURS)]
    print(f"| workload | server | output tok/s | TTFT p50 / p99 ms | {' is | '.join(own)} is |")
    print(f"|---|---|---|---|{'---|' * len(own)}")
    for workload, by in result["medians"].items():
        for name, m in by.items():
            ratios = [f"{by[ours]['tokens_per_s'] / m['tokens_per_s']:.2f} x" for ours in own]
            cells = [""] * len(own) if name in own else ratios
            ttft = f"{m['ttft_p50_ms']:.0f} / {m['ttft_p99_ms']:.0f}"
            print(f"| {workload} | {name} | {m['tokens_per_s']:.1f} | {ttft} | {' | '.join(cells)} |")
    print()
    for workload, by in result["medians"].items():
        peers = {name: m["tokens_per_s"] for name, m in by.items() if name not in own}
        best = max(peers, key=peers.__getitem__)
        both = ", ".join(f"{ours} {by[ours]['tokens_per_s'] / peers[best]:.2f} x" for ours in own)
        print(f"{workload}: against the best peer ({best}): {both}")


def main() -> None:
    """Command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--minutes", type=float, default=11.0)
    parser.add_argument("--long", action="store_true", help="three times the requests; give it --minutes 40")
    parser.add_argument("--native", action="store_true", help="what `make native native-server` compiled")
    parser.add_argument("--layouts", default="auto", help="hitsend with its weights in each of these, too")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    levels = [int(c) for c in asked.concurrency.split(",")]
    layouts, times = [name for name in asked.layouts.split(",") if name], 3 if asked.long else 1
    result = run(asked.rounds, levels, asked.minutes, layouts, times=times, native=asked.native)
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
