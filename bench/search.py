"""How long a search takes with many flight records stored: over HTTP, and in the page until its table is drawn.

Usage: python -m bench.search [--count 50000] [--rounds 20] [--json FILE]
Fills a fresh database with records of the usual size, starts a server on it, and prints the median and the slowest of
every kind of search in ms; the page's figure is from pressing the button to the new table, in headless Chromium.
"""

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator

import aiohttp

from hitsend.core.clock import SystemClock
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.records import RecordStore, RecordSummary
from hitsend.settings import RecordSettings
from tests.inspect.chromium import Chromium, find
from tests.served import Served, serving

BATCH = 1000
BODY_BYTES = 7_000
"""As an answer of some twenty steps has: short enough to be stored as it is."""

SEARCHES = {
    "newest": "",
    "principal": "name=name17",
    "model": "model=m3",
    "finish reason": "finish_reason=error",
    "slow": "min_wall_ms=9990",
    "expensive": "min_cost_microusd=9990",
    "nobody's": "name=nobody",
    "all at once": "name=name17&model=m3&finish_reason=length&min_wall_ms=5000",
}


def made(count: int) -> Iterator[tuple[RecordSummary, bytes]]:
    """Records of a week, up to now, of 50 principals and 5 models."""
    draw = random.Random(1)
    now = time.time()
    for number in range(count):
        summary = RecordSummary(
            request_id=f"req_{number:024x}",
            received_at=now - (count - number) * 7 * 86_400 / count,
            state="finished",
            finish_reason=draw.choice(("stop", "stop", "stop", "length", "error")),
            error_code=None,
            model=f"m{draw.randrange(5)}",
            key_id=f"k{number % 50}",
            key_name=f"name{number % 50}",
            wall_ms=draw.uniform(1, 10_000),
            prompt_tokens=100,
            completion_tokens=20,
            cost_microusd=draw.randrange(10_000),
            ttft_ms=draw.uniform(1, 1000),
        )
        yield summary, draw.randbytes(BODY_BYTES)


async def fill(folder: pathlib.Path, count: int) -> None:
    """Through the store itself."""
    database = await Database.open(database_url(None, folder))
    writer = Writer(database)
    writer.start()
    store = RecordStore(database, writer, SystemClock(), RecordSettings(ring=1))
    for number, (summary, body) in enumerate(made(count), 1):
        store.put(summary, body)
        if number % BATCH == 0:
            await store.flush()
    await store.flush()
    await writer.stop()
    await database.close()


def over_http(served: Served, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every search, interleaved."""
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, query in SEARCHES.items():
            for path in ("requests", "percentiles"):
                begun = time.perf_counter()
                served.text(f"/inspect/{path}?{query}")
                taken.setdefault(f"{path}: {name}", []).append((time.perf_counter() - begun) * 1000.0)
    return taken


async def in_the_page(url: str, rounds: int) -> list[float]:
    """Milliseconds from asking for a filter to the drawn table."""
    script = """new Promise((done) => {
      const begun = performance.now();
      const onDrawn = () => requestAnimationFrame(() => done(performance.now() - begun));
      new MutationObserver((_, watch) => { watch.disconnect(); onDrawn(); })
        .observe(document.querySelector("#requests tbody"), { childList: true });
      document.querySelector("#f-name").value = NAME;
      document.querySelector("#search button").click();
    })"""
    with tempfile.TemporaryDirectory() as folder:
        browser = Chromium(pathlib.Path(folder))
        try:
            async with aiohttp.ClientSession() as session:
                page = await browser.page(session)
                await page.open(f"{url}/inspect#/requests")
                await page.until("document.querySelectorAll('#requests tbody tr').length > 10")
                taken = [
                    await page.run(script.replace("NAME", json.dumps(f"name{number % 50}"))) for number in range(rounds)
                ]
                await page.close()
        finally:
            browser.close()
    return taken


def main() -> None:
    """Fill, serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hitsend-search-") as name:
        folder = pathlib.Path(name)
        asyncio.run(fill(folder, given.count))
        with serving("--set", "record.max_stored=1000000", data=folder) as served:
            taken = over_http(served, given.rounds)
            if find() is not None:
                taken["page: a filter drawn"] = asyncio.run(in_the_page(served.url, given.rounds))
    found = {what: {"median_ms": statistics.median(ms), "max_ms": max(ms)} for what, ms in taken.items()}
    for what, figures in found.items():
        print(f"{what:28} {figures['median_ms']:8.1f} ms, slowest {figures['max_ms']:8.1f} ms")
    if given.json is not None:
        given.json.write_text(json.dumps({"count": given.count, "searches": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
