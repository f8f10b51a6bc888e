"""`hitsend chat`: a conversation in the terminal.

Enters: typed lines (or a pipe's, one message each). Leaves: answers, each with what it took. Always true: Ctrl-C while
an answer comes closes its connection, which cancels it on the server, and shows what it cost until then; at the prompt
it leaves; what was said is sent again with every question, as the API wants it. Next: `conversation.py`.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hitsend.cli import CallFailed, options
from hitsend.cli.client import Client
from hitsend.cli.conversation import COMMANDS, Conversation, Lines, command, message
from hitsend.cli.painter import MarkdownPainter, Painter, PlainPainter
from hitsend.cli.send import closed_record
from hitsend.cli.waterfall import draw, money

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def chat(
    url: options.Url = None,
    key: options.Key = None,
    model: Annotated[str | None, typer.Option(help="A model's name; default the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens an answer may have.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 always takes the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answers.")] = None,
) -> None:
    """Talk with the model in this terminal."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    fields = {"max_completion_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with asyncio.Runner() as runner:
        talk = Talk(runner, url or options.DEFAULT_URL, key, is_terminal=is_terminal)
        conversation = Conversation(talk.choose(model), system, **fields)
        talk.run(conversation, _typed() if is_terminal else _piped())


class Talk:
    """The loop of question and answer."""

    def __init__(self, runner: asyncio.Runner, url: str, key: str | None, *, is_terminal: bool) -> None:
        self._runner = runner
        self._url, self._key = url, key
        self._is_terminal = is_terminal
        self._console = Console()
        self._aside = Console(stderr=not is_terminal, highlight=False)
        self._request_id: str | None = None
        self._last_chunk: dict[str, Any] | None = None

    def choose(self, model: str | None) -> str:
        """The model to talk with. Raises CallFailed."""
        return model or self._runner.run(self._first_model())

    def run(self, conversation: Conversation, lines: Iterator[str]) -> None:
        """Until the lines end or `/quit`. In a pipe the first failure is the last word: it raises CallFailed."""
        if self._is_terminal:
            self._say(f"{conversation.model} at {self._url} · /help lists the commands, Ctrl-C stops an answer")
        for text in lines:
            try:
                if not self._obey(conversation, text):
                    return
            except CallFailed as error:
                if not self._is_terminal:
                    raise
                self._say(str(error), style="red")

    def _obey(self, conversation: Conversation, text: str) -> bool:
        """Do what a text says; False to leave."""
        given = command(text)
        if given is None:
            if text.strip():
                self._ask(conversation, message(text))
            return True
        name, argument = given
        if name == "/quit":
            return False
        if name == "/reset":
            conversation.reset()
            self._say("forgotten")
        elif name == "/system":
            conversation.system = argument or conversation.system
            self._say(f"system: {conversation.system or 'none'}")
        elif name == "/stats":
            self._stats(conversation)
        elif name == "/save" and argument:
            conversation.save(Path(argument).expanduser())
            self._say(f"saved to {argument}")
        else:
            self._say("\n".join(f"{name:8} {meaning}" for name, meaning in COMMANDS.items()))
        return True

    def _ask(self, conversation: Conversation, text: str) -> None:
        body = conversation.ask(text)
        said: list[str] = []
        painter: Painter = MarkdownPainter(self._console) if self._is_terminal else PlainPainter()
        try:
            with painter:
                self._runner.run(self._answer(body, painter, said))
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
        finally:
            conversation.answered("".join(said))
        if self._last_chunk is None:
            self._account_cancelled(conversation)
        else:
            conversation.spent.add(self._last_chunk["usage"], self._last_chunk["hitsend"]["cost_microusd"])
            self._say(summary(self._last_chunk))

    async def _answer(self, body: dict[str, Any], painter: Painter, said: list[str]) -> None:
        self._request_id = self._last_chunk = None
        async with Client(self._url, self._key) as client, aclosing(client.chat_chunks(body)) as chunks:
            async for chunk in chunks:
                self._request_id = client.request_id
                if "hitsend" in chunk:
                    self._last_chunk = chunk
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    piece = delta.get("content") or ""
                    said.append(piece)
                    painter.add(piece, delta.get("reasoning_content") or delta.get("reasoning") or "")

    def _account_cancelled(self, conversation: Conversation) -> None:
        """What an answer took that was cut off, from its flight record."""
        if self._request_id is None:
            self._say("cancelled before the server took it: nothing was billed")
            return
        try:
            record = self._runner.run(self._record(self._request_id))
        except KeyboardInterrupt:
            self._say(f"cancelled; what it cost: hitsend inspect {self._request_id}")
            return
        conversation.spent.add(record["usage"], record["cost_microusd"])
        usage = record["usage"]
        tokens = f"{usage['prompt_tokens']} in, {usage['completion_tokens']} out"
        self._say(f"cancelled · {tokens} · {money(record['cost_microusd'])}")

    async def _record(self, request_id: str) -> dict[str, Any]:
        async with Client(self._url, self._key) as client:
            client.request_id = request_id
            return await closed_record(client)

    async def _first_model(self) -> str:
        async with Client(self._url, self._key) as client:
            return str((await client.get("/v1/models"))["data"][0]["id"])

    def _stats(self, conversation: Conversation) -> None:
        spent = conversation.spent
        if self._request_id is not None:
            self._aside.print(draw(self._runner.run(self._record(self._request_id))))
        tokens = f"{spent.prompt_tokens} tokens in, {spent.completion_tokens} out"
        self._say(f"{spent.answers} answers, {tokens}, {money(spent.cost_microusd)}")

    def _say(self, text: str, style: str = "dim") -> None:
        self._aside.print(Text(text, style=style))


def summary(chunk: dict[str, Any]) -> str:
    """One line from a stream's last chunk: tokens, time to the first one, speed, cost."""
    usage, timings = chunk["usage"], chunk["hitsend"]["timings"]
    parts = [f"{usage['prompt_tokens']} in, {usage['completion_tokens']} out"]
    if "ttft_ms" in timings:
        parts.append(f"first token {timings['ttft_ms']:.0f} ms")
    decode_ms = timings.get("decode_own_ms", 0.0) + timings.get("decode_shared_ms", 0.0)
    if decode_ms > 0 and usage["completion_tokens"] > 1:
        # the first token belongs to the prompt's last step
        parts.append(f"{(usage['completion_tokens'] - 1) / decode_ms * 1000:.1f} tokens/s")
    return " · ".join([*parts, money(chunk["hitsend"]["cost_microusd"])])


def _typed() -> Iterator[str]:
    """What a person types, with the line editing and the history of readline where Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # importing it is what turns line editing on; only a terminal needs it
    lines = Lines()
    while True:
        try:
            line = input(". " if lines.is_open else "> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        text = lines.take(line)
        if text is not None:
            yield text


def _piped() -> Iterator[str]:
    lines = Lines()
    for line in sys.stdin:
        text = lines.take(line.rstrip("\n"))
        if text is not None:
            yield text
    if lines.is_open:
        yield lines.end()
