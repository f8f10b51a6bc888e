import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.tool_format import REASONING_FORMATS
from hitsend.serve.output.reasoning import ReasoningSplitter
from tests.output.reading import pieces, read

CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'

CASES = [
    # output, whether the prompt ends inside thoughts, thoughts, answer
    ("<think>step one", False, "step one", ""),
    ("step one", True, "step one", ""),
    ("<think>\nstep one\n</think>\n\nyes ", False, "step one", "yes "),
    ("\n<think>a</think>b", False, "a", "b"),
    ("a</think>b", True, "a", "b"),
    ("<think>a</think>b", True, "a", "b"),
    ("plain", False, "", "plain"),
    (" plain <think>a</think>", False, "", " plain <think>a</think>"),
    ("a</think>b", False, "", "a</think>b"),
    ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
    ("<think></think>b", False, "", "b"),
    ("<thi", False, "", "<thi"),
    ("<think>a</thin", False, "a</thin", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("output", "is_open", "thoughts", "answer"), CASES)
def test_thoughts_and_answer_at_every_cut(output: str, is_open: bool, thoughts: str, answer: str):
    for cut in range(len(output) + 1):
        seen = read(pieces(output, [cut]), None, "think", is_thinking_open=is_open)
        assert (seen.reasoning, seen.text) == (thoughts, answer)


@pytest.mark.parametrize(("output", "is_open"), [("<think>step one", False), ("step one", True), ("step one", False)])
def test_with_thinking_off_everything_is_answer(output: str, is_open: bool):
    seen = read(list(output), None, "think", is_thinking_open=is_open, is_thinking_wanted=False)
    assert (seen.reasoning, seen.text) == ("", "step one")
    seen = read(["<think>a\n</think>\n\nb"], None, "think", is_thinking_wanted=False)
    assert (seen.reasoning, seen.text) == ("", "a\n\n\nb")


def test_calls_are_looked_for_in_the_answer_only():
    seen = read(list(f"<think>{CALL}</think>\n{CALL}"), "hermes", "think")
    assert (seen.reasoning, seen.text, seen.calls) == (CALL, "", (("f", "{}"),))
    assert read([f"<think>{CALL}"], "hermes", "think").calls == ()


SNIPPETS = st.sampled_from(["<think>", "</think>", "<", "think>", "</", " ", "\n", "a", "é"])


@given(
    st.lists(SNIPPETS, max_size=20).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_any_cuts_give_the_same(output: str, cuts: list[int], is_open: bool, is_wanted: bool):
    wanted = {"is_thinking_open": is_open, "is_thinking_wanted": is_wanted}
    whole = read([output], None, "think", **wanted)
    assert read(pieces(output, cuts), None, "think", **wanted) == whole
    assert read(list(output), None, "think", **wanted) == whole
    for letter in "aé":
        assert (whole.reasoning + whole.text).count(letter) == output.count(letter)


@pytest.mark.parametrize("snippet", ["<think>", " ", "</thin", "<", "a", "\n</"])
@pytest.mark.parametrize("size", [1, 5, 1 << 16])
def test_work_grows_no_faster_than_the_output(snippet: str, size: int):
    def work(length: int) -> int:
        splitter = ReasoningSplitter(REASONING_FORMATS["think"], is_open=False)
        text = ("<think>" + snippet * length)[:length]
        for at in range(0, length, size):
            splitter.feed(text[at : at + size])
        splitter.finish()
        return splitter.work

    small, large = work(1 << 14), work(1 << 15)
    assert large <= 2.5 * small
    assert large <= 200 * (1 << 15)
