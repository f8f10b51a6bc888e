"""The list of recent requests."""

import io

import msgspec
from rich.console import Console

from hitsend.cli.inspect import explained, listed
from hitsend.inspect.explain import explain
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


def test_an_explanation_is_causes_changes_and_a_bill():
    row = {"price_input_picousd": 450_000, "price_output_picousd": 3_200_000, "cost_microusd": 147}
    document = msgspec.to_builtins(explain(record(request_id="[b]x", ledger=row)))
    console = Console(file=io.StringIO(), width=150, color_system=None)
    console.print(explained(document))
    told = console.file.getvalue()
    assert told.startswith("[b]x: 100.0 ms, most of it decoding in a batch with others")
    assert "60.0 ms  60.0%  decoding in a batch with others" in told
    assert "waiting for cells and a slot" in told
    assert "the client didn't read" not in told
    assert "-29.9 ms" in told
    assert "$0.000012  4 tokens    output" in told
