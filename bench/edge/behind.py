"""vLLM behind hitsend against vLLM alone: what the edge adds to a first token, and what it leaves of the throughput.

Usage: python -m bench.edge.behind [--pairs 100] [--rounds 3] [--concurrency 8] [--threads N] [--litellm PROGRAM]
       [--json FILE]
Needs `python -m bench.peers.prepare vllm`. First tokens: one connection, the same short prompt (vLLM has it in its
cache, so that its own share is small and steady), one request alone, one through the gateway, in turns, with one
gateway at a time: what another one still does after its answer would count for the next. Throughput: 128 tokens in, 64
out, closed loop, in turns. hitsend has ledger, record and metrics on, and stands there four times: with prompts counted
by vLLM, as by default; by the checkpoint's tokenizer.json (`tokenizer`); bounded by their bytes (`counts_prompts`); and
by vLLM before anything is sent, because a limit has to contain them. What their flight records say of where the time
went is printed too. Beside it, for the first tokens: a forwarder that only passes bytes, which is what any program in
between costs here, and LiteLLM's proxy where it is given. `--threads`: cores on which vLLM computes, else
all; with one less than there are, hitsend and the client have one that isn't vLLM's.
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
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from bench.edge.gateways import ANY_CORE, forwarder, litellm
from bench.edge.gateways import MODEL as MODEL_ID
from bench.peers.prepare import MODEL
from bench.peers.servers import NAME, vllm
from bench.serving import free_port, machine, measure, wait_ready

TOKENS = 2
STEPS = ("parsed", "fitted", "reserved", "sent", "answered", "first_token")
"""Events of a record whose times are shown; other events' go to the next one of these."""
KEPT_S = 3.0
ALONE = "vLLM alone"
LIMITED = "behind hitsend, a limit to be kept"
BEHIND = {
    "behind hitsend": 'counts_prompts = "upstream"',
    "behind hitsend, prompts by tokenizer.json": f'tokenizer = "{MODEL}"',
    "behind hitsend, prompts by bytes": 'counts_prompts = "bytes"',
    LIMITED: 'counts_prompts = "upstream"',
}
LIMITS = {LIMITED: ("--input-tpm", "100000000")}
FORWARDER = "behind a bare aiohttp forwarder"
LITELLM = "behind LiteLLM's proxy"
Target = tuple[str, str]


