"""Which files hold no test that `-m` chooses, told by their text: importing them all takes seconds in each process."""

import itertools
import re

KINDS = frozenset({"model", "slow", "client"})
_MARKS = re.compile(r"^pytestmark = (\[.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)


def nothing_chosen(text: str, expression: str) -> bool:
    """Whether no test of a file can be chosen, judged by the marks of the whole file alone.

    Single tests may have more marks than their file: they are tried with any. Expressions of other words than `KINDS`
    are not understood, and leave nothing out.
    """
    found = _MARKS.search(text)
    marks = {kind for kind in KINDS if found and f"pytest.mark.{kind}" in found[1]}
    if not marks or not set(re.findall(r"[^\s()]+", expression)) <= {*KINDS, "and", "or", "not"}:
        return False
    more = KINDS - marks
    tried = itertools.product((False, True), repeat=len(more))
    return not any(_chosen(expression, marks | set(itertools.compress(more, chosen))) for chosen in tried)


def _chosen(expression: str, marks: set[str]) -> bool:
    try:
        return bool(eval(expression, {"__builtins__": {}}, {kind: kind in marks for kind in KINDS}))
    except SyntaxError:
        return True  # pytest says it better
