"""Calls of the scripts that count limits inside Valkey or Redis: each one atomic, all that wait sent together.

Enters: a script's name, keys and arguments. Leaves: its answer, or `Away`. Always true: a call ends within twice the
timeout; a call that reaches the server later than its caller waited does nothing there, so that what was given up can
be taken back for good; a caller that leaves never tears a connection. The only file that knows the client library.
Next: `valkey.py`.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError

ScriptName = Literal["reserve", "settle", "renew", "seed", "rehold", "charge"]
SCRIPTS: tuple[ScriptName, ...] = ("reserve", "settle", "renew", "seed", "rehold", "charge")

BATCH = 128
"""Calls sent at once."""

OFFSET_AGE_S = 10.0
"""How long the best estimate of the server's time is kept before a later one takes its place."""


class Away(Exception):
    """No answer. `was_sent`: the server may have done it all the same, or do it until the caller's time is over."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class Reply(msgspec.Struct, frozen=True):
    """What a script answered: a word, the server's time (microseconds since the epoch), and the rest."""

    word: str
    now_us: int
    rest: list[Any] = []


class _Call(msgspec.Struct, frozen=True):
    name: ScriptName
    epoch: str
    keys: tuple[str, ...]
    args: tuple[str | int, ...]
    answer: "asyncio.Future[Reply]"


class Scripts:
    """One server, one batch of calls at a time. `clock_source`: Lua text of the function that tells the time."""

    def __init__(
        self, url: str, prefix: str, timeout_s: float, clock: Clock, *, clock_source: str | None = None
    ) -> None:
        self.prefix = f"{{{prefix}}}:"
        self.timeout_s = timeout_s
        self.last_us = 0
        self._clock = clock
        self._client = _client(url, timeout_s)
        before = (clock_source or _source("clock")) + _source("levels")
        self._texts = {name: before + _source(name) for name in SCRIPTS}
        self._shas = {
            name: sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in self._texts.items()
        }
        self._waiting: deque[_Call] = deque()
        self._woken = asyncio.Event()
        self._offset_us: int | None = None
        self._offset_at_us = 0
        self._working: asyncio.Task[None] | None = None
        self.is_stopping = False

    def start(self) -> None:
        """Begin to send."""
        self._working = asyncio.create_task(self._work(), name="valkey")

    async def stop(self) -> None:
        """Calls that still wait end in `Away`."""
        self.is_stopping = True
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        self._fail(list(self._waiting), "the server stops", was_sent=False)
        self._waiting.clear()
        await self._client.aclose()

    async def call(self, name: ScriptName, epoch: str, keys: Sequence[str], args: Sequence[str | int]) -> Reply:
        """Run a script. Keys are given their prefix; raises Away. Who is cancelled may have been heard all the same."""
        if self.is_stopping:
            raise Away("the server stops", was_sent=False)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(name, epoch, tuple(self.prefix + key for key in keys), tuple(args), answer))
        self._woken.set()
        return await answer

    async def _work(self) -> None:
        while not self.is_stopping:  # looked at too, because the client library may swallow a cancellation
            await self._woken.wait()
            self._woken.clear()
            while self._waiting and not self.is_stopping:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                batch = [call for call in batch if not call.answer.done()]  # its caller left before it was sent
                if batch:
                    await self._send(batch)

    async def _send(self, batch: list[_Call]) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                answers = await self._answers(batch)
        except (RedisError, OSError, TimeoutError) as error:
            self._fail(batch, f"{type(error).__name__}: {error}", was_sent=True)
            await self._client.connection_pool.disconnect(inuse_connections=True)
            return
        except asyncio.CancelledError:
            self._fail(batch, "the server stops", was_sent=True)
            raise
        for call, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                self._fail([call], f"{type(answer).__name__}: {answer}", was_sent=True)
            elif not call.answer.done():
                call.answer.set_result(self._heard(answer))

    async def _answers(self, batch: list[_Call]) -> list[Any]:
        deadline_us = self._deadline_us()
        answers = await self._run([("EVALSHA", self._shas[call.name], call) for call in batch], deadline_us)
        missing = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if missing:
            calls = [("EVAL", self._texts[batch[index].name], batch[index]) for index in missing]
            for index, answer in zip(missing, await self._run(calls, deadline_us), strict=True):
                answers[index] = answer
        return answers

    async def _run(self, commands: list[tuple[str, str, _Call]], deadline_us: int) -> list[Any]:
        sent = self._client.pipeline(transaction=False)
        for command, script, call in commands:
            keys = (f"{self.prefix}latest", *call.keys)
            sent.execute_command(command, script, len(keys), *keys, self.prefix, call.epoch, deadline_us, *call.args)
        answers: list[Any] = await sent.execute(raise_on_error=False)
        return answers

    def _heard(self, answer: list[Any]) -> Reply:
        word, now_us, *rest = answer
        here_us = round(self._clock.now() * 1_000_000)
        offset_us = now_us - here_us
        # answers come late, never early: the largest difference is nearest to the truth
        is_old = here_us - self._offset_at_us > OFFSET_AGE_S * 1_000_000
        if self._offset_us is None or offset_us > self._offset_us or word == "late" or is_old:
            self._offset_us, self._offset_at_us = offset_us, here_us
        self.last_us = now_us
        return Reply(word, now_us, rest[0] if rest else [])

    def _deadline_us(self) -> int:
        """When, by the server's clock, a call that begins now is given up; 0 while that clock isn't known."""
        if self._offset_us is None:
            return 0
        return round((self._clock.now() + self.timeout_s) * 1_000_000) + self._offset_us

    def _fail(self, calls: list[_Call], reason: str, *, was_sent: bool) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(Away(reason, was_sent=was_sent))


def _client(url: str, timeout_s: float) -> Redis:
    scheme, separator, rest = url.partition("://")
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(scheme, scheme)
    if not separator or scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("access.quota_url: must begin with redis://, rediss://, valkey://, valkeys:// or unix://")
    try:
        return Redis.from_url(
            f"{scheme}://{rest}",
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError:  # its text may hold a part of the password
        raise ConfigError("access.quota_url: is no URL of a Valkey or Redis server") from None


def _source(name: str) -> str:
    return (files("hitsend.serve.access") / "lua" / f"{name}.lua").read_text("utf-8") + "\n"
