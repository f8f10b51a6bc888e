"""How long a refusal takes: bad bodies of every kind, one after the other over one keep-alive connection.

Usage: python -m bench.refusals [--count 20000] [--seed 1] [--json FILE]
Prints p50 and p99 in ms over all refusals, of each kind, and of a GET that ends in 404 on the same connection after
every tenth: what the machine, the client and the HTTP stack cost without any body. The server's processor time per
request (all its processes) is printed too: other programs on the machine don't change it much.
"""

import argparse
import http.client
import json
import pathlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.serving import bundled_gguf, hitsend, percentile

PATH = "/v1/chat/completions"
EVERY = 10
"""One request in so many is the GET."""

GOOD: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _with(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


def _raw(field: str, value: str) -> bytes:
    return f'{json.dumps(GOOD)[:-1]},"{field}":{value}}}'.encode()


def _schema(chance: random.Random) -> bytes:
    """The title makes it another schema each time: nothing is cached."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "title": str(chance.random())}
    return _with(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    )


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "unknown field": lambda chance: _with(**{f"field_{chance.randrange(10**6)}": 1}),
    "wrong type": lambda chance: _with(**{chance.choice(["n", "seed", "top_p", "logprobs", "stream"]): "text"}),
    "out of range": lambda chance: _with(temperature=2 + chance.random()),
    "not built": lambda chance: _with(**{chance.choice(["functions", "audio", "prediction", "moderation"]): {"a": 1}}),
    "duplicate key": lambda chance: _raw("model", f'"m{chance.random()}"'),
    "NaN": lambda chance: _raw(chance.choice(["temperature", "top_p", "min_p"]), chance.choice(["NaN", "1e999"])),
    "surrogate": lambda _: _raw("user", '"\\ud83d"'),
    "not UTF-8": lambda _: _raw("user", '"x"').replace(b'"x"', b'"\xff"'),
    "trailing bytes": lambda chance: _with() + chance.choice([b"{}", b" x", b"\x00"]),
    "cut off": lambda chance: _with()[: chance.randrange(1, 40)],
    "deep": lambda chance: _raw("metadata", "[" * (depth := chance.choice([65, 500, 20_000])) + "]" * depth),
    "limit": lambda chance: _with(stop=["x"] * chance.randint(5, 500)),
    "messages": lambda _: _with(messages=[{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "x"}]),
    "tool choice": lambda chance: _with(tool_choice={"type": "function", "function": {"name": f"f{chance.random()}"}}),
    "unknown model": lambda chance: _with(model=f"m{chance.random()}"),
    "does not fit": lambda chance: _with(messages=[{"role": "user", "content": "word " * chance.randint(1200, 2000)}]),
    "schema": _schema,
}


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(kind, body), all kinds equally often."""
    chance = random.Random(seed)
    names = list(KINDS)
    for number in range(count):
        name = names[number % len(names)]
        yield name, KINDS[name](chance)


def run(url: str, count: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds by kind; "GET" is the 404. Ends the program where a body is not refused with a 4xx."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    found: defaultdict[str, list[float]] = defaultdict(list)
    connection.connect()
    first = connection.sock
    for number, (kind, body) in enumerate(bodies(count, seed)):
        found[kind].append(_one(connection, "POST", PATH, body))
        if number % EVERY == 0:
            found["GET"].append(_one(connection, "GET", "/nowhere", None))
    if connection.sock is not first:
        raise SystemExit("the server closed the connection on the way")
    connection.close()
    return found


def _one(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None) -> float:
    headers = {"content-type": "application/json"} if body is not None else {}
    sent = time.perf_counter()
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    took = (time.perf_counter() - sent) * 1000
    if not 400 <= answer.status < 500:
        raise SystemExit(f"{answer.status} for {(body or b'')[:200]!r}: {data[:500]!r}")
    return took


def processor_s(pid: int) -> float:
    """What the process and its children have used so far."""
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    """Start a server, send, print."""
    parser = argparse.ArgumentParser(description="How long a refusal takes.")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    asked = parser.parse_args()
    with hitsend(bundled_gguf(), 1) as (url, _, pid):
        run(url, len(KINDS) * 5, seed=0)
        before = processor_s(pid)
        found = run(url, asked.count, asked.seed)
        spent_s = processor_s(pid) - before
    every = [took for kind, values in found.items() if kind != "GET" for took in values]
    rows = {"all refusals": every, "GET, 404": found.pop("GET")} | found
    figures = {}
    print(f"{'':16} {'count':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}")
    for name, values in rows.items():
        values.sort()
        shown = {"count": len(values), "p50_ms": percentile(values, 0.5), "p99_ms": percentile(values, 0.99)}
        figures[name] = shown | {"max_ms": values[-1]}
        print(f"{name:16} {len(values):7} {shown['p50_ms']:8.2f} {shown['p99_ms']:8.2f} {values[-1]:8.2f}")
    per_request_ms = spent_s * 1000 / (len(every) + len(rows["GET, 404"]))
    print(f"processor time of the server per request: {per_request_ms:.2f} ms")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
