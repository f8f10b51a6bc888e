"""What `hitsend load` shows: a bar while it runs, and the summary.

Enters: stages while they run, then the run and its document. Leaves: lines in the terminal. Always true: the bar goes
to stderr and only to a terminal; names from outside are printed as text, never as markup, and can't drive the terminal.
Next: `load/plots.py`.
"""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hitsend.cli.send import safe
from hitsend.load.compare import Ratio, middle
from hitsend.load.document import title
from hitsend.load.drive import Stage
from hitsend.load.plots import Bins, bins, sparkline, tokens_over_time
from hitsend.load.report import Level
from hitsend.load.result import Measured, Run

REFRESH_S = 0.1
WIDTH = 28
MOST_DRAWN = 1000
"""Answers whose gaps are drawn; all are counted."""
SHOWN = ("output_tokens_per_s", "goodput_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "e2e_p50_ms")
"""Of the ratios; all are in the document."""


class Bar:
    """How far the running stage is."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task: TaskID | None = None
        self._stage: Stage | None = None
        self._requests: int | None = None
        self._next_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def stage(self, title: str, stage: Stage, *, requests: int | None, duration_s: float | None) -> None:
        """Another one begins; the last one's bar goes."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._stage, self._requests, self._began_s = stage, requests, time.monotonic()
        total = duration_s if requests is None else requests
        self._task = self._progress.add_task(safe(title), total=total, counts="")

    def seen(self) -> None:
        """At most every `REFRESH_S`, since drawing takes time that the client needs."""
        now_s = time.monotonic()
        if self._progress.disable or now_s < self._next_s or self._task is None or self._stage is None:
            return
        self._next_s = now_s + REFRESH_S
        done = len(self._stage.samples)
        completed = now_s - self._began_s if self._requests is None else done
        counts = f"{done} answered, {self._stage.num_open} open"
        self._progress.update(self._task, completed=completed, counts=counts)


def summary(run: Run, document: dict[str, Any], console: Console) -> None:
    """Everything a person wants to know first."""
    work, lengths = document["workload"], ""
    if work["trace_lines"]:
        lengths = f"a trace of {work['trace_lines']} requests"
    else:
        shared = f"{work['system_tokens']} shared + " if work["system_tokens"] else ""
        lengths = f"{shared}{work['input']} tokens in, {work['output']} out"
        lengths += f", {work['turns']} turns" if work["turns"] > 1 else ""
    console.print(Text(f"{lengths}; {document['date']}", style="dim"))
    for one, told in zip(run.targets, document["targets"], strict=True):
        console.print(Text(safe(f"\n{told['name']}: {told['model']} at {told['url']}"), style="bold"))
        levels = [measured.level for measured in one.measured]
        console.print(_table(levels))
        shown = middle(levels)
        for measured in one.measured:
            if any(measured.level is level for level in shown):
                _latencies(measured, console)
        _saturation(told["saturation"], console)
    if document["ratios"]:
        console.print(Text("\nratios of medians (least to greatest of the rounds)", style="bold"))
        console.print(_ratios(document["ratios"], run.plan.rounds))
    for text in document["warnings"]:
        console.print(Text(safe(f"! {text}"), style="yellow"))


def _table(levels: list[Level]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("load", no_wrap=True)
    has_slo = any(level.goodput_per_s is not None for level in levels)
    for heading in ("ok", "failed", "cut", "req/s", "out tok/s", "all tok/s", *(["good/s", "good"] if has_slo else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for level in levels:
        counts = level.requests
        cells = [f"{count:,}" for count in (counts.ok, counts.errors, counts.aborted)]
        speeds = (level.requests_per_s, level.output_tokens_per_s, level.total_tokens_per_s)
        cells += [number(speed) for speed in speeds]
        if has_slo:
            share = level.goodput_share
            cells += [number(level.goodput_per_s), "-" if share is None else f"{100 * share:.0f} %"]
        table.add_row(Text(title(level)), *(Text(cell) for cell in cells))
    return table


def number(value: float | None) -> str:
    """Three digits that count; `-` for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _latencies(one: Measured, console: Console) -> None:
    """Of one level: percentiles in ms, each beside its distribution, and tokens over time."""
    whole = [sample for sample in one.samples if sample.outcome == "ok"]
    if not whole:
        return
    level = one.level
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(Text(title(level)), no_wrap=True)
    for heading in ("p50", "p90", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ms", no_wrap=True)
    values = {
        "TTFT": (level.ttft_ms, [sample.ttft_ms or 0.0 for sample in whole]),
        "TPOT": (level.tpot_ms, [at for sample in whole if (at := sample.tpot_ms) is not None]),
        "ITL": (level.itl_ms, [gap for sample in whole[:MOST_DRAWN] for gap in sample.gaps_ms()]),
        "E2E": (level.e2e_ms, [sample.e2e_ms or 0.0 for sample in whole]),
    }
    for name, (found, drawn) in values.items():
        parts = ("-",) * 3 if found is None else (number(found.p50), number(found.p90), number(found.p99))
        table.add_row(f"  {name}", *parts, Text(_distribution(bins(drawn, WIDTH))))
    rates = tokens_over_time(one.samples, level.wall_s, WIDTH)
    over = f"{sparkline(rates):{WIDTH}} over {level.wall_s:.0f} s"
    table.add_row("  tok/s", "", "", number(max(rates, default=0.0)), Text(over))
    console.print()
    console.print(table)


def _distribution(found: Bins | None) -> str:
    return "" if found is None else f"{sparkline(found.counts):{WIDTH}} {number(found.low)}-{number(found.high)}"


def _saturation(found: dict[str, Any] | None, console: Console) -> None:
    if found is None:
        return
    if found["at"] is None:
        console.print(Text("saturated at the lowest rate already"))
        return
    beyond = "beyond it more load brings no more" if found["is_reached"] else "not reached at these levels"
    unit = "requests/s" if found["by"] == "rate" else "at once"
    text = f"saturation: {found['at']:.3g} {unit}, {number(found['output_tokens_per_s'])} tok/s; {beyond}"
    console.print(Text(text, style="bold"))
    if found["goodput_per_s"] is not None:
        console.print(
            Text(f"goodput peaks at {found['goodput_at']:.3g} {unit}: {number(found['goodput_per_s'])} good/s")
        )


def _ratios(found: list[dict[str, Any]], rounds: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("load", "figure", "of / to"):
        table.add_column(heading)
    table.add_column("ratio", justify="right")
    for row in found:
        if row["metric"] in SHOWN:
            who = safe(f"{row['target']} / {row['base']}")
            cells = (f"{row['by']} {row['load']:g}", row["metric"], who, Ratio(**row).said(rounds))
            table.add_row(*(Text(cell) for cell in cells))
    return table
