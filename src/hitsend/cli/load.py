"""`hitsend load`: load any OpenAI-compatible server and say what it did.

Enters: flags. Leaves: a summary in the terminal, or with `--json` one document; a CSV and a page where asked. Always
true: progress and everything for the eye that isn't the result goes to stderr; Ctrl-C (or SIGTERM, or a terminal that
closes) ends the test and shows what was measured so far, a second one ends the program; without `--url` and `--target`,
and without a server at the default address, a server with the bundled model is started beside this process and stopped
afterwards, however this one ends. Next: `load_flags.py`.
"""

import asyncio
import io
import json
import os
import resource
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import typer
import uvloop
from rich.console import Console

from hitsend.cli import CallFailed, options
from hitsend.cli import load_flags as flags
from hitsend.cli.client import Client
from hitsend.cli.load_server import own_server
from hitsend.cli.load_view import Bar, summary
from hitsend.core.errors import ConfigError
from hitsend.load.document import document
from hitsend.load.drive import MOST_OPEN
from hitsend.load.page import page
from hitsend.load.result import Run
from hitsend.load.rows import write_rows
from hitsend.load.run import run

NUM_FILES = MOST_OPEN + 256
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WIDTHS = (80, 120)
"""Least columns of a summary in a terminal, and elsewhere: a table that doesn't fit loses figures."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def load(
    ctx: typer.Context,
    url: options.Url = None,
    key: options.Key = None,
    model: flags.Model = None,
    target: flags.Targets = None,
    concurrency: flags.Concurrency = None,
    rate: flags.Rate = None,
    ramp: flags.RampTo = None,
    replay: flags.Replay = None,
    arrivals: flags.Arrivals = None,
    burst_size: flags.Burst = None,
    requests: flags.Requests = None,
    duration: flags.Duration = None,
    warmup: flags.Warmup = 2,
    repeat: flags.Repeat = None,
    workload: flags.Preset = None,
    input: flags.Input = None,  # noqa: A002  # the flag's name
    output: flags.Output = None,
    system: flags.System = None,
    turns: flags.Turns = None,
    trace: flags.Trace = None,
    endpoint: flags.EndpointName = "chat",
    abort: flags.Abort = 0.0,
    seed: flags.Seed = 0,
    temperature: flags.Temperature = 0.0,
    extra: flags.Extra = None,
    think: flags.Think = 0.0,
    timeout: flags.Timeout = 120.0,
    slo_ttft: flags.SloTtft = None,
    slo_tpot: flags.SloTpot = None,
    slo_e2e: flags.SloE2e = None,
    fresh_connections: flags.Fresh = False,
    note: flags.Note = None,
    as_json: options.Json = False,
    csv: flags.Csv = None,
    html: flags.Html = None,
) -> None:
    """Load any OpenAI-compatible server and measure it."""
    typed = {name: value for name, value in locals().items() if name in flags.Given.__struct_fields__}
    given = flags.Given(**typed | {"url": url or options.DEFAULT_URL, "is_key_typed": _is_typed(ctx, "key")})
    if target and _is_typed(ctx, "url"):
        raise ConfigError(f"flag --url={url}: with --target, every server is one")
    for flag, file in (("--csv", csv), ("--html", html)):
        _check_writable(flag, file)
    done = _run(given, starts_own=url is None and not target)
    _write(done, note, as_json=as_json, csv=csv, html=html)
    if done.is_interrupted:
        raise typer.Exit(130)


def _is_typed(ctx: typer.Context, name: str) -> bool:
    """By flag, not from the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_writable(flag: str, file: Path | None) -> None:
    """Before anything is measured: what takes an hour must not be lost to a path. Raises ConfigError."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"flag {flag}={file}: there is no folder {folder}")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"flag {flag}={file}: it can't be written")


def _run(given: flags.Given, *, starts_own: bool) -> Run:
    """On a loop of its own, which the first Ctrl-C cancels once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:  # a connection is a descriptor, and 1,024 of them is what most systems give
        most = NUM_FILES if hard == resource.RLIM_INFINITY else min(hard, NUM_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(given, starts_own=starts_own))


async def _measure(given: flags.Given, *, starts_own: bool) -> Run:
    plan = flags.make_plan(given)
    async with AsyncExitStack() as stack:
        if starts_own:
            async with Client(given.url) as probe:
                found = await probe.answers()
            if not found:
                url = await stack.enter_async_context(own_server())
                plan = flags.make_plan(_at(given, url))
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in _ENDING:
            loop.add_signal_handler(number, _interrupt, loop, task)
        bar = stack.enter_context(Bar())
        try:
            return await run(plan, bar)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            for number in _ENDING:
                loop.remove_signal_handler(number)


def _interrupt(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[object]") -> None:
    """The first one ends the test; a second Ctrl-C is Python's own."""
    loop.remove_signal_handler(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    task.cancel()


def _at(given: flags.Given, url: str) -> flags.Given:
    """The same, at a server of our own, which wants no key."""
    fields = {name: getattr(given, name) for name in given.__struct_fields__}
    return flags.Given(**fields | {"url": url, "key": None})


def _write(done: Run, note: str | None, *, as_json: bool, csv: Path | None, html: Path | None) -> None:
    """Files first: whoever reads stdout may have left, and what took an hour must be somewhere."""
    result = document(done, note=note)
    failed = []
    for file, write in ((csv, _rows), (html, page)):
        if file is None:
            continue
        try:
            file.write_text(write(done, result), encoding="utf-8", newline="")
            print(f"wrote {file}", file=sys.stderr)
        except OSError as error:
            failed.append(f"{file} can't be written: {error.strerror}")
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        least = _WIDTHS[0] if sys.stdout.isatty() else _WIDTHS[1]
        summary(done, result, Console(highlight=False, width=max(least, Console().width)))
    if failed:
        raise CallFailed("; ".join(failed))


def _rows(done: Run, _: dict[str, Any]) -> str:
    rows = io.StringIO(newline="")
    write_rows(done, rows)
    return rows.getvalue()
