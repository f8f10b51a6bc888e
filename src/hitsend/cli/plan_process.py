"""What the embedded engine's process takes on this machine, for `hitsend plan memory --engine hitsend`.

Enters: a model that this machine can load, and how many sequences of which length. Leaves: bytes by what they are for,
as a document and as lines. Always true: it is what `engine.memory_budget_bytes` is compared with at a start; a
model that isn't a file here has none. Next: `serve/engine/rehearsal.py`.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.explain import GIB

_MB = 1e6


def process_memory(
    model: str, max_model_len: int | None, max_num_seqs: int | None, kv_dtype: str, kv_gib: float | None
) -> dict[str, Any] | None:
    """Bytes of the process with these settings, else the engine's defaults. `kv_gib`: for the cells.

    None: the model is no file here."""
    # the planner itself starts without the engine's libraries
    from hitsend.serve.engine.models import BUNDLED, resolve  # noqa: PLC0415
    from hitsend.serve.engine.rehearsal import server_bytes  # noqa: PLC0415
    from hitsend.serve.engine.sizing import sizes  # noqa: PLC0415
    from hitsend.serve.engine.startup import WorkerConfig  # noqa: PLC0415
    from hitsend.settings import EngineSettings  # noqa: PLC0415

    if not Path(model).is_file() and model.lower() != BUNDLED:
        return None
    kv_bytes = None if kv_gib is None else int(kv_gib * GIB)
    given: dict[str, Any] = {"context": max_model_len, "num_slots": max_num_seqs, "kv_budget_bytes": kv_bytes}
    kv_type: Literal["f16", "q8_0"] = "q8_0" if kv_dtype == "q8_0" else "f16"
    settings = EngineSettings(kv_type=kv_type, **{name: value for name, value in given.items() if value is not None})
    found = resolve(model, Path())
    try:
        (sized,) = asyncio.run(sizes([WorkerConfig(found.name, found.path, settings)]))
    except ConfigError as error:
        return {"refused": str(error)}
    parts = msgspec.to_builtins(sized.memory)
    facts = {"num_slots": sized.facts.num_slots, "cells_per_slot": sized.facts.cells_per_slot}
    totals = {"engine_bytes": sized.memory.total, "server_bytes": server_bytes(sized.memory)}
    return {**facts, "kv_mode": sized.facts.kv_mode, "parts": parts, **totals}


def process_text(found: dict[str, Any]) -> list[str]:
    """The same for a reader."""
    if "refused" in found:
        return [f"process: {found['refused']}"]
    parts = " + ".join(f"{name} {size / _MB:,.0f}" for name, size in found["parts"].items() if size)
    shape = f"{found['num_slots']} slots, {found['cells_per_slot']:,} tokens each at most, {found['kv_mode']}"
    return [
        f"engine's process here ({shape}): {found['engine_bytes'] / _MB:,.0f} MB = {parts}",
        f"with a gateway and its text process: {found['server_bytes'] / _MB:,.0f} MB; saved prefixes come on top",
    ]
