"""engine/embedded.py, generation.py and worker.py: a real child on real weights."""

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
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
from hitsend.core.events import Admitted, FirstToken, Paused, PrefixMatched, Queued, Released, Resumed, Step
from hitsend.core.request import SamplingParams
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.keeper import ChildKeeper
from hitsend.serve.engine.protocol import ChoiceDone, Job, Produced, Tokens
from hitsend.settings import EngineSettings
from tests.engine.conftest import SMALL, until

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0)


def job(name: str = "r", *, prompt: int = 20, n: int = 1, max_tokens: int = 16, **more: Any) -> Job:
    ids = tuple(1000 + (7 * i) % 900 for i in range(prompt))
    return Job(name, ids, more.get("sampling", GREEDY), n, max_tokens, more.get("deadline_s", 60.0))


def of(tenant: str, name: str, **more: Any) -> Job:
    return msgspec.structs.replace(job(name, **more), tenant=(tenant,))


async def collect(generation: Any) -> list[Any]:
    return [event async for event in generation]


def ids(events: list[Any], choice: int = 0) -> list[int]:
    return [t.token_id for e in events if isinstance(e, Tokens) and e.choice == choice for t in e.sampled]


async def idle(engine: EmbeddedEngine) -> None:
    await until(lambda: engine.state().slots_used == 0 and engine.state().cells_used == 0, lambda: asyncio.sleep(0.01))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_job_gives_its_events_in_order_and_leaves_nothing(
    engine_of: Callable[..., Any], model_path: str
) -> None:
    async with engine_of(model_path) as engine:
        assert engine.facts.kv_bytes_per_cell == 23040
        generation = engine.generate(job(n=2, max_tokens=5))
        events = await collect(generation)
        assert [type(e) for e in events[:6]] == [Queued, Admitted, Admitted, PrefixMatched, Step, FirstToken]
        assert len(ids(events, 0)) == len(ids(events, 1)) == 5
        assert ids(events, 0) == ids(events, 1)
        assert sum(isinstance(e, ChoiceDone) for e in events) == 2
        assert isinstance(events[-1], ChoiceDone)
        steps = [e for e in events if isinstance(e, Step)]
        assert sum(s.prefill_tokens for s in steps) == 20  # the second choice takes over what the first computed
        assert all(s.batch_sequences == 2 for s in steps)
        released = [e for e in events if isinstance(e, Released)]
        assert [e.cells_used for e in released] == [0]
        assert generation.produced == Produced(20, (5, 5))
        await generation.aclose()
        state = engine.state()
        assert (state.cells_used, state.slots_used, state.running, state.waiting, state.check) == (0, 0, 0, 0, None)


async def test_a_seeded_job_gives_the_same_bits_alone_and_in_company(
    engine_of: Callable[..., Any], model_path: str
) -> None:
    """Tokens and log-probabilities, exactly, with prompts cut into chunks by a budget that others use up too.

    From 257 cells on, libllama decodes a sequence that is alone in its step with another kernel, so the long prompt has
    one companion in its reference, and a last one in company: which of them ends last depends on the machine.
    """
    lengths = (1, 10, 63, 64, 90, 200, 300, 25, 130, 77)
    sampled = SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=True, top_logprobs=3)
    settings = msgspec.structs.replace(SMALL, step_tokens=192)

    def outputs(events: list[Any]) -> list[Any]:
        return [token for e in events if isinstance(e, Tokens) for token in e.sampled]

    async with engine_of(model_path, settings) as engine:
        jobs = [job(f"{n}", prompt=n, max_tokens=20, sampling=sampled) for n in lengths]
        alone = []
        for each in jobs:
            companion = engine.generate(job("companion", max_tokens=400)) if len(each.prompt_token_ids) > 230 else None
            alone.append(outputs(await collect(engine.generate(each))))
            if companion is not None:
                await companion.aclose()
        for pause_s in (0.0, 0.03):
            running, companion = [], engine.generate(job("companion", max_tokens=400))
            for each in jobs:
                running.append(asyncio.ensure_future(collect(engine.generate(each))))
                await asyncio.sleep(pause_s)
            assert [outputs(events) for events in await asyncio.gather(*running)] == alone
            await companion.aclose()
        await idle(engine)


