"""Bottlenecks made on purpose on the real engine, and whether `hitsend diagnose` names them.

    python -m tests.inspect.induced [--only NAME,NAME] [--record FOLDER]

Every scenario starts a server of its own, loads it in the way that its name says, and asks the command of two looks.
`--record` keeps the two looks of each, cut down to what the rules read: the recorded scenarios of `test_rules.py`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from tests.mock_upstream import Call, mock_upstream
from tests.served import Served, free_port, serving

TALKATIVE = {"2": -100, "0": -100}
"""Without its end tokens the model goes on to max_tokens."""
OTHERS = "# cores that others used: "
BETWEEN = "# later\n"
"""Parts the two looks in a recorded scenario."""
WINDOW_S = 6
SETTLE_S = 2.5
CROWDED = 0.25
"""Cores. With more of them in other hands, starving is true as well, whatever else was made."""
CELL_BYTES = 23_040
"""Of the bundled model: 30 layers, 3 heads of 64 keys and values, f16."""
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Load:
    """Requests without end, until the block of its scenario ends."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self.served = served
        self._session = session
        self.model = served.model

    async def ask(self, words: int, max_tokens: int, **more: Any) -> None:
        """One request of about so many prompt tokens."""
        text = " ".join(f"{os.urandom(2).hex()[:3]}" if word % 5 == 0 else "word" for word in range(words))
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        body |= {"stream": True, "logit_bias": TALKATIVE} | more
        with contextlib.suppress(aiohttp.ClientError):
            async with self._session.post(f"{self.served.url}/v1/chat/completions", json=body) as answer:
                await answer.read()
                if answer.status != 200:
                    await asyncio.sleep(0.05)

    async def forever(self, words: int, max_tokens: int, pause_s: float = 0.0, **more: Any) -> None:
        """A client that asks again as soon as it has its answer."""
        while True:
            await self.ask(words, max_tokens, **more)
            await asyncio.sleep(pause_s)

    def clients(self, number: int, words: int, max_tokens: int, pause_s: float = 0.0, **more: Any) -> list[Any]:
        """So many of them."""
        return [self.forever(words, max_tokens, pause_s, **more) for _ in range(number)]


Make = Callable[[Load], Awaitable[None]]


class Scenario(NamedTuple):
    """`make` runs while it is looked at; `expected` is the verdict."""

    name: str
    expected: str
    words: tuple[str, ...]
    make: Make
    config: str = ""
    settle_s: float = SETTLE_S


def sets(**settings: object) -> tuple[str, ...]:
    """Settings of the engine as flags."""
    return tuple(word for key, value in settings.items() for word in ("--set", f"engine.{key}={value}"))


def clients(number: int, words: int, max_tokens: int, pause_s: float = 0.0, **more: Any) -> Make:
    """A load of alike clients."""

    async def make(load: Load) -> None:
        await asyncio.gather(*load.clients(number, words, max_tokens, pause_s, **more))

    return make


async def nothing(_: Load) -> None:
    """Nobody comes."""
    await asyncio.sleep(60)


async def long_among_decodes(load: Load) -> None:
    """Four answers being written, and now and then somebody's prompt in one piece, as where nobody paces it."""

    async def long_prompt() -> None:
        while True:
            await asyncio.sleep(1.5)
            await load.ask(450, 2)

    await asyncio.gather(*load.clients(4, 10, 400), long_prompt())


async def slow_readers(load: Load) -> None:
    """Four clients with the smallest buffers there are, who don't read; alternatives make the chunks large."""
    where = urlsplit(load.served.url)
    fields = {"max_tokens": 900, "stream": True, "logprobs": True, "top_logprobs": 20, "logit_bias": TALKATIVE}
    body = {"model": load.model, "messages": [{"role": "user", "content": "Tell a story."}]} | fields
    raw = json.dumps(body).encode()
    head = HEAD
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the sender's buffer grows with it
            client.connect((str(where.hostname), int(where.port or 0)))
            client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await asyncio.sleep(60)


async def core_taken(load: Load) -> None:
    """Somebody else computes on the engine's cores."""
    hogs = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(2)]
    try:
        await asyncio.gather(*load.clients(1, 10, 200))
    finally:
        for hog in hogs:
            hog.kill()
            await hog.wait()


async def engine_killed(load: Load) -> None:
    """The engine's process dies twice while it answers."""

    async def kill() -> None:
        for _ in range(2):
            await asyncio.sleep(SETTLE_S + 1)
            pid = load.served.state()["engine"]["pid"]
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    await asyncio.gather(*load.clients(2, 10, 40), kill())
    await asyncio.sleep(60)


