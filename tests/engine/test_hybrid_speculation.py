"""Drafts on models with recurrent layers: from their own text and from a head of their own, taken back in both ways."""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.drafts import Drafted
from hitsend.core.errors import ConfigError
from hitsend.core.request import SamplingParams
from hitsend.gguf import read_header
from hitsend.serve.engine.libllama import Library, open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.shape import head_bytes, memory_shape, num_states, plan_cells
from hitsend.serve.engine.speculating import (
    can_pay,
    check_head,
    going_back,
    speculator_for,
    way_to_speculate,
    why_no_head,
)
from hitsend.serve.loop.decoder import Batch
from hitsend.serve.loop.messages import Abort, EngineFacts, StepReport, Submit
from hitsend.serve.loop.own_head import Likelier, OwnHead
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.speculate import KnownCosts
from hitsend.serve.loop.step import Loop
from hitsend.serve.loop.trust import FIRST_CHANCE
from hitsend.serve.loop.verify import GoingBack, PromptLookup, Proposer, Speculator
from hitsend.settings import EngineSettings
from tests.engine.conftest import bundled
from tests.engine.hybrid import Tiny
from tests.engine.test_llama_decoder import prompt
from tests.engine.test_speculation import answers, loaded, setting
from tests.loop.test_own_head import Guessing
from tests.loop.test_verify import Free

pytestmark = pytest.mark.model

TIGHT = 1_100_000
"""Of KV budget: eight slots of 512 cells fit, and no snapshot beside their states."""


def started(decoder: LlamaDecoder, facts: EngineFacts, settings: EngineSettings) -> Speculator:
    speculator, facts = speculator_for(decoder, facts, settings, SystemClock())
    assert facts.speculation == settings.speculation
    assert speculator is not None
    return speculator


def all_the_time(decoder: LlamaDecoder, proposer: Proposer) -> Speculator:
    """Drafts wherever they are possible, as if they were free."""
    return Speculator(proposer, Free(), going_back=going_back(decoder))


class Told:
    """A loop, and what it said."""

    def __init__(self, decoder: LlamaDecoder, speculator: Speculator | None, **limits: Any) -> None:
        self.loop = Loop(decoder, LoopLimits(check_every_step=True, **limits), SystemClock(), None, speculator)
        self.tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.drafts: list[Drafted] = []

    def ask(self, name: str, tokens: list[int]) -> None:
        sampling = SamplingParams(temperature=1.0)
        self.loop.handle(Submit(name, tuple(tokens), sampling, (7, 8), 40, 60.0, cache_salt="one"))

    def run(self, is_over: Callable[[], bool]) -> None:
        for _ in range(300):
            if is_over() or not self.loop.has_work:
                break
            for report in self.loop.step():
                for row in report.rows if isinstance(report, StepReport) else ():
                    self.tokens[row.request_id, row.choice] += [token.token_id for token in row.sampled]
                    self.drafts += [row.drafted] if row.drafted else []
            assert self.loop.pulse().check is None


def test_answers_are_the_same_with_drafts_and_without(mtp_path: str) -> None:
    """To the last bit of every log-probability, together and alone; where nothing is guessed, no state is kept."""
    with loaded(mtp_path, setting("off")) as (decoder, facts):
        assert (facts.speculation, decoder.num_snapshots) == ("off", 0)
        plain, _, plain_steps = answers(decoder, None)
    settings = setting("mtp")
    with loaded(mtp_path, settings) as (decoder, facts):
        assert way_to_speculate(decoder, setting("auto"), "") == ("prompt_lookup+mtp", "")
        head = started(decoder, facts, settings).proposer
        both = Likelier([PromptLookup(), head])
        for proposer, most in ((both, 0.7), (head, 0.7), (PromptLookup(), 1.0)):
            said, drafts, steps = answers(decoder, all_the_time(decoder, proposer))
            assert said == plain
            assert steps <= most * plain_steps
            assert max((draft.proposed for draft in drafts), default=0) <= decoder.num_snapshots
            if proposer is head:
                assert {draft.drafter for draft in drafts} == {"mtp"}
                assert sum(draft.accepted for draft in drafts) > 40
                assert sum(draft.accepted < draft.proposed for draft in drafts) > 5


def test_a_checkpoint_does_where_no_snapshot_fits(mtp_path: str) -> None:
    with loaded(mtp_path, setting("off")) as (decoder, _):
        plain, _, _ = answers(decoder, None)
    settings = setting("mtp", kv_budget_bytes=TIGHT)
    with loaded(mtp_path, settings) as (decoder, facts):
        assert (facts.speculation, decoder.num_snapshots, decoder.cells_per_slot) == ("mtp", 0, 512)
        said, drafts, _ = answers(decoder, all_the_time(decoder, started(decoder, facts, settings).proposer))
        assert said == plain
        assert sum(draft.accepted for draft in drafts) > 5
        assert any(0 < draft.accepted < draft.proposed for draft in drafts)


