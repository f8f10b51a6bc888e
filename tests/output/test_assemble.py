import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.events import Held, StopMatched
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, SampledToken, TokenLogprob
from hitsend.serve.output.assemble import Assembler


class Table(msgspec.Struct, frozen=True):
    token_bytes: tuple[bytes, ...]
    control_ids: frozenset[int] = frozenset()


PIECES = (
    b"<end>",
    b"a",
    b"b",
    b"ab",
    "é".encode()[:1],
    "é".encode()[1:],
    "👻".encode(),
    b"\xf0\x9f",
    b"\xff",
    b" b",
    b"",
)
TABLE = Table(PIECES, frozenset({0}))
ids = st.lists(st.integers(0, len(PIECES) - 1), max_size=20)


def tokens(token_ids: list[int]) -> list[SampledToken]:
    return [
        SampledToken(token_id, -0.5, (TokenLogprob(token_id, -0.5), TokenLogprob(0, -2.0))) for token_id in token_ids
    ]


def run(token_ids: list[int], stop: tuple[str, ...], portions: list[int]) -> tuple[list[Delta], Assembler]:
    assembler = Assembler(TABLE, stop, want_logprobs=True)
    deltas: list[Delta] = []
    left = tokens(token_ids)
    for size in [*portions, len(left)]:
        delta, _ = assembler.feed(left[:size])
        deltas += [delta] if delta else []
        left = left[size:]
    if not assembler.is_finished:
        deltas.append(assembler.finish(FinishReason.LENGTH))
    return deltas, assembler


@given(
    ids,
    st.lists(st.sampled_from(["ab", "é", "bb", "\ufffd", "b👻"]), max_size=3),
    st.lists(st.integers(0, 4), max_size=20),
)
def test_any_portions_give_the_same_answer(token_ids: list[int], stops: list[str], portions: list[int]):
    stop = tuple(stops)
    deltas, assembler = run(token_ids, stop, portions)
    at_once, other = run(token_ids, stop, [])
    text = "".join(delta.text for delta in deltas)
    assert text == "".join(delta.text for delta in at_once)
    assert assembler.num_tokens == other.num_tokens
    assert deltas[-1].finish_reason is at_once[-1].finish_reason
    assert deltas[-1].matched_stop == at_once[-1].matched_stop
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    assert not any(one in text for one in stop)
    shown = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token for entry in shown] == [
        PIECES[i].decode(errors="replace") for i in token_ids[: assembler.num_tokens]
    ]
    exact = b"".join(bytes(entry.bytes) for entry in shown).decode(errors="replace")
    assert exact.startswith(text)


def test_logprobs_come_with_their_text_or_before_and_carry_the_exact_bytes():
    assembler = Assembler(TABLE, (), want_logprobs=True, index=3)
    nothing, events = assembler.feed(tokens([4]))
    assert nothing is None
    assert events == (Held(choice=3, num_bytes=1, reason="partial_utf8"),)
    delta, _ = assembler.feed(tokens([5]))
    assert delta is not None
    assert (delta.index, delta.text) == (3, "é")
    assert [entry.bytes for entry in delta.logprobs] == [(0xC3,), (0xA9,)]
    assert [entry.token for entry in delta.logprobs] == ["\ufffd", "\ufffd"]
    assert delta.logprobs[0].top[1].token == "<end>"
    assert delta.logprobs[0].top[1].bytes == ()


def test_a_stop_ends_the_choice_at_the_token_that_completed_it():
    assembler = Assembler(TABLE, ("bab",), want_logprobs=False)
    delta, events = assembler.feed(tokens([1, 2]))
    assert delta is not None
    assert delta.text == "a"
    assert events == (Held(choice=0, num_bytes=1, reason="partial_stop"),)
    last, events = assembler.feed(tokens([3, 1, 1]))
    assert last == Delta(index=0, text="", finish_reason=FinishReason.STOP, matched_stop="bab")
    assert events == (StopMatched(choice=0, stop="bab", num_tokens=3),)
    assert assembler.num_tokens == 3
    assert assembler.feed(tokens([1])) == (None, ())


def test_the_end_releases_what_was_held():
    assembler = Assembler(TABLE, ("bab",))
    assembler.feed(tokens([1, 2, 7]))
    assert assembler.finish(FinishReason.STOP) == Delta(index=0, text="b\ufffd", finish_reason=FinishReason.STOP)
    assembler = Assembler(TABLE, ("bab",))
    assembler.feed(tokens([1, 3, 2]))
    assert assembler.finish(FinishReason.LENGTH).text == "b"


def test_a_control_token_is_no_text_but_counts():
    assembler = Assembler(TABLE, ())
    delta, _ = assembler.feed(tokens([1, 0, 2]))
    assert delta is not None
    assert delta.text == "ab"
    assert assembler.num_tokens == 3


@given(ids, st.integers(0, 4))
def test_a_stop_can_be_shown_and_is_not_looked_for_in_the_first_tokens(token_ids: list[int], min_tokens: int):
    free = Assembler(TABLE)
    free.feed(tokens(token_ids))
    shown = Assembler(TABLE, ("b",), shows_stop=True, min_tokens=min_tokens)
    deltas = [delta for token in tokens(token_ids) if (delta := shown.feed([token])[0])]
    if not shown.is_finished:
        deltas.append(shown.finish(FinishReason.LENGTH))
    text = "".join(delta.text for delta in deltas)
    later = next(
        (place for place, token in enumerate(token_ids) if place >= min_tokens and b"b" in PIECES[token]), None
    )
    if later is None:
        assert deltas[-1].finish_reason is FinishReason.LENGTH
    else:
        assert text.endswith("b")
        assert (deltas[-1].finish_reason, shown.num_tokens) == (FinishReason.STOP, later + 1)
