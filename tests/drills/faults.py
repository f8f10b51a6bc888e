"""A recorded answer, broken at its socket at every byte: whole server, real sockets, both kinds of upstreams, streamed
to the client and not. `make drill` breaks all of them; CI a sample.

Faults, each at one byte of head and body: `cut` (closed), `reset` (closed hard), `stall` (silent and open), `junk` (a
NUL for that byte), `brace` (bad JSON), `half` (the first half of a character), `again` (the event under way comes once
more, whole), `left` (silent, and the client leaves). And statuses in place of an answer.
"""

import asyncio
import contextlib
import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec

from hitsend import settings
from hitsend.serve.app import running
from hitsend.settings_upstreams import UpstreamSettings, WorkersAISettings
from tests.drills.accounting import fresh

KINDS = ("openai", "workers_ai")
FAULTS = ("cut", "reset", "stall", "junk", "brace", "half", "again", "left")
STATUSES = ("429", "500", "502", "503", "504", "529")
STALL_S = 0.5
AT_ONCE = 32
TEXT = "é\u2028b"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
_BYTES = {"junk": b"\x00", "brace": b"}", "half": b"\xc3"}
_NAME = re.compile(r"f-([a-z_]+)-([01])-([a-z]+)-(\d+)")


def _event(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def _chunk(reason: str | None = None, **delta: str) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


EVENTS = (
    _chunk(content="é\u2028"),
    _chunk(content="b"),
    _chunk("stop"),
    _event({"choices": [], "usage": USAGE}),
    b"data: [DONE]\n\n",
)


class Recording(msgspec.Struct, frozen=True):
    """The bytes of a whole answer. `answered`: where its head is over; `begun`: where its body begins; `ended`: from
    where on the answer is whole, and only bill and good-bye are missing; `done`: from where on nothing is; `starts`: of
    its events.
    """

    data: bytes
    answered: int
    begun: int
    ended: int
    done: int
    starts: tuple[int, ...]


def recording(kind: str) -> Recording:
    """Ended by closing, or (`workers_ai`) in chunks."""
    is_chunked = kind == "workers_ai"
    how = b"transfer-encoding: chunked" if is_chunked else b"connection: close"
    data = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + how + b"\r\n\r\n"
    answered, starts, ended, done = len(data), [], 0, 0
    for number, event in enumerate(EVENTS):
        starts.append(len(data))
        data += (f"{len(event):x}\r\n".encode() if is_chunked else b"") + event
        ended = len(data) if number == 2 else ended
        done = len(data)
        data += b"\r\n" if is_chunked else b""
    begun = data.index(b"data: ")
    return Recording(data + (b"0\r\n\r\n" if is_chunked else b""), answered, begun, ended, done, tuple(starts))


class Case(msgspec.Struct, frozen=True):
    """One broken answer. `at`: a byte, or for a status its number."""

    kind: str
    is_streamed: bool
    fault: str
    at: int

    @property
    def name(self) -> str:
        """Its request's id."""
        return f"f-{self.kind}-{int(self.is_streamed)}-{self.fault}-{self.at}"

    def bytes(self) -> bytes:
        """What is sent before it ends as its fault says."""
        whole, at = recording(self.kind), self.at
        if self.fault.startswith("whole"):
            return whole.data
        if self.fault == "status":
            return f"HTTP/1.1 {at} No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        if self.fault in _BYTES:
            return whole.data[:at] + _BYTES[self.fault] + whole.data[at + 1 :]
        if self.fault == "again":
            start = max((one for one in whole.starts if one <= at), default=0)
            return whole.data[:at] + whole.data[start:]
        return whole.data[:at]


def cases(faults: Iterable[str] = FAULTS, step: int = 1) -> list[Case]:
    """Of every `step`-th byte, beginning with another one for each fault, and those around the end of the answer."""
    found = []
    for kind in KINDS:
        whole = recording(kind)
        edges = {whole.answered, whole.ended - 1, whole.ended}
        for is_streamed in (True, False):
            for offset, fault in enumerate(faults):
                places = edges | set(range(offset % step, len(whole.data), step))
                found += [Case(kind, is_streamed, fault, at) for at in sorted(places)]
            found += [Case(kind, is_streamed, "status", int(status)) for status in STATUSES]
    return found


class Player:
    """Plays the case whose name a request's message is."""

    def __init__(self) -> None:
        self.num_runs: Counter[str] = Counter()
        self.written: dict[str, asyncio.Event] = {}
        self.left_at: dict[str, asyncio.Future[float]] = {}
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            found = _NAME.fullmatch(json.loads(await reader.readexactly(length))["messages"][-1]["content"])
            assert found is not None
            case = Case(found[1], found[2] == "1", found[3], int(found[4]))
            self.num_runs[case.name] += 1
            writer.write(case.bytes())
            await writer.drain()
            if case.name in self.written:
                self.written[case.name].set()
            if case.fault in ("stall", "left"):
                await reader.read()  # until it is closed there
                left = self.left_at.get(case.name)
                if left is not None and not left.done():
                    left.set_result(time.monotonic())
            elif case.fault == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


class Report(msgspec.Struct):
    """`left_ms`: from a client's leaving to the end of the upstream's connection."""

    num_cases: int = 0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    left_ms: list[float] = msgspec.field(default_factory=list)
    faults: list[str] = msgspec.field(default_factory=list)


@asynccontextmanager
async def _server(folder: Path, player: Player) -> AsyncIterator[str]:
    fields: dict[str, Any] = {"breaker_failures": 10**6, "breaker_share": 1.0, "retry_share": 1.0}
    fields["connect_timeout_s"] = 60.0  # what is drilled is the answer, and a busy machine takes its time
    engines: list[Any] = []
    for suffix, stall_s in (("", 60.0), ("-stall", STALL_S)):
        more = fields | {"base_url": player.url, "stall_timeout_s": stall_s}
        prices = settings.UpstreamPrices(1.0, 1.0)
        there = {f"openai{suffix}": "far"}
        engines.append(UpstreamSettings(name=f"o{suffix}", models=there, prices=prices, **more))
        there = {f"workers_ai{suffix}": "@cf/qwen/qwen3.8-27b"}
        engines.append(WorkersAISettings(name=f"w{suffix}", models=there, plan="paid", **more))
    tree = settings.Settings(
        server=settings.ServerSettings(data_dir=str(folder)),
        engine=settings.EngineSettings(model="none"),
        engines=tuple(engines),
    )
    listening = await asyncio.start_server(player.serve, "127.0.0.1", 0)
    player.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    for index, engine in enumerate(engines):
        engines[index] = msgspec.structs.replace(engine, base_url=player.url)
    try:
        async with running(msgspec.structs.replace(tree, engines=tuple(engines))) as server:
            yield server.base_url
    finally:
        listening.close()


async def broken(folder: Path, asked: list[Case]) -> Report:
    """Ask all of them; then every one has one row, and what the client got is what its fault allows."""
    player, report = Player(), Report(len(asked))
    async with _server(folder, player) as url, aiohttp.ClientSession(connector=fresh()) as session:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(case: Case) -> None:
            async with turns:
                # a whole one before each: a breaker that sees nothing but failures is right to open
                good = msgspec.structs.replace(case, fault=f"whole{case.fault}")
                found = _read(good, *await _answer(session, url, good))
                report.faults += [] if found == (True, TEXT, 1) else [f"{good.name}: {found}"]
                if case.fault == "left":
                    await _leave(session, url, case, player, report)
                else:
                    report.faults += judged(
                        case, *await _answer(session, url, case), player.num_runs[case.name], report
                    )

        await asyncio.gather(*map(one, asked))
        rows = await _rows(session, url)
        state = await _get(session, f"{url}/inspect/state")
        found = await _get(session, f"{url}/admin/reconcile")
    report.faults += [f"reconcile: {one}" for one in found["drifted"]]
    report.faults += [] if state["running"] == 0 else [f"{state['running']} still run"]
    for case in asked:
        report.faults += _billed(case, rows.get(case.name, []))
    return report


async def _answer(session: aiohttp.ClientSession, url: str, case: Case) -> tuple[int, str]:
    slow = "-stall" if case.fault.endswith("stall") else ""
    body = {"model": case.kind + slow, "messages": [{"role": "user", "content": case.name}], "stream": case.is_streamed}
    headers = {"x-request-id": case.name}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, (await answer.read()).decode()


async def _leave(session: aiohttp.ClientSession, url: str, case: Case, player: Player, report: Report) -> None:
    """When the upstream has sent what it will."""
    written = player.written[case.name] = asyncio.Event()
    left = player.left_at[case.name] = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(_answer(session, url, case))
    sent = asyncio.create_task(written.wait())
    async with asyncio.timeout(60):
        await asyncio.wait({asking, sent}, return_when=asyncio.FIRST_COMPLETED)
        if not written.is_set():
            sent.cancel()
            report.faults.append(f"{case.name}: never reached the upstream: {asking.result()}")
            return
        begun = time.monotonic()
        asking.cancel()
        await asyncio.wait({asking})
        report.left_ms.append((await left - begun) * 1000)
    report.outcomes["left"] += 1
    report.faults += [] if player.num_runs[case.name] == 1 else [f"{case.name}: ran {player.num_runs[case.name]} times"]


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        return await answer.json()


async def _rows(session: aiohttp.ClientSession, url: str) -> dict[str, list[dict[str, Any]]]:
    """By request, once nothing is held or waits to be written."""
    async with asyncio.timeout(60):
        while (state := await _get(session, f"{url}/inspect/state"))["holds_open"] or state["writes_waiting"]:
            await asyncio.sleep(0.05)
    found: dict[str, list[dict[str, Any]]] = {}
    after = 0
    while page := (await _get(session, f"{url}/admin/ledger?after={after}&limit=500"))["data"]:
        for one in page:
            found.setdefault(one["row"]["request_id"], []).append(one["row"])
        after = page[-1]["seq"]
    return found


def judged(case: Case, status: int, body: str, num_runs: int, report: Report) -> list[str]:
    """What is wrong with what the client got."""
    whole = recording(case.kind)
    is_good, text, num_ends = _read(case, status, body)
    report.outcomes["answered" if is_good else "an error"] += 1
    has_begun = case.fault != "status" and case.at > whole.begun
    may_run = 2 if not has_begun and case.fault != "stall" else 1  # again only before the first byte of an answer
    faults = [] if 1 <= num_runs <= may_run else [f"ran {num_runs} times, at most {may_run}"]
    if case.fault in ("cut", "stall", "status"):
        is_whole = case.at >= {"cut": whole.ended, "stall": whole.ended, "status": 1000}[case.fault]
        faults += (
            []
            if is_good is is_whole
            else [f"{'answered' if is_good else 'an error'}, expected the other: {body[-300:]}"]
        )
    if case.fault in ("cut", "reset", "stall"):
        faults += [] if TEXT.startswith(text) else [f"text {text!r}"]
        faults += [] if not is_good or case.at >= whole.ended else ["an end that never came"]
    faults += [] if num_ends <= 1 and (not is_good or num_ends == 1) else [f"{num_ends} ends"]
    return [f"{case.name}: {fault}" for fault in faults]


def _read(case: Case, status: int, body: str) -> tuple[bool, str, int]:
    """Whether it is an answer, its text, and how many times it said that it ends."""
    if not case.is_streamed or status != 200:
        document = json.loads(body)
        choices = document.get("choices", ())
        text = choices[0]["message"]["content"] if choices else ""
        return status == 200 and "error" not in document, text, len(choices)
    events = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
    chunks = [json.loads(one) for one in events if one != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    is_good = "[DONE]" in events and not any("error" in chunk for chunk in chunks)
    return is_good, text, sum(choice.get("finish_reason") is not None for choice in choices)


def _billed(case: Case, rows: list[dict[str, Any]]) -> list[str]:
    """One row each, and never more in it than one run gave."""
    if len(rows) != 1:
        return [f"{case.name}: {len(rows)} rows"]
    prompt, completion = rows[0]["prompt_tokens"], rows[0]["completion_tokens"]
    whole = recording(case.kind)
    has_bill = case.fault == "cut" and case.at >= whole.starts[4] - 2 * (case.kind == "workers_ai")
    if has_bill and (prompt, completion) != (7, 3):
        return [f"{case.name}: {prompt} + {completion} tokens"]
    is_bounded = completion <= 3 or case.fault in ("junk", "again", "brace", "half")
    return [] if is_bounded else [f"{case.name}: {completion} tokens"]


async def shown(folder: Path, step: int = 1) -> tuple[Report, str]:
    """The drill, and what it came to in words."""
    report = await broken(folder, cases(step=step))
    left = sorted(report.left_ms) or [0.0]
    spread = f"upstream closed {median(left):.1f} ms after the client left (median; most {left[-1]:.1f})"
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.most_common())
    return report, f"{report.num_cases:,} broken answers: {counts}; {spread}"
