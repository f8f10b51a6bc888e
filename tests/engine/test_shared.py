"""engine/shared.py: two gateways on one real child."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import EngineFailed, EngineUnavailable, InvalidRequest
from hitsend.core.request import SamplingParams
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.protocol import Job, Produced, StepFigures, Tokens
from hitsend.serve.engine.shared import RemoteLine, SharedEngine
from hitsend.settings import AdapterSettings
from tests.engine.conftest import SMALL, until
from tests.engine.lora import write_lora

pytestmark = pytest.mark.model


def job(name: str, *, n: int = 1, max_tokens: int = 16) -> Job:
    ids = tuple(1000 + (7 * i) % 900 for i in range(20))
    return Job(name, ids, SamplingParams(temperature=0.0), n, max_tokens, 60.0)


class House:
    """The owner, and its gateways' engines."""

    def __init__(self, path: str, adapters: tuple[AdapterSettings, ...] = ()) -> None:
        clock = SystemClock()
        self.steps: list[StepFigures] = []
        self.shared = SharedEngine(SMALL, path, clock, model="tested", adapters=adapters)
        self.owner = self._engine(self.shared, self.steps.append)
        self.lines = [RemoteLine(SMALL, clock, self._sender(number)) for number in range(2)]
        self.engines = [self._engine(line, lambda _: None) for line in self.lines]
        self.gone: set[int] = set()

    def _engine(self, line: Any, on_step: Any) -> EmbeddedEngine:
        return EmbeddedEngine(SMALL, "", SystemClock(), model="tested", pause_tokens=1000, on_step=on_step, line=line)

    def _sender(self, number: int) -> Any:
        def send(body: bytes) -> bool:
            if number not in self.gone:
                asyncio.get_running_loop().call_soon(self.shared.receive, number, body)
            return number not in self.gone

        return send

    def join(self, number: int) -> None:
        line = self.lines[number]
        self.shared.join(number, lambda body: asyncio.get_running_loop().call_soon(line.receive, body))

    async def idle(self) -> None:
        await until(
            lambda: self.owner.state().slots_used == 0 and self.owner.state().cells_used == 0,
            lambda: asyncio.sleep(0.01),
        )


@asynccontextmanager
async def open_house(path: str, adapters: tuple[AdapterSettings, ...] = ()) -> AsyncGenerator[House]:
    house = House(path, adapters)
    try:
        house.join(0)  # before the child is up
        await asyncio.gather(house.owner.start(), house.engines[0].start())
        house.join(1)  # and after
        await house.engines[1].start()
        yield house
    finally:
        await house.owner.stop()


def tokens(events: list[Any]) -> list[int]:
    return [each.token_id for event in events if isinstance(event, Tokens) for each in event.sampled]


async def collect(generation: Any) -> list[Any]:
    return [event async for event in generation]


async def test_each_gateway_gets_its_own_and_the_owner_counts_all(model_path: str) -> None:
    async with open_house(model_path) as house:
        running = [engine.generate(job(f"r{number}", n=2)) for number, engine in enumerate(house.engines)]
        events = await asyncio.gather(*map(collect, running))
        assert [len(tokens(each)) for each in events] == [32, 32]
        assert [each.produced for each in running] == [Produced(20, (16, 16))] * 2
        assert sum(step.prefill_tokens for step in house.steps) == 40
        assert sum(step.output_tokens for step in house.steps) == 64
        await house.idle()
        for engine in house.engines:
            assert engine.facts == house.owner.facts
            assert engine.state().pid == house.owner.state().pid
            await until(lambda engine=engine: engine.state().cells_used == 0, lambda: asyncio.sleep(0.01))


async def test_a_gateway_that_is_gone_frees_its_cells_and_leaves_the_others_alone(model_path: str) -> None:
    async with open_house(model_path) as house:
        mine, theirs = house.engines[0].generate(job("mine", max_tokens=60)), house.engines[1]
        lost = theirs.generate(job("lost", max_tokens=400))
        await anext(event async for event in lost if isinstance(event, Tokens))
        house.gone.add(1)
        house.shared.leave(1)
        house.lines[1].lose()
        assert len(tokens(await collect(mine))) == 60
        with pytest.raises(EngineFailed):
            await collect(lost)
        with pytest.raises(EngineUnavailable):
            theirs.generate(job("more"))
        await house.idle()
        assert house.owner.state().check is None


async def test_nobody_touches_what_is_somebody_elses(model_path: str) -> None:
    async with open_house(model_path) as house:
        mine = house.engines[0].generate(job("same", max_tokens=40))
        await anext(event async for event in mine if isinstance(event, Tokens))
        second = house.engines[1].generate(job("same", n=2))
        with pytest.raises(InvalidRequest, match="running already"):
            await collect(second)
        await second.aclose()  # its abort names the first one's id
        assert len(tokens(await collect(mine))) >= 38
        await house.idle()
        with pytest.raises(msgspec.ValidationError):
            house.shared.receive(1, b"\0\0\0\0" + msgspec.msgpack.encode({"type": "shutdown"}))


async def test_a_dead_child_fails_all_once_and_commands_for_it_reach_no_other(model_path: str) -> None:
    async with open_house(model_path) as house:
        running = [engine.generate(job(f"r{number}", max_tokens=400)) for number, engine in enumerate(house.engines)]
        for generation in running:
            await anext(event async for event in generation if isinstance(event, Tokens))
        os.kill(house.owner.state().pid or 0, signal.SIGKILL)
        for generation in running:
            with pytest.raises(EngineFailed):
                await collect(generation)
        for engine in house.engines:
            await until(lambda engine=engine: engine.state().is_ready, lambda: asyncio.sleep(0.05))
        assert [engine.state().restarts for engine in house.engines] == [1, 1]
        for number, engine in enumerate(house.engines):
            assert len(tokens(await collect(engine.generate(job(f"s{number}"))))) == 16
        late = msgspec.msgpack.encode({"type": "abort", "request_id": "t", "choice": None})
        going = house.engines[0].generate(job("t"))
        house.shared.receive(0, b"\0\0\0\0" + late)  # said to the first child
        assert len(tokens(await collect(going))) == 16
        await house.idle()


async def test_adapters_are_there_for_every_gateway(model_path: str, tmp_path: Path) -> None:
    red = AdapterSettings("red", write_lora(tmp_path / "red.gguf", model_path))
    async with open_house(model_path, (red,)) as house:
        asked = [
            msgspec.structs.replace(job(f"r{i}", max_tokens=4), adapter=name) for i, name in enumerate((None, "red"))
        ]
        said = []
        for engine, each in zip(house.engines, asked, strict=True):
            generation = engine.generate(each)
            said.append([t.token_id async for event in generation if isinstance(event, Tokens) for t in event.sampled])
        assert said[0] != said[1]
        assert len(said[1]) == 4