class Cheap(OwnHead):
    """Its time isn't measured, so that every run has the same drafts."""

    def seconds(self, count: int, length: int) -> float:
        """A twentieth of a pass."""
        return 0.05 * length


def test_a_head_that_knows_nothing_changes_nothing_and_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "random.gguf")
    Tiny(Path(path), bundled(), head="random", circle=5000)
    settings = setting("mtp")
    with loaded(path, settings) as (decoder, facts):
        started(decoder, facts, settings)
        assert decoder.head is not None
        costs = KnownCosts(0.7, 0.3)
        runs = [Told(decoder, Speculator(Cheap(decoder.head), costs, costs, going_back(decoder))), Told(decoder, None)]
        for run in runs:
            run.ask("one", prompt(30, 1))
            run.run(lambda: False)
        assert runs[0].tokens == runs[1].tokens
        assert 0 < len(runs[0].drafts) <= 2 * 5
        heads_guesses(decoder)


def heads_guesses(decoder: LlamaDecoder) -> None:
    """Of sequences of unequal lengths, asked together, those of each alone: states aren't mixed up."""
    prompts = [prompt(length, length) for length in (5, 70, 130, 300)]
    head = decoder.head
    assert head is not None
    alone = []
    for tokens in prompts:
        decoder.decode(rows((0, 0, tokens)))
        first = head.draft({0: 77}, 5)[0]
        decoder.decode(rows((0, len(tokens), [77, 1, 2, 3]))._replace(has_drafts=True))
        assert decoder.truncate(0, len(tokens) + 2)
        alone.append((first, head.draft({0: 99}, 4)[0]))
        decoder.release(0)
    for slot, tokens in enumerate(prompts):
        decoder.decode(rows((slot, 0, tokens)))
    first_ones = head.draft(dict.fromkeys(range(4), 77), 5)
    again = [(slot, len(tokens), [77, 1, 2, 3]) for slot, tokens in enumerate(prompts)]
    decoder.decode(rows(*again)._replace(has_drafts=True))
    assert all(decoder.truncate(slot, len(tokens) + 2) for slot, tokens in enumerate(prompts))
    second_ones = head.draft(dict.fromkeys(range(4), 99), 4)
    assert [(first_ones[slot], second_ones[slot]) for slot in range(4)] == alone
    assert len({first for first, _ in alone}) == 4
    decoder.move(3, 5)
    assert head.draft({5: 98}, 3)[5] != ()
    assert head.draft({3: 98}, 3) == {}, "nothing is there any more"
    for slot in range(8):
        decoder.release(slot)


def rows(*runs: tuple[int, int, list[int]]) -> Batch:
    """All of them want logits."""
    count = sum(len(tokens) for _, _, tokens in runs)
    return Batch(
        np.concatenate([np.array(tokens, np.int32) for _, _, tokens in runs]),
        np.concatenate([np.arange(at, at + len(tokens), dtype=np.int32) for _, at, tokens in runs]),
        np.concatenate([np.full(len(tokens), slot, np.int32) for slot, _, tokens in runs]),
        np.ones(count, np.bool_),
    )


def test_only_what_can_be_right_is_taken_back(hybrid_path: str) -> None:
    """The library would believe anything: also in tokens of earlier calls, whose states are gone."""
    with loaded(hybrid_path, setting("auto")) as (decoder, _):
        tokens = prompt(40, 1)
        decoder.decode(rows((0, 0, tokens), (1, 0, tokens)))
        decoder.decode(rows((0, 40, [5]), (1, 40, [5])))
        assert not decoder.truncate(0, 40), "a call of one token"
        decoder.decode(rows((0, 41, [6, 7, 8]), (1, 41, [6, 7, 9]))._replace(has_drafts=True))
        expected = [decoder.save(slot).tobytes() for slot in (0, 1)]
        assert expected[0] != expected[1]
        assert not decoder.truncate(0, 41), "nothing of the call would be left"
        assert decoder.truncate(0, 43)
        assert decoder.truncate(0, 43), "nothing to do"
        assert not decoder.truncate(0, 42), "once only"
        assert decoder.cells_used(0) == 43
        decoder.copy(0, 2)
        decoder.decode(rows((1, 44, [3])))
        assert not decoder.truncate(1, 43), "computed before the last call"
        last = [decoder.decode(rows((slot, 43, [9])))[0] for slot in (0, 2)]
        assert (last[0] == last[1]).all(), "a copy of what was taken back"
        decoder.release(0)
        decoder.decode(rows((0, 0, tokens)))
        for at, token in enumerate((5, 6, 7, 9), 40):
            plain = decoder.decode(rows((0, at, [token])))[0]
        assert (plain == last[0]).all(), "as if nothing had been guessed"


