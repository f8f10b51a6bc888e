"""All drills in full, as a table: `make drill`, or `python -m tests.drills --times 5` for a taste."""

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hitsend.serve.database.connection import database_url
from tests.drills import accounting
from tests.drills import faults as broken
from tests.drills.batches import BATCH_POINTS, batch_crash
from tests.drills.crashes import POINTS, WITH_A_MODEL, Launcher, Tally, crash, launcher
from tests.drills.outages import outages
from tests.postgres import Postgres, binaries, postgres, say_missing

MODEL_TIMES = 2


def show(name: str, point: str, tally: Tally, seconds: float) -> None:
    """One row of the table."""
    result = f"{len(tally.faults)} faults" if tally.faults else "ok"
    print(f"| {name} | {point} | {tally.lives} | {tally.rows} | {result} | {seconds:.0f} s |", flush=True)
    for fault in tally.faults[:10]:
        print(f"    {fault}", file=sys.stderr, flush=True)


async def crashes(name: str, at: Launcher, new_url: Callable[[], str], times: int) -> int:
    """Every point on one kind of database; how many faults."""
    faults = 0
    for point in POINTS:
        begun = time.monotonic()
        tally = await crash(at, await asyncio.to_thread(new_url), [point] * times)
        show(name, point, tally, time.monotonic() - begun)
        faults += len(tally.faults)
    return faults


async def batches(name: str, at: Launcher, new_url: Callable[[], str], times: int) -> int:
    """Every point of a batch's lines on one kind of database; how many faults. A batch bears only some deaths."""
    faults = 0
    for point in BATCH_POINTS:
        begun, whole = time.monotonic(), Tally()
        for _ in range(max(1, times // 5)):
            tally = await batch_crash(at, await asyncio.to_thread(new_url), point, 5)
            whole.lives, whole.rows = whole.lives + tally.lives, whole.rows + tally.rows
            whole.faults += tally.faults
        show(f"{name}, a batch", point, whole, time.monotonic() - begun)
        faults += len(whole.faults)
    return faults


async def with_a_model(at: Launcher, folder: Path, times: int) -> int:
    """Some rounds with the bundled model and its processes."""
    faults = 0
    for point in WITH_A_MODEL:
        begun = time.monotonic()
        tally = await crash(at, database_url(None, folder / point.replace(" ", "-")), [point] * times, real=True)
        show("SQLite, bundled model", point, tally, time.monotonic() - begun)
        faults += len(tally.faults)
    return faults


async def upstreams(num: int, step: int) -> int:
    """Mixed requests over four engines with faults, and an answer broken at every byte; how many faults."""
    total = 0
    with tempfile.TemporaryDirectory(prefix="hitsend-drill-") as folder:
        for name, work in (
            ("accounting", accounting.shown(num, Path(folder) / "accounts")),
            ("broken answers", broken.shown(Path(folder) / "faults", step)),
        ):
            begun = time.monotonic()
            report, text = await work
            result = f"{len(report.faults)} faults" if report.faults else "ok"
            print(f"\n{name}: {text}: {result}, {time.monotonic() - begun:.0f} s", flush=True)
            for fault in report.faults[:10]:
                print(f"    {fault}", file=sys.stderr, flush=True)
            total += len(report.faults)
    return total


async def main(times: int, model_times: int) -> int:
    """Everything; how many faults."""
    print("| database | killed at | lives | rows | result | took |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    async with contextlib.AsyncExitStack() as stack:
        kinds: list[tuple[str, Callable[[], str]]] = []
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hitsend-drill-")))
        urls = (database_url(None, folder / str(number)) for number in itertools.count())
        kinds.append(("SQLite", lambda: next(urls)))
        work = [crashes("SQLite", await stack.enter_async_context(launcher()), lambda: next(urls), times)]
        if binaries() is None:
            say_missing()
        else:
            server = await stack.enter_async_context(_durable())
            kinds.append(("PostgreSQL", server.make))
            work.append(crashes("PostgreSQL", await stack.enter_async_context(launcher()), server.make, times))
        faults = sum(await asyncio.gather(*work))
        at = await stack.enter_async_context(launcher())
        for name, new_url in kinds:
            faults += await batches(name, at, new_url, times)
        if binaries() is not None:
            begun = time.monotonic()
            url = await asyncio.to_thread(server.make)
            tally = await outages(at, server, url, times)
            show("PostgreSQL", "(its own immediate shutdown)", tally, time.monotonic() - begun)
            faults += len(tally.faults)
        faults += await with_a_model(at, folder, model_times) if model_times else 0
    return faults


@contextlib.asynccontextmanager
async def _durable() -> AsyncIterator[Postgres]:
    with postgres(is_durable=True) as server:
        yield server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="lives per point, and outages")
    parser.add_argument("--model-times", type=int, default=MODEL_TIMES, help="lives per point with the bundled model")
    parser.add_argument("--requests", type=int, default=1000, help="of the accounting drill")
    parser.add_argument("--step", type=int, default=1, help="break an upstream's answer at each such byte")
    parser.add_argument("--only", choices=("crashes", "upstreams"))
    given = parser.parse_args()
    num_faults = 0
    if given.only != "upstreams":
        num_faults += asyncio.run(main(given.times, given.model_times))
    if given.only != "crashes":
        num_faults += asyncio.run(upstreams(given.requests, given.step))
    sys.exit(num_faults > 0)
