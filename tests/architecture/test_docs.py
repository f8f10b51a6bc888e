"""Docs that name something that isn't there are wrong: files, symbols, commands, the generated page."""

import re
from pathlib import Path

import pytest

from hitsend.cli import COMMANDS
from hitsend.cli.config import page
from tests.architecture.tree import ROOT, SRC, defined

PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.name != "CHANGELOG.md"  # it tells what was, too
]
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"^[\w.-]+(/[\w.-]+)*/?$")
SYMBOL = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?$")
SUFFIXES = (".py", ".js", ".css", ".html", ".md", ".toml", ".lock", ".jinja")


def spans(path: Path) -> list[str]:
    return SPAN.findall(FENCE.sub("", path.read_text("utf-8")))


def exists(place: str) -> bool:
    return any((base / place).exists() for base in (ROOT, SRC, SRC / "serve", ROOT / "docs"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path):
    named = [span for span in spans(path) if PLACE.match(span) and (span.endswith(SUFFIXES) or span.endswith("/"))]
    bare = {found.name for found in SRC.rglob("*") if found.is_file()}
    made = {"hitsend.toml", ".hitsend/", ".venv/"}  # by whoever runs it
    assert [place for place in named if not exists(place) and place not in bare and place not in made] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_a_page_shows_exist(path):
    text = path.read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    # in code only: prose may say "make sure"
    code = "\n".join([*spans(path), *FENCE.findall(text)])
    made = set(re.findall(r"(?:^|\s|`)make ([a-z]+)", code))
    assert made <= targets
    ran = set(re.findall(r"^(?:\$ |    )?(?:\.venv/bin/)?hitsend ([a-z]+)", code, re.MULTILINE))
    assert ran <= set(COMMANDS)


def test_symbols_that_the_architecture_names_exist():
    words = {"asyncio", "uvicorn", "libllama", "ls", "with"}  # the language's, the shell's and the libraries' own
    missing = []
    for span in spans(ROOT / "ARCHITECTURE.md"):
        if SYMBOL.match(span) and not span.endswith(SUFFIXES):
            missing += [span for part in span.removesuffix("()").split(".") if part not in defined() | words]
    assert missing == []


def test_the_architecture_is_one_sitting():
    assert len((ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines()) <= 150


def test_links_between_pages_lead_somewhere():
    bad = []
    for path in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
            if "://" not in link and not (path.parent / link).exists():
                bad.append(f"{path.name} -> {link}")
    assert bad == []


def test_the_settings_page_is_current():
    assert (ROOT / "docs/settings.md").read_text("utf-8") == page(), "make docs"


def test_decisions_are_numbered_without_gaps():
    numbers = [int(path.name[:3]) for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
