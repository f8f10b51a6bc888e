"""What must not be in the source, beyond `tests/architecture/test_bans.py`: doors for code, commands and addresses."""

import ast
import re
import tomllib

import pytest

from tests.architecture.tree import ROOT, name, nodes, sources

COMMANDS = {"system", "popen", "spawnl", "spawnv", "execv", "execve", "execvp", "execl", "fork", "posix_spawn"}
CODE = {"eval", "exec", "compile", "__import__", "execfile", "import_module", "run_path", "run_module", "literal_eval"}
NAMED_IMPORTS = {
    "src/hitsend/cli/__init__.py": ("importlib.import_module(f'hitsend.cli.{name}')",),  # its commands, from a list
    "src/hitsend/serve/chat/checkpoint.py": ("importlib.import_module('tokenizers')",),  # one that may be missing
    # a cascade's own code, named by the settings and by nothing else
    "src/hitsend/serve/cascade.py": ("importlib.import_module(module)",),
    "src/hitsend/serve/engine/models.py": (
        "importlib.import_module('huggingface_hub')",  # an extra that may be missing
        "importlib.import_module('huggingface_hub.errors')",
    ),
    # what an engine's process imports is part of what it takes, and only the process that rehearses one may load it
    "src/hitsend/serve/engine/sizing.py": ("importlib.import_module('hitsend.serve.engine.worker')",),
}
LOADERS = {"yaml", "pickle", "dill", "cloudpickle", "joblib", "torch", "shelve", "marshal", "jsonpickle", "xml", "lxml"}
SPEAKS_HTTP = {"aiohttp", "requests", "httpx", "urllib3", "http", "ftplib", "smtplib", "huggingface_hub"}


def imported(path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def calls(path):
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def test_nothing_becomes_code_by_whatever_name():
    bad = []
    for path in sources():
        named = NAMED_IMPORTS.get(name(path), ())
        for node in calls(path):
            called = node.func
            if named and ast.unparse(node) in named:
                continue
            if isinstance(called, ast.Name) and called.id in CODE:
                bad.append(f"{name(path)}:{node.lineno} {called.id}")
            # `re.compile` and a compiler's own `compile` are no Python
            if isinstance(called, ast.Attribute) and called.attr in CODE - {"compile", "exec", "eval"}:
                bad.append(f"{name(path)}:{node.lineno} {ast.unparse(called)}")
            if isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("builtins", "__builtins__"):
                bad.append(f"{name(path)}:{node.lineno} {ast.unparse(called)}")
    assert bad == []


def test_no_shell_and_no_command_from_text():
    bad = []
    for path in sources():
        for node in calls(path):
            called = ast.unparse(node.func)
            if called.startswith("os.") and called.removeprefix("os.") in COMMANDS:
                bad.append(f"{name(path)}:{node.lineno} {called}")
            if any(keyword.arg == "shell" for keyword in node.keywords) or "create_subprocess_shell" in called:
                bad.append(f"{name(path)}:{node.lineno} {called} through a shell")
            is_start = called.startswith("subprocess.") or "create_subprocess" in called
            if is_start and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr | ast.BinOp):
                bad.append(f"{name(path)}:{node.lineno} {called} of a text")
    assert bad == []


def test_no_loader_that_makes_objects():
    bad = [f"{name(path)} {found}" for path in sources() for found in imported(path) if found.split(".")[0] in LOADERS]
    assert bad == []


def test_only_these_speak_to_other_machines():
    """The configured issuer and engine; models that the operator names; the commands, which ask our own server; the
    load tester, which asks the servers that were named."""
    found = {
        name(path)
        for path in sources()
        if any(one.split(".")[0] in SPEAKS_HTTP or one == "urllib.request" for one in imported(path))
    }
    engine = tuple(f"src/hitsend/serve/engine/{file}" for file in ("models.py", "upstream.py"))
    allowed = ("src/hitsend/serve/access/jwks.py", "src/hitsend/cli/", "src/hitsend/load/client.py", *engine)
    assert [path for path in found if not path.startswith(allowed)] == []


def test_html_and_sql_of_the_page_come_from_files():
    """No page is put together from what somebody sent: HTML is served as it lies in the package. The load tester's
    report is a file for whoever ran it, never served; tests/load holds it to its escaping."""
    bad = []
    for path in sources():
        if name(path) == "src/hitsend/load/page.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr) and re.search(r"<\s*(script|html|div|body|img|a)\b", ast.unparse(node)):
                bad.append(f"{name(path)}:{node.lineno}")
    assert bad == []


def locked(lock: str) -> dict[str, tuple[int, ...]]:
    lines = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([0-9.]+)", (ROOT / lock).read_text("utf-8"), re.MULTILINE)
    return {one.lower().replace("_", "-"): numbers(version) for one, version in lines}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.strip(".").split("."))


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_locked_versions_are_past_their_advisories(lock: str):
    """The versions that mended what `docs/security.md` cites; a library that isn't there needs none."""
    least = {
        "jinja2": "3.1.6",
        "h11": "0.16.0",
        "starlette": "1.3.1",
        "llguidance": "1.0",
        "aiohttp": "3.12",
        "httptools": "0.7",
    }
    found = locked(lock)
    assert {one: found[one] for one, needs in least.items() if one in found and found[one] < numbers(needs)} == {}


def test_dependencies_say_from_which_version_on_and_the_lock_keeps_to_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = locked("requirements.lock")
    for line in project["dependencies"]:
        matched = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(>=|==)([0-9.]+)", line)
        assert matched, f"{line}: no lower bound, or more than one is said"
        one, relation, bound = matched[1].lower().replace("_", "-"), matched[2], numbers(matched[3])
        assert found[one] >= bound if relation == ">=" else found[one] == bound, line
    for extra in project["optional-dependencies"].values():
        assert all(re.search(r"(>=|==)[0-9]", line) for line in extra)
    assert re.fullmatch(r">=3\.\d+(,<\d(\.\d+)?)?", project["requires-python"])
