"""What an engine's process was predicted to take, beside what it takes when all of its slots were in use."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hitsend.core.request import SamplingParams
from hitsend.serve.engine.protocol import Job
from hitsend.serve.engine.sizing import sizes
from hitsend.serve.engine.startup import WorkerConfig
from tests.engine.conftest import SMALL

pytestmark = pytest.mark.model

WAYS = {
    "streams": {"num_slots": 8, "context": 1024},
    "one pool, q8_0": {"kv_type": "q8_0", "kv_mode": "unified", "kv_budget_bytes": 40_000_000},
}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def compare(path: str, engine_of: Callable[..., Any], **way: Any) -> None:
    settings = msgspec.structs.replace(SMALL, prefix_cache_bytes=0, **way)
    (sized,) = await sizes([WorkerConfig("tested", path, settings)])
    async with engine_of(path, settings) as engine:

        async def one(number: int) -> None:
            prompt = tuple(1000 + (7 * i + number) % 900 for i in range(128))
            job = Job(f"{number}", prompt, SamplingParams(), n=1, max_tokens=4, deadline_s=900.0, tenant=())
            generation = engine.generate(job)
            async for _ in generation:
                pass
            await generation.aclose()

        await asyncio.gather(*(one(number) for number in range(settings.num_slots)))
        measured = resident_bytes(engine.state().pid)
    assert sized.memory.total == pytest.approx(measured, rel=0.05), sized.memory
    assert sized.num_bytes == sized.memory.total


@pytest.mark.parametrize("way", WAYS)
async def test_memory_is_predicted_within_five_percent(
    way: str, engine_of: Callable[..., Any], model_path: str
) -> None:
    await compare(model_path, engine_of, **WAYS[way])


async def test_memory_of_a_hybrid_is_predicted_within_five_percent(
    engine_of: Callable[..., Any], hybrid_path: str
) -> None:
    await compare(hybrid_path, engine_of, num_slots=8, context=1024)
