"""What is used again of earlier prompts, on real weights: the bits of a fresh run, and few tokens computed."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hitsend.core.events import PrefixMatched
from hitsend.core.request import SamplingParams
from hitsend.serve.engine.protocol import Job, Tokens
from tests.engine.conftest import SMALL

pytestmark = pytest.mark.model

SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=True, top_logprobs=3)
PROMPT = tuple(1000 + (7 * i) % 900 for i in range(180))
OFF = msgspec.structs.replace(SMALL, prefix_cache_bytes=0)


def job(name: str, prompt: tuple[int, ...], **more: Any) -> Job:
    values = {"sampling": SAMPLED, "n": 1, "max_tokens": 12, "deadline_s": 300.0, "tenant": ("t",)} | more
    return Job(name, prompt, **values)


async def run(engine: Any, asked: Job) -> tuple[list[Any], int]:
    """Tokens with their log-probabilities, and how many tokens of the prompt came from the cache."""
    generation = engine.generate(asked)
    events = [event async for event in generation]
    await generation.aclose()
    matched = [event for event in events if isinstance(event, PrefixMatched)]
    cached = generation.produced.cached_tokens
    assert [event.cached_tokens for event in matched] in ([], [cached])
    assert generation.produced.prompt_tokens == len(asked.prompt_token_ids) - cached
    assert engine.state().check is None
    return [token for event in events if isinstance(event, Tokens) for token in event.sampled], cached


async def test_a_hit_gives_the_bits_of_a_fresh_run(engine_of: Callable[..., Any], model_path: str) -> None:
    """Again, shorter, and with another end: live, copied, and from memory, when others took the slots.

    Below 257 cells in a step that has one sequence: beyond, libllama's kernel for a sequence on its own differs.
    """
    prompts = {"again": PROMPT[:150], "shorter": PROMPT[:100], "other end": (*PROMPT[:70], *range(5000, 5020))}
    async with engine_of(model_path, OFF) as engine:
        fresh = {name: (await run(engine, job(name, prompt)))[0] for name, prompt in prompts.items()}
    two = msgspec.structs.replace(SMALL, num_slots=2)
    async with engine_of(model_path, two) as engine:
        assert (await run(engine, job("first", PROMPT[:150])))[1] == 0
        for name, expected in (("again", 128), ("shorter", 64), ("other end", 64)):
            assert await run(engine, job(name, prompts[name])) == (fresh[name], expected)
        for number in range(3):
            await run(engine, job(f"else {number}", tuple(range(9000 + number, 9070 + number))))
        assert engine.state().cache_bytes > 0
        assert await run(engine, job("late", prompts["again"])) == (fresh["again"], 128)
        together = await asyncio.gather(*(run(engine, job(f"new {n}", PROMPT[50:130])) for n in range(2)))
        assert sorted(cached for _, cached in together) == [0, 64]
        assert together[0][0] == together[1][0]


async def test_a_hybrid_goes_on_from_a_checkpoint_and_says_that_it_had_no_later_one(
    engine_of: Callable[..., Any], hybrid_path: str
) -> None:
    async with engine_of(hybrid_path) as engine:
        seen: list[PrefixMatched] = []
        other_end = (*PROMPT[:140], *range(5000, 5020))
        for number, prompt in enumerate((PROMPT[:150], PROMPT[:150], other_end)):
            generation = engine.generate(job(f"{number}", prompt, boundaries=(70,), max_tokens=1))
            seen += [event async for event in generation if isinstance(event, PrefixMatched)]
            await generation.aclose()
    assert [(event.matched_tokens, event.cached_tokens, event.limited_by) for event in seen] == [
        (0, 0, None),
        (150, 64, "checkpoint"),
        (140, 64, "checkpoint"),
    ]
    assert (seen[2].differs_at, seen[2].cached_token_id, seen[2].prompt_token_id) == (140, PROMPT[140], 5000)


async def test_another_tenant_finds_nothing(engine_of: Callable[..., Any], model_path: str) -> None:
    async with engine_of(model_path) as engine:
        found = [
            (await run(engine, job(f"{n}", PROMPT[:80], max_tokens=1, **who)))[1]
            for n, who in enumerate(
                (
                    {},
                    {"tenant": ("u",)},
                    {"cache_salt": "mine"},
                    {"tenant": ("", "t")},
                    {"tenant": ("tm",), "cache_salt": "ine"},
                    {},
                    {"cache_salt": "mine"},
                )
            )
        ]
        assert found == [0, 0, 0, 0, 0, 64, 64]


async def test_ten_turns_on_a_hybrid_model_compute_only_the_rest(engine_of: Callable[..., Any], mtp_path: str) -> None:
    """With guesses. Outputs are equal with checkpoints alone; what was decoded and is used again differs in the last
    bits.
    """
    settings = msgspec.structs.replace(SMALL, context=1024, num_slots=4, speculation="mtp")
    exact = msgspec.structs.replace(settings, prefix_cache_answers=False)
    greedy = SamplingParams(temperature=0.0)
    for mode, slack in ((settings, 0), (exact, 64)):
        turns: list[tuple[tuple[int, ...], list[Any]]] = []
        async with engine_of(mtp_path, mode) as engine:
            assert (engine.facts.is_hybrid, engine.facts.speculation) == (True, "mtp")
            prompt, known = PROMPT[:100], 0
            for turn in range(10):
                asked = job(f"{turn}", prompt, sampling=greedy, boundaries=(len(prompt) - 3,))
                tokens, cached = await run(engine, asked)
                assert len(prompt) - cached <= len(prompt) - known + slack + 3
                turns.append((prompt, tokens))
                known = len(prompt) if mode is exact else len(prompt) + len(tokens) - 1
                prompt = (*prompt, *(token.token_id for token in tokens), *range(6000 + turn, 6020 + turn))
        if mode is exact:
            neither = msgspec.structs.replace(mode, prefix_cache_bytes=0, speculation="off")
            async with engine_of(mtp_path, neither) as engine:
                for turn in (4, 9):
                    prompt, tokens = turns[turn]
                    assert (await run(engine, job("fresh", prompt, sampling=greedy)))[0] == tokens
