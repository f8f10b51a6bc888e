import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hitsend.serve.output.stop import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.feed, pieces))
    return shown + matcher.finish(), matcher.matched


def by_definition(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


few_letters = st.text(alphabet="abc", max_size=30)
stop_sets = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4).map(tuple)


@given(stop_sets, few_letters, st.lists(st.integers(0, 30), max_size=6))
@example(("ab", "abc"), "xabc", [2])
@example(("bc", "abcd"), "abcd", [])
@example(("abab", "b"), "aab", [1, 2])
def test_any_split_does_what_the_rule_says(stops: tuple[str, ...], text: str, cuts: list[int]):
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert run(stops, pieces) == by_definition(stops, text)


@given(stop_sets, st.lists(few_letters, max_size=6))
def test_only_a_proper_prefix_of_a_stop_is_held_and_nothing_shown_is_taken_back(
    stops: tuple[str, ...], pieces: list[str]
):
    matcher = StopMatcher(stops)
    shown = fed = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        fed += piece
        assert not any(stop in shown for stop in stops)
        if matcher.matched is not None:
            break
        assert shown + matcher.held == fed
        prefixes = {stop[:size] for stop in stops for size in range(1, len(stop))}
        longest = max((size for size in range(1, len(fed) + 1) if fed[-size:] in prefixes), default=0)
        assert matcher.held == fed[len(fed) - longest :]


@pytest.mark.parametrize(
    ("pieces", "text", "matched"),
    [
        (["Hi", "\nUser", ":", " x"], "Hi", "\nUser:"),
        (["Hi", "\nUse"], "Hi\nUse", None),
        (["Hi", "\nUs", "\nUser:"], "Hi\nUs", "\nUser:"),
    ],
)
def test_a_stop_over_several_pieces(pieces: list[str], text: str, matched: str | None):
    assert run(("\nUser:",), pieces) == (text, matched)


def test_of_two_stops_the_one_that_completes_first_wins():
    assert run(("ab", "abc"), ["x", "a", "b", "c"]) == ("x", "ab")
    assert run(("abc", "bc"), ["x", "abc"]) == ("x", "abc")


def test_text_after_a_match_is_dropped():
    matcher = StopMatcher(("END",))
    assert matcher.feed("aENDb") == "a"
    assert matcher.feed("more") == ""
    assert matcher.finish() == ""


def test_a_long_stop_that_almost_matches_all_the_time_stays_cheap():
    stop = "a" * 255 + "b"
    matcher = StopMatcher((stop,))
    shown = "".join(matcher.feed("a") for _ in range(20_000))
    assert len(shown) == 20_000 - 255
    assert matcher.finish() == "a" * 255
