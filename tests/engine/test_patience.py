"""engine/patience.py: what is said while a model is measured, and how much there is time for."""

import pytest

from hitsend.serve.engine.patience import Patience
from hitsend.testing import FakeClock

WAYS = ("a", "b", "c")


def measured(each_s: float, prefill: float, *, turns: int = 5) -> tuple[int, int, float, list[str]]:
    """Turns, every which window, seconds in all, and the lines; `prefill` in tokens/s."""
    said: list[str] = []
    clock = FakeClock()
    start = clock.now()
    patience = Patience(said.append, clock, 1800.0)
    patience.begin(WAYS, turns)
    made = 0
    while made < turns and patience.has_time_for(made):
        for number, way in enumerate((*WAYS, WAYS[0])):
            patience.speed(made, number, way)
            clock.advance(each_s)
        made += 1
    every = patience.every([prefill] * len(WAYS), 1)
    for number, way in enumerate(WAYS):
        patience.perplexity(number, [prefill] * len(WAYS), every, way)
        clock.advance(25_000 / every / prefill)
    return made, every, clock.now() - start, said


def test_a_small_model_is_measured_in_full_and_every_line_says_how_far_it_is() -> None:
    made, every, _, said = measured(3.0, 500.0)
    assert (made, every) == (5, 1)
    in_turns = "speed 5 times each in turns that end with the first one again"
    assert said[0] == f"3 ways to run it: {in_turns}, then perplexity; about 30 min at most"
    assert said[1] == "speed 1/20: a"
    assert said[4] == "speed 4/20: a"
    assert said[6] == "speed 6/20: b; about 45 s left for speeds"
    assert said[-1].startswith("perplexity 3/3: c; about ")
    assert len(said) == 1 + 20 + 3


@pytest.mark.parametrize(("each_s", "prefill", "turns"), [(20.0, 60.0, 5), (52.0, 60.0, 4), (250.0, 30.0, 1)])
def test_of_a_large_one_as_much_as_there_is_time_for(each_s: float, prefill: float, turns: int) -> None:
    made, every, seconds, said = measured(each_s, prefill)
    assert made == turns
    assert every > 1
    assert seconds <= 1800
    assert any("there is no time for more" in line for line in said) == (turns < 5)


def test_what_a_result_needs_is_measured_however_long_it_takes() -> None:
    made, every, _, _ = measured(1000.0, 1.0)
    assert made == 1
    assert every == 12, "at least four of about fifty"
