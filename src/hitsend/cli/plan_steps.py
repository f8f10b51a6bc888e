"""`hitsend plan steps`: how long a running server's steps take, from its own flight records.

Enters: a server's address. Leaves: a calibration for `plan simulate` and `plan fleet`, as text or as a file. Always
true: nothing is sent to the model; what is found is what the newest requests did. Next: `plan_fleet.py`.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from hitsend.cli import options
from hitsend.plan.steps import Calibration, Room, calibrated

MOST = 1000


def steps(
    url: options.Url = None,
    key: options.Key = None,
    newest: Annotated[int, typer.Option("--newest", min=1, max=MOST, help="Requests that are looked at.")] = 200,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="For plan simulate --timing FILE.")] = None,
    as_json: options.Json = False,
) -> None:
    """What the steps of a running server take, from the records of its newest requests."""
    found = asyncio.run(_calibrated(url or options.DEFAULT_URL, key, newest))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{found.steps:,} steps, {found.error:.1%} off in the median")
    for name, value in msgspec.to_builtins(found.timing).items():
        print(f"  {name.removesuffix('_ms')}: {value:,.4f} ms")


async def _calibrated(url: str, key: str | None, newest: int) -> Calibration:
    # other plans start without a client's libraries
    from hitsend.cli.client import Client  # noqa: PLC0415

    async with Client(url, key) as client:
        listed = await client.get(f"/inspect/requests?limit={newest}")
        ids = [one["request_id"] for one in listed["requests"]]
        records = [await client.get(f"/inspect/requests/{quote(one, safe='')}") for one in ids]
        room = room_of(await client.get("/inspect/state"))
    return msgspec.structs.replace(calibrated(records), room=room)


def room_of(state: dict[str, Any]) -> Room | None:
    """As `/inspect/state` says; None for a server without an engine of its own."""
    engine = state.get("engine") or {}
    if not state.get("slots_total") or "cells_per_slot" not in engine:
        return None
    return Room(
        slots=state["slots_total"],
        cells=state["cells_total"],
        cells_per_slot=engine["cells_per_slot"],
        drafts=engine.get("speculation") == "prompt_lookup",
    )
