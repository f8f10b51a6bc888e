"""The list of recent requests."""

import io

from rich.console import Console

from hitsend.cli.inspect import listed
from tests.cli.sample import record, summary


def test_each_request_is_one_line():
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(
        listed([summary(record()), summary(record(request_id="[b]x", model=None, finish_reason=None, state="running"))])
    )
    head, first, second, *_ = console.file.getvalue().splitlines()
    assert head.split() == ["received", "request", "model", "state", "finish", "in", "out", "ms", "cost"]
    assert first.split()[1:] == ["req-1", "smollm2-135m", "finished", "stop", "300", "4", "100", "$0.001735"]
    assert "[b]x" in second
