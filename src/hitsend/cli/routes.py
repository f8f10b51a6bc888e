"""`hitsend routes`: what a route would choose and why, what it would have chosen, and how sure a draft has to be.

Enters: a question, recorded traffic, or a labelled sample. Leaves: words, or one JSON document. Always true: `explain`
asks a server and runs nothing there; `what-if` needs no server, only the database and a settings file; `calibrate`
changes no setting, it says which value to set. Next: `models.py`.
"""

import asyncio
import json
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import CallFailed, options
from hitsend.cli.client import Client
from hitsend.cli.database import with_database
from hitsend.cli.statement import usd
from hitsend.serve.engine.calibrate import Calibration, Labelled, calibrate
from hitsend.serve.usage.traffic import Sent, traffic
from hitsend.serve.what_if import Side, WhatIf, what_if

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="What routes choose, and why."
)

_DAY = "%Y-%m-%d"
_From = Annotated[
    datetime | None, typer.Option("--from", "--since", formats=[_DAY], metavar="YYYY-MM-DD", help="First UTC day.")
]
_To = Annotated[
    datetime | None, typer.Option("--to", "--until", formats=[_DAY], metavar="YYYY-MM-DD", help="Last UTC day.")
]


@app.command()
def explain(
    text: Annotated[str, typer.Argument(help="The question.")],
    model: Annotated[str | None, typer.Option("--model", help="The route; default is the server's first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens the answer may have.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Ask for thoughts.")] = None,
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
) -> None:
    """Say which engine would be asked, and why; nothing is asked."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    body |= {} if max_tokens is None else {"max_tokens": max_tokens}
    body |= {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    found = asyncio.run(_explain(body, url or options.DEFAULT_URL, key, model))
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    print(f"{found['model']} → {found['target']} at {found['engine']}: {found['reason']}")
    if found["refused"]:
        print(f"but it would be refused: {found['refused']}")
    if found["order"]:
        print(f"then {', '.join(found['order'][1:]) or 'nobody'}")
        Console().print(_candidates(found["candidates"]))


async def _explain(body: dict[str, Any], url: str, key: str | None, model: str | None) -> Any:
    async with Client(url, key) as client:
        if model is None:
            served = (await client.get("/v1/models"))["data"]
            model = next((one["id"] for one in served if one.get("hitsend", {}).get("route")), None)
            if model is None:
                raise CallFailed(f"{url} has no routes; --model names a model")
        return await client.post("/v1/routes/explain", body | {"model": model})


def _candidates(candidates: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "model", "at", "micro-USD", "first token", "seen", "failed", ""):
        table.add_column(heading)
    for one in candidates:
        first, failed = one["ttft_ms"], one["error_share"]
        state = one["unable"] or ("" if one["is_ready"] else "left alone now")
        table.add_row(
            *map(Text, (one["name"], one["model"], one["engine"], f"{one['cost_microusd']:.3f}")),
            "-" if first is None else f"{first:.0f} ms",
            str(one["num_observed"]),
            "-" if failed is None else f"{failed:.0%}",
            Text(state),
        )
    return table


@app.command("what-if")
def replay(
    table: Annotated[Path | None, typer.Option("--table", metavar="FILE", help="Settings with other routes.")] = None,
    route: Annotated[str | None, typer.Option("--route", help="Gets what was sent to no route of the table.")] = None,
    since: _From = None,
    until: _To = None,
    config: options.Config = None,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Replay recorded traffic under a route table: its cost and times as they were and as they would be."""
    settings = options.settings_from(table or config, None).settings
    first, last = options.days(since, until)

    async def read(database: Any) -> list[Sent]:
        return [one async for one in traffic(database, first, last)]

    found = what_if(with_database(config, data, read), settings, route)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{found.num_requests} requests, {found.num_routed} of them to a route")
    Console().print(_sides(found))


