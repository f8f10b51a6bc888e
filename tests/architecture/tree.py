"""The source tree as the architecture tests see it: files, their text, their syntax trees."""

import ast
import gc
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "hitsend"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Python files under these folders of the repository, sorted; without any: the package's own."""
    roots = [ROOT / folder for folder in folders or ("src/hitsend",)]
    return tuple(sorted(path for root in roots for path in root.rglob("*.py")))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _trees(folder: str) -> dict[Path, tuple[ast.AST, ...]]:
    """All at once, and out of the collector's sight: it would walk their millions of nodes again and again, for as long
    as the tests run."""
    gc.collect()
    gc.disable()
    try:
        return {path: tuple(ast.walk(ast.parse(path.read_text("utf-8")))) for path in sources(folder)}
    finally:
        gc.freeze()
        gc.enable()


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree, in the order of `ast.walk`: a dozen tests go through all of them."""
    return _trees(path.relative_to(ROOT).parts[0])[path]


def tree(path: Path) -> ast.Module:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module


def num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def functions(path: Path) -> Iterator[Function]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@cache
def allowed() -> dict[str, dict[str, Any]]:
    return tomllib.loads((ROOT / "tests/architecture/allowed.toml").read_text("utf-8"))


@cache
def defined() -> frozenset[str]:
    """Every name that the package defines: modules, classes, functions, fields, constants, and its string constants."""
    found: set[str] = {"hitsend"}
    for path in sources():
        found.update(path.relative_to(SRC).with_suffix("").parts)
        for node in nodes(path):
            match node:
                case ast.ClassDef(name=defined_name) | ast.FunctionDef(name=defined_name):
                    found.add(defined_name)
                case ast.AsyncFunctionDef(name=defined_name) | ast.arg(arg=defined_name):
                    found.add(defined_name)
                case ast.Name(id=defined_name, ctx=ast.Store()) | ast.Attribute(attr=defined_name, ctx=ast.Store()):
                    found.add(defined_name)
                case ast.Constant(value=str(text)) if text.isidentifier():
                    found.add(text)
    return frozenset(found)