def test_an_aborted_guess_leaves_cells_that_others_can_go_on_from(mtp_path: str) -> None:
    """Cut off behind a guess that was wrong; the next turn takes the cells and says what it says without all that."""
    settings = setting("mtp")
    asked = {f"{number}": prompt(80 + number, number) for number in range(2)}
    with loaded(mtp_path, settings) as (decoder, facts):
        speculator = all_the_time(decoder, started(decoder, facts, settings).proposer)
        told = Told(decoder, speculator, prefix_cache_bytes=10**7)
        for name, tokens in asked.items():
            told.ask(name, tokens)
        told.run(lambda: bool(told.drafts) and told.drafts[-1].accepted < told.drafts[-1].proposed)
        assert told.drafts[-1].accepted < told.drafts[-1].proposed
        for name in asked:
            told.loop.handle(Abort(name))
        fresh = Told(decoder, None)
        for which in (told, fresh):
            for name, tokens in asked.items():
                which.ask(f"{name} again", tokens + told.tokens[name, 0])
            which.run(lambda: False)
        assert {key: told.tokens[key] for key in fresh.tokens} == fresh.tokens
        assert all(len(tokens) == 40 for tokens in fresh.tokens.values())


class Hiding:
    """A shared library without some of its functions."""

    def __init__(self, functions: ctypes.CDLL, hidden: str) -> None:
        self._functions, self._hidden = functions, hidden

    def __getattr__(self, name: str) -> Any:
        if self._hidden in name:
            raise AttributeError(name)
        return getattr(self._functions, name)


def test_a_library_that_lacks_what_heads_need_says_so(mtp_path: str, hybrid_path: str) -> None:
    whole = open_library()
    assert whole.lacks_for_head == ""
    lacking = Library(whole.path, cast("ctypes.CDLL", Hiding(whole._functions, "embeddings_nextn")), 1)
    auto, named = setting("auto"), setting("mtp")
    why = why_no_head(read_header(mtp_path), lacking, auto)
    assert why == "llama.cpp b1 lacks llama_set_embeddings_nextn, without which MTP heads can't run"
    with pytest.raises(ConfigError, match="lacks llama_set_embeddings_nextn"):
        lacking.llama_set_embeddings_nextn(0, True, True)
    with loaded(hybrid_path, auto) as (decoder, facts):
        assert (facts.speculation, facts.speculation_reason) == ("prompt_lookup", "")
        assert way_to_speculate(decoder, auto, why) == ("prompt_lookup", why)
    with pytest.raises(ConfigError, match=r"engine\.speculation: mtp needs .* lacks"):
        check_head(read_header(mtp_path), lacking, named)
    check_head(read_header(mtp_path), lacking, auto)
    with pytest.raises(ConfigError, match="the model has no MTP head"), loaded(hybrid_path, named):
        raise AssertionError("it should not have been loaded")


def test_snapshots_and_the_heads_cache_are_counted(mtp_path: str) -> None:
    header = read_header(mtp_path)
    shape, off, on = memory_shape(header), setting("off"), setting("auto")
    plans = [plan_cells(shape, settings) for settings in (off, on)]
    assert [plan.num_snapshots for plan in plans] == [0, 7]
    without, with_them = (
        num_states(plan, settings) * shape.state_bytes_per_slot + head_bytes(header, plan, settings)
        for plan, settings in zip(plans, (off, on), strict=True)
    )
    head = 512 * 2 * (32 + 32) * 2 + 256 * 128 * 4
    assert with_them - without == 8 * (7 * shape.state_bytes_per_slot + head)
    with loaded(mtp_path, on) as (decoder, facts):
        assert decoder.num_snapshots == 7
        assert facts.state_bytes_per_slot == 8 * shape.state_bytes_per_slot
    for budget, count in ((TIGHT, 0), (2_000_000, 1), (5_000_000, 2), (10**8, 7)):
        assert plan_cells(shape, setting("auto", kv_budget_bytes=budget)).num_snapshots == count


def test_a_head_that_can_not_pay_is_not_asked() -> None:
    """At the start: nobody's first guess would be worth its time, and so nothing would ever be learnt."""
    costs = KnownCosts(0.8, 0.2)
    for pass_s, is_worth_it in ((0.05, True), (0.2, True), (0.6, False)):
        head = Guessing(lambda _slot, _token: (), pass_s)
        assert can_pay(head.seconds, FIRST_CHANCE, costs, GoingBack(7)) is is_worth_it
    assert not can_pay(
        Guessing(lambda _slot, _token: (), 0.05).seconds, FIRST_CHANCE, costs, GoingBack(7, is_again=True)
    )