def _sides(found: WhatIf) -> Table:
    rows = Table(box=None, pad_edge=False)
    for heading in ("", "cost USD", "first token", "whole", "by model"):
        rows.add_column(heading)
    for name, side in (("as it was", found.before), ("as it would be", found.after)):
        rows.add_row(name, *map(Text, _cells(side)))
    return rows


def _cells(side: Side) -> tuple[str, ...]:
    times = ("-" if one is None else f"{one:.0f} ms" for one in (side.ttft_ms, side.wall_ms))
    counts = ", ".join(f"{model} {count}" for model, count in sorted(side.by_model.items()))
    return (usd(side.cost_microusd), *times, counts)


@app.command("calibrate")
def threshold(
    file: Annotated[Path, typer.Argument(help="JSON lines: {confidence, is_good}, or {prompt, expect} to be asked.")],
    max_wrong: Annotated[float, typer.Option(min=0, max=1, help="Share of accepted answers that may be wrong.")] = 0.05,
    model: Annotated[str | None, typer.Option("--model", help="The cheap model, where prompts are asked.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that an answer may have.")] = 64,
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
) -> None:
    """Find the lowest `cascade.min_logprob` that keeps wrong answers among the accepted ones to a share."""
    asked = {"model": model, "max_tokens": max_tokens, "temperature": 0, "logprobs": True}
    samples = asyncio.run(_labelled(_lines(file), asked, url or options.DEFAULT_URL, key))
    found = calibrate(samples, max_wrong)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(_advice(found, max_wrong))


def _advice(found: Calibration, max_wrong: float) -> str:
    good = f"{found.num_good} of {found.num_samples} answers are good"
    if found.min_logprob is None:
        return f"{good}; no threshold keeps wrong ones to {max_wrong:.1%} of the accepted: don't accept this model's"
    return (
        f"cascade = {{ min_logprob = {found.min_logprob} }}\n{good}; this accepts {found.accepted_share:.1%} of all, "
        f"{found.wrong_share:.1%} of those wrong, and escalates {found.missed_share:.1%} of the good ones"
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    """Raises CallFailed naming the line."""
    found = []
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise CallFailed(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CallFailed(f"{file}: not UTF-8") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except ValueError as error:
            raise CallFailed(f"{file}, line {number}: not JSON") from error
        if (fault := _fault(one)) is not None:
            raise CallFailed(f"{file}, line {number}: {fault}")
        found.append(one)
    return found


def _fault(one: Any) -> str | None:
    """Why a line is none that can be used."""
    given = one if isinstance(one, dict) else {}
    if {"confidence", "is_good"} <= set(given):
        confidence, is_good = given["confidence"], given["is_good"]
        is_number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
        if not (is_number and math.isfinite(confidence) and isinstance(is_good, bool)):
            return "confidence: expected a number, is_good: true or false"
        return None
    if not {"prompt", "expect"} <= set(given):
        return "expected confidence and is_good, or prompt and expect"
    if not (isinstance(given["prompt"], str) and isinstance(given["expect"], str)):
        return "prompt and expect: expected texts"
    try:
        re.compile(given["expect"])
    except re.error as error:
        return f"expect: no regular expression ({error})"
    return None


async def _labelled(lines: list[dict[str, Any]], asked: dict[str, Any], url: str, key: str | None) -> list[Labelled]:
    async with Client(url, key) as client:
        samples = []
        for one in lines:
            if "confidence" in one:
                samples.append(Labelled(float(one["confidence"]), bool(one["is_good"])))
                continue
            if asked["model"] is None:
                raise CallFailed("--model: prompts are in the file, so the cheap model has to be named")
            answer = await client.chat(asked | {"messages": [{"role": "user", "content": one["prompt"]}]})
            samples.append(_judged(answer["choices"][0], one["expect"]))
        return samples


def _judged(choice: dict[str, Any], expect: str) -> Labelled:
    logprobs = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()]
    if not logprobs:
        raise CallFailed("the model gives no log-probabilities")
    is_good = re.search(expect, choice["message"]["content"] or "") is not None
    return Labelled(sum(logprobs) / len(logprobs), is_good and choice["finish_reason"] != "length")
