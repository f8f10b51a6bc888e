"""A process made to be killed: reserves and settles without end, and prints what the ledger confirmed, line by line."""

import asyncio
import sys

from hitsend.core.clock import SystemClock
from hitsend.core.request import Usage
from hitsend.serve.usage.ledger import Settlement
from tests.usage.storage import storage, wanted


async def _live(ledger, request_id: str, *, is_settled: bool, is_streamed: bool) -> None:
    hold = await ledger.reserve(wanted(request_id))
    if is_streamed:
        await ledger.secure()
    print("held", request_id, flush=True)
    if is_settled:
        row = await ledger.settle(hold, Settlement(Usage(10, 5), "stop"))
        print("settled", row.request_id, row.cost_microusd, flush=True)


async def _main(url: str) -> None:
    async with storage(url, SystemClock()) as opened:
        number = 0
        while True:
            batch = range(number, number + 8)
            await asyncio.gather(
                *(_live(opened.ledger, f"r{i}", is_settled=i % 4 != 0, is_streamed=i % 3 == 0) for i in batch)
            )
            number += 8


asyncio.run(_main(sys.argv[1]))