async def edge_flood(load: Load) -> None:
    """Requests that an upstream answers at once, as raw bytes, so that the client costs little."""
    where = urlsplit(load.served.url)
    messages = [{"role": "user", "content": "word " * 20}]
    raw = json.dumps({"model": "there", "messages": messages, "max_tokens": 1}).encode()
    head = HEAD
    request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw

    async def one() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        while True:
            writer.write(request)
            answered = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", answered, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)

    await asyncio.gather(*(one() for _ in range(96)))


UPSTREAM = """
[[engines]]
name = "away"
base_url = "{url}"
models = {{ there = "there" }}
prices = {{ input = 1.0, output = 1.0 }}
"""

SMALL = sets(num_slots=8, context=2048)
UNIFIED = sets(kv_mode="unified", num_slots=16, kv_budget_bytes=1024 * CELL_BYTES, context=1024)
TINY = sets(kv_mode="unified", num_slots=16, kv_budget_bytes=512 * CELL_BYTES, context=512, reserve_tokens=8)
SCENARIOS = (
    Scenario("healthy", "healthy", SMALL, clients(1, 12, 24, pause_s=0.3)),
    Scenario("healthy-two", "healthy", SMALL, clients(2, 20, 60, pause_s=0.2)),
    Scenario("idle", "idle", SMALL, nothing),
    Scenario("queue-flood", "queue_bound", sets(num_slots=8, context=1024), clients(48, 12, 60)),
    Scenario("few-slots", "queue_bound", sets(num_slots=1, context=1024), clients(6, 12, 40)),
    Scenario("queue-refuses", "queue_bound", sets(num_slots=2, context=1024, max_waiting=1), clients(12, 12, 60)),
    Scenario("tiny-kv", "kv_memory_bound", UNIFIED, clients(12, 180, 40)),
    Scenario("preemption", "preemption", TINY, clients(12, 10, 400)),
    Scenario("tiny-context", "context_too_small", sets(num_slots=4, context=256), clients(4, 400, 16)),
    Scenario("huge-prompts", "prefill_bound", sets(num_slots=4, context=2048, step_tokens=128), clients(2, 500, 2)),
    Scenario("long-among-decodes", "long_prefills", (*SMALL, *sets(tpot_target_s=60)), long_among_decodes),
    Scenario("wide-decode", "decode_bound", sets(num_slots=24, context=1024), clients(20, 10, 600), settle_s=6.0),
    Scenario(
        "slow-readers",
        "slow_clients",
        (*sets(num_slots=4, context=2048), "--set", "stream.pause_tokens=8", "--set", "stream.stall_s=60"),
        slow_readers,
        settle_s=6.0,
    ),
    Scenario("core-taken", "engine_starved", sets(num_slots=4, context=1024, num_threads=2), core_taken),
    Scenario("engine-killed", "engine_failing", SMALL, engine_killed),
    Scenario("slow-upstream", "upstream_bound", sets(model="none"), clients(4, 12, 8), config="slow"),
    Scenario("edge-flood", "edge_bound", sets(model="none"), edge_flood, config="instant"),
)


async def slow(call: Call) -> None:
    """An upstream that takes its time."""
    await asyncio.sleep(1.5)
    await call.start()
    for word in ("slow", "ly", " it", " comes"):
        await call.say(word)
        await asyncio.sleep(0.2)
    await call.finish(usage={"prompt_tokens": 12, "completion_tokens": 4, "total_tokens": 16})


