"""Names say what a thing is, and the folder listing says in which order a request meets the stages."""

import ast
import re

from tests.architecture.tree import SRC, functions, name, nodes, sources

BANNED = re.compile(
    r"(Manager|Helper|Util|Utils|Wrapper|Factory|Processor)s?$|^(helpers?|utils?|common|misc|process_data)$"
)
VERSIONED = re.compile(r"(^|_)[vV]?[2-9]$|[a-z]V[2-9]$|_(new|old)$")

STAGES = ("access", "api", "chat", "engine", "loop", "output", "stream", "usage")
"""The order of the request, as serve/__init__.py tells it."""
GROUND = {
    "database": "where holds are taken: after chat, before engine",
    "batching": "requests that come from files: each goes through all of the stages",
}


def test_names_say_what_a_thing_is():
    bad = []
    for path in sources("src/hitsend", "tests", "bench"):
        names = [path.stem, *(function.name for function in functions(path))]
        names += [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]
        bad += [f"{name(path)}: {found}" for found in names if BANNED.search(found) or VERSIONED.search(found)]
    assert bad == []


def test_listing_the_packages_tells_the_order_of_the_request():
    packages = sorted(path.parent.name for path in (SRC / "serve").glob("*/__init__.py"))
    assert list(STAGES) == sorted(STAGES)
    assert packages == sorted([*STAGES, *GROUND])


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in sources() if "migrations" not in path.parts and path.parent != SRC}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def is_minus_one(value: ast.expr | None) -> bool:
    return isinstance(value, ast.UnaryOp) and ast.unparse(value) == "-1"


def test_none_is_not_minus_one():
    """-1 as a default or as a returned "nothing" is a sentinel."""
    found = []
    for path in sources():
        for node in nodes(path):
            values = []
            if isinstance(node, ast.Return):
                values = [node.value]
            elif isinstance(node, ast.arguments):
                values = [*node.defaults, *node.kw_defaults]
            elif isinstance(node, ast.AnnAssign):
                values = [node.value]
            found += [f"{name(path)}:{value.lineno}" for value in values if is_minus_one(value)]
    assert found == []
