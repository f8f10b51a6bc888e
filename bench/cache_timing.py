"""Can one tenant tell by the clock what another one asked? The attack on a prefix cache, on the real model.

Usage: python -m bench.cache_timing [--trials 100] [--tokens 8,32,256] [--json FILE]
Per trial the victim sends a prompt; then the attacker sends, in random order, that prompt and one that nobody has sent,
and looks at the times to the first token. Prints the area under the curve of telling one from the other (0.5: it can't
tell, 1: always), and as a control the same for the victim itself, whose cache does work.
"""

import argparse
import json
import pathlib
import random
import sys
import time
import urllib.request
from typing import Any

from bench.isolation import served
from bench.prefix import WORDS
from bench.serving import machine


def first_token_s(url: str, key: str, text: str) -> float:
    """Seconds from sending to the first token of an answer of one."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": True}
    request = urllib.request.Request(  # noqa: S310  # our own loopback server
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        for line in answer:
            if b'"finish_reason":"' in line or (b'"content":"' in line and b'"content":""' not in line):
                spent = time.perf_counter() - began
                answer.read()
                return spent
    raise SystemExit("no token came")


def area(seen: list[float], unseen: list[float]) -> float:
    """Mann and Whitney's U over its most: how often a seen prompt is faster than an unseen one; ties count half."""
    wins = sum((a < b) + (a == b) / 2 for a in seen for b in unseen)
    return wins / (len(seen) * len(unseen))


def run(trials: int, tokens: list[int]) -> list[dict[str, Any]]:
    """All lengths; words of the list are about one token each."""
    rng = random.Random(1)
    rows: list[dict[str, Any]] = []
    with served() as (url, keys):
        victim, attacker = keys[0], keys[1]
        for _ in range(5):
            first_token_s(url, attacker, text(rng, 32))
        for length in tokens:
            found: dict[str, dict[str, list[float]]] = {
                who: {"seen": [], "unseen": []} for who in ("attacker", "victim")
            }
            for _ in range(trials):
                secret, fresh = text(rng, length), text(rng, length)
                first_token_s(url, victim, secret)
                for who, key, others in (("attacker", attacker, fresh), ("victim", victim, text(rng, length))):
                    asked = [("seen", secret), ("unseen", others)]
                    rng.shuffle(asked)
                    for name, prompt in asked:
                        found[who][name].append(first_token_s(url, key, prompt))
                print(".", end="", file=sys.stderr, flush=True)
            rows.append({"tokens": length} | {who: area(**times) for who, times in found.items()})
    print(file=sys.stderr)
    return rows


def text(rng: random.Random, length: int) -> str:
    """Words in an order that nobody had."""
    return " ".join(rng.choice(WORDS) for _ in range(length))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--tokens", default="8,32,256")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    rows = run(asked.trials, [int(length) for length in asked.tokens.split(",")])
    print(f"{asked.trials} trials each; {machine(0)}\n")
    print("| words shared | area under the curve: another tenant | its own tenant (control) |\n|---|---|---|")
    for row in rows:
        print(f"| {row['tokens']} | {row['attacker']:.2f} | {row['victim']:.2f} |")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
