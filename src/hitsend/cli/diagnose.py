"""`hitsend diagnose`: what is the bottleneck, from two looks at a server's `/metrics`.

Enters: a URL (of hitsend, vLLM, SGLang or llama-server), or two saved looks. Leaves: the verdict, its evidence and what
to try first; with `--json` as one document. Always true: looking changes nothing at the server; a server whose metrics
nobody here knows is an error, never a guess; exit status 0 whatever the verdict. Next: `../inspect/diagnose.py`.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hitsend.cli import CallFailed, options
from hitsend.core.errors import ConfigError
from hitsend.inspect.baseline import Baseline, baseline_of
from hitsend.inspect.diagnose import Diagnosis, diagnose
from hitsend.inspect.findings import Evidence, Finding
from hitsend.inspect.readings import figures_of, server_of
from hitsend.inspect.scrapes import Sample, Scrape, Window

app = typer.Typer(add_completion=False, rich_markup_mode=None)

LONGEST_S = 3600.0
EVERY_S = 1.0
"""Between two looks: gauges are averaged over all of them, counters compared from the first to the last."""
MAX_BYTES = 16 * 1024 * 1024
TIMEOUT_S = 10.0
CLOCK = "hitsend_scraped_at_seconds"
KNOWN = "hitsend, vLLM, SGLang (--enable-metrics) or llama-server (--metrics)"


@app.command(name="diagnose")
def command(
    url: options.Url = None,
    key: options.Key = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="TIME", help="How long to look: 500ms, 10s, 2m; default 10s.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A saved /metrics, instead of looking now ...")
    ] = None,
    end: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="... and a later one.")] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="A load test of this deployment (load --json).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say what the bottleneck is: of hitsend, vLLM, SGLang or llama-server, from its /metrics."""
    if (start is None) != (end is None):
        raise ConfigError("flags --from and --to: give both, or neither to look at a server now")
    seconds = None if window is None else seconds_of(window)
    known = _baseline(baseline)
    if start is not None and end is not None:
        looked = _saved(start, end, seconds)
    else:
        looked = asyncio.run(_look(metrics_url(url or options.DEFAULT_URL), key, seconds or 10.0))
    figures = figures_of(looked)
    if figures is None:
        raise CallFailed(f"these metrics are of no server that is known here: {KNOWN}")
    found = diagnose(figures, known)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        Console().print(shown(found))


def seconds_of(text: str) -> float:
    """`500ms`, `10s`, `2m`, or seconds without a unit. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", text.strip())
    seconds = float(found[1]) * {"ms": 0.001, "m": 60.0}.get(found[2], 1.0) if found else 0.0
    if not 0.1 <= seconds <= LONGEST_S:
        raise ConfigError(f"flag --window: {text!r} must be a time from 100ms to {LONGEST_S / 60:.0f}m")
    return seconds


def metrics_url(url: str) -> str:
    """Where its metrics are: below its address, also where that is given with `/v1` or with the path itself."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ConfigError(f"flag --url: {url!r} must be http://HOST[:PORT] or https://HOST[:PORT]")
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path = path.removesuffix("/v1") + "/metrics"
    return f"{parts.scheme}://{parts.netloc}{path}"


def parsed(text: str, source: str) -> Scrape:
    """Raises CallFailed where it is no exposition, or of nobody that is known."""
    try:
        scrape = Scrape(_samples(text))
    except (ValueError, KeyError, IndexError) as error:
        raise CallFailed(f"{source}: no Prometheus metrics: {error}") from error
    if server_of(scrape) is None:
        raise CallFailed(f"{source}: metrics of no server that is known here: {KNOWN}")
    return scrape


def _samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield Sample(sample.name, sample.labels, float(sample.value))


def _baseline(path: Path | None) -> Baseline | None:
    return None if path is None else baseline_of(_read(path, "--baseline"), path.name)


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"flag {flag}: {path}: {error.strerror}") from error


def _saved(start: Path, end: Path, seconds: float | None) -> Window:
    """How long it was between them says `--window`, else hitsend's own clock in them, else the files' times."""
    first, last = (
        parsed(_read(path, flag).decode("utf-8", "replace"), str(path))
        for path, flag in ((start, "--from"), (end, "--to"))
    )
    if server_of(first) != server_of(last):
        raise ConfigError(f"flags --from and --to: {start} and {end} are of different servers")
    if seconds is None:
        clocks = first.total(CLOCK), last.total(CLOCK)
        began, ended = clocks if None not in clocks else (start.stat().st_mtime, end.stat().st_mtime)
        seconds = (ended or 0.0) - (began or 0.0)
    if seconds <= 0:
        raise ConfigError(f"flags --from and --to: {end} isn't later than {start}; say how long it was by --window")
    return Window([first, last], seconds)


async def _look(url: str, key: str | None, seconds: float) -> Window:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    scrapes: list[Scrape] = []
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        began = ended = time.monotonic()
        while True:
            text = await _fetch(session, url)
            ended = time.monotonic()
            if not scrapes:
                began = ended
            scrapes.append(parsed(text, url))
            left = began + seconds - ended
            if left <= 0 and len(scrapes) > 1:
                return Window(scrapes, ended - began)
            await asyncio.sleep(min(EVERY_S, max(0.05, left)))


async def _fetch(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status in {401, 403}:
                raise CallFailed(f"{url} answered {response.status}: it wants a key (--key) that may read metrics")
            if response.status != 200:
                raise CallFailed(f"{url} answered {response.status}: are metrics on there? {KNOWN}")
            body = await response.content.read(MAX_BYTES)
            while piece := await response.content.read(MAX_BYTES - len(body) + 1):
                body += piece
                if len(body) > MAX_BYTES:
                    raise CallFailed(f"{url}: more than {MAX_BYTES} bytes of metrics")
            return body.decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise CallFailed(f"{url}: {reason}") from error


def shown(found: Diagnosis) -> RenderableType:
    """For a person: the verdict, then each finding with its evidence."""
    head = Text.assemble((found.verdict.replace("_", " "), "bold"), f"  {found.text}")
    parts: list[RenderableType] = [Text(f"{found.server}, {found.window_s:.1f} s"), head]
    for number, finding in enumerate(found.findings):
        if number:
            parts += [Text(), Text.assemble("also ", (finding.name.replace("_", " "), "bold"), f"  {finding.text}")]
        parts.append(_finding(finding))
    parts += [Text(), Text("Seen", style="bold"), _numbers(found.seen)]
    return Group(*parts)


def _finding(finding: Finding) -> RenderableType:
    advice = Table(box=None, pad_edge=False, show_header=False)
    advice.add_column(no_wrap=True)
    advice.add_column()
    for name, text in (
        ("confidence", finding.confidence),
        ("try first", finding.change),
        ("expect", finding.effect),
        ("then measure", finding.measure),
    ):
        advice.add_row(Text(name), Text(text))
    return Group(_numbers(finding.evidence), advice)


def _numbers(evidence: tuple[Evidence, ...]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for each in evidence:
        limit = "" if each.threshold is None else f"{each.relation} {_said(each.threshold, each.unit)} ({each.source})"
        table.add_row(Text(_said(each.value, each.unit)), Text(each.name), Text(limit))
    return table


def _said(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.0%}"
    if unit == "s" and value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.4g} {unit}".rstrip()
