import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from hitsend.serve.output.detokenize import Detokenizer


def run(pieces: list[bytes]) -> str:
    detokenizer = Detokenizer()
    return "".join(map(detokenizer.feed, pieces)) + detokenizer.finish()


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


mostly_text = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(lambda text: text.encode()),
    st.tuples(st.text(max_size=8), st.binary(max_size=4), st.text(max_size=8)).map(
        lambda parts: parts[0].encode() + parts[1] + parts[2].encode()
    ),
    st.tuples(st.text(min_size=1, max_size=8), st.integers(0, 3)).map(
        lambda parts: parts[0].encode()[: len(parts[0].encode()) - parts[1]]
    ),
)


@given(mostly_text, st.lists(st.integers(0, 40), max_size=8))
@example(b"\xf0\x9f\x91", [1, 2])
@example(b"\xe0\x80\x80\xed\xa0\x80\xf5\x80", [1, 2, 3, 4, 5, 6, 7])
@example(b"\xf0\x9f\x41\xe4\xb8\xc3", [2, 3])
def test_any_split_gives_the_text_of_one_decode(data: bytes, cuts: list[int]):
    assert run(cut(data, cuts)) == data.decode("utf-8", "replace")


@given(st.text(max_size=20), st.lists(st.integers(0, 80), max_size=12))
def test_text_that_is_whole_never_shows_a_replacement(text: str, cuts: list[int]):
    shown = run(cut(text.encode(), cuts))
    assert shown == text


def test_characters_over_several_tokens_come_whole():
    pieces = ["C4", "8FC3A162", "F09F91", "A8E2808D", "F0", "9F", "92", "BB"]
    detokenizer = Detokenizer()
    shown = [detokenizer.feed(bytes.fromhex(piece)) for piece in pieces]
    assert shown == ["", "ďáb", "", "👨\u200d", "", "", "", "💻"]
    assert detokenizer.finish() == ""


def test_an_end_inside_a_character_is_one_replacement():
    detokenizer = Detokenizer()
    assert detokenizer.feed(b"ok \xf0\x9f\x92") == "ok "
    assert detokenizer.num_held_bytes == 3
    assert detokenizer.finish() == "\ufffd"
