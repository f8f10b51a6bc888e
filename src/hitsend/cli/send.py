"""`hitsend send`: one question, its answer, and where the time went.

Enters: a question. Leaves: the answer on stdout as it comes, then the request's waterfall on stderr. Always true:
without `--url` and without a server at the default address the same pipeline runs in this process, on a free loopback
port; interrupting closes the connection, which cancels the request. Next: `waterfall.py`.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from hitsend.cli import CallFailed, options
from hitsend.cli.client import Client
from hitsend.cli.waterfall import draw
from hitsend.settings_source import Loaded

app = typer.Typer(add_completion=False, rich_markup_mode=None)

RECORD_TRIES = 40
RECORD_PAUSE_S = 0.05
"""The flight record closes just after the last byte: how often and how long to wait for that."""


@app.command()
def send(
    text: Annotated[str, typer.Argument(help="The question; `-` reads it from stdin.")],
    url: options.Url = None,
    key: options.Key = None,
    as_json: options.Json = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Wait for the whole answer.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens the answer may have.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the question.")] = None,
    model: options.Model = None,
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
) -> None:
    """Ask one question; show the answer and where its time went."""
    body = _body(sys.stdin.read() if text == "-" else text, system, max_tokens)
    loaded = partial(options.settings_from, config, sets, data=data, engine__model=model)
    sent = asyncio.run(_send(body, _server(url, loaded), key, stream=not (no_stream or as_json), model=model))
    if as_json:
        print(json.dumps(sent, ensure_ascii=False))
        return
    if no_stream:
        print(safe(sent["answer"]) if sys.stdout.isatty() else sent["answer"])
    Console(stderr=True).print(draw(sent["record"]))


def _body(text: str, system: str | None, max_tokens: int | None) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": text}]}
    if max_tokens is not None:
        body["max_completion_tokens"] = max_tokens
    return body


class Server(NamedTuple):
    """Where to call, and whether it lives in this process (then `--model` was already obeyed)."""

    url: str
    is_own: bool


async def _send(
    body: dict[str, Any],
    server: AbstractAsyncContextManager[Server],
    key: str | None,
    *,
    stream: bool,
    model: str | None,
) -> dict[str, Any]:
    async with server as (url, is_own), Client(url, key) as client:
        asked = None if is_own else model
        body["model"] = asked or (await client.get("/v1/models"))["data"][0]["id"]
        answer = await (_streamed(client, body) if stream else _whole(client, body))
        return {"request_id": client.request_id, "answer": answer, "record": await closed_record(client)}


@asynccontextmanager
async def _server(url: str | None, loaded: Callable[[], Loaded]) -> AsyncIterator[Server]:
    """The server given, else the default one if somebody is there, else one in this process."""
    if url is not None:
        yield Server(url, is_own=False)
        return
    async with Client(options.DEFAULT_URL) as probe:
        found = await probe.answers()
    if found:
        yield Server(options.DEFAULT_URL, is_own=False)
        return
    from hitsend.serve.app import running  # noqa: PLC0415  # the server's libraries, only where it runs in here

    settings = loaded().settings
    print(f"no server at {options.DEFAULT_URL}: running the pipeline in this process ...", file=sys.stderr)
    async with running(settings) as local:
        yield Server(local.base_url, is_own=True)


async def _streamed(client: Client, body: dict[str, Any]) -> str:
    parts: list[str] = []
    try:
        async for chunk in client.chat_chunks(body):
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                parts.append(piece)
                sys.stdout.write(safe(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return "".join(parts)


def safe(text: str) -> str:
    """Text that can't drive the terminal: a model may write escape sequences as well as anything else."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


async def _whole(client: Client, body: dict[str, Any]) -> str:
    completion = await client.chat(body)
    answer: str = completion["choices"][0]["message"]["content"] or ""
    return answer


async def closed_record(client: Client) -> dict[str, Any]:
    """The flight record, once it is closed."""
    for _ in range(RECORD_TRIES):
        record: dict[str, Any] = await client.get(f"/inspect/requests/{client.request_id}")
        if record["ledger"] is not None and record["state"] in ("finished", "failed", "cancelled"):
            return record
        await asyncio.sleep(RECORD_PAUSE_S)
    raise CallFailed(f"the record of {client.request_id} is still open: hitsend inspect {client.request_id}")