async def test_closing_frees_everything_at_any_time(engine_of: Callable[..., Any], model_path: str) -> None:
    kinds = {"submitted": None, "queued": Queued, "admitted": Admitted, "tokens": Tokens}
    async with engine_of(model_path) as engine:
        for after, _ in itertools.product(kinds, range(5)):
            generation = engine.generate(job(prompt=100, n=2, max_tokens=200))
            if kinds[after] is not None:
                async for event in generation:
                    if isinstance(event, kinds[after]):
                        break
            await generation.aclose()
            await generation.aclose()
            assert (engine.state().cells_used, engine.state().slots_used) == (0, 0), after
            produced = generation.produced
            rest = await collect(generation)
            assert any(isinstance(e, Released) for e in rest), after
            assert not any(isinstance(e, ChoiceDone) for e in rest), after
            assert generation.produced == produced, after


async def test_one_choice_ends_and_the_other_goes_on(engine_of: Callable[..., Any], model_path: str) -> None:
    async with engine_of(model_path) as engine:
        generation = engine.generate(job(n=2, max_tokens=120))
        after: list[Any] = []
        ended = False
        async for event in generation:
            if ended:
                after.append(event)
            elif isinstance(event, Tokens) and event.choice == 0:
                await generation.end_choice(0)
                ended = True
        assert not [e for e in after if isinstance(e, Tokens | ChoiceDone) and e.choice == 0]
        assert after[-1] == ChoiceDone(1, "length")
        produced = generation.produced
        assert 1 <= produced.output_tokens[0] < 120, "the child reads between two steps, whenever that is"
        assert produced.output_tokens[1] == 120
        only = engine.generate(job("only", max_tokens=100))
        async for event in only:
            if isinstance(event, Tokens):
                await only.end_choice(0)
        await idle(engine)


