"""Prompt-lookup drafts: hitsend with `engine.speculation` auto beside hitsend with off, interleaved, in one run.

Usage: python -m bench.speculation [--rounds 7] [--concurrency 1,8] [--json FILE]

Two workloads. `edit`: a text and the request to write it again with one word changed. `story`: a free answer at
temperature 1, where there is nothing to look up. Same seeds on both sides. Prints, per workload and concurrency, the
medians of whole output tokens/s (prompts included) and of tokens/s while decoding, their ratios, and the passes
through the model per wave.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import sys
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import aiohttp

from bench.serving import bundled_gguf, hitsend, machine

Target = tuple[str, str, int]

SENTENCES = (
    "The harbour master wrote down every boat that came in before the storm.",
    "Three of them carried salt, one carried letters, and the last one carried nothing at all.",
    "Maria counted the crates twice, because the first count had been wrong on Tuesday.",
    "Nobody in the office believed that the old clock was seven minutes slow.",
    "In the afternoon the wind turned north and the flags on the pier went stiff.",
    "The baker sent two loaves to the lighthouse, as he had done for twenty years.",
    "A boy found a green bottle with a map of another coast inside.",
    "When the lamps were lit, the water looked like hammered copper.",
    "The ferry to the islands was late, and its captain apologised to no one.",
    "They wrote a short report, signed it, and put it into the wrong drawer.",
    "Later the inspector asked for it and was shown a menu instead.",
    "By midnight the rain had stopped and the gulls were arguing on the roof.",
)
SUBJECTS = ("a lighthouse", "two brothers", "a lost map", "a winter market", "a broken clock", "an island", "a violin")


def edit(rng: random.Random, model: str, output_tokens: int) -> dict[str, Any]:
    """A text to repeat with one word changed; the answer has begun, so that even a small model knows what to do."""
    sentences = rng.sample(SENTENCES, 7)
    text = " ".join(sentences)
    word = rng.choice([w.strip(".,") for w in text.split() if len(w) > 5])
    ask = (
        f"Write the text again, word for word, with {word!r} replaced by 'silver'.\n\nText: {text}\n\nThe text again: "
    )
    return {
        "model": model,
        "messages": [{"role": "user", "content": ask}],
        "temperature": 0,
        "max_tokens": output_tokens,
    }


def story(rng: random.Random, model: str, output_tokens: int) -> dict[str, Any]:
    """Something to make up."""
    ask = f"Tell me a story about {rng.choice(SUBJECTS)} and {rng.choice(SUBJECTS)}, number {rng.randrange(10**6)}."
    return {
        "model": model,
        "messages": [{"role": "user", "content": ask}],
        "temperature": 1,
        "seed": rng.randrange(10**6),
        "max_tokens": output_tokens,
    }


WORKLOADS = {"edit": edit, "story": story}


async def one(session: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one request and time its tokens."""
    sent = time.perf_counter()
    first = last = None
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=payload) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
                last = time.perf_counter()
                first = first or last
    if first is None or last is None:
        raise RuntimeError("an answer without text")
    tokens = usage["completion_tokens"]
    tpot = (last - first) / (tokens - 1) * 1000 if tokens > 1 else None
    return {"ttft_ms": (first - sent) * 1000, "tpot_ms": tpot, "output": tokens, "prompt": usage["prompt_tokens"]}


async def wave(target: Target, bodies: list[dict[str, Any]]) -> dict[str, float]:
    """All at once; tokens per second of the whole wave, and while decoding (the median request's)."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    more = {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"2": -100, "0": -100}}
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        before = await _passes(session, target[0])
        started = time.perf_counter()
        answers = await asyncio.gather(*(one(session, target[0], body | more) for body in bodies))
        wall_s = time.perf_counter() - started
        passes = await _passes(session, target[0]) - before
    return {
        "tokens_per_s": sum(a["output"] for a in answers) / wall_s,
        "decode_tokens_per_s": 1000 / median(a["tpot_ms"] for a in answers),
        "passes": passes,
    }


async def _passes(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        found = re.search(r"^hitsend_steps_total{.*} (\S+)", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def run(rounds: int, levels: list[int], output_tokens: int) -> dict[str, Any]:
    """Both servers run all the time and take turns after every wave; who goes first alternates."""
    gguf, threads = bundled_gguf(), os.cpu_count() or 1
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        targets = {
            setting: stack.enter_context(hitsend(gguf, threads, f"engine.speculation={setting}"))
            for setting in ("auto", "off")
        }
        for number in range(-1, rounds):
            for name, make in WORKLOADS.items():
                for concurrency in levels:
                    rng = random.Random(f"{number} {name} {concurrency}")
                    bodies = [make(rng, "bench", output_tokens) for _ in range(concurrency)]
                    for setting in list(targets) if number % 2 else list(reversed(targets)):
                        row = asyncio.run(wave(targets[setting], bodies))
                        if number >= 0:
                            found.setdefault(f"{name} c={concurrency}", {}).setdefault(setting, []).append(row)
                        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"machine": machine(threads), "rounds": rounds, "output_tokens": output_tokens, "runs": found}


def show(result: dict[str, Any]) -> None:
    """The table, as Markdown: medians of both, and the median of the ratios of neighbouring waves."""
    print(f"{result['output_tokens']} output tokens, {result['rounds']} waves, medians; {result['machine']}\n")
    print("| workload | tok/s off | auto | ratio | decoding tok/s off | auto | ratio | passes off | auto |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, by in result["runs"].items():
        cells = []
        for key in ("tokens_per_s", "decode_tokens_per_s", "passes"):
            off, auto = ([row[key] for row in by[setting]] for setting in ("off", "auto"))
            cells += [f"{median(off):.1f}", f"{median(auto):.1f}"]
            if key != "passes":
                cells.append(f"{median(a / o for a, o in zip(auto, off, strict=True)):.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--output-tokens", type=int, default=160)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    result = run(asked.rounds, [int(c) for c in asked.concurrency.split(",")], asked.output_tokens)
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
