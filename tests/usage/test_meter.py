import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.request import Usage
from hitsend.serve.usage.meter import ChoiceCounts, PromptCounts, WrongCounts, check, meter

choices = st.lists(
    st.integers(0, 1000).flatmap(
        lambda n: st.builds(ChoiceCounts, produced_tokens=st.just(n), ended_after=st.none() | st.integers(0, 1200))
    ),
    max_size=4,
).map(tuple)


@given(st.sampled_from(["completed", "cancelled", "failed"]), st.integers(0, 500), st.integers(0, 500), choices)
def test_every_computed_token_is_billed_or_discarded_once(outcome, length, computed, each):
    found = meter(outcome, PromptCounts(length, min(computed, length)), each)
    produced = sum(choice.produced_tokens for choice in each)
    assert found.usage.completion_tokens + found.discarded_tokens == produced
    assert found.discarded_tokens >= 0


def test_a_completed_request_bills_its_prompt_once_and_each_choice_up_to_its_end():
    each = (ChoiceCounts(10, ended_after=8), ChoiceCounts(5))
    found = meter("completed", PromptCounts(100, 100), each)
    assert found.usage == Usage(prompt_tokens=100, completion_tokens=13)
    assert found.discarded_tokens == 2


@pytest.mark.parametrize("outcome", ["cancelled", "failed"])
def test_an_unfinished_request_bills_what_was_computed(outcome):
    assert meter(outcome, PromptCounts(100, 64), (ChoiceCounts(0),)).usage == Usage(64, 0)
    assert meter(outcome, PromptCounts(100, 100), (ChoiceCounts(7),)).usage == Usage(100, 7)
    assert meter(outcome, PromptCounts(100, 0), ()).usage == Usage()
    assert meter(outcome, PromptCounts(100, 20, cached_tokens=40), ()).usage == Usage(60, 0, cached_tokens=40)


def test_a_refused_request_bills_nothing():
    assert meter("refused", PromptCounts(100, 0), ()).usage == Usage()


@pytest.mark.parametrize(
    "usage",
    [
        Usage(prompt_tokens=1, cached_tokens=2),
        Usage(completion_tokens=1, reasoning_tokens=2),
        Usage(prompt_tokens=-1),
        Usage(completion_tokens=-1),
        Usage(prompt_tokens=5, cached_tokens=-1),
    ],
)
def test_counts_that_contradict_each_other_are_never_billed(usage):
    with pytest.raises(WrongCounts):
        check(usage)


def test_negative_counts_are_refused():
    with pytest.raises(WrongCounts):
        meter("completed", PromptCounts(1, 1), (ChoiceCounts(-1),))
    with pytest.raises(WrongCounts):
        meter("completed", PromptCounts(1, 1), (ChoiceCounts(3, ended_after=-1),))
