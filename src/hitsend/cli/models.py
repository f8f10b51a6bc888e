"""`hitsend models`: the models that are here, which layout of their weights suits this machine, and converted copies.

Enters: the flags of `serve`. Leaves: a table or JSON. Always true: what `tune` measured is kept in the data folder, and
`hitsend serve --layout auto` does what it says here. Next: `serve/engine/tuned.py`.
"""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hitsend.cli import options
from hitsend.core.errors import ConfigError
from hitsend.serve.children import find_model, models_dir
from hitsend.serve.engine.copies import copies, prune
from hitsend.serve.engine.measure import WIDTHS
from hitsend.serve.engine.models import BUNDLED, NO_MODEL, resolve
from hitsend.serve.engine.tuned import BOUND_S, Measured, Tuned, Way, explained, remembered, tune
from hitsend.settings import Settings

_LEAST_WIDTH = 80

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Models on this machine.")


@app.command("list")
def list_models(
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """List the models that need no network: bundled, and in the models folder."""
    settings = options.settings_from(config, sets, data=data).settings
    rows = _models(settings)
    if as_json:
        print(msgspec.json.encode({"models": rows}).decode())
        return
    table = Table(box=None, pad_edge=False)
    for name in ("name", "from", "MB", "layout auto", "converted copies"):
        table.add_column(name, overflow="fold")
    for row in rows:
        kept = ", ".join(f"{copy['layout']} {copy['num_bytes'] / 1e6:.0f} MB" for copy in row["copies"])
        size = f"{row['num_bytes'] / 1e6:.0f}"
        table.add_row(row["name"], row["origin"], size, row["auto"] or "not measured", kept)
    Console().print(table)


@app.command("prune")
def prune_copies(
    every: Annotated[bool, typer.Option("--all", help="Also copies of files that are as they were.")] = False,
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Delete converted copies whose file has changed or is gone; never one that a server runs on."""
    folder = models_dir(options.settings_from(config, sets, data=data).settings)
    rows = [msgspec.to_builtins(copy) | {"is_deleted": is_deleted} for copy, is_deleted in prune(folder, every=every)]
    if as_json:
        print(msgspec.json.encode({"copies": rows}).decode())
        return
    for row in rows:
        what = "deleted" if row["is_deleted"] else "kept, a server runs on it" if row["is_used"] else "can't be deleted"
        words = f"{row['layout'] or Path(row['path']).name} of {row['source'] or 'an unknown file'} ({row['state']})"
        print(f"{what}: {words}, {row['num_bytes'] / 1e6:.0f} MB")
    freed = sum(row["num_bytes"] for row in rows if row["is_deleted"])
    print(f"{sum(row['is_deleted'] for row in rows)} copies deleted, {freed / 1e6:.0f} MB")


@app.command("tune")
def tune_model(
    model: options.Model = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Layouts only, fewer turns and texts; no loss of what gains nothing.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=1.0, help="Most that measuring takes, once weights are converted: as far as it can.")
    ] = BOUND_S / 60,
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Measure speed and loss of each layout; takes minutes, on a quiet machine."""
    settings = options.settings_from(config, sets, data=data, engine__model=model).settings
    if not math.isfinite(minutes):
        raise ConfigError(f"flag --minutes={minutes}: it must be a finite number")
    if settings.engine.model == NO_MODEL:
        raise ConfigError("engine.model is none: there is nothing to measure")
    found, folder = find_model(settings), models_dir(settings)
    result = tune(found, folder, settings.engine, is_quick=quick, say=_say, bound_s=60 * minutes)
    bound, slots = settings.engine.layout_max_loss, settings.engine.num_slots
    if as_json:
        print(msgspec.json.encode(as_document(result, bound, slots)).decode())
        return
    # a narrow terminal, or a file, would cut columns off
    Console(width=max(_LEAST_WIDTH, Console().width)).print(table_of(result, bound))
    print(f"\nlayout auto would be {explained(result, bound, slots)}")


def as_document(result: Tuned, bound: float, num_slots: int = max(WIDTHS)) -> dict[str, Any]:
    """What `--json` prints."""
    rows = [msgspec.to_builtins(row) | {"is_within": row.is_within(bound)} for row in result.rows]
    built: dict[str, Any] = msgspec.to_builtins(result)
    return built | {"rows": rows, "max_loss": bound, "auto": result.choice(bound, num_slots).way.layout}


def table_of(result: Tuned, bound: float) -> Table:
    """The figures for a terminal; of the ways that compute the weights as shipped, what sets them apart."""
    first = result.rows[0].way
    known = (
        f"KV {first.kv_type}, {first.num_threads} threads, batches of {first.micro_batch} where nothing else is said"
    )
    units = "tokens/s; B: so many at once; alone: one on one thread; x: times as shipped"
    caption = f"{result.model} on {result.machine}\n{units}\n{known}\n{result.build}"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("way", no_wrap=True)
    for name in ("prefill", *(f"B={width}" for width in WIDTHS), "alone", *(f"x{width}" for width in WIDTHS)):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("loss", "MB", "ok"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row, first, bound))
    return table


def _cells(row: Measured, first: Way, bound: float) -> list[str]:
    loss = "" if row.loss is None else f"{row.loss:+.1%} ±{100 * (row.loss_error or 0.0):.1f}"
    speeds = [f"{row.prefill:.0f}", *(f"{row.decode[width]:.0f}" for width in WIDTHS), f"{row.alone:.0f}"]
    within = "" if row.loss is None else "yes" if row.is_within(bound) else "no"
    gains = [f"{row.gains.get(width, row.gain):.2f}" for width in WIDTHS]
    return [_name(row.way, first), *speeds, *gains, loss, f"{row.peak_bytes / 1e6:.0f}", within]


def _name(way: Way, first: Way) -> str:
    apart = [
        (way.layout, way.layout != first.layout),
        (f"KV {way.kv_type}", way.kv_type != first.kv_type),
        (f"{way.num_threads} threads", way.num_threads != first.num_threads),
        (f"batch {way.micro_batch}", way.micro_batch != first.micro_batch),
    ]
    return ", ".join(name for name, is_other in apart if is_other) or way.layout


def _models(settings: Settings) -> list[dict[str, Any]]:
    folder, engine = models_dir(settings), settings.engine
    found, made = [], copies(folder)
    for name in (BUNDLED, *sorted(file.stem for file in folder.glob("*.gguf"))):
        try:
            model = resolve(name, folder)
        except ConfigError:
            continue  # the package with the bundled weights isn't installed
        kept = remembered(model, folder, engine)
        auto = None if kept is None else kept.choice(engine.layout_max_loss, engine.num_slots).way.layout
        size = Path(model.path).stat().st_size
        own = [msgspec.to_builtins(copy) for copy in made if copy.source == str(Path(model.path).resolve())]
        row = {"name": model.name, "origin": model.origin, "path": model.path, "num_bytes": size}
        found.append(row | {"auto": auto, "copies": own})
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
