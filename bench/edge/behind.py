"""vLLM behind hitsend against vLLM alone: what the edge adds to a first token, and what it leaves of the throughput.

Usage: python -m bench.edge.behind [--pairs 100] [--rounds 3] [--concurrency 8] [--json FILE]
Needs `python -m bench.peers.prepare vllm`. First tokens: one connection, the same short prompt (vLLM has it in its
cache, so that its own share is small and steady), one request alone, one through hitsend, in turns. Throughput: 128
tokens in, 64 out, closed loop, in turns. hitsend has ledger, record, metrics and prompt counting on.
"""

import argparse
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from bench.peers.servers import NAME, vllm
from bench.serving import free_port, machine, measure, wait_ready

TOKENS = 2
KEPT_S = 3.0
Target = tuple[str, str]


@contextmanager
def in_front_of(url: str) -> Iterator[Target]:
    """hitsend with that vLLM behind it, its prompts counted there, its load read."""
    with tempfile.TemporaryDirectory() as data:
        config = pathlib.Path(data) / "hitsend.toml"
        config.write_text(
            f'[engine]\nmodel = "none"\n[[engines]]\nname = "vllm"\nkind = "vllm"\nbase_url = "{url}"\n'
            f'models = {{ {NAME} = "{NAME}" }}\nprices = {{ input = 0.2, output = 0.8 }}\ncontext = 2048\n'
        )
        port = free_port()
        words = [sys.executable, "-m", "hitsend", "serve", "--config", str(config), "--port", str(port), "--data", data]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}", NAME
        finally:
            process.terminate()
            process.wait(20)


class Line:
    """One connection that stays."""

    def __init__(self, target: Target) -> None:
        self._model = target[1]
        self._line = http.client.HTTPConnection(urlsplit(target[0]).netloc, timeout=120)
        self._used_at = 0.0

    def first_ms(self) -> float:
        """Milliseconds from sending to the first text of a short answer, which is read to its end."""
        messages = [{"role": "user", "content": "Say hi."}]
        body = {"model": self._model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        if time.perf_counter() - self._used_at > KEPT_S:  # a slow machine; the server has closed it, or soon will
            self._line.close()
            self._line.connect()
        began = time.perf_counter()
        self._line.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = self._line.getresponse()
        first = None
        while line := answer.readline():
            if first is None and b'"content":"' in line and b'"content":""' not in line:
                first = time.perf_counter()
        if answer.status != 200 or first is None:
            raise SystemExit(f"no answer: HTTP {answer.status}")
        self._used_at = time.perf_counter()
        return (first - began) * 1000


def first_tokens(alone: Target, behind: Target, pairs: int) -> dict[str, float]:
    """Medians, and the median of what each pair differs by."""
    lines = {"alone": Line(alone), "behind": Line(behind)}
    for line in lines.values():
        for _ in range(3):
            line.first_ms()
    found: dict[str, list[float]] = {"alone": [], "behind": []}
    for number in range(pairs):
        for name in lines if number % 2 == 0 else reversed(lines):
            found[name].append(lines[name].first_ms())
    added = sorted(b - a for a, b in zip(found["alone"], found["behind"], strict=True))
    return {
        "alone_p50_ms": median(found["alone"]),
        "behind_p50_ms": median(found["behind"]),
        "added_of_medians_ms": median(found["behind"]) - median(found["alone"]),
        "added_p50_ms": median(added),
        "added_p25_ms": added[len(added) // 4],
        "added_p75_ms": added[3 * len(added) // 4],
    }


def run(pairs: int, rounds: int, concurrency: int) -> dict[str, Any]:
    """Both measurements against one vLLM."""
    threads = os.cpu_count() or 1
    speeds: dict[str, list[float]] = {"alone": [], "behind": []}
    with vllm(threads) as alone, in_front_of(alone[0]) as behind:
        targets = {"alone": alone, "behind": behind}
        firsts = first_tokens(alone, behind, pairs)
        print(f"first tokens: {json.dumps(firsts)}", file=sys.stderr, flush=True)
        for number in range(rounds):
            for name in targets if number % 2 == 0 else reversed(targets):
                row = measure(targets[name], concurrency, max(16, 2 * concurrency), 1000 * number + len(name))
                speeds[name].append(row["tokens_per_s"])
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    shares = [b / a for a, b in zip(speeds["alone"], speeds["behind"], strict=True)]
    share = median(speeds["behind"]) / median(speeds["alone"])
    found = {"machine": machine(threads), "pairs": pairs, "rounds": rounds, "concurrency": concurrency}
    return found | {"first_tokens": firsts, "tokens_per_s": speeds, "share": share, "shares": shares}


def show(found: dict[str, Any]) -> None:
    """In words."""
    first = found["first_tokens"]
    quartiles = f"{first['added_p25_ms']:.2f} to {first['added_p75_ms']:.2f}"
    print(f"\nvLLM behind hitsend against vLLM alone; {found['machine']}")
    print(
        f"first token, {found['pairs']} pairs: alone p50 {first['alone_p50_ms']:.2f} ms, behind "
        f"{first['behind_p50_ms']:.2f} ms; added p50 {first['added_p50_ms']:.2f} ms (quartiles {quartiles}), of the "
        f"medians {first['added_of_medians_ms']:.2f}"
    )
    alone, behind = (median(found["tokens_per_s"][name]) for name in ("alone", "behind"))
    print(
        f"throughput at {found['concurrency']}, {found['rounds']} rounds: alone {alone:.1f} tokens/s, behind "
        f"{behind:.1f}, share {found['share']:.1%} (rounds: {', '.join(f'{one:.1%}' for one in found['shares'])})"
    )


def main() -> None:
    """Command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    found = run(asked.pairs, asked.rounds, asked.concurrency)
    show(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
