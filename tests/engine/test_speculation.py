"""Drafts on real weights: the same answers in fewer passes; and models that can't take tokens back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.core.request import SamplingParams
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.loading import load
from hitsend.serve.engine.speculating import speculator_for
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.loop.draft_model import DraftModel
from hitsend.serve.loop.messages import EngineFacts, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop
from hitsend.serve.loop.verify import PromptLookup, Speculator
from hitsend.settings import EngineSettings
from tests.engine.conftest import SMALL
from tests.loop.test_draft_model import Instant
from tests.loop.test_verify import eager

pytestmark = pytest.mark.model

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.6, top_p=0.9, seed=11, logprobs=True, top_logprobs=2),
    "penalised": SamplingParams(temperature=0.4, presence_penalty=0.2, repetition_penalty=1.05),
}
TEXT = "The harbour master wrote down every boat that came in. Three of them carried salt, one carried letters. "


def setting(speculation: str, **more: Any) -> EngineSettings:
    changed: EngineSettings = msgspec.structs.replace(SMALL, num_threads=2, speculation=speculation, **more)
    return changed


@contextmanager
def loaded(path: str, settings: EngineSettings) -> Iterator[tuple[LlamaDecoder, EngineFacts]]:
    decoder, facts, _ = load(WorkerConfig("tested", path, settings), SystemClock())
    try:
        yield decoder, facts
    finally:
        decoder.close()
        decoder.model.close()


def answers(decoder: LlamaDecoder, speculator: Speculator | None) -> tuple[dict[str, list[Any]], list[Any], int]:
    """What is said by all kinds at once, then by one alone; all drafts; the number of passes.

    Below 256 cells to the end: beyond them a sequence alone in a call has other last bits (see engine/calls.py).
    """
    loop = Loop(decoder, LoopLimits(check_every_step=True), SystemClock(), None, speculator)
    prompt = tuple(decoder.model.vocabulary.tokenize((TEXT * 3).encode()))
    said: dict[str, list[Any]] = {}
    drafts: list[Any] = []
    steps = 0
    for wave in (list(KINDS), ["seeded"]):
        for kind in wave:
            loop.handle(Submit(f"{kind} of {len(wave)}", prompt, KINDS[kind], (7,), 32, 60.0))
        for _ in range(500):
            if not loop.has_work:
                break
            for report in loop.step():
                if isinstance(report, StepReport):
                    steps += 1
                    for row in report.rows:
                        said.setdefault(row.request_id, []).extend(row.sampled)
                        drafts += [row.drafted] if row.drafted else []
                    for done in report.done:
                        said[done.request_id] += [done.reason, done.num_output_tokens, done.num_prompt_tokens_computed]
        assert loop.pulse().cells_used == 0
        assert loop.pulse().check is None
    return said, drafts, steps


def test_answers_are_the_same_with_drafts_and_without(model_path: str) -> None:
    with loaded(model_path, setting("auto")) as (decoder, facts):
        assert facts.speculation == "prompt_lookup"
        plain, none, plain_steps = answers(decoder, None)
        assert not none
        said, drafts, steps = answers(decoder, eager(PromptLookup()))
        assert said == plain
        assert steps < plain_steps
        assert sum(draft.accepted for draft in drafts) > 20
        assert any(draft.accepted < draft.proposed for draft in drafts)
        own = LlamaDecoder(decoder.model, decoder.plan, SystemClock(), step_tokens=512, num_threads=2, is_unified=False)
        said, drafts, steps = answers(decoder, eager(Instant(own, SystemClock(), 0.01)))
        own.close()
        assert said == plain
        assert steps < 0.7 * plain_steps


def test_a_long_sequence_alone_says_the_same_again(model_path: str) -> None:
    """Beyond 256 cells drafts change the last bits, so when there is one must not depend on the clock."""
    settings = setting("auto")
    with loaded(model_path, settings) as (decoder, facts):
        prompt = tuple(decoder.model.vocabulary.tokenize((TEXT * 12).encode()))[:280]
        speculator, _ = speculator_for(decoder, facts, settings, SystemClock())
        loop = Loop(decoder, LoopLimits(), SystemClock(), None, speculator)
        said: list[list[int]] = []
        for number in range(2):
            loop.handle(Submit(str(number), prompt, SamplingParams(temperature=0.7), (5,), 40, 60.0))
            rows = [
                row
                for _ in range(100)
                if loop.has_work
                for report in loop.step()
                if isinstance(report, StepReport)
                for row in report.rows
            ]
            said.append([token.token_id for row in rows for token in row.sampled])
        assert len(said[0]) == 40
        assert said[0] == said[1]


def test_a_model_that_is_its_own_draft_is_always_right(model_path: str) -> None:
    """At temperature 0, through the loader that the engine's child uses."""
    settings = setting("draft", draft_model=model_path)
    with loaded(model_path, settings) as (decoder, facts):
        speculator, _ = speculator_for(decoder, facts, settings, SystemClock())
        assert isinstance(speculator, Speculator)
        proposer = speculator.proposer
        assert isinstance(proposer, DraftModel)
        loop = Loop(decoder, LoopLimits(), SystemClock(), None, eager(proposer))
        prompt = tuple(decoder.model.vocabulary.tokenize(TEXT.encode()))
        loop.handle(Submit("r", prompt, KINDS["greedy"], (7,), 40, 60.0))
        drafts = []
        for _ in range(200):
            for report in loop.step() if loop.has_work else []:
                drafts += [row.drafted for row in getattr(report, "rows", ()) if row.drafted]
        assert all(draft.accepted == draft.proposed for draft in drafts)


class Ticking(SystemClock):
    """Each look at it is a second after the last one."""

    def __init__(self) -> None:
        self._looks = 0

    def now(self) -> float:
        self._looks += 1
        return float(self._looks)


def test_a_draft_model_that_cannot_save_time_stays_and_is_said(model_path: str) -> None:
    settings = setting("draft", draft_model=model_path)
    with loaded(model_path, settings) as (decoder, facts):
        # the draft model's passes take three looks, the model's own one: nobody guesses for such a model
        speculator, told = speculator_for(decoder, facts, settings, Ticking())
        assert isinstance(speculator, Speculator)
        assert told.speculation == "draft"
        (line,) = told.unmet[len(facts.unmet) :]
        assert line == f"engine.draft_model is {model_path}: {told.speculation_reason}"
        assert "a guess took 3000.0 ms just now, a token of the model 1000.0" in line


async def test_a_draft_model_has_to_fit(engine_of: Callable[..., Any], model_path: str, hybrid_path: str) -> None:
    for more, reason in (({}, "engine.draft_model"), ({"draft_model": hybrid_path}, "take tokens back")):
        with pytest.raises(ConfigError, match=reason):
            async with engine_of(model_path, setting("draft", **more)):
                raise AssertionError("it should not have started")
