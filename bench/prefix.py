"""A shared system prompt and ten-turn chats: hitsend's prefix cache beside llama-server's, interleaved.

Usage: python -m bench.prefix [--rounds 3] [--turns 10] [--json FILE]
Prints, per workload, the prompt tokens that each server computed per request and the median time to the first token,
and the ratios. Prompt tokens computed are `prompt_tokens - cached_tokens` of the servers' own usage.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time
import urllib.request
from statistics import median
from typing import Any

from bench.serving import both

WORDS = (
    "red",
    "green",
    "blue",
    "one",
    "two",
    "sun",
    "moon",
    "star",
    "tree",
    "river",
    "stone",
    "bread",
    "water",
    "fire",
)
SYSTEM_WORDS, USER_WORDS, OUTPUT_TOKENS = 350, 40, 32

Target = tuple[str, str]
Row = dict[str, float]


def words(rng: random.Random, count: int) -> str:
    """Text that no other round has."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def ask(target: Target, messages: list[dict[str, str]]) -> tuple[Row, str]:
    """One streamed request: what it cost, and what was answered."""
    body: dict[str, Any] = {"model": target[1], "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310  # our own loopback server
        target[0] + "/v1/chat/completions", raw, {"content-type": "application/json"}
    )
    began, first, text, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter()
                    text += piece
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    ttft_ms = ((first or time.perf_counter()) - began) * 1000
    return {"computed": usage["prompt_tokens"] - cached, "prompt": usage["prompt_tokens"], "ttft_ms": ttft_ms}, text


def shared_system(target: Target, seed: int, turns: int) -> list[Row]:
    """Different questions behind one system prompt; the first one, which nobody can save, isn't counted."""
    rng = random.Random(seed)
    system = {"role": "system", "content": words(rng, SYSTEM_WORDS)}
    asked = [[system, {"role": "user", "content": words(rng, USER_WORDS)}] for _ in range(turns)]
    return [ask(target, messages)[0] for messages in asked][1:]


def chat(target: Target, seed: int, turns: int) -> list[Row]:
    """One conversation; its first turn isn't counted."""
    rng = random.Random(seed)
    messages: list[dict[str, str]] = []
    rows = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(rng, USER_WORDS)})
        row, text = ask(target, messages)
        messages.append({"role": "assistant", "content": text})
        rows.append(row)
    return rows[1:]


def run(rounds: int, turns: int, layout: str | None, *, native: bool) -> dict[str, dict[str, Row]]:
    """Medians over all requests of all rounds, the servers taking turns."""
    threads = os.cpu_count() or 1
    found: dict[str, dict[str, list[Row]]] = {}
    with both(threads, layout, native=native) as (ours, peer):
        targets: list[tuple[str, Target]] = [("hitsend", ours), ("llama-server", peer)]
        for number in range(rounds):
            for workload in (shared_system, chat):
                for name, target in targets if number % 2 == 0 else reversed(targets):
                    rows = workload(target, 100 * number + len(found), turns)
                    found.setdefault(workload.__name__, {}).setdefault(name, []).extend(rows)
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {
        workload: {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in by_name.items()}
        for workload, by_name in found.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--native", action="store_true", help="both on what `make native native-server` compiled")
    parser.add_argument("--layout", help="hitsend with its weights in this layout")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    medians = run(given.rounds, given.turns, given.layout, native=given.native)
    for workload, by_name in medians.items():
        for name, row in by_name.items():
            shown = (
                f"{row['computed']:7.0f} of {row['prompt']:.0f} prompt tokens computed, TTFT {row['ttft_ms']:8.1f} ms"
            )
            print(f"{workload:14} {name:13} {shown}")
        ours, peer = by_name["hitsend"], by_name["llama-server"]
        ratios = ", ".join(f"{key} {ours[key] / max(peer[key], 1e-9):.2f}" for key in ("computed", "ttft_ms"))
        print(f"{workload:14} ratio         {ratios}")
    if given.json is not None:
        given.json.write_text(json.dumps(medians, indent=2), "utf-8")


if __name__ == "__main__":
    main()
