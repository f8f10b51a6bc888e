"""engine/pooled.py and waiting.py over a scripted child: who waits, who is let in, what is given back."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    ServerOverloaded,
    ShuttingDown,
)
from hitsend.core.events import Admitted, ModelLoaded, Queued, Released
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import SamplingParams
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.pool import Pool
from hitsend.serve.engine.pooled import RETRY_S, ModelPool, PooledModel
from hitsend.serve.engine.protocol import ChoiceDone, Job
from hitsend.serve.engine.several import generate_all
from hitsend.serve.loop.messages import Abort, Done, EngineFacts, Submit, WasAdmitted, WasQueued
from hitsend.settings import EngineSettings
from hitsend.testing import FakeClock

FACTS = EngineFacts("m", "llama", "lib", 64, 128, 2, 256, 128, "per_stream", 10, 0, 1000, 1, False)


class ScriptedLine:
    """A child that loads when it is let, and takes everything it is sent; `finish` ends a request."""

    def __init__(self, gate):
        self.gate = gate
        self.is_ready = False
        self.pid = None
        self.restarts = 0
        self.progress_at = 0.0
        self.facts = None
        self.submitted = []
        self.is_stopped = False

    def attach(self, on_report, on_down):
        self.on_report, self.on_down = on_report, on_down

    async def start(self):
        if isinstance(self.gate, Exception):
            raise self.gate
        await self.gate.wait()
        self.facts, self.is_ready, self.pid = FACTS, True, 1

    async def stop(self):
        self.is_ready, self.is_stopped = False, True

    def send(self, command):
        if isinstance(command, Submit):
            self.submitted.append(command)
            soon = asyncio.get_running_loop().call_soon
            soon(self.on_report, WasQueued(command.request_id, 0.0, 1, 0), b"")
            for choice in range(len(command.seeds)):
                soon(self.on_report, WasAdmitted(command.request_id, choice, 0.0, 0, 9, 1), b"")
        elif isinstance(command, Abort):
            self._end(command.request_id, FinishReason.CANCELLED)
        return True

    def finish(self, request_id):
        self._end(request_id, FinishReason.STOP)

    def die(self):
        self.is_ready = False
        self.on_down(EngineFailed("it died"))

    def _end(self, request_id, reason):
        for submit in self.submitted:
            if submit.request_id == request_id:
                for choice in range(len(submit.seeds)):
                    self.on_report(Done(request_id, choice, 0.0, reason.value, 1, 0), b"")


class House:
    """A pool whose models take 10 bytes each."""

    def __init__(self, *names, budget=None, patience_s=10.0, clock=None, **fields):
        self.pool = ModelPool(Pool(budget, patience_s), clock or SystemClock())
        self.lines = {name: [] for name in names}
        self.gates = {}
        for name in names:
            self.gates[name] = asyncio.Event()
            self.gates[name].set()
            given = {"max_waiting": 4, "max_concurrent": 50, "idle_s": None} | fields
            self.pool.add(PooledModel(name, FACTS, 10, **given), self._builder(name))

    def _builder(self, name):
        def build(on_rest):
            line = ScriptedLine(self.gates[name])
            self.lines[name].append(line)
            settings = EngineSettings(max_waiting=4)
            return EmbeddedEngine(
                settings, "x", SystemClock(), name=name, model=name, pause_tokens=9, line=line, on_rest=on_rest
            )

        return build

    def __getitem__(self, name):
        return self.pool.engines[name]

    def line(self, name):
        return self.lines[name][-1]

    async def until_stage(self, name, stage):
        await until(lambda: self[name].member.stage == stage)


@asynccontextmanager
async def house(*names, **fields):
    made = House(*names, **fields)
    await made.pool.start()
    try:
        yield made
    finally:
        await made.pool.stop()
        lines = [line for lines in made.lines.values() for line in lines]
        assert all(line.is_stopped for line in lines if line.is_ready or line.facts)


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


def job(request_id, *, n=1, deadline_s=60.0, **fields):
    return Job(request_id, (1, 2, 3), SamplingParams(), n, 4, deadline_s, **fields)


async def ending(generation):
    return [event async for event in generation]


async def test_the_first_job_loads_the_model_and_the_record_says_so():
    async with house("a") as rooms:
        generation = rooms["a"].generate(job("r"))
        await until(lambda: rooms.lines["a"] and rooms.line("a").submitted)
        await asyncio.sleep(0)  # what it says to a job comes a turn later
        rooms.line("a").finish("r")
        events = await ending(generation)
        kinds = [type(event) for event in events]
        assert kinds[:3] == [Queued, ModelLoaded, Admitted]
        assert (kinds.count(Queued), kinds[-2:]) == (1, [Released, ChoiceDone])
        assert events[1].num_bytes == 10
        assert rooms["a"].facts == FACTS
        second = rooms["a"].generate(job("s"))
        await until(lambda: len(rooms.line("a").submitted) == 2)
        await asyncio.sleep(0)
        rooms.line("a").finish("s")
        assert [type(event) for event in await ending(second)][:2] == [Queued, Admitted]


async def test_the_deadline_counts_from_the_arrival():
    async with house("a") as rooms:
        rooms.gates["a"].clear()
        generation = rooms["a"].generate(job("r", deadline_s=0.05))
        with pytest.raises(ServerOverloaded, match=r"0\.05 s"):
            await ending(generation)
        assert rooms["a"].state().waiting == 0
        await generation.aclose()
        rooms.gates["a"].set()
        waited = rooms["a"].generate(job("s", deadline_s=60.0))
        await until(lambda: rooms.lines["a"] and rooms.line("a").submitted)
        assert 0.0 < rooms.line("a").submitted[0].deadline_s < 60.0
        await waited.aclose()


async def test_who_leaves_while_it_loads_leaves_nothing():
    async with house("a", "b") as rooms:
        rooms.gates["a"].clear()
        one, other = rooms["a"].generate(job("r", n=2)), rooms["a"].generate(job("s"))
        assert rooms["a"].state().waiting == 3
        reading = asyncio.ensure_future(ending(one))
        await rooms.until_stage("a", "loading")
        reading.cancel()
        await asyncio.wait({reading})
        await one.aclose()
        await one.aclose()
        assert [type(event) for event in await ending(one)][-1] is Released
        assert one.produced.output_tokens == (0, 0)
        assert rooms["a"].state().waiting == 1
        rooms.gates["a"].set()
        await until(lambda: rooms.line("a").submitted)
        assert [each.request_id for each in rooms.line("a").submitted] == ["s"]
        await other.aclose()
        await until(lambda: not rooms["a"].is_busy)


async def test_what_can_never_fit_is_refused_before_anything_is_loaded():
    async with house("a", max_concurrent=8) as rooms:
        rooms.gates["a"].clear()
        with pytest.raises(ContextLengthExceeded, match="128"):
            rooms["a"].generate(Job("r", (1,) * 100, SamplingParams(), 1, 29, 60.0))
        with pytest.raises(InvalidRequest, match="7 choices, but only 6"):
            rooms["a"].generate(job("r", n=7))
        assert not rooms.lines["a"]


async def test_the_queue_and_the_number_of_open_requests_are_bounded():
    async with house("a", max_concurrent=8) as rooms:
        rooms.gates["a"].clear()
        waiting = [rooms["a"].generate(job(f"r{i}")) for i in range(6)]
        with pytest.raises(ServerOverloaded, match="room for 6"):
            rooms["a"].generate(job("s"))
        await waiting.pop().aclose()
        with pytest.raises(InvalidRequest, match="running already"):
            rooms["a"].generate(job("r0"))
        for each in waiting:
            await each.aclose()
    async with house("a", max_concurrent=2) as rooms:
        running = [rooms["a"].generate(job(f"r{i}")) for i in range(2)]
        with pytest.raises(ServerOverloaded, match="limit 2"):
            rooms["a"].generate(job("s"))
        for each in running:
            await each.aclose()


async def test_a_model_whose_file_is_another_than_its_prompts_were_read_by_is_not_used():
    async with house("a") as rooms:
        rooms["a"].words = "other words"
        with pytest.raises(EngineUnavailable, match="could not be loaded"):
            await ending(rooms["a"].generate(job("r")))
        assert rooms.line("a").is_stopped
        assert rooms.pool.state()["memory_used_bytes"] == 0


async def test_a_model_that_cannot_be_loaded_fails_its_jobs_and_is_tried_again_later():
    async with house("a", "b") as rooms:
        rooms.gates["a"] = ConfigError("broken")
        generation, fine = rooms["a"].generate(job("r")), rooms["b"].generate(job("s"))
        with pytest.raises(EngineUnavailable, match="could not be loaded"):
            await ending(generation)
        assert (rooms["a"].member.stage, rooms["a"].state().is_ready) == ("unloaded", False)
        with pytest.raises(EngineUnavailable):
            rooms["a"].generate(job("t"))
        await until(lambda: rooms.lines["b"] and rooms.line("b").submitted)
        rooms.line("b").finish("s")
        assert (await ending(fine))[-1] == ChoiceDone(0, "stop")


async def test_a_model_that_could_not_be_loaded_is_ready_to_be_asked_again_once_its_time_is_over():
    """Or a route would put it last for ever, and nobody would find out that its file is there again."""
    clock = FakeClock()
    async with house("a", clock=clock) as rooms:
        fine, rooms.gates["a"] = rooms.gates["a"], ConfigError("broken")
        with pytest.raises(EngineUnavailable):
            await ending(rooms["a"].generate(job("r")))
        clock.advance(RETRY_S)
        assert rooms["a"].state().is_ready
        rooms.gates["a"] = fine
        generation = rooms["a"].generate(job("s"))
        await until(lambda: rooms.line("a").submitted)
        rooms.line("a").finish("s")
        assert (await ending(generation))[-1] == ChoiceDone(0, "stop")


async def test_an_idle_model_goes_and_comes_back():
    async with house("a", idle_s=0.02) as rooms:
        for number in range(2):
            generation = rooms["a"].generate(job(f"r{number}"))
            await until(lambda number=number: len(rooms.lines["a"]) > number and rooms.line("a").submitted)
            rooms.line("a").finish(f"r{number}")
            await ending(generation)
            await rooms.until_stage("a", "unloaded")
            assert rooms.line("a").is_stopped
        assert rooms["a"].num_loads == 2


async def test_a_busy_model_stays_until_its_last_job_has_ended():
    async with house("a", "b", budget=15) as rooms:
        first = rooms["a"].generate(job("r"))
        await until(lambda: rooms.lines["a"] and rooms.line("a").submitted)
        second = rooms["b"].generate(job("s"))
        await until(lambda: rooms["b"].member.wanted_at is not None)
        assert (rooms["a"].member.stage, rooms["b"].member.stage) == ("loaded", "unloaded")
        assert not rooms.line("a").is_stopped
        rooms.line("a").finish("r")
        await ending(first)
        await until(lambda: rooms.lines["b"] and rooms.line("b").submitted)
        assert (rooms.line("a").is_stopped, rooms.pool.state()["memory_used_bytes"]) == (True, 10)
        rooms.line("b").finish("s")
        await ending(second)


async def test_two_models_that_both_have_work_take_turns():
    """Each ends what it has; whoever comes meanwhile waits for the model's next turn."""
    async with house("a", "b", budget=15, patience_s=0.01) as rooms:
        served = []

        async def ask(name, number):
            generation = rooms[name].generate(job(f"{name}{number}"))
            async for event in generation:
                if isinstance(event, ChoiceDone):
                    served.append(name)

        async def work():
            while True:
                for name in ("a", "b"):
                    for line in rooms.lines[name]:
                        for submit in list(line.submitted):
                            line.finish(submit.request_id)
                            line.submitted.remove(submit)
                await asyncio.sleep(0.005)

        working = asyncio.ensure_future(work())
        try:
            for round_ in range(3):
                await asyncio.gather(*(ask(name, f"{round_}.{i}") for i in range(2) for name in ("a", "b")))
        finally:
            working.cancel()
        assert (served.count("a"), served.count("b")) == (6, 6)


