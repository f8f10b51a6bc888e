"""The waterfall: bars that follow on each other, numbers that can be checked by hand, nothing read as markup."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hitsend.cli.waterfall import BAR_WIDTH, _bar, draw, money, tpot_ms, ttft_ms
from tests.cli.sample import record


def drawn(document, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw(document))
    return console.file.getvalue()


def test_everything_of_a_finished_request_is_there():
    text = drawn(record())
    for part in (
        "req-1  smollm2-135m · on embedded · finished · stop",
        "prefill own",
        "30.0 ms",
        "60.0%",
        "wall",
        "300 in (20 cached), 4 out",
        "$0.001735",
        "first token after 40.0 ms, then 20.00 ms each",
        "3, with 3.0 sequences",
        "0 used before, 364 held, 0 used after",
        "max_messages 1/1024",
    ):
        assert part in text
    assert "tokenize" not in text, "a segment without time has no bar"


def test_a_refused_request_is_drawn_as_far_as_it_got():
    refused = record(
        state="failed",
        finish_reason="error",
        error={"code": "context_length_exceeded", "message": "9000 tokens, limit 8192", "param": "messages"},
        events=[],
        usage=dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"), 0),
        cells={"before": None, "held": 0, "after": None},
        limits=[],
        engine=None,
        ledger=None,
        segments=[],
        wall_ms=0.0,
    )
    text = drawn(refused)
    assert "context_length_exceeded: 9000 tokens, limit 8192" in text
    assert "first token" not in text
    assert "cells" not in text


def test_who_guessed_and_how_well():
    drafts = {"proposed": [5, 3], "accepted": [4, 1], "drafters": ["mtp", "prompt_lookup"]}
    assert "guesses  by mtp and prompt lookup: 5 of 8 right, by position 4/5 1/3" in drawn(record(drafts=drafts))
    drafts.pop("drafters")  # as earlier versions kept it
    assert "guesses  5 of 8 right, by position 4/5 1/3" in drawn(record(drafts=drafts))
    assert "guesses" not in drawn(record())


def test_names_are_not_markup():
    assert "[red]model[/red]" in drawn(record(model="[red]model[/red]"))


def test_speed_is_only_said_where_it_is_defined():
    one = record()
    one["usage"]["completion_tokens"] = 1
    assert tpot_ms(one) is None
    two_choices = record()
    two_choices["events"].append({"type": "choice_finished", "at_ms": 100.0, "choice": 1})
    assert tpot_ms(two_choices) is None
    assert tpot_ms(record(steps_dropped=3)) is None
    assert ttft_ms(record(events=[])) is None


@pytest.mark.parametrize(
    ("microusd", "text"), [(0, "$0.000000"), (1735, "$0.001735"), (54_600_000, "$54.600000"), (-5, "-$0.000005")]
)
def test_money_is_exact(microusd, text):
    assert money(microusd) == text


@given(st.floats(0, 1e6, allow_nan=False), st.floats(0.001, 1e6, allow_nan=False), st.floats(0, 1e6, allow_nan=False))
def test_a_bar_never_leaves_its_column(before, ms, after):
    bar = _bar(before, ms, before + ms + after)
    assert bar.strip()
    assert len(bar) <= BAR_WIDTH


def test_bars_follow_on_each_other():
    assert _bar(0, 50, 100) == "█" * 20
    assert _bar(50, 50, 100) == " " * 20 + "█" * 20
    assert _bar(0, 0.001, 100) == "▏"
