"""What a hold and its settlement cost, one request at a time and many at once; for docs/decisions/004-database.md.

Enters: nothing. Leaves: a table on stdout. Always true: the code is the server's own, on a real file in a temporary
folder, and every row is checked to be there in the end. Next: `docs/decisions/004-database.md`.

    .venv/bin/python -m bench.ledger
"""

import asyncio
import tempfile
import time

from hitsend.core.clock import SystemClock
from hitsend.core.request import Principal, Usage
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.ledger import Ledger, Settlement
from hitsend.serve.usage.pricing import Price
from hitsend.serve.usage.rows import HoldRequest
from hitsend.settings import UsageSettings

REQUESTS = 640
PRICE = Price(id="bench", input_picousd=450_000, output_picousd=3_200_000)


async def bill(ledger: Ledger, number: int) -> None:
    """One request's life as the ledger sees it, durable at both ends."""
    request = HoldRequest(f"bench-{number}", Principal(), "model", "engine", PRICE, input_tokens=300, output_tokens=500)
    hold = await ledger.reserve(request)
    await ledger.settle(hold, Settlement(Usage(prompt_tokens=300, completion_tokens=500), "stop"))


async def measure(concurrency: int) -> tuple[float, int]:
    """Seconds for all requests, and the transactions they took."""
    with tempfile.TemporaryDirectory() as folder:
        database = await Database.open(database_url(None, folder))
        writer = Writer(database)
        writer.start()
        ledger = Ledger(database, writer, SystemClock(), UsageSettings())
        numbers = iter(range(REQUESTS))

        async def worker() -> None:
            for number in numbers:
                await bill(ledger, number)

        begun = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        spent = time.perf_counter() - begun
        last = await ledger.row(f"bench-{REQUESTS - 1}")
        if last is None or last.cost_microusd != 1735:
            raise SystemExit("the ledger is wrong")
        await ledger.stop()
        await writer.stop()
        await database.close()
        return spent, writer.num_commits


async def main() -> None:
    """Print one line per concurrency."""
    for concurrency in (1, 8, 32, 64):
        spent, commits = await measure(concurrency)
        each = spent / REQUESTS * 1000
        print(f"{concurrency:3} at once  {REQUESTS / spent:7.0f} requests/s  {each:6.2f} ms each  {commits:5} commits")


if __name__ == "__main__":
    asyncio.run(main())
