"""Size gauges: small files, short functions, and a request path that one person can read. Printed like coverage."""

from statistics import median

import pytest

from tests.architecture.tree import ROOT, allowed, functions, name, num_lines, sources

MAX_FILE = 400
MAX_FUNCTION = 50
MAX_PATH_FILES = 28
MAX_PATH_LINES = 6_000

REQUEST_PATH = (
    "core/request.py",
    "serve/api/routes.py",
    "serve/access/auth.py",
    "serve/access/memory.py",
    "serve/api/chat_completions.py",
    "serve/api/recorded.py",
    "serve/api/chat_request.py",
    "serve/api/chat_response.py",
    "serve/pipeline.py",
    "serve/account.py",
    "serve/chat/text.py",
    "serve/chat/prompt.py",
    "serve/chat/tokenizer.py",
    "serve/chat/budget.py",
    "serve/engine/embedded.py",
    "serve/engine/generation.py",
    "serve/engine/worker.py",
    "serve/engine/llama_decoder.py",
    "serve/loop/step.py",
    "serve/loop/roster.py",
    "serve/loop/scheduler.py",
    "serve/loop/sampler.py",
    "serve/output/assemble.py",
    "serve/output/detokenize.py",
    "serve/output/stop.py",
    "serve/stream/deliver.py",
    "serve/usage/meter.py",
    "serve/usage/ledger.py",
)
"""What a reader opens to follow one streamed chat request on the bundled model, in order. Not counted: what these stand
on and whose name is enough (the arithmetic of limits, the record that watches, events, errors, frames, sockets, Jinja's
sandbox, declarations of libllama, SQL statements, and how it all is started)."""


@pytest.fixture
def say(capsys):
    def shown(line):
        with capsys.disabled():
            print(f"\n{line}", end="")

    return shown


def test_no_file_is_longer_than_a_reader_bears(say):
    exceptions = allowed()["files"]
    sizes = {name(path): num_lines(path) for path in sources("src/hitsend", "tests", "bench")}
    too_long = {
        path: lines for path, lines in sizes.items() if lines > exceptions.get(path, {"lines": MAX_FILE})["lines"]
    }
    assert too_long == {}, f"over {MAX_FILE} lines"
    unused = [path for path in exceptions if sizes.get(path, 0) <= MAX_FILE]
    assert unused == [], "no longer needed in allowed.toml"
    own = {path: lines for path, lines in sizes.items() if path.startswith("src/")}
    longest = max(own, key=own.__getitem__)
    facts = f"{len(own)} modules, {sum(own.values())} lines, median {median(own.values()):.0f}"
    say(f"sizes: {facts}, longest {longest} {own[longest]}")


def test_no_function_is_longer_than_a_screen(say):
    exceptions = allowed()["functions"]
    sizes = {
        f"{name(path)}:{function.name}": function.end_lineno - function.lineno + 1
        for path in sources("src/hitsend", "bench")
        for function in functions(path)
    }
    too_long = {
        at: lines for at, lines in sizes.items() if lines > exceptions.get(at, {"lines": MAX_FUNCTION})["lines"]
    }
    assert too_long == {}, f"over {MAX_FUNCTION} lines"
    unused = [at for at in exceptions if sizes.get(at, 0) <= MAX_FUNCTION]
    assert unused == [], "no longer needed in allowed.toml"
    longest = max(sizes, key=sizes.__getitem__)
    say(f"sizes: {len(sizes)} functions, median {median(sizes.values()):.0f} lines, longest {longest} {sizes[longest]}")


def test_the_request_path_can_be_read(say):
    missing = [file for file in REQUEST_PATH if not (ROOT / "src/hitsend" / file).is_file()]
    assert missing == []
    lines = sum(num_lines(ROOT / "src/hitsend" / file) for file in REQUEST_PATH)
    say(f"sizes: request path {len(REQUEST_PATH)}/{MAX_PATH_FILES} files, {lines}/{MAX_PATH_LINES} lines")
    assert len(REQUEST_PATH) <= MAX_PATH_FILES
    assert lines <= MAX_PATH_LINES


def test_every_exception_has_a_reason():
    rows = [*allowed()["files"].items(), *allowed()["functions"].items()]
    assert [at for at, row in rows if len(row.get("reason", "")) < 20] == []
    assert [at for at, reason in allowed()["docstrings"].items() if len(reason) < 20] == []