async def test_unread_tokens_pause_the_job_and_reading_resumes_it(
    engine_of: Callable[..., Any], model_path: str
) -> None:
    # one token per step: with drafts a pause can come up to 15 tokens later
    plain = msgspec.structs.replace(SMALL, speculation="off")
    async with engine_of(model_path, plain, pause_tokens=10) as engine:
        generation = engine.generate(job(max_tokens=60))
        await until(lambda: sum(generation.produced.output_tokens) > 10, lambda: asyncio.sleep(0.01))
        await until(lambda: engine.state().progress_age_s > 0.3, lambda: asyncio.sleep(0.01))
        assert 10 < sum(generation.produced.output_tokens) < 20
        other = await collect(engine.generate(job("other", max_tokens=5)))
        assert len(ids(other)) == 5
        events = await collect(generation)
        assert len(ids(events)) == 60
        pauses = [type(e) for e in events if isinstance(e, Paused | Resumed)]
        assert pauses
        assert pauses == [Paused, Resumed] * (len(pauses) // 2)


async def test_what_can_never_fit_is_refused_with_numbers(engine_of: Callable[..., Any], model_path: str) -> None:
    async with engine_of(
        model_path, EngineSettings(num_slots=1, context=256, kv_budget_bytes=0, max_waiting=2)
    ) as engine:
        with pytest.raises(ContextLengthExceeded, match=r"250 tokens .* 7 .* 257, more than the 256"):
            engine.generate(job(prompt=250, max_tokens=7))
        for wrong in (job(prompt=0), job(n=0), job(max_tokens=0)):
            with pytest.raises(InvalidRequest):
                engine.generate(wrong)
        with pytest.raises(InvalidRequest, match="4 choices, but only 3") as too_many:
            engine.generate(job(n=4))
        assert too_many.value.param == "n"
        running = [engine.generate(job(f"{i}", max_tokens=100)) for i in range(3)]
        with pytest.raises(ServerOverloaded, match="3 waiting, 1 more, room for 3") as refused:
            engine.generate(job("more"))
        assert refused.value.retry_after_s
        await running.pop().aclose()
        with pytest.raises(InvalidRequest, match="running already"):
            engine.generate(job("0"))
        late = engine.generate(job("late", deadline_s=0.05))
        with pytest.raises(ServerOverloaded, match="Waited longer"):
            await collect(late)
        for generation in running:
            await generation.aclose()


async def test_a_full_queue_makes_room_for_another_tenant(engine_of: Callable[..., Any], model_path: str) -> None:
    """The edge and the loop agree on who yields."""
    async with engine_of(
        model_path, EngineSettings(num_slots=1, context=256, kv_budget_bytes=0, max_waiting=2)
    ) as engine:
        flood = [engine.generate(of("flood", f"{i}", max_tokens=100)) for i in range(3)]
        with pytest.raises(ServerOverloaded, match="The queue is full"):
            engine.admit(of("flood", "more"))
        other = await collect(engine.generate(of("other", "other", max_tokens=5)))
        assert len(ids(other)) == 5
        with pytest.raises(ServerOverloaded, match="made room"):
            await collect(flood[2])
        for generation in flood[:2]:
            assert len(ids(await collect(generation))) == 100


NUM_DEATHS = 3
"""More are died behind a whole server: `journeys/test_kills.py`."""


async def test_a_killed_child_fails_its_jobs_once_and_is_replaced(
    engine_of: Callable[..., Any], model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with engine_of(model_path) as engine:
        pids = set()
        before = tasks = 0
        for round_ in range(NUM_DEATHS):
            jobs = [engine.generate(job(f"{round_}-{i}", max_tokens=200)) for i in range(4)]
            for generation in jobs:
                async for event in generation:
                    if isinstance(event, Tokens):
                        break
            pids.add(engine.state().pid)
            os.kill(engine.state().pid or 0, signal.SIGKILL)
            for generation in jobs:
                with pytest.raises(EngineFailed, match=r"process ended \(signal 9\)"):
                    await collect(generation)
                assert await collect(generation) == []
                assert generation.produced.prompt_tokens == 20
                assert generation.produced.output_tokens[0] >= 1
                await generation.aclose()
            state = engine.state()
            assert (state.is_ready, state.running, state.cells_used) == (False, 0, 0)
            with pytest.raises(EngineUnavailable, match="restarting"):
                engine.generate(job())
            await until(lambda: engine.state().is_ready, lambda: asyncio.sleep(0.01))
            assert engine.state().restarts == round_ + 1
            if round_ == 0:
                await asyncio.sleep(0.2)  # the keeper is back at its watch, which is a task more
                before, tasks = descriptors(), len(asyncio.all_tasks())
        # the last dead child's watcher may still be on its way out
        await until(lambda: len(asyncio.all_tasks()) <= tasks, lambda: asyncio.sleep(0.01))
        assert descriptors() <= before
        assert len(pids) == NUM_DEATHS
        assert len(ids(await collect(engine.generate(job("last"))))) > 0


async def test_a_frozen_child_shows_in_the_age_of_its_progress(engine_of: Callable[..., Any], model_path: str) -> None:
    async with engine_of(model_path) as engine:
        pid = engine.state().pid or 0
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: engine.state().progress_age_s > 2.5, lambda: asyncio.sleep(0.05))
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: engine.state().progress_age_s < 1.5, lambda: asyncio.sleep(0.05))


