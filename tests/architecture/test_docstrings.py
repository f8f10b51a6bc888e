"""Each module opens with what enters, what leaves, what is always true, and where to read on."""

import ast
import re

from tests.architecture.tree import SRC, allowed, name, sources, tree

FORM = {
    "Enters": re.compile(r"\bEnters: "),
    "Leaves": re.compile(r"\bLeaves: "),
    "Always true": re.compile(r"\bAlways true\b[^:.]*: "),
    "where to read on": re.compile(r"\bNext: |\bOrder of reading: |\bRead `"),
}


def test_each_module_opens_in_the_fixed_form():
    exceptions = allowed()["docstrings"]
    bad = {}
    for path in sources():
        # line breaks are where the width put them
        docstring = re.sub(r"\s+", " ", ast.get_docstring(tree(path)) or "")
        missing = [part for part, form in FORM.items() if not form.search(docstring)]
        if missing and name(path) not in exceptions and "migrations" not in path.parts:
            bad[name(path)] = missing
    assert bad == {}


def test_files_that_docstrings_name_exist():
    """A reader who follows `Next:` must arrive somewhere."""
    bad = []
    for path in sources():
        places = {SRC, SRC / "serve", path.parent}
        for file in re.findall(r"`([\w/]+\.(?:py|js))`", ast.get_docstring(tree(path)) or ""):
            if not any((place / file).is_file() for place in places):
                bad.append(f"{name(path)} names {file}")
    assert bad == []
