"""Statements and rows, as text, CSV and JSON.

Enters: what `hitsend usage --by` and `--rows` found. Leaves: lines on stdout, as they come. Always true: a CSV has one
header and a `kind` in front of every line, and what is `part` or `row` plus what is `allowance` is what `total` says; a
text cell never begins with what a spreadsheet takes for a formula. Next: `usage.py`.
"""

import csv
import sys
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.serve.usage.report import Totals
from hitsend.serve.usage.rows import LedgerRow
from hitsend.serve.usage.statement import AllowanceLine, Days, NumberedRow, Statement, totals_of_row

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
_COUNTS = Totals.__struct_fields__
_ROW_TEXT = ("request_id", "key_name", "model")


def print_csv(found: Statement) -> None:
    """The parts, the allowance of each day, and what is due."""
    names = list(found.parts[0].of) if found.parts else [found.by]
    write = csv.writer(sys.stdout, lineterminator="\n").writerow
    write(["kind", *names, *_COUNTS, "neurons_micro", "cost_usd"])
    empty = [""] * len(names)
    for part in found.parts:
        write(["part", *map(safe, part.of.values()), *_figures(part.totals, part.neurons_micro)])
    for line in found.allowance:
        write(["allowance", line.day, *empty[1:], *_allowance(line)])
    total = msgspec.structs.replace(found.totals, cost_microusd=found.due_microusd)
    billed = found.neurons_micro + sum(line.billed_neurons_micro - line.neurons_micro for line in found.allowance)
    write(["total", *empty, *_figures(total, billed)])


def print_table(found: Statement) -> None:
    """The same for the eye."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("requests", "prompt", "cached", "completion", "discarded", "neurons", "cost USD"):
        table.add_column(heading, justify="right")
    for part in found.parts:
        name = " / ".join("-" if value is None else value for value in part.of.values())
        table.add_row(Text(name), *_shown(part.totals, part.neurons_micro))
    table.add_row(Text("total"), *_shown(found.totals, found.neurons_micro), style="bold")
    for line in found.allowance:
        freed = (line.billed_neurons_micro - line.neurons_micro) // 1_000_000
        table.add_row(Text(f"free {line.day}"), *[""] * 5, f"{freed:,}", usd(line.amount_microusd))
    if found.allowance:
        table.add_row("due", *[""] * 6, usd(found.due_microusd), style="bold")
    Console().print(table)


async def print_rows(rows: AsyncGenerator[NumberedRow], form: str) -> None:
    """Every row as it is read (`form`: csv, json or text), then the allowance, then the total of what was read."""
    totals, neurons, days = Totals(), 0, Days()
    begin, line, end = {"csv": _csv_rows, "json": _json_rows, "text": _text_rows}[form]()
    begin()
    async for numbered in rows:
        row = numbered.row
        totals += totals_of_row(row)
        neurons += row.neurons_micro or 0
        if row.neurons_micro is not None:
            days.add(row.day, row.neurons_micro, row.cost_microusd)
        line(numbered)
    end(totals, neurons, days.lines())


def usd(microusd: int) -> str:
    """Micro-dollars as dollars with all six decimals, by integer arithmetic."""
    whole, rest = divmod(abs(microusd), 1_000_000)
    return f"{'-' if microusd < 0 else ''}{whole:,}.{rest:06d}"


def safe(value: Any) -> Any:
    """A text that a spreadsheet would calculate gets an apostrophe in front; numbers stay numbers."""
    if isinstance(value, str) and value.lstrip().startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value


def _plain_usd(microusd: int) -> str:
    return usd(microusd).replace(",", "")


def _figures(totals: Totals, neurons_micro: int) -> list[Any]:
    return [*msgspec.structs.astuple(totals), neurons_micro, _plain_usd(totals.cost_microusd)]


def _allowance(line: AllowanceLine) -> list[Any]:
    figures = {"cost_microusd": line.amount_microusd}
    freed = line.billed_neurons_micro - line.neurons_micro
    return [*(figures.get(name, "") for name in _COUNTS), freed, _plain_usd(line.amount_microusd)]


def _shown(totals: Totals, neurons_micro: int) -> Iterable[Text]:
    counts = (
        totals.requests,
        totals.prompt_tokens,
        totals.cached_tokens,
        totals.completion_tokens,
        totals.discarded_tokens,
        neurons_micro // 1_000_000,
    )
    return (*(Text(f"{count:,}") for count in counts), Text(usd(totals.cost_microusd)))


def _due(totals: Totals, lines: tuple[AllowanceLine, ...]) -> int:
    return totals.cost_microusd + sum(line.amount_microusd for line in lines)


def _csv_rows() -> tuple[Any, Any, Any]:
    fields = LedgerRow.__struct_fields__
    write = csv.writer(sys.stdout, lineterminator="\n").writerow

    def end(totals: Totals, neurons: int, lines: tuple[AllowanceLine, ...]) -> None:
        def summed(kind: str, cost: int, neurons_micro: int, day: str = "") -> None:
            known: dict[str, Any] = {"cost_microusd": cost, "neurons_micro": neurons_micro, "day": day}
            write([kind, "", *(known.get(name, "") for name in fields), _plain_usd(cost)])

        for line in lines:
            summed("allowance", line.amount_microusd, line.billed_neurons_micro - line.neurons_micro, line.day)
        billed = neurons + sum(line.billed_neurons_micro - line.neurons_micro for line in lines)
        summed("total", _due(totals, lines), billed)

    def one(numbered: NumberedRow) -> None:
        values = (safe(value) for value in msgspec.structs.astuple(numbered.row))
        write(["row", numbered.seq, *values, _plain_usd(numbered.row.cost_microusd)])

    return lambda: write(["kind", "seq", *fields, "cost_usd"]), one, end


def _json_rows() -> tuple[Any, Any, Any]:
    comma = ""

    def one(numbered: NumberedRow) -> None:
        nonlocal comma
        print(comma + msgspec.json.encode(numbered).decode(), end="")
        comma = ",\n"

    def end(totals: Totals, neurons: int, lines: tuple[AllowanceLine, ...]) -> None:
        rest = {
            "totals": totals,
            "neurons_micro": neurons,
            "allowance": lines,
            "due_microusd": _due(totals, lines),
        }
        print("]," + msgspec.json.encode(rest).decode()[1:])

    return lambda: print('{"rows":[', end=""), one, end


def _text_rows() -> tuple[Any, Any, Any]:
    def one(numbered: NumberedRow) -> None:
        row = numbered.row
        names = " ".join(_printable(getattr(row, name)) for name in _ROW_TEXT)
        print(f"{row.day} {names} {row.prompt_tokens}+{row.completion_tokens} tokens {usd(row.cost_microusd)} USD")

    def end(totals: Totals, _: int, lines: tuple[AllowanceLine, ...]) -> None:
        for line in lines:
            print(f"{line.day} allowance {usd(line.amount_microusd)} USD")
        print(f"total {totals.requests} requests {usd(_due(totals, lines))} USD")

    return lambda: None, one, end


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
