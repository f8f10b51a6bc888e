import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, SampledToken
from hitsend.core.tool_format import HERMES, MISTRAL, REASONING_FORMATS, THINK, TOOL_FORMATS
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.output.assemble import Assembler
from hitsend.serve.output.reader import AnswerReader, Wanted, markup
from hitsend.serve.output.tool_calls import ONE_TOO_MANY
from tests.output.reading import TOOLS, Read, check_order

SPELLED = (
    "<end>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name":"f","arguments":',
    '{"x":1}', "}", "f", "a", "\n", "STOP", "<", "tool_call>", "é",
)  # fmt: skip
IDS = {text: token for token, text in enumerate(SPELLED)}
PIECES = tuple(text.encode() for text in SPELLED)
PLAIN = Vocabulary(PIECES, control_ids=frozenset({0}), user_defined_ids=frozenset(range(1, 7)))
CONTROL = Vocabulary(PIECES, control_ids=frozenset(range(7)))


def tokens(*texts: str) -> list[SampledToken]:
    return [SampledToken(IDS[text]) for text in texts]


def assemble(
    words: Vocabulary,
    sampled: list[SampledToken],
    form: str = "hermes",
    reason: FinishReason = FinishReason.STOP,
    portion: int = 1,
    **wanted: object,
) -> tuple[list[Delta], Assembler]:
    ids = itertools.count()
    marks = markup(words, TOOL_FORMATS[form], THINK)
    reader = AnswerReader(marks, Wanted(**({"tools": TOOLS} | wanted)), lambda: f"call_{next(ids)}")
    assembler = Assembler(words, ("STOP",), reader=reader)
    found = [assembler.feed(sampled[at : at + portion])[0] for at in range(0, len(sampled), portion)]
    deltas = [delta for delta in found if delta is not None]
    if not assembler.is_finished:
        deltas.append(assembler.finish(reason))
    return deltas, assembler


def said(deltas: list[Delta], assembler: Assembler) -> Read:
    calls = [call for delta in deltas for call in delta.tool_calls]
    check_order(calls)
    names = {call.index: call.name for call in calls if call.name is not None}
    return Read(
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple((name, "".join(c.arguments for c in calls if c.index == i)) for i, name in names.items()),
        assembler.faults,
        deltas[-1].finish_reason is FinishReason.TOOL_CALLS,
    )


CALL = ("<tool_call>", '{"name":"f","arguments":', '{"x":1}', "}", "</tool_call>")


@pytest.mark.parametrize("words", [PLAIN, CONTROL])
def test_thoughts_then_calls_whatever_kind_of_tokens_mark_them(words: Vocabulary):
    deltas, assembler = assemble(words, tokens("<think>", "a", "</think>", "a", *CALL, "\n", *CALL, "<end>"))
    assert said(deltas, assembler) == Read("a", "a", (("f", '{"x":1}'), ("f", '{"x":1}')), (), has_whole_calls=True)
    assert assembler.num_reasoning_tokens == 3
    assert deltas[-1].finish_reason is FinishReason.TOOL_CALLS


def test_markers_of_control_tokens_never_reach_the_client():
    broken = tokens("a", "<tool_call>", "f", "</tool_call>", "</think>", "a", "<tool_call>")
    deltas, assembler = assemble(CONTROL, broken)
    assert said(deltas, assembler).text == "afa"
    assert assembler.faults
    deltas, assembler = assemble(PLAIN, broken)
    assert said(deltas, assembler).text == "a<tool_call>f</tool_call></think>a<tool_call>"


def test_mistral_with_its_control_tokens():
    deltas, assembler = assemble(CONTROL, tokens("[TOOL_CALLS]", "f", "[ARGS]", '{"x":1}', "<end>"), "mistral")
    assert said(deltas, assembler).calls == (("f", '{"x":1}'),)


def test_markup_that_text_tokens_spell_is_text_where_a_control_token_means_it():
    deltas, assembler = assemble(CONTROL, tokens("<", "tool_call>", *CALL[1:4]))
    assert said(deltas, assembler).text == "<tool_call>" + "".join(CALL[1:4])


def test_a_call_that_was_cut_off_keeps_the_reason_and_is_not_repaired():
    deltas, assembler = assemble(PLAIN, tokens(*CALL[:2], '{"x":1}'), reason=FinishReason.LENGTH)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert said(deltas, assembler).calls == (("f", '{"x":1}'),)


def test_a_stop_string_after_a_call_leaves_it_a_call():
    deltas, assembler = assemble(PLAIN, tokens(*CALL, "STOP", "a"))
    assert (deltas[-1].finish_reason, deltas[-1].matched_stop) == (FinishReason.TOOL_CALLS, "STOP")
    assert assembler.num_tokens == 6


def test_a_second_call_ends_the_choice_where_one_is_allowed():
    deltas, assembler = assemble(PLAIN, tokens("a", *CALL, *CALL, "a"), is_parallel=False)
    assert said(deltas, assembler) == Read("a", "", (("f", '{"x":1}'),), (ONE_TOO_MANY,), has_whole_calls=True)
    assert assembler.is_finished
    assert assembler.num_tokens == 1 + len(CALL) + 3


def test_thinking_tokens_are_counted_apart():
    _, assembler = assemble(PLAIN, tokens("\n", "<think>", "a", "a"), reason=FinishReason.LENGTH)
    assert assembler.num_reasoning_tokens == 4
    _, assembler = assemble(PLAIN, tokens("a", "</think>", "a"), is_thinking_open=True)
    assert assembler.num_reasoning_tokens == 2
    _, assembler = assemble(PLAIN, tokens("<think>", "a"), is_thinking_wanted=False)
    assert assembler.num_reasoning_tokens == 0
    _, assembler = assemble(PLAIN, tokens("\n", "a", "<think>"))
    assert assembler.num_reasoning_tokens == 0


@given(
    st.sampled_from([PLAIN, CONTROL]),
    st.sampled_from(["hermes", "mistral"]),
    st.lists(st.integers(0, len(SPELLED) - 1), max_size=20),
    st.integers(2, 30),
    st.booleans(),
)
def test_any_portions_give_the_same(words: Vocabulary, form: str, ids: list[int], portion: int, is_parallel: bool):
    sampled = [SampledToken(token) for token in ids]
    one, first = assemble(words, sampled, form, is_parallel=is_parallel)
    other, second = assemble(words, sampled, form, portion=portion, is_parallel=is_parallel)
    assert said(one, first) == said(other, second)
    assert (first.num_tokens, first.num_reasoning_tokens) == (second.num_tokens, second.num_reasoning_tokens)
    assert first.num_reasoning_tokens <= first.num_tokens
    assert [delta.finish_reason for delta in one[:-1]] == [None] * (len(one) - 1)
    if words is CONTROL:
        shown = said(one, first)
        spelled = "".join(text for token, text in enumerate(SPELLED) if token in ids and token not in words.control_ids)
        assert "\ufdd0" not in shown.text + shown.reasoning
        assert ("</tool_call>" in shown.text) <= ("</tool_call>" in spelled)


def test_a_format_is_written_with_private_characters_only_where_it_has_to_be():
    assert markup(PLAIN, HERMES, THINK).hidden == {}
    marks = markup(CONTROL, MISTRAL, REASONING_FORMATS["think"])
    assert set(marks.hidden) == {IDS["[TOOL_CALLS]"], IDS["[ARGS]"], IDS["<think>"], IDS["</think>"]}
    assert marks.tool_format is not None
    assert marks.tool_format.begin == marks.hidden[IDS["[TOOL_CALLS]"]]
