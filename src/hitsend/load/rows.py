"""One CSV row per request.

Enters: a `Run`. Leaves: lines. Always true: a text that a spreadsheet would calculate gets an apostrophe in front; what
wasn't measured is empty; no prompt and no answer is in it. Next: `page.py`.
"""

import csv
from collections.abc import Iterator
from typing import Any, Protocol

from hitsend.load.report import Level
from hitsend.load.result import Run
from hitsend.load.sample import Sample

COLUMNS = (
    *("target", "mode", "concurrency", "rate_per_s", "round", "number", "turn", "outcome", "error", "status"),
    *("finish_reason", "intended_s", "sent_s", "done_s", "ttft_ms", "ttft_sent_ms", "tpot_ms", "e2e_ms", "e2e_sent_ms"),
    *("asked_input", "input_tokens", "cached_tokens", "asked_output", "output_tokens", "pieces", "request_id"),
    "conversation",
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class File(Protocol):
    """What can be written to."""

    def write(self, text: str, /) -> object:
        """Add it."""
        ...


def write_rows(run: Run, file: File) -> None:
    """Header and rows, in the order in which requests ended."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in run.targets:
        for measured in one.measured:
            for sample in measured.samples:
                writer.writerow(_cells(one.target.name, measured.level, sample))


def _cells(target: str, level: Level, sample: Sample) -> Iterator[Any]:
    load = (level.mode, level.concurrency, level.rate_per_s, level.round)
    how = (sample.number, sample.turn, sample.outcome, sample.error, sample.status, sample.finish_reason)
    when = (sample.intended_s, sample.sent_s, sample.done_s)
    took = (sample.ttft_ms, sample.ttft_sent_ms, sample.tpot_ms, sample.e2e_ms, sample.e2e_sent_ms)
    asked = (sample.asked_input, sample.claimed_input, sample.claimed_cached, sample.asked_output)
    for value in (target, *load, *how, *when, *took, *asked, sample.output_tokens, len(sample.arrivals_s)):
        yield _cell(value)
    yield _cell(sample.request_id)
    yield _cell(sample.conversation)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
