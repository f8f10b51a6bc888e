"""kill -9 while a batch runs, at each named point of a line's way to its answer, again and again over one batch; then
the count: every line answered once, none billed twice."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections import Counter
from typing import Any

import aiohttp

from tests.drills.crashes import Launcher, Tally, ledger
from tests.drills.scripted import COMPLETION_TOKENS, PROMPT_TOKENS, STOP

BATCH_POINTS = (
    *(f"hold {step}" for step in ("unwritten", "written", "uncommitted", "durable")),
    *(f"settlement {step}" for step in ("unwritten", "written", "uncommitted", "durable")),
    *(f"answer {step}" for step in ("unwritten", "written", "uncommitted", "durable")),
    *(f"ending {step}" for step in ("unwritten", "written", "uncommitted", "durable")),
)
NUM_LINES = 8
PICOUSD = PROMPT_TOKENS * 450_000 + COMPLETION_TOKENS * 3_200_000
LINE_MICROUSD = (PICOUSD + 500_000) // 1_000_000
ENDS = ("completed", "failed", "expired", "cancelled")
LIFE_S = 30.0


def line(number: int) -> dict[str, Any]:
    """One good request; the last one of a file is refused by its route."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "stop": [STOP]}
    if number == NUM_LINES:
        body["temperature"] = 9
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


class Talk:
    """What a client says to a server that may die in the middle of it."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}/v1"

    async def begin(self) -> str:
        """A batch that is taken."""
        form = aiohttp.FormData({"purpose": "batch"})
        raw = b"\n".join(json.dumps(line(number)).encode() for number in range(1, NUM_LINES + 1))
        form.add_field("file", raw, filename="in.jsonl")
        async with self._session.post(f"{self._url}/files", data=form) as answer:
            file_id = (await answer.json())["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with self._session.post(f"{self._url}/batches", json=body) as answer:
            return str((await answer.json())["id"])

    async def watched(self, batch_id: str, tally: Tally) -> dict[str, Any] | None:
        """The batch when it is over; None when the server died before."""
        async with asyncio.timeout(LIFE_S):
            while True:
                try:
                    async with self._session.get(f"{self._url}/batches/{batch_id}") as answer:
                        batch = dict(await answer.json())
                except aiohttp.ClientError:
                    return None
                counts = batch["request_counts"]
                if counts["completed"] + counts["failed"] > NUM_LINES:
                    tally.faults.append(f"counts {counts}")
                if batch["status"] in ENDS:
                    return batch
                await asyncio.sleep(0.02)

    async def content(self, file_id: str) -> list[Any]:
        """The lines of a file."""
        async with self._session.get(f"{self._url}/files/{file_id}/content") as answer:
            return [json.loads(each) for each in (await answer.text()).splitlines()]


async def batch_crash(at: Launcher, url: str, point: str, times: int) -> Tally:
    """Die there so many times (as long as the batch isn't over), then let it end, and count."""
    tally = Tally()
    timeout = aiohttp.ClientTimeout(20)
    with tempfile.TemporaryDirectory(prefix="hitsend-drill-") as data:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            batch_id = ""
            for life in range(times):
                pid, port = await at.start(
                    url, data, point, of_batches=1 if point.startswith("ending") else 1 + life % 3
                )
                with contextlib.suppress(aiohttp.ClientError):
                    batch_id = batch_id or await Talk(session, port).begin()
                over = await Talk(session, port).watched(batch_id, tally)
                if over is not None:
                    os.kill(pid, signal.SIGTERM)
                await at.reap(pid)
                tally.lives += over is None
                if over is not None:
                    break
            pid, port = await at.start(url, data, None)
            talk = Talk(session, port)
            batch = await talk.watched(batch_id, tally)
            assert batch is not None
            answers = [
                await talk.content(batch[name]) if batch[name] else [] for name in ("output_file_id", "error_file_id")
            ]
            os.kill(pid, signal.SIGTERM)
            await at.reap(pid)
    rows, holds = await ledger(url)
    tally.rows = len(rows)
    tally.faults += judge_batch(batch, answers, rows, holds)
    return tally


def judge_batch(batch: dict[str, Any], answers: list[list[Any]], rows: list[Any], holds: int) -> list[str]:
    """Everything that is wrong with a batch that is over."""
    faults = [] if holds == 0 else [f"{holds} holds are left"]
    counts = {"total": NUM_LINES, "completed": NUM_LINES - 1, "failed": 1}
    if (batch["status"], batch["request_counts"]) != ("completed", counts):
        faults.append(f"{batch['status']} with {batch['request_counts']}")
    wanted = [f"line-{number}" for number in range(1, NUM_LINES + 1)]
    if [each["custom_id"] for each in answers[0]] != wanted[:-1] or [
        each["custom_id"] for each in answers[1]
    ] != wanted[-1:]:
        faults.append(f"answers {[[each['custom_id'] for each in file] for file in answers]}")
    billed: Counter[str] = Counter()
    for row in rows:
        billed[row["request_id"].split("-")[1]] += row["cost_microusd"]
    paid_rows = Counter(row["request_id"].split("-")[1] for row in rows if row["cost_microusd"])
    for number in range(1, NUM_LINES):
        if billed[str(number)] != LINE_MICROUSD or paid_rows[str(number)] != 1:
            faults.append(f"line {number}: {billed[str(number)]} micro-USD in {paid_rows[str(number)]} rows")
    return faults
