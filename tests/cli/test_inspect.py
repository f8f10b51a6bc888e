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
    assert head.split() == ["at", "request", "ended", "in", "out", "ms", "cost", "model"]
    assert first.split()[1:] == ["req-1", "stop", "300", "4", "100", "$0.001735", "smollm2-135m"]
    assert second.split()[1:3] == ["[b]x", "running"]


def test_a_whole_id_fits_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    request_id = "req_0123456789abcdef01234567"
    console.print(listed([summary(record(request_id=request_id))]))
    assert request_id in console.file.getvalue()
