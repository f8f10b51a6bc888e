"""A chat server on a real socket that does what a test scripts: token counts, lies, errors, cuts, never a clock."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.mock_upstream import Call, MockUpstream, mock_upstream

TEMPLATE = 5
"""Tokens that its template puts around the messages."""


class Scripted:
    """A word is a token. `answers` maps the number of a chat (from 0, probes included) to a script; others are good."""

    def __init__(self, mock: MockUpstream) -> None:
        self.mock = mock
        self.url = mock.url.removesuffix("/v1")
        self.has_tokenize = True
        self.tokenizes = 10**9
        """So many times; after that its connections end without an answer."""
        self.is_known: tuple[str, ...] = ("max_tokens", "ignore_eos", "stream_options")
        self.claims_more = 0
        self.gives_usage = True
        self.scripts: dict[int, object] = {}
        self.chats: list[dict] = []
        self.keys: list[str | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        mock.script = self._answer

    def gate_at(self, number: int) -> None:
        """From chat `number` on nothing is answered until the gate is set."""

        async def shut(call: Call) -> None:
            self.gate.clear()
            await self._good(call)

        self.scripts[number] = shut

    def prompts(self) -> list[str]:
        """The text of every chat's messages."""
        return [text_of(chat) for chat in self.chats]

    async def _answer(self, call: Call) -> None:
        path = call.head.split(" ")[1]
        self.keys.append(call.headers().get("authorization"))
        if path == "/v1/models":
            models = [{"id": "scripted", "max_model_len": 4096}, {"id": "other"}]
            await call.answer("200 OK", {"object": "list", "data": models})
        elif path == "/tokenize" and self.has_tokenize:
            self.tokenizes -= 1
            if self.tokenizes < 0:
                return
            text = call.body.get("content") or call.body.get("prompt") or ""
            await call.answer("200 OK", {"tokens": [7] * len(text.split())})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            number = len(self.chats)
            self.chats.append(call.body)
            await (self.scripts.get(number) or self._good)(call)
        else:
            await call.answer("404 Not Found", {"error": {"message": path}})

    async def _good(self, call: Call) -> None:
        strange = {"max_tokens", "max_completion_tokens", "ignore_eos", "stream_options"} & set(call.body)
        if unknown := strange - set(self.is_known):
            await call.answer("400 Bad Request", {"error": {"message": f"unknown: {sorted(unknown)}"}})
            return
        await self.gate.wait()
        number = call.body.get("max_tokens") or call.body.get("max_completion_tokens") or 3
        prompt = len(text_of(call.body).split()) + TEMPLATE
        usage = {"prompt_tokens": prompt, "completion_tokens": number + self.claims_more}
        await call.start()
        for at in range(number):
            word = f"{'' if at == 0 else ' '}w{at}"
            delta = {"text": word} if "prompt" in call.body else {"delta": {"content": word}}
            await call.event({"choices": [{"index": 0, **delta}]})
        await call.finish("length", usage if self.gives_usage else None)


def text_of(body: dict) -> str:
    if "prompt" in body:
        return body["prompt"]
    return " ".join(message["content"] for message in body["messages"])


async def refuse(call: Call) -> None:
    """429."""
    await call.answer("429 Too Many Requests", b'{"error": {"code":\n"rate_limit_exceeded \x1b[2J"}}')


async def break_off(call: Call) -> None:
    """Two words, and the connection is gone."""
    await call.start()
    await call.say("one", " two")


async def fail_midway(call: Call) -> None:
    """A word, and an error frame."""
    await call.start()
    await call.say("one")
    await call.event({"error": {"code": "engine_failed", "message": "<b>died</b>"}})


async def say_nothing(call: Call) -> None:
    """An answer without text."""
    await call.start()
    await call.finish("stop", {"prompt_tokens": 1, "completion_tokens": 0})


async def no_stream(call: Call) -> None:
    """A 200 that is a web page."""
    await call.start("200 OK", "text/html")
    await call.raw(b"<html>hello</html>")


async def garbage(call: Call) -> None:
    """Events that are no JSON."""
    await call.start()
    await call.event("{what")


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    async with mock_upstream() as mock:
        yield Scripted(mock)


class Quiet:
    """A watcher that looks away."""

    def stage(self, title, stage, *, requests, duration_s):
        pass

    def seen(self):
        pass


def parsed(text: str) -> dict:
    """One document, and nothing after it."""
    return json.loads(text)
