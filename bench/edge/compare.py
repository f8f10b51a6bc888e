"""Two or more versions of hitsend and the bare forwarder, on one core in turns: what a change to the edge saves.

Usage: python -m bench.edge.compare before=../old/src after=src [--rounds 5] [--requests 2000] [--data FOLDER]
Prints medians over the rounds, and for CPU also the median of each round's ratio to the forwarder: on a machine with
other work the rounds swing together, and the ratios don't.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.edge.gateways import OTHER_CORE, Gateway, forwarder, hitsend, started
from bench.edge.run import STREAM_TOKENS, TOKENS, ask
from bench.serving import free_port

BARE = "bare aiohttp forwarder"
Rows = dict[str, list[dict[str, float]]]


def one_round(gateway: Gateway, requests: int, alone: int) -> dict[str, float]:
    """One gateway's turn."""
    busy = ask(gateway, 32, requests, TOKENS, "whole")
    lone = ask(gateway, 1, alone, TOKENS, "whole")
    stream = ask(gateway, 32, max(32, requests // 8), STREAM_TOKENS, "stream")
    return {
        "cpu_us": busy["cpu_s"] / busy["requests"] * 1e6,
        "per_s": busy["requests"] / busy["wall_s"],
        "p50_ms": lone["p50_ms"],
        "p99_ms": lone["p99_ms"],
        "chunks_per_s": stream["events"] / stream["wall_s"],
        "stream_cpu_us": stream["cpu_s"] / stream["requests"] * 1e6,
        "rss_mb": gateway.rss_mb(),
    }


def run(
    trees: dict[str, Path], rounds: int, sizes: tuple[int, int], data: str | None
) -> dict[str, list[dict[str, float]]]:
    """All rounds, the order turned round after each."""
    mock = free_port()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-edge-", dir=data)))
        words = [sys.executable, "-m", "bench.edge.mock", str(mock)]
        stack.enter_context(started(words, OTHER_CORE, folder / "mock.log"))
        gateways = {BARE: stack.enter_context(forwarder(free_port(), mock, folder))}
        for name, source in trees.items():
            (folder / name).mkdir()
            gateways[name] = stack.enter_context(hitsend(free_port(), mock, folder / name, source.absolute()))
        for gateway in gateways.values():
            ask(gateway, 32, 500, TOKENS, "whole")  # warm
        rows: Rows = {name: [] for name in gateways}
        for number in range(rounds):
            for name in list(gateways) if number % 2 == 0 else reversed(gateways):
                rows[name].append(one_round(gateways[name], *sizes))
                print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    return rows


def show(rows: Rows) -> None:
    """Markdown."""
    print("| | CPU us/request (least, most) | x forwarder | requests/s | p50 / p99 ms, 1 connection |", end="")
    print(" CPU us/stream | chunks/s | RSS MB |\n|---|---|---|---|---|---|---|---|")
    for name, found in rows.items():
        mid = {key: median(row[key] for row in found) for key in found[0]}
        cpu = [row["cpu_us"] for row in found]
        ratio = median(row["cpu_us"] / bare["cpu_us"] for row, bare in zip(found, rows[BARE], strict=True))
        print(
            f"| {name} | {mid['cpu_us']:.0f} ({min(cpu):.0f}, {max(cpu):.0f}) | {ratio:.2f} | {mid['per_s']:.0f} | "
            f"{mid['p50_ms']:.2f} / {mid['p99_ms']:.2f} | {mid['stream_cpu_us']:.0f} | {mid['chunks_per_s']:.0f} | "
            f"{mid['rss_mb']:.0f} |"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="+", help="NAME=FOLDER, the folder being a version's `src`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--alone", type=int, default=300, help="requests at one connection")
    parser.add_argument("--data", help="folder for ledgers and records; default: the system's temporary folder")
    asked = parser.parse_args()
    trees = {name: Path(folder) for name, _, folder in (each.partition("=") for each in asked.trees)}
    show(run(trees, asked.rounds, (asked.requests, asked.alone), asked.data))


if __name__ == "__main__":
    main()
