"""`docs/security.md` names tests that there are."""

import re

from tests.architecture.tree import ROOT

PAGE = (ROOT / "docs/security.md").read_text("utf-8")


def test_every_row_names_tests_that_exist():
    rows = [line.rpartition(" | ")[2] for line in PAGE.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert len(rows) >= 20
    for row in rows:
        for place, names in re.findall(r"`(tests/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", row):
            source = (ROOT / place).read_text("utf-8")
            for name in re.findall(r"`(\w+)`", names):
                assert f"def {name}(" in source, (place, name)


def test_every_test_of_this_folder_has_a_row():
    named = set(re.findall(r"`tests/security/(\w+\.py)`", PAGE))
    there = {path.name for path in (ROOT / "tests/security").glob("test_*.py")} - {"test_page.py"}
    assert there == named
