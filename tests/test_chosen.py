import pytest

from tests.chosen import nothing_chosen

DEFAULT = "not model and not slow and not client"
SLOW = "slow and not (model or client)"
MODEL = "model or client"


@pytest.mark.parametrize(
    ("line", "left_out_by"),
    [
        ("pytestmark = pytest.mark.slow  # processes", {DEFAULT}),
        ("pytestmark = pytest.mark.model", {DEFAULT, SLOW}),
        ("pytestmark = [pytest.mark.model, pytest.mark.slow]", {DEFAULT, SLOW}),
        (
            "pytestmark = [\n    pytest.mark.client,\n    pytest.mark.skipif(no_node, reason='no node'),\n]",
            {DEFAULT, SLOW},
        ),
        ("pytestmark = pytest.mark.filterwarnings('ignore::model.Slow')", set()),
        ("@pytest.mark.slow\ndef test_one(): ...", set()),
        ("    pytestmark = pytest.mark.slow", set()),
    ],
)
def test_only_files_without_any_chosen_test_are_left_out(line, left_out_by):
    text = f"import pytest\n\n{line}\n\ndef test_it(): ...\n"
    assert {e for e in (DEFAULT, SLOW, MODEL, "", "slow") if nothing_chosen(text, e)} == left_out_by


@pytest.mark.parametrize("expression", ["not (slow", "slow slow", "not slow and asyncio", "not slow(why='x')", "  "])
def test_what_is_not_understood_leaves_nothing_out(expression):
    assert not nothing_chosen("pytestmark = pytest.mark.slow\n", expression)
