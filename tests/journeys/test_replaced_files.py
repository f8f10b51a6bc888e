"""A model file that is replaced, or written to, while it is served: nothing is made of half of the one and half of the
other."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine import hybrid
from tests.engine.conftest import bundled
from tests.served import Served, descendants, serving, until

pytestmark = pytest.mark.model

SMALL = ("--set", "engine.num_slots=2", "--set", "engine.context=256", "--set", "engine.kv_budget_bytes=0")


class Renamed(hybrid.TinyDense):
    """The same ids with other words."""

    def _describe(self, donor: str) -> int:
        words = hybrid._metadata(donor)
        tokens = words["tokenizer.ggml.tokens"]
        try:
            words["tokenizer.ggml.tokens"] = tokens[:300] + tokens[300:][::-1]
            return super()._describe(donor)
        finally:
            words["tokenizer.ggml.tokens"] = tokens


def replace(file: Path, source: Path) -> None:
    """As careful tools do it: the old file stays what it is for those who have it open."""
    shutil.copy(source, file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def end(served: Served, module: str) -> None:
    """kill -9 of the child that runs this module, of the model that is always there."""
    pids = [pid for pid in descendants(served.process.pid) if module in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(min(pids), signal.SIGKILL)


def log(served: Served, start: int = 0) -> str:
    return (served.data / "server.log").read_text()[start:]


def ask(served: Served) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "salt"}], "max_tokens": 8, "temperature": 0}
    status, answer, _ = served.post("/v1/chat/completions", {"model": served.model} | body)
    return status, answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["code"]


def test_a_file_that_is_another_now_is_not_served_by_halves(tmp_path: Path) -> None:
    file, first, second = (tmp_path / name for name in ("live.gguf", "first", "second"))
    hybrid.TinyDense(first, bundled(), layers=1)
    Renamed(second, bundled(), layers=1)
    replace(file, first)
    with serving("--model", str(file), *SMALL) as served:
        before = ask(served)
        assert before[0] == 200
        replace(file, second)
        assert ask(served) == before  # nobody looks at the new one yet
        for module in ("text_worker", "engine.worker"):
            said = len(log(served))
            end(served, module)
            assert "another file than when" in until(partial(log, served, said), lambda more: "another" in more)
            assert ask(served) == (502, "engine_unavailable")
        replace(file, first)
        assert until(lambda: ask(served), lambda got: got == before) == before
        pid = served.state()["engine"]["pid"]
        with file.open("r+b") as writer:  # it is mapped: what is written now is what the engine would compute with
            writer.seek(-64, 2)
            writer.write(b"\0" * 64)
        assert until(lambda: served.state()["engine"]["pid"], lambda now: now not in (None, pid)) not in (None, pid)
        assert "was written to while it was served" in log(served)
