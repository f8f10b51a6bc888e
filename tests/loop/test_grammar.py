import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.request import SamplingParams
from hitsend.serve.loop.grammar import Constraint, GrammarFailed, constraint_for
from hitsend.serve.loop.messages import Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop
from tests.loop.driven import Driven

END, OPEN, CLOSE, LATE = 0, 50, 51, 52
VOCAB = 64


class Word:
    """A grammar of one word; `breaks_at` fails there."""

    def __init__(self, word, breaks_at=None, is_too_complex=True):
        self.left = list(word)
        self.breaks_at = breaks_at
        self.is_too_complex = is_too_complex

    def forbidden(self):
        if self.breaks_at == len(self.left):
            raise GrammarFailed("no more fuel", is_too_complex=self.is_too_complex)
        forbidden = np.ones(VOCAB, dtype=np.bool_)
        forbidden[self.left[0] if self.left else END] = False
        return forbidden

    def accept(self, token_id):
        if token_id != self.left.pop(0):
            raise GrammarFailed("not that one")

    @property
    def is_complete(self):
        return not self.left


class Words:
    """Grammars whose text is their word."""

    def __init__(self, **options):
        self.options = options

    def matcher(self, grammar):
        return Word([int(part) for part in grammar.split()], **self.options)


def allowed(constraint):
    row = np.zeros(VOCAB, dtype=np.float32)
    constraint.restrict(row)
    return set(np.flatnonzero(np.isfinite(row)).tolist())


def follow(constraint, *tokens):
    for token in tokens:
        assert token in allowed(constraint)
        constraint.accept(token)
        assert constraint.failure is None


def made(**spec):
    return constraint_for(ConstraintSpec(**spec), Words(), frozenset({END}))


def test_no_wishes_no_constraint():
    assert made() is None
    assert made(starts_after=(CLOSE,)) is None
    assert constraint_for(None, None, frozenset()) is None


def test_the_grammar_holds_from_the_first_token_and_then_it_is_complete():
    constraint = made(grammar="1 2")
    assert allowed(constraint) == {1}
    follow(constraint, 1, 2)
    assert constraint.is_complete
    assert allowed(constraint) == {END}


def test_thinking_is_free_but_cannot_end_the_answer():
    constraint = made(grammar="1", starts_after=(CLOSE, LATE))
    assert allowed(constraint) == set(range(VOCAB)) - {END}
    follow(constraint, 9, CLOSE, 9, CLOSE, CLOSE, LATE)
    assert not constraint.is_complete
    assert allowed(constraint) == {1}


def test_a_model_that_opens_its_reasoning_itself_may_leave_it_out():
    constraint = made(grammar="1 2", starts_after=(CLOSE,), opens_with=(OPEN, LATE))
    assert allowed(constraint) == {1, OPEN}
    follow(constraint, 1)
    assert allowed(constraint) == {2}
    thinking = made(grammar="1 2", starts_after=(CLOSE,), opens_with=(OPEN, LATE))
    follow(thinking, OPEN)
    assert allowed(thinking) == {LATE}
    follow(thinking, LATE, 7, CLOSE)
    assert allowed(thinking) == {1}


def test_without_a_grammar_nothing_is_forced_at_the_opening():
    constraint = made(starts_after=(CLOSE,), opens_with=(OPEN, LATE), thinking_budget=1)
    follow(constraint, OPEN, 7, 7, 7, END)
    thinking = made(starts_after=(CLOSE,), opens_with=(OPEN, LATE), thinking_budget=1)
    follow(thinking, OPEN, LATE, 7)
    assert allowed(thinking) == {CLOSE}


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_closes_the_reasoning(budget):
    constraint = made(starts_after=(CLOSE, LATE), thinking_budget=budget)
    follow(constraint, *[7] * budget)
    assert allowed(constraint) == {CLOSE}
    follow(constraint, CLOSE)
    assert allowed(constraint) == {LATE}
    follow(constraint, LATE)
    assert allowed(constraint) == set(range(VOCAB))