@contextmanager
def in_front_of(url: str, counts: str, *limits: str) -> Iterator[Target]:
    """hitsend with that vLLM behind it, its prompts counted so, its load read; `limits` of everybody, as flags."""
    with tempfile.TemporaryDirectory() as data:
        config = pathlib.Path(data) / "hitsend.toml"
        config.write_text(
            f'[engine]\nmodel = "none"\n[[engines]]\nname = "vllm"\nkind = "vllm"\nbase_url = "{url}"\n'
            f'models = {{ {NAME} = "{NAME}" }}\nprices = {{ input = 0.2, output = 0.8 }}\ncontext = 2048\n'
            f"{counts}\n"
        )
        if limits:
            subprocess.run(
                [sys.executable, "-m", "hitsend", "limits", "set", *limits, "--data", data],
                check=True,
                stdout=subprocess.DEVNULL,
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

    def __init__(self, target: Target, key: str = "none") -> None:
        self._model = target[1]
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self._line = http.client.HTTPConnection(urlsplit(target[0]).netloc, timeout=120)
        self._used_at = 0.0
        self.request_ids: list[str] = []

    def first_ms(self) -> float:
        """Milliseconds from sending to the first text of a short answer, which is read to its end."""
        messages = [{"role": "user", "content": "Say hi."}]
        body = {"model": self._model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        if time.perf_counter() - self._used_at > KEPT_S:  # a slow machine; the server has closed it, or soon will
            self._line.close()
            self._line.connect()
        began = time.perf_counter()
        self._line.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
        answer = self._line.getresponse()
        first = None
        while line := answer.readline():
            if first is None and _has_text(line):
                first = time.perf_counter()
        if answer.status != 200 or first is None:
            raise SystemExit(f"no answer: HTTP {answer.status}")
        self._used_at = time.perf_counter()
        self.request_ids += [answer.headers["x-request-id"]] if "x-request-id" in answer.headers else []
        return (first - began) * 1000

    def steps_ms(self, count: int) -> dict[str, float]:
        """Medians of what the last requests' records say was spent until each event, since the one before."""
        time.sleep(1.0)  # records are stored a moment after their answers
        found: dict[str, list[float]] = {name: [] for name in STEPS}
        self._line.close()
        for request_id in self.request_ids[-count:]:
            self._line.request("GET", f"/inspect/requests/{request_id}")
            since = 0.0
            for event in json.loads(self._line.getresponse().read())["events"]:
                if event["type"] in found:
                    found[event["type"]].append(event["at_ms"] - since)
                    since = event["at_ms"]
        return {name: median(times) for name, times in found.items() if times}


def _has_text(event: bytes) -> bool:
    """Whether it brings some of the answer."""
    bare = event.replace(b'": "', b'":"')
    return b'"content":"' in bare and b'"content":""' not in bare


def first_tokens(alone: Line, behind: Line, pairs: int) -> dict[str, float]:
    """Both medians, and the quartiles of what the second one took longer in the same turn."""
    lines = (alone, behind)
    for line in lines:
        for _ in range(3):
            line.first_ms()
    found: dict[Line, list[float]] = {line: [] for line in lines}
    for number in range(pairs):
        for line in lines if number % 2 == 0 else reversed(lines):
            found[line].append(line.first_ms())
    added = sorted(b - a for a, b in zip(found[alone], found[behind], strict=True))
    quarter, half, rest = (added[len(added) * part // 4] for part in (1, 2, 3))
    row = {"alone_p50_ms": median(found[alone]), "p50_ms": median(found[behind])}
    return row | {"added_p25_ms": quarter, "added_p50_ms": half, "added_p75_ms": rest}


@contextmanager
def other(name: str, url: str, program: str) -> Iterator[Line]:
    """A line through what else may stand in front of that vLLM."""
    upstream = urlsplit(url).port or 80
    with ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == FORWARDER:
            bare = stack.enter_context(forwarder(free_port(), upstream, folder, core=ANY_CORE))
            yield Line((f"http://127.0.0.1:{bare.port}", NAME))
            return
        proxy = stack.enter_context(litellm(free_port(), upstream, folder, program, core=ANY_CORE, model=NAME))
        yield Line((f"http://127.0.0.1:{proxy.port}", MODEL_ID), proxy.key)


def compare(alone: Target, pairs: int, program: str | None) -> dict[str, dict[str, float]]:
    """First tokens of all, each beside vLLM alone."""
    rows = {}
    for name, counts in BEHIND.items():
        with in_front_of(alone[0], counts, *LIMITS.get(name, ())) as target:
            line = Line(target)
            rows[name] = first_tokens(Line(alone), line, pairs)
            rows[name] |= {f"{step}_ms": spent for step, spent in line.steps_ms(pairs).items()}
    for name in (FORWARDER, *([LITELLM] if program else [])):
        with other(name, alone[0], program or "") as line:
            rows[name] = first_tokens(Line(alone), line, pairs)
    print(f"first tokens: {json.dumps(rows)}", file=sys.stderr, flush=True)
    return rows


def run(pairs: int, rounds: int, concurrency: int, *, threads: int = 0, program: str | None = None) -> dict[str, Any]:
    """Both measurements against one vLLM; `threads` 0: it computes on all cores. `program`: LiteLLM's."""
    threads = threads or os.cpu_count() or 1
    with ExitStack() as stack:
        alone = stack.enter_context(vllm(threads))
        firsts = compare(alone, pairs, program)
        targets = {ALONE: alone}
        for name, counts in BEHIND.items():
            targets[name] = stack.enter_context(in_front_of(alone[0], counts, *LIMITS.get(name, ())))
        speeds: dict[str, list[float]] = {name: [] for name in targets}
        for number in range(rounds):
            for name in targets if number % 2 == 0 else reversed(targets):
                row = measure(targets[name], concurrency, max(16, 2 * concurrency), 1000 * number + len(name))
                speeds[name].append(row["tokens_per_s"])
                print(f"{name}: {row['tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    shares = {name: median(found) / median(speeds[ALONE]) for name, found in speeds.items()}
    found = {"machine": machine(threads), "pairs": pairs, "rounds": rounds, "concurrency": concurrency}
    return found | {"first_tokens": firsts, "tokens_per_s": speeds, "shares": shares}


def show(found: dict[str, Any]) -> None:
    """Markdown."""
    print(f"\n{found['pairs']} turns, {found['rounds']} rounds at {found['concurrency']}; {found['machine']}\n")
    print("| | first token p50 ms | alone | added ms p50 (quartiles) | output tokens/s | share |")
    print(f"|---|---|---|---|---|---|\n| {ALONE} | | | | {median(found['tokens_per_s'][ALONE]):.1f} | |")
    for name, first in found["first_tokens"].items():
        added = f"{first['added_p50_ms']:.2f} ({first['added_p25_ms']:.2f} to {first['added_p75_ms']:.2f})"
        speeds = found["tokens_per_s"].get(name)
        speed = f"{median(speeds):.1f} | {found['shares'][name]:.1%}" if speeds else "|"
        print(f"| {name} | {first['p50_ms']:.2f} | {first['alone_p50_ms']:.2f} | {added} | {speed} |")
    print(f"\n| ms until, by the records | {' | '.join(STEPS)} |\n|---|{'---|' * len(STEPS)}")
    for name in BEHIND:
        spent = (found["first_tokens"][name].get(f"{step}_ms") for step in STEPS)
        print(f"| {name} | {' | '.join('' if each is None else f'{each:.2f}' for each in spent)} |")


def main() -> None:
    """Command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--litellm", metavar="PROGRAM")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    found = run(asked.pairs, asked.rounds, asked.concurrency, threads=asked.threads, program=asked.litellm)
    show(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
