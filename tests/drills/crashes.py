"""kill -9 at each named point between admission and settlement, again and again over one ledger; then the count.

Each life of the server: it starts on what the last one left, serves a whole request, and dies during a doomed one.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from sqlalchemy import select
from sqlalchemy.ext.asyncio import create_async_engine

from hitsend.serve.database.schema import HOLDS, LEDGER
from tests.drills.scripted import COMPLETION_TOKENS, PROMPT_TOKENS, STOP

NOTHING, RECOVERED, BILLED = "nothing", "recovered_after_crash", "stop"
POINTS = {
    "arrived": NOTHING,
    "hold unwritten": NOTHING,
    "hold written": NOTHING,
    "hold uncommitted": NOTHING,
    "hold durable": RECOVERED,
    "hold acknowledged": RECOVERED,
    "submitted to the engine": RECOVERED,
    "admitted": RECOVERED,
    "first token": RECOVERED,
    "mid-stream": RECOVERED,
    "stop found": RECOVERED,
    "engine released": RECOVERED,
    "settlement unwritten": RECOVERED,
    "settlement written": RECOVERED,
    "settlement uncommitted": RECOVERED,
    "settlement durable": BILLED,
    "settlement acknowledged": BILLED,
    "response unsent": BILLED,
    "response sent": BILLED,
    "record unwritten": BILLED,
    "record uncommitted": BILLED,
    "record durable": BILLED,
}
"""Where the server dies, and how the doomed request stands in the ledger after the next start."""

ONLY_SCRIPTED = {"submitted to the engine", "stop found", "engine released"}
"""Points that only the scripted engine tells."""
WITH_A_MODEL = tuple(point for point in POINTS if point not in ONLY_SCRIPTED)


@dataclass
class Tally:
    """What was found wrong, by kind, and what was counted."""

    lives: int = 0
    rows: int = 0
    faults: list[str] = field(default_factory=list)


class Launcher:
    """The process that forks servers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def start(
        self, url: str, data: str, point: str | None, *, real: bool = False, of_batches: int | None = None
    ) -> tuple[int, int]:
        """Pid and port of a server that is ready."""
        order = {"url": url, "data": data, "point": point, "real": real, "of_batches": of_batches}
        found = await self._ask(order)
        return found["pid"], found["port"]

    async def reap(self, pid: int) -> bool:
        """Wait until that server has ended; whether it did so by itself."""
        return bool((await self._ask({"reap": pid}))["ended"])

    async def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(60):
            line = await self._process.stdout.readline()
        assert line, "the launcher is gone"
        return json.loads(line)


@contextlib.asynccontextmanager
async def launcher() -> AsyncIterator[Launcher]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.drills.launcher"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        try:
            yield Launcher(process)
        except BaseException:
            log.seek(0)
            print(log.read()[-5000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def ask(session: aiohttp.ClientSession, port: int, request_id: str) -> bool:
    """One streamed chat; whether its end came, which is said only after it was settled."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 60}
    body |= {"stop": [STOP]}
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"x-request-id": request_id}
    try:
        async with session.post(url, json=body, headers=headers) as answer:
            return b"data: [DONE]" in await answer.read()
    except aiohttp.ClientError:
        return False


async def ledger(url: str) -> tuple[list[Any], int]:
    """All rows, and how many holds are open, read past every server."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        rows = (await connection.execute(select(LEDGER))).mappings().all()
        holds = len((await connection.execute(select(HOLDS))).all())
    await engine.dispose()
    return list(rows), holds


async def crash(at: Launcher, url: str, points: Sequence[str], *, real: bool = False) -> Tally:
    """Die at each of these points in turn, on one ledger; then count."""
    tally = Tally()
    expected: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory(prefix="hitsend-drill-") as data:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
            for life, point in enumerate(points):
                pid, port = await at.start(url, data, point, real=real)
                whole, doomed = f"whole-{life}", f"doomed-{life}"
                if not await ask(session, port, whole):
                    tally.faults.append(f"{whole}: not served")
                expected[whole] = {BILLED}
                is_told = await ask(session, port, doomed)
                expected[doomed] = {BILLED} if is_told else {POINTS[point]}
                if not await at.reap(pid):
                    tally.faults.append(f"{doomed}: the server lives on")
                tally.lives += 1
            pid, _ = await at.start(url, data, None, real=real)
            rows, holds = await ledger(url)
            os.kill(pid, signal.SIGTERM)
            await at.reap(pid)
    tally.rows = len(rows)
    tally.faults += judge(rows, holds, expected, is_scripted=not real)
    return tally


def judge(rows: list[Any], holds: int, expected: dict[str, set[str]], *, is_scripted: bool = True) -> list[str]:
    """Everything that is wrong with the ledger. `expected`: for each request, how it may stand there."""
    faults = [] if holds == 0 else [f"{holds} holds are left"]
    by_id = {row["request_id"]: row for row in rows}
    if len(by_id) != len(rows) or len({row["hold_id"] for row in rows}) != len(rows):
        faults.append("a request has two rows")
    faults += [f"{request_id}: nobody asked for it" for request_id in by_id if request_id not in expected]
    for request_id, endings in expected.items():
        row = by_id.get(request_id)
        found = NOTHING if row is None else row["reason"]
        found = BILLED if found == "length" and not is_scripted else found
        if found not in endings:
            faults.append(f"{request_id}: {found}, not {' or '.join(endings)}")
        elif row is not None and not _adds_up(row, is_scripted=is_scripted):
            faults.append(f"{request_id}: wrong figures {dict(row)}")
    return faults


def _adds_up(row: Any, *, is_scripted: bool) -> bool:
    picousd = row["prompt_tokens"] * row["price_input_picousd"] + row["completion_tokens"] * row["price_output_picousd"]
    if row["cost_microusd"] != (picousd + 500_000) // 1_000_000 or row["is_estimate"] != (row["reason"] == RECOVERED):
        return False
    if row["reason"] not in {BILLED, "length"}:
        return row["prompt_tokens"] == row["completion_tokens"] == 0
    counts = (row["prompt_tokens"], row["completion_tokens"])
    return counts == (PROMPT_TOKENS, COMPLETION_TOKENS) if is_scripted else min(counts) > 0