def test_the_budget_only_adds_what_is_missing_of_a_close_that_has_begun():
    constraint = made(grammar="3", starts_after=(CLOSE, LATE), thinking_budget=2)
    follow(constraint, 7, CLOSE)
    assert allowed(constraint) == {LATE}
    follow(constraint, LATE, 3)
    assert constraint.is_complete


@given(st.lists(st.sampled_from([1, 2]), max_size=12), st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4))
def test_the_close_is_found_wherever_it_first_ends(tokens, close):
    constraint = made(grammar="9", starts_after=tuple(close))
    first = next((n for n in range(len(close), len(tokens) + 1) if tokens[n - len(close) : n] == close), None)
    for token in tokens[:first]:
        constraint.accept(token)
    assert (allowed(constraint) == {9}) == (first is not None)


@given(st.integers(0, 6), st.lists(st.sampled_from([7, CLOSE, LATE]), max_size=20))
def test_reasoning_never_goes_beyond_its_budget_and_close(budget, wishes):
    constraint = made(grammar="9", starts_after=(CLOSE, LATE, 7), thinking_budget=budget)
    thoughts = []
    for wish in [*wishes, *[8] * 12]:
        may = allowed(constraint)
        if may == {9}:
            break
        thoughts.append(wish if wish in may else min(may))
        constraint.accept(thoughts[-1])
    assert thoughts[-3:] == [CLOSE, LATE, 7]
    assert len(thoughts) <= budget + 3


class Machine(Driven):
    def __init__(self, grammars, **decoder):
        super().__init__(end_token_ids=frozenset({END}), **decoder)
        self.loop = Loop(self.decoder, LoopLimits(step_tokens=16, reserve_tokens=4), self.clock, grammars)


def submit(request_id, spec, max_tokens=20, seeds=(1,), **sampling):
    return Submit(request_id, (5,), SamplingParams(**sampling), seeds, max_tokens, 60.0, constraint=spec)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_loop_keeps_to_it(temperature):
    machine = Machine(Words())
    spec = ConstraintSpec("1 2 3", starts_after=(CLOSE,), thinking_budget=4)
    machine.handle(submit("r", spec, temperature=temperature), submit("free", None, temperature=temperature))
    machine.run()
    assert machine.tokens("r")[-4:] == [CLOSE, 1, 2, 3]
    assert machine.done["r", 0].reason == "stop"


def test_edits_cannot_bring_a_forbidden_token_back():
    machine = Machine(Words())
    sampling = {"logit_bias": ((9, 100.0), (1, -100.0)), "repetition_penalty": 0.1, "top_k": 3, "min_p": 0.5}
    machine.handle(submit("r", ConstraintSpec("1 1 2"), **sampling))
    machine.run()
    assert machine.tokens("r") == [1, 1, 2]


@pytest.mark.parametrize(("is_too_complex", "code"), [(True, "invalid_request"), (False, "engine_failed")])
def test_a_failing_matcher_ends_its_own_sequence(is_too_complex, code):
    machine = Machine(Words(breaks_at=1, is_too_complex=is_too_complex))
    machine.handle(submit("bad", ConstraintSpec("1 2 3")), submit("ok", None, 5))
    machine.run()
    assert machine.done["bad", 0].code == code
    assert machine.tokens("bad") == [1, 2]
    assert machine.done["ok", 0].reason in {"stop", "length"}


def test_ids_outside_the_vocabulary_are_refused():
    machine = Machine(Words())
    machine.handle(submit("r", ConstraintSpec("1", starts_after=(VOCAB,)), seeds=(1, 2)))
    machine.run()
    assert [machine.done["r", i].code for i in (0, 1)] == ["invalid_request"] * 2


def test_a_row_longer_than_the_mask_ends_there():
    constraint = Constraint(ConstraintSpec("1"), Word([1]), frozenset({END}))
    row = np.zeros(VOCAB + 8, dtype=np.float32)
    constraint.restrict(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [1]
