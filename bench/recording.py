"""What the flight record costs: the same server with it and without it (`bench/unrecorded.py`), in one run, in turns.

Usage: python -m bench.recording [--pairs 24] [--concurrency 32] [--memory 100000] [--json FILE]
First, without a server, what the record's own code takes: the events of `--concurrency` requests in one batch, closed,
packed, summed up; the least of many turns, which other load can't raise. Then the real model, `--concurrency` sequences
at once: the ratio of output tokens per second with its 95 % interval, from pairs of rounds whose order alternates, and
the processor time per output token of the edge process, which records, and of all processes. Then, before a fast mock
upstream, what both hold in memory over `--memory` requests, every twentieth of it, and how many records are kept.
"""

import argparse
import asyncio
import contextlib
import json
import math
import pathlib
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil
from sqlalchemy import func, select

from bench.edge.gateways import OTHER_CORE, Gateway, hitsend, started
from bench.edge.run import TOKENS, ask
from bench.serving import OUTPUT_TOKENS, bundled_gguf, machine, measure
from bench.serving import hitsend as serving
from bench.unrecorded import Unrecorded
from hitsend.core import events as ev
from hitsend.core.clock import SystemClock
from hitsend.core.record import Flight
from hitsend.core.request import SamplingParams
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.schema import RECORDS
from hitsend.serve.database.writer import Writer
from hitsend.serve.flights import summary
from hitsend.serve.usage.records import RecordStore, RecordSummary
from hitsend.settings import RecordSettings
from tests.served import free_port

T_95 = {8: 2.365, 12: 2.201, 16: 2.131, 24: 2.069, 32: 2.040, 48: 2.012}
"""Student's t for so many pairs; between them the next smaller number of pairs, above them the last."""

ROUND = 1
"""Requests of a round, as a multiple of what runs at once: short rounds, many pairs."""

MAX_STORED = 20_000
"""Records on disk in the memory test: a fifth of its requests, so that the bound is reached."""


def cpu_s(pid: int) -> tuple[float, float]:
    """Of the edge process alone, and of it with its children."""
    me = psutil.Process(pid)
    own = sum(me.cpu_times()[:2])
    return own, own + sum(sum(child.cpu_times()[:2]) for child in me.children(recursive=True))


def one_round(server: tuple[str, str, int], concurrency: int, seed: int) -> dict[str, float]:
    """Tokens per second, and microseconds of processor time per output token."""
    count = ROUND * concurrency
    before = cpu_s(server[2])
    found = measure(server[:2], concurrency, count, seed)
    edge, whole = (after - start for after, start in zip(cpu_s(server[2]), before, strict=True))
    tokens = count * OUTPUT_TOKENS
    return {
        "tokens_per_s": found["tokens_per_s"],
        "edge_us": 1e6 * edge / tokens,
        "all_us": 1e6 * whole / tokens,
    }


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval."""
    mean = statistics.fmean(values)
    t = next((T_95[size] for size in sorted(T_95, reverse=True) if size <= len(values)), 2.776)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def speed(pairs: int, concurrency: int) -> list[dict[str, dict[str, float]]]:
    """Rounds in pairs: with records and without."""
    gguf, threads = bundled_gguf(), psutil.cpu_count() or 1
    rows = []
    patient = "engine.wait_timeout_s=900"  # a slow machine is no fault
    with (
        serving(gguf, threads, patient) as full,
        serving(gguf, threads, patient, module="bench.unrecorded") as bare,
    ):
        servers = {"with": full, "without": bare}
        for server in servers.values():
            one_round(server, concurrency, 99)
        for number in range(pairs):
            order = list(servers) if number % 2 == 0 else list(servers)[::-1]
            rows.append({name: one_round(servers[name], concurrency, 1000 + number) for name in order})
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def judged(rows: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Ratios with their intervals, and the cost in percent."""
    rate = interval([math.log(row["with"]["tokens_per_s"] / row["without"]["tokens_per_s"]) for row in rows])
    more = interval([row["with"]["edge_us"] - row["without"]["edge_us"] for row in rows])
    whole = statistics.median(row["without"]["all_us"] for row in rows)
    medians = {
        name: {key: statistics.median(row[name][key] for row in rows) for key in rows[0][name]}
        for name in ("with", "without")
    }
    return {
        "pairs": len(rows),
        "tokens_per_s_ratio": [math.exp(value) for value in rate],
        "edge_us_more_per_token": list(more),
        "cpu_share": [value / whole for value in more],
        "medians": medians,
    }


def flown(kind: type[Flight], count: int, first: int = 0) -> list[tuple[RecordSummary, bytes]]:
    """So many requests side by side: each of `OUTPUT_TOKENS` steps, then closed, packed and summed up."""
    clock = SystemClock()
    flights = [kind(f"req_{first + number}", clock) for number in range(count)]
    for flight in flights:
        now = clock.now()
        told: list[ev.Event] = [ev.Tokenized(now, now, 128, 4, ()), ev.Fitted(OUTPUT_TOKENS, (), SamplingParams(), {})]
        told += [ev.Reserved("h", 128, OUTPUT_TOKENS, 1, "p"), ev.Queued(now, 0, 0), ev.Admitted(now, 0, 0, 256, 192)]
        for event in told:
            flight.record(event)
    for step in range(OUTPUT_TOKENS):
        now = clock.now()
        for flight in flights:
            flight.record(ev.Step(step, now, now + 1e-6, 0 if step else 128, 1, 0, count, count))
            if step == 0:
                flight.record(ev.FirstToken(now, 0))
    for flight in flights:
        flight.close()
        flight.segments()
    return [(summary(flight), flight.pack()) for flight in flights]