async def test_a_hanging_child_is_killed_and_replaced(
    engine_of: Callable[..., Any], model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    settings = EngineSettings(num_slots=1, context=256, kv_budget_bytes=0, progress_timeout_s=0.4)
    async with engine_of(model_path, settings) as engine:
        generation = engine.generate(job(max_tokens=200))
        await anext(generation)
        os.kill(engine.state().pid or 0, signal.SIGSTOP)
        with pytest.raises(EngineFailed, match="signal 9"):
            await collect(generation)
        await until(lambda: engine.state().is_ready, lambda: asyncio.sleep(0.05))


@pytest.mark.parametrize("rounds", range(5))
async def test_it_stops_at_whatever_moment_its_next_child_is_ready(model_path: str, rounds: int) -> None:
    """`rounds` turns of the event loop after it: what waits for the child then is just being told."""
    ups, stopped, loop = 0, asyncio.Event(), asyncio.get_running_loop()

    async def stop() -> None:
        await keeper.stop()
        stopped.set()

    def later(left: int) -> None:
        if left:
            loop.call_soon(later, left - 1)
        else:
            stopping.append(loop.create_task(stop()))

    def came_up() -> None:
        nonlocal ups
        ups += 1
        if ups == 2:
            later(rounds)

    stopping: list[asyncio.Task[None]] = []
    keeper = ChildKeeper(SMALL, model_path, SystemClock(), model="tested", on_up=came_up)
    await keeper.start()
    os.kill(keeper.pid or -1, signal.SIGKILL)
    async with asyncio.timeout(60):
        await stopped.wait()
    assert keeper.pid is None


async def test_stopping_ends_running_jobs(model_path: str) -> None:
    engine = EmbeddedEngine(SMALL, model_path, SystemClock(), model="tested", pause_tokens=100)
    await engine.start()
    generation = engine.generate(job(max_tokens=200))
    await anext(generation)
    await engine.stop()
    await engine.stop()
    with pytest.raises(ShuttingDown):
        await collect(generation)
    assert engine.state().pid is None
    assert len(asyncio.all_tasks()) == 1


async def test_a_file_that_is_no_model_is_a_config_error_with_the_reason(tmp_path: Path, model_path: str) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + b"\0" * 100)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(model_path).read_bytes()[:5_000_000])
    for path, settings, reason in (
        (str(junk), SMALL, "version 0"),
        (str(cut), SMALL, "the file at byte 5000000"),
        (str(tmp_path / "none.gguf"), SMALL, "No such file"),
        (model_path, EngineSettings(kv_budget_bytes=1000), "engine.kv_budget_bytes is 1000, needed are"),
        (model_path, EngineSettings(libllama="/nowhere.so"), "engine.libllama: can't load"),
    ):
        before = descriptors()
        engine = EmbeddedEngine(settings, path, SystemClock(), model="tested", pause_tokens=100)
        with pytest.raises(EngineUnavailable):
            _ = engine.facts
        with pytest.raises(ConfigError, match=reason):
            await engine.start()
        await engine.stop()
        assert descriptors() == before
        assert len(asyncio.all_tasks()) == 1


async def test_a_start_that_takes_too_long_is_given_up(model_path: str) -> None:
    settings = EngineSettings(num_slots=1, context=256, kv_budget_bytes=0, start_timeout_s=0.01)
    engine = EmbeddedEngine(settings, model_path, SystemClock(), model="tested", pause_tokens=100)
    with pytest.raises(EngineUnavailable, match=r"within 0\.01 s"):
        await engine.start()
    await engine.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_a_hybrid_model_serves_batches_too(engine_of: Callable[..., Any], hybrid_path: str) -> None:
    async with engine_of(hybrid_path) as engine:
        assert engine.facts.is_hybrid
        assert engine.facts.state_bytes_per_slot > 0
        alone = ids(await collect(engine.generate(job("a", prompt=90, max_tokens=10))))
        running = [engine.generate(job(f"{i}", prompt=90, max_tokens=10)) for i in range(12)]
        for events in await asyncio.gather(*[collect(g) for g in running]):
            assert len(ids(events)) == len(alone)
        await idle(engine)
