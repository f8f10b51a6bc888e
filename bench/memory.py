"""Memory predicted before the start beside what the processes take after every slot has been in use.

Usage: python -m bench.memory [--model GGUF] [--json FILE]
For each way to divide memory: the prediction of the engine's process (`hitsend plan memory --engine hitsend`), a real
server, a full batch of requests through all of its slots, then what its processes have in memory. Saved prefixes are
off: they are a bound of their own. Exits with 1 where the engine, or the server, is more than 5 % off.
"""

import argparse
import asyncio
import json
import os
import pathlib
import subprocess
import sys
import urllib.request
from typing import Any

import psutil

from bench import serving
from bench.serving import bundled_gguf, hitsend
from hitsend.serve.engine.rehearsal import server_bytes
from hitsend.serve.engine.sizing import sizes
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.settings import EngineSettings

MIB = 1024 * 1024
WITHIN = 0.05

WAYS: tuple[dict[str, Any], ...] = (
    {"num_slots": 1, "context": 2048},
    {"num_slots": 8, "context": 1024},
    {"num_slots": 32, "context": 512, "kv_type": "q8_0"},
    {"num_slots": 32, "context": 0, "kv_budget_bytes": 2**30},
    {"num_slots": 16, "context": 4096, "kv_mode": "unified", "kv_budget_bytes": 200_000_000},
)


def measure(gguf: str, way: dict[str, Any]) -> dict[str, float]:
    """MiB predicted and measured, of the engine's process and of the server's together."""
    settings = EngineSettings(prefix_cache_bytes=0, **way)
    (sized,) = asyncio.run(sizes([WorkerConfig("bench", gguf, settings)]))
    serving.SLOTS, serving.CONTEXT = settings.num_slots, settings.context
    rest = [f"engine.{name}={value}" for name, value in way.items() if name not in {"num_slots", "context"}]
    with hitsend(gguf, os.cpu_count() or 1, "engine.prefix_cache_bytes=0", *rest) as (url, model, pid):
        load(url, model, settings.num_slots)
        with urllib.request.urlopen(f"{url}/inspect/state", timeout=20) as answer:  # noqa: S310  # our own server
            engine = json.load(answer)["engine"]["pid"]
        edge = psutil.Process(pid)
        everybody = [edge, *edge.children(recursive=True)]
        taken = {process.pid: process.memory_info().rss for process in everybody}
    return {
        "engine_predicted": sized.memory.total / MIB,
        "engine_measured": taken[engine] / MIB,
        "server_predicted": server_bytes(sized.memory) / MIB,
        "server_measured": sum(taken.values()) / MIB,
    }


def load(url: str, model: str, slots: int) -> None:
    """Every slot in use at once, for a while."""
    words = [sys.executable, "-m", "hitsend", "load", "--url", url, "--model", model, "--concurrency", str(slots)]
    words += ["--requests", str(2 * slots), "--input", "128", "--output", "32", "--warmup", "0", "--json"]
    subprocess.run(words, check=True, capture_output=True, timeout=600)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    gguf = asked.model or bundled_gguf()
    rows, is_off = [], False
    for way in WAYS:
        row = measure(gguf, way)
        rows.append({**way, **row})
        told = []
        for who in ("engine", "server"):
            predicted, measured = row[f"{who}_predicted"], row[f"{who}_measured"]
            is_off |= abs(predicted / measured - 1) > WITHIN
            told.append(
                f"{who} {predicted:7.0f} MiB predicted, {measured:7.0f} measured, {predicted / measured - 1:+.1%}"
            )
        print(" ".join(f"{name}={value}" for name, value in way.items()), *told, sep="\n    ", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    raise SystemExit(int(is_off))


if __name__ == "__main__":
    main()