async def store_alone(requests: int) -> list[tuple[int, float, int]]:
    """(requests, MB of this process, records on disk) after each twentieth: the store as a server has it."""
    settings = RecordSettings(max_stored=MAX_STORED)
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-recording-") as folder:
        database = await Database.open(database_url(None, pathlib.Path(folder)))
        writer = Writer(database)
        writer.start()
        store = RecordStore(database, writer, SystemClock(), settings)
        for step in range(21):
            for first in range((step - 1) * (requests // 20), step * (requests // 20), 100) if step else ():
                for one, body in flown(Flight, 100, first):
                    store.put(one, body)
                await store.flush()
            await store.prune()
            async with database.reading() as connection:
                count = (await connection.execute(select(func.count()).select_from(RECORDS))).scalar_one()
            found.append((step * (requests // 20), psutil.Process().memory_info().rss / 1e6, count))
        await writer.stop()
        await database.close()
    return found


def alone(count: int, turns: int = 40) -> dict[str, float]:
    """Microseconds of processor time per output token: with a record, and with what the pipeline needs anyway."""
    least = {}
    for name, kind in (("with", Flight), ("without", Unrecorded)):
        times = []
        for _ in range(turns):
            began = time.process_time()
            flown(kind, count)
            times.append(time.process_time() - began)
        least[name] = 1e6 * min(times) / (count * OUTPUT_TOKENS)
    return least


@contextlib.contextmanager
def upstream_and(module: str, folder: pathlib.Path, mock: int) -> Iterator[Gateway]:
    """hitsend or its unrecorded twin before the mock."""
    folder.mkdir()
    sizes = f"--set record.max_stored={MAX_STORED}"
    with hitsend(free_port(), mock, folder, module=module, more=sizes.split()) as gateway:
        yield gateway


def memory(requests: int) -> dict[str, Any]:
    """MB after each twentieth of the requests, with records and without; and records on disk at the end."""
    rows: dict[str, list[tuple[int, float]]] = {"with": [], "without": []}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-recording-")))
        mock = free_port()
        words = [sys.executable, "-m", "bench.edge.mock", str(mock)]
        stack.enter_context(started(words, OTHER_CORE, folder / "mock.log"))
        gateways = {
            name: stack.enter_context(upstream_and(module, folder / name, mock))
            for name, module in (("with", "hitsend"), ("without", "bench.unrecorded"))
        }
        for step in range(21):
            for name, gateway in gateways.items():
                if step:
                    ask(gateway, 32, requests // 20, TOKENS, "whole")
                rows[name].append((step * requests // 20, gateway.rss_mb()))
            print(".", end="", file=sys.stderr, flush=True)
        stored = {name: in_store(folder / name / "data") for name in gateways}
    print(file=sys.stderr)
    return {"rss_mb": rows, "stored": stored, "max_stored": MAX_STORED}


def in_store(data: pathlib.Path) -> int:
    """Records on disk."""
    file = next(data.glob("*.sqlite3"))
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM records").fetchone()[0])


def show_speed(found: dict[str, Any], concurrency: int) -> None:
    """For a reader."""
    ratio, more, share = found["tokens_per_s_ratio"], found["edge_us_more_per_token"], found["cpu_share"]
    print(f"{concurrency} at once, {found['pairs']} pairs; {machine(psutil.cpu_count() or 1)}")
    for name, row in found["medians"].items():
        times = f"edge {row['edge_us']:.0f} us, all processes {row['all_us']:.0f} us of CPU a token"
        print(f"  {name:7} records: {row['tokens_per_s']:.1f} output tokens/s, {times}")
    print(f"  output tokens/s, with / without: {ratio[0]:.4f} [{ratio[1]:.4f}, {ratio[2]:.4f}]")
    print(f"  recording: {more[0]:.1f} us of CPU a token [{more[1]:.1f}, {more[2]:.1f}], of all CPU time", end=" ")
    print(f"{share[0]:.2%} [{share[1]:.2%}, {share[2]:.2%}]")


def show_memory(found: dict[str, Any]) -> None:
    """For a reader."""
    print("| requests | MB with records | MB without |\n| --- | --- | --- |")
    for full, bare in zip(found["rss_mb"]["with"], found["rss_mb"]["without"], strict=True):
        print(f"| {full[0]:,} | {full[1]:.1f} | {bare[1]:.1f} |")
    print(f"records on disk at the end: {found['stored']['with']:,} (record.max_stored {found['max_stored']:,})")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--memory", type=int, default=100_000, metavar="REQUESTS", help="0: don't")
    parser.add_argument("--alone", action="store_true", help="no server: the record's own code and its store")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {}
    result["alone_us"] = found = alone(asked.concurrency)
    print(f"the record's own code: {found['with']:.2f} us a token, {found['without']:.2f} of it without a record")
    if asked.pairs and not asked.alone:
        rows = speed(asked.pairs, asked.concurrency)
        result |= {"rows": rows, "speed": judged(rows)}
        show_speed(result["speed"], asked.concurrency)
    if asked.memory:
        result["store"] = rows = asyncio.run(store_alone(asked.memory))
        for count, rss_mb, stored in rows:
            print(f"the store alone, {count:,} requests: {rss_mb:.1f} MB, {stored:,} records on disk")
    if asked.memory and not asked.alone:
        result["memory"] = memory(asked.memory)
        show_memory(result["memory"])
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