@contextlib.contextmanager
def instant_upstream() -> Iterator[str]:
    """One that answers at once, in a process of its own."""
    port = free_port()
    mock = subprocess.Popen([sys.executable, "-m", "bench.edge.mock", str(port)], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        mock.kill()
        mock.wait()


class Found(NamedTuple):
    """What the command said, the looks before and after, and how many cores processes had that aren't part of this."""

    diagnosis: dict[str, Any]
    before: str
    after: str
    others: float


async def induce(scenario: Scenario, window_s: float = WINDOW_S) -> Found:
    """Start, load, look."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hitsend-induced-")))
        words = list(scenario.words)
        if scenario.config:
            url = stack.enter_context(instant_upstream()) if scenario.config == "instant" else await _slow(stack)
            config = folder / "hitsend.toml"
            config.write_text(UPSTREAM.format(url=url))
            words += ["--config", str(config)]
        served = await asyncio.to_thread(stack.enter_context, serving(*words, data=folder))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        load = Load(served, session) if not scenario.config else _elsewhere(served, session)
        making = asyncio.ensure_future(scenario.make(load))
        try:
            await asyncio.sleep(scenario.settle_s)
            await under_way(served, scenario)
            before = await asyncio.to_thread(served.text, "/metrics")
            began = busy_s() - own_s(before), time.monotonic()
            await asyncio.sleep(window_s)
            after = await asyncio.to_thread(served.text, "/metrics")
            others = max(0.0, busy_s() - own_s(after) - began[0]) / (time.monotonic() - began[1])
            if making.done():
                making.result()
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        return Found(await _ask(folder, before, after), before, after, others)


async def under_way(served: Served, scenario: Scenario) -> None:
    """Until the engine has made some steps: on a crowded machine they take seconds."""
    computes = not scenario.config and scenario.expected not in {"idle", "context_too_small"}
    give_up = time.monotonic() + 15
    while computes and time.monotonic() < give_up:
        text = await asyncio.to_thread(served.text, "/metrics")
        found = re.search(r"^hitsend_steps_total\S* (\S+)$", text, re.MULTILINE)
        if found and float(found[1]) >= 20:
            return
        await asyncio.sleep(0.5)


async def _slow(stack: contextlib.AsyncExitStack) -> str:
    mock = await stack.enter_async_context(mock_upstream())
    mock.script = slow
    return mock.url


def _elsewhere(served: Served, session: aiohttp.ClientSession) -> Load:
    load = Load.__new__(Load)
    load.served, load._session, load.model = served, session, "there"
    return load


async def _ask(folder: Path, before: str, after: str) -> dict[str, Any]:
    """The command itself, of the two looks: it takes a core while it starts, which would be in a live window."""
    looks = folder / "before.txt", folder / "after.txt"
    for path, text in zip(looks, (before, after), strict=True):
        path.write_text(text)
    command = [sys.executable, "-m", "hitsend", "diagnose", "--from", str(looks[0]), "--to", str(looks[1]), "--json"]
    asked = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await asked.communicate()
    assert asked.returncode == 0
    return dict(json.loads(output))


UNREAD = re.compile(
    r"#|python_|process_|hitsend_(http|choices|cost|holds|writes|quota|budget|records|tokens_(reasoning|discarded)"
    r"|requests_(settled|cancelled)|prefill|decode|engine_progress)|\S+_(created|bucket)\b"
)


def cut_down(text: str) -> str:
    """Only what the rules read."""
    return "".join(f"{line}\n" for line in text.splitlines() if not UNREAD.match(line))


def is_named(scenario: Scenario, diagnosis: dict[str, Any], *, is_crowded: bool) -> bool:
    """Whether it is the verdict."""
    names = [finding["name"] for finding in diagnosis["findings"]]
    verdict = diagnosis["verdict"]
    if is_crowded and verdict == "engine_starved" != scenario.expected:
        others = [name for name in names if name != "engine_starved"]
        verdict = others[0] if others else "healthy"
    return bool(verdict == scenario.expected)


def busy_s() -> float:
    """Core seconds that this machine has worked."""
    user, nice, system = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def own_s(metrics: str) -> float:
    """Of these, this process's, its ended children's and the server's."""
    server = re.findall(r"^hitsend_process_cpu_seconds_total\S* (\S+)$", metrics, re.MULTILINE)
    return sum(os.times()[:4]) + sum(float(seconds) for seconds in server)


def main() -> int:
    """Print the table; the exit status says whether all were named."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--only", default="")
    flags.add_argument("--record", type=Path)
    given = flags.parse_args()
    chosen = [each for each in SCENARIOS if not given.only or each.name in given.only.split(",")]
    num_named = 0
    heads = ("scenario", "expected", "found", "confidence", "also", "named", "cores that others used")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for scenario in chosen:
        started = time.monotonic()
        found = asyncio.run(induce(scenario))
        diagnosis = found.diagnosis
        good = is_named(scenario, diagnosis, is_crowded=found.others > CROWDED)
        num_named += good
        first, *also = diagnosis["findings"] or [None]
        confidence = first["confidence"] if first else "-"
        others = ", ".join(each["name"] for each in also) or "-"
        mark = "yes" if good else "NO"
        row = (scenario.name, scenario.expected, diagnosis["verdict"], confidence, others, mark, f"{found.others:.1f}")
        print(f"| {' | '.join(row)} |", flush=True)
        print(f"{scenario.name}: {time.monotonic() - started:.0f} s {json.dumps(diagnosis['seen'])}", file=sys.stderr)
        if not good:
            print(json.dumps(diagnosis["findings"], indent=1), file=sys.stderr)
        if given.record:
            others = f"{OTHERS}{found.others:.1f}\n"
            both = f"{others}{cut_down(found.before)}{BETWEEN}{cut_down(found.after)}"
            (given.record / f"hitsend-{scenario.name}.txt").write_text(both)
    print(f"\n{num_named} of {len(chosen)} named")
    return 0 if num_named == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