async def test_a_death_touches_only_its_own_jobs():
    async with house("a", "b") as rooms:
        dying, living = rooms["a"].generate(job("r")), rooms["b"].generate(job("s"))
        await until(lambda: all(rooms.lines[name] and rooms.line(name).submitted for name in ("a", "b")))
        rooms.line("a").die()
        with pytest.raises(EngineFailed, match="it died"):
            await ending(dying)
        rooms.line("b").finish("s")
        assert (await ending(living))[-1] == ChoiceDone(0, "stop")


async def test_several_prompts_wait_as_one():
    async with house("a") as rooms:
        whole = generate_all(rooms["a"], job("r", more_prompts=((4, 5), (6,))))
        await until(lambda: rooms.lines["a"] and len(rooms.line("a").submitted) == 3)
        for request_id in ("r", "r/1", "r/2"):
            rooms.line("a").finish(request_id)
        kinds = [type(event) for event in await ending(whole)]
        assert [kinds.count(kind) for kind in (Queued, ModelLoaded, ChoiceDone, Released)] == [1, 1, 3, 1]


async def test_stopping_fails_those_who_wait():
    async with house("a") as rooms:
        rooms.gates["a"].clear()
        generation = rooms["a"].generate(job("r"))
        await rooms.until_stage("a", "loading")
        await rooms.pool.stop()
        with pytest.raises(ShuttingDown):
            await ending(generation)
        with pytest.raises(ShuttingDown):
            rooms["a"].generate(job("s"))


async def test_what_shall_be_there_from_the_start_must_fit():
    made = House("a", "b", budget=15, is_loaded_at_start=True)
    with pytest.raises(ConfigError, match=r"engines\[b\]\.is_loaded_at_start.*10 bytes"):
        await made.pool.start()
    assert made["a"].member.stage == "loaded"
    await made.pool.stop()
    assert made.line("a").is_stopped
