"""Guessing ahead: hitsend with each way to guess beside hitsend without, interleaved, in one run.

Usage: python -m bench.speculation [--rounds 7] [--concurrency 1,8] [--only NAME,NAME] [--native] [--json FILE]

Two workloads. `edit`: a text and the request to write it again with one word changed. `story`: a free answer at
temperature 1, where there is nothing to look up. Same seeds on both sides.

Models: the bundled one; a tiny hybrid; a tiny hybrid with a head that was never trained. Where guessing can't help: a
story by own text, by a draft model with random weights, by that head. Tiny models take some 0.5 ms a pass, so that
deciding and noting weigh as much as they ever do; they get ten times as many waves.

Prints, per workload and concurrency, the medians of whole output tokens/s (prompts included) and of tokens/s while
decoding, the medians of the ratios of neighbouring waves, the passes through the model per wave, and how many answers
were the same.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any, NamedTuple

import aiohttp

from bench.serving import bundled_gguf, compiled, hitsend, machine
from tests.engine.hybrid import Tiny, TinyDense

Target = tuple[str, str, int]
Row = dict[str, Any]
Runs = dict[str, dict[str, list[Row]]]

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


class Case(NamedTuple):
    """A model, the ways to guess that are held against `off` on it, and what is asked of it."""

    gguf: Callable[[pathlib.Path], str]
    ways: dict[str, tuple[str, ...]]
    workloads: tuple[Callable[[random.Random, str, int], dict[str, Any]], ...]
    times: int = 1
    """So many times as many waves: short ones, of which many make a median that a neighbour's moment doesn't move."""


def tiny(folder: pathlib.Path, head: str = "none") -> str:
    """A hybrid that never says the same twice: each word has one successor, all of them are one circle."""
    path = folder / f"{head}.gguf"
    if not path.exists():
        Tiny(path, bundled_gguf(), head=head)  # type: ignore[arg-type]  # one of its words
    return str(path)


def stranger(folder: pathlib.Path) -> str:
    """A draft model that knows nothing."""
    path = folder / "stranger.gguf"
    if not path.exists():
        TinyDense(path, bundled_gguf(), layers=2, seed=99)
    return str(path)


OFF = ("engine.speculation=off",)
OWN_TEXT = ("engine.speculation=prompt_lookup",)
HEAD = ("engine.speculation=mtp",)
DRAFT = ("engine.speculation=draft", "engine.draft_model={stranger}")
AUTO = ("engine.speculation=auto",)

CASES = {
    "llama": Case(lambda _: bundled_gguf(), {"auto": AUTO, "bad draft": DRAFT}, (edit, story)),
    "hybrid": Case(tiny, {"own text": OWN_TEXT, "bad draft": DRAFT}, (story,), 10),
    "head": Case(lambda folder: tiny(folder, "random"), {"auto": AUTO, "bad head": HEAD}, (story,), 10),
}


async def one(session: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one request and time its tokens."""
    sent = time.perf_counter()
    first = last = None
    usage: dict[str, Any] = {}
    text = ""
    async with session.post(f"{url}/v1/chat/completions", json=payload) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if piece := "".join(choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", ())):
                text += piece
                last = time.perf_counter()
                first = first or last
    if first is None or last is None:
        raise RuntimeError("an answer without text")
    tokens = usage["completion_tokens"]
    tpot = (last - first) / (tokens - 1) * 1000 if tokens > 1 else None
    return {"ttft_ms": (first - sent) * 1000, "tpot_ms": tpot, "output": tokens, "text": text}


async def wave(target: Target, bodies: list[dict[str, Any]]) -> Row:
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
        "texts": [a["text"] for a in answers],
    }


async def _passes(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        found = re.search(r"^hitsend_steps_total{.*} (\S+)", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Model after model; each one's servers run all the time and take turns after every wave."""
    threads = os.cpu_count() or 1
    names = asked.only.split(",") if asked.only else list(CASES)
    found: Runs = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:  # then what there is until then is shown
        for name in names:
            _case(name, pathlib.Path(folder), asked, found)
    print(file=sys.stderr)
    return {"machine": machine(threads), "rounds": asked.rounds, "output_tokens": asked.output_tokens, "runs": found}


def _case(name: str, folder: pathlib.Path, asked: argparse.Namespace, found: Runs) -> None:
    case = CASES[name]
    gguf, threads = case.gguf(folder), os.cpu_count() or 1
    levels = [int(level) for level in asked.concurrency.split(",")]
    with ExitStack() as stack:
        own = compiled() if asked.native else ()
        targets = {}
        for way, settings in (case.ways | {"off": OFF}).items():
            told = [each.format(stranger=stranger(folder)) for each in settings]
            targets[way] = stack.enter_context(hitsend(gguf, threads, *told, *own))
        for number in range(-1, case.times * asked.rounds):
            for make in case.workloads:
                for level in levels:
                    rng = random.Random(f"{number} {make.__name__} {level}")
                    bodies = [make(rng, "bench", asked.output_tokens) for _ in range(level)]
                    rows = {}
                    for way in list(targets) if number % 2 else list(reversed(targets)):
                        rows[way] = asyncio.run(wave(targets[way], bodies))
                        print(".", end="", file=sys.stderr, flush=True)
                    for way, row in rows.items() if number >= 0 else ():
                        found.setdefault(f"{name} {make.__name__} c={level}", {}).setdefault(way, []).append(row)


def show(result: dict[str, Any]) -> None:
    """The table, as Markdown: medians of both, and the median of the ratios of neighbouring waves."""
    print(f"{result['output_tokens']} output tokens, {result['rounds']} waves, medians; {result['machine']}\n")
    print("| model, workload | guesses | tok/s off | on | ratio | decoding off | on | ratio | passes off | on | same |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, by in result["runs"].items():
        for way in (way for way in by if way != "off"):
            print(f"| {name} | {way} | " + " | ".join(_cells(by["off"], by[way])) + " |")


def _cells(without: list[Row], having: list[Row]) -> list[str]:
    cells = []
    for key in ("tokens_per_s", "decode_tokens_per_s", "passes"):
        off, on = ([row[key] for row in rows] for rows in (without, having))
        cells += [f"{median(off):.1f}", f"{median(on):.1f}"]
        if key != "passes":
            cells.append(f"{median(a / o for a, o in zip(on, off, strict=True)):.2f}")
    texts = [pair for a, b in zip(without, having, strict=True) for pair in zip(a["texts"], b["texts"], strict=True)]
    return [*cells, f"{sum(a == b for a, b in texts)} of {len(texts)}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--output-tokens", type=int, default=160)
    parser.add_argument("--only", help=f"of {', '.join(CASES)}, with commas")
    parser.add_argument("--native", action="store_true", help="on what `make native` compiled")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    result = run(asked)
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
