"""hitsend, LiteLLM's proxy and a bare forwarder in front of the same fast mock upstream, in one run.

Usage: python -m bench.edge.run [--rounds 3] [--litellm PATH] [--memory 100000] [--data FOLDER] [--json FILE]
Gateways run on core 0, mock and client on core 1, and take turns. Medians of the rounds. Where `bench.peers.prepare`
has installed vLLM, it is then measured behind hitsend and alone (`behind.py`), unless `--without-vllm`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
import urllib.request
from statistics import median
from typing import Any

from bench.edge import behind
from bench.edge.gateways import MODEL, OTHER_CORE, TASKSET, Gateway, everything
from bench.peers.servers import there
from bench.serving import free_port, machine

TOKENS, STREAM_TOKENS = 20, 200
SECONDS = 4.0
"""How long a measurement should take: the number of requests follows from the speed of a first short one."""


def ask(gateway: Gateway, connections: int, requests: int, tokens: int, kind: str) -> dict[str, Any]:
    """One measurement, from a process of its own on the other core; adds the gateway's CPU time."""
    words = [TASKSET, "-c", OTHER_CORE, sys.executable, "-m", "bench.edge.client", str(gateway.port), gateway.key]
    words += [MODEL, str(connections), str(requests), str(tokens), kind]
    before = gateway.cpu_s()
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    if ran.returncode:
        raise SystemExit(f"the client failed against {gateway.name}:\n{ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    if found["bad"]:
        raise SystemExit(f"{gateway.name}: {found['bad']} answers were no 200, the first:\n{found['first_bad']}")
    return found | {"cpu_s": gateway.cpu_s() - before}


def figures(gateway: Gateway) -> dict[str, float]:
    """One round against one gateway."""
    speed = ask(gateway, 32, 64, TOKENS, "whole")
    count = max(64, int(SECONDS * 64 / speed["wall_s"]))
    busy = ask(gateway, 32, count, TOKENS, "whole")
    alone = ask(gateway, 1, max(30, min(2000, int(SECONDS * 500 / max(0.3, speed["p50_ms"])))), TOKENS, "whole")
    streams = max(32, min(640, count // 8))
    stream = ask(gateway, 32, streams, STREAM_TOKENS, "stream")
    return {
        "requests_per_s": busy["requests"] / busy["wall_s"],
        "cpu_s_per_1000": busy["cpu_s"] / busy["requests"] * 1000,
        "p50_ms": alone["p50_ms"],
        "p99_ms": alone["p99_ms"],
        "chunks_per_s": stream["events"] / stream["wall_s"],
        "rss_mb": gateway.rss_mb(),
    }


def run(rounds: int, binary: str | None, data: str | None, memory: int) -> dict[str, Any]:
    """All rounds."""
    ports = [free_port() for _ in range(4)]
    with everything(ports, binary, data) as gateways:
        mock = Gateway("no gateway", ports[0], "none", gateways[0].pid)
        start = {gateway.name: gateway.rss_mb() for gateway in gateways}
        rows: dict[str, list[dict[str, float]]] = {one.name: [] for one in (mock, *gateways)}
        for number in range(rounds):
            turn = (mock, *gateways)
            for gateway in turn if number % 2 == 0 else reversed(turn):
                rows[gateway.name].append(figures(gateway))
                print(".", end="", file=sys.stderr, flush=True)
        growth = [memory_after(gateways[0], memory)] if memory else []
        shown = _ledger(gateways[0])
    print(file=sys.stderr)
    medians = {name: {key: median(row[key] for row in found) for key in found[0]} for name, found in rows.items()}
    for name, rss in start.items():
        medians[name]["rss_start_mb"] = rss
    return {"machine": machine(2), "rounds": rounds, "medians": medians, "memory": growth, "ledger": shown}


def memory_after(gateway: Gateway, requests: int) -> list[tuple[int, float]]:
    """(requests, MB) in ten steps: flat is what it should be once the caches are full."""
    found = [(0, gateway.rss_mb())]
    for step in range(1, 11):
        ask(gateway, 32, requests // 10, TOKENS, "whole")
        found.append((step * requests // 10, gateway.rss_mb()))
    return found


def _ledger(gateway: Gateway) -> dict[str, float]:
    """What hitsend says of itself: nothing may be owed, dropped or open."""
    head = {"authorization": f"Bearer {gateway.reader}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{gateway.port}/metrics", headers=head)  # loopback
    time.sleep(2)
    with urllib.request.urlopen(asked, timeout=20) as answer:  # noqa: S310  # the same
        lines = answer.read().decode().splitlines()
    names = ("hitsend_holds_open", "hitsend_records_dropped_total", "hitsend_writes_waiting", "hitsend_tokens_")
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(names) and "_created" not in line
    }


def show(result: dict[str, Any]) -> None:
    """Markdown."""
    medians = result["medians"]
    print(f"60 tokens in, {TOKENS} out, {result['rounds']} rounds, medians; {result['machine']}\n")
    print(
        "| | requests/s, 32 connections | CPU s per 1,000 | added ms p50 / p99, 1 connection | SSE chunks/s | RSS MB |"
    )
    print("|---|---|---|---|---|---|")
    base = medians["no gateway"]
    for name, row in medians.items():
        added = f"{row['p50_ms'] - base['p50_ms']:.2f} / {row['p99_ms'] - base['p50_ms']:.2f}"
        cpu, rss = f"{row['cpu_s_per_1000']:.3f}", f"{row.get('rss_start_mb', 0):.0f} → {row['rss_mb']:.0f}"
        if row is base:
            added, cpu, rss = "0", "-", "-"
        print(f"| {name} | {row['requests_per_s']:.0f} | {cpu} | {added} | {row['chunks_per_s']:.0f} | {rss} |")
    ours, bare = medians["hitsend"], medians["bare aiohttp forwarder"]
    print(f"\nCPU: {ours['cpu_s_per_1000'] / bare['cpu_s_per_1000']:.2f} x the bare forwarder's")
    if "LiteLLM proxy" in medians:
        print(f"throughput: {ours['requests_per_s'] / medians['LiteLLM proxy']['requests_per_s']:.1f} x LiteLLM's")
    for growth in result["memory"]:
        print("RSS over requests: " + ", ".join(f"{count}: {rss:.0f} MB" for count, rss in growth))
    print("afterwards: " + ", ".join(f"{name} {value:g}" for name, value in result["ledger"].items()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litellm")
    parser.add_argument("--memory", type=int, default=100_000)
    parser.add_argument("--data", help="folder for ledger and records; default: the system's temporary folder")
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    binary = asked.litellm if asked.litellm and pathlib.Path(asked.litellm).exists() else None
    result = run(asked.rounds, binary, asked.data, asked.memory)
    show(result)
    if "vLLM" in there() and not asked.without_vllm:
        result["vllm"] = behind.run(100, asked.rounds, 8, program=asked.litellm)
        behind.show(result["vllm"])
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
