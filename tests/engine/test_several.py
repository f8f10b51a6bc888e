"""Several generations as one: numbering, what is told once, failures, and what is left after closing."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.errors import EngineFailed
from hitsend.core.events import Admitted, Queued, Released
from hitsend.core.request import SampledToken, SamplingParams
from hitsend.serve.engine.protocol import ChoiceDone, Job, Produced, Tokens
from hitsend.serve.engine.several import SeveralGenerations, admit_all, generate_all, split


def job(number: int, length: int = 2) -> Job:
    return Job(f"r/{number}", tuple(range(length)), SamplingParams(), n=2, max_tokens=4, deadline_s=1.0)


class ScriptedGeneration:
    """Gives its events, then waits for ever; closed, it gives what is left."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.is_closed = False
        self.ended: list[int] = []
        self.produced = Produced(3, (4, 5))

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if not self.script:
            if self.is_closed:
                raise StopAsyncIteration
            await asyncio.Event().wait()
        if self.script[0] is None:
            raise StopAsyncIteration
        event = self.script.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    async def end_choice(self, choice: int) -> None:
        self.ended.append(choice)

    async def aclose(self) -> None:
        self.is_closed = True


class ScriptedEngine:
    def __init__(self, *generations) -> None:
        self.generations = list(generations)

    def generate(self, _job):
        return self.generations.pop(0)


def script(*events):
    return ScriptedGeneration(Queued(1.0, 1, 0), Admitted(1.0, 0, 0, 9, 1), *events, Released(2.0, 0), None)


async def test_choices_are_numbered_through_and_once_is_once():
    parts = [script(Tokens(1, (SampledToken(7),)), ChoiceDone(0, "stop")) for _ in range(3)]
    whole = SeveralGenerations(ScriptedEngine(*parts), [job(0), job(1), job(2)])
    seen = [event async for event in whole]
    assert sorted(event.choice for event in seen if isinstance(event, Tokens)) == [1, 3, 5]
    assert sorted(event.choice for event in seen if isinstance(event, ChoiceDone)) == [0, 2, 4]
    assert sorted(event.choice for event in seen if isinstance(event, Admitted)) == [0, 2, 4]
    assert sum(isinstance(event, Queued) for event in seen) == 1
    assert [isinstance(event, Released) for event in seen].index(True) == len(seen) - 1
    assert whole.produced == Produced(9, (4, 5, 4, 5, 4, 5))
    await whole.end_choice(3)
    assert [part.ended for part in parts] == [[], [1], []]
    await whole.aclose()


async def test_one_failure_is_everybody_s():
    parts = [ScriptedGeneration(), ScriptedGeneration(EngineFailed("gone"))]
    whole = SeveralGenerations(ScriptedEngine(*parts), [job(0), job(1)])
    with pytest.raises(EngineFailed):
        await anext(whole)
    await whole.aclose()
    assert all(part.is_closed for part in parts)


async def test_after_closing_the_rest_can_be_read_without_waiting():
    parts = [ScriptedGeneration(Tokens(0, (SampledToken(1),)), Tokens(0, (SampledToken(2),))) for _ in range(2)]
    whole = SeveralGenerations(ScriptedEngine(*parts), [job(0), job(1)])
    first = await anext(whole)
    reading = asyncio.create_task(_read_all(whole))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await whole.aclose()
    await whole.aclose()
    async with asyncio.timeout(5):
        rest = [event async for event in whole]
    assert isinstance(first, Tokens)
    assert rest == []
    assert all(part.is_closed and not part.script for part in parts)


async def _read_all(events) -> None:
    async for _ in events:
        pass


def test_one_prompt_is_passed_through():
    generation = ScriptedGeneration()
    assert generate_all(ScriptedEngine(generation), job(0)) is generation


def test_a_job_is_split_so_that_each_choice_keeps_its_seed_and_admission_is_asked_about_all():
    whole = msgspec.structs.replace(job(0), sampling=SamplingParams(seed=10), more_prompts=((5, 6, 7), (8,)))
    assert (whole.num_prompt_tokens, whole.num_choices) == (6, 6)
    parts = split(whole)
    assert [part.prompt_token_ids for part in parts] == [(0, 1), (5, 6, 7), (8,)]
    assert [part.sampling.seed for part in parts] == [10, 12, 14]
    assert len({part.request_id for part in parts}) == 3
    assert parts[0].request_id == whole.request_id
    held = ConstraintSpec("g")
    assert {part.constraint for part in split(msgspec.structs.replace(whole, constraint=held))} == {held}
    asked = []
    admit_all(SimpleNamespace(admit=asked.append), whole)
    admit_all(SimpleNamespace(admit=asked.append), job(0))
    assert [(one.prompt_token_ids, one.n, one.more_prompts) for one in asked] == [((5, 6, 7), 6, ()), ((0, 1), 2, ())]
