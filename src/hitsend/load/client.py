"""One target over HTTP: sends an `Ask`, times what comes back.

Enters: an `Ask` and the instant at which it was to go out. Leaves: a `Sample`, whatever happens. Always true: instants
are the client's, taken when the bytes are handed to this process; hanging up closes the connection, so that the server
notices; redirects aren't followed, so a key goes to one address only; every request ends, by `timeout_s` at the latest.
Next: `probe.py`.
"""

import asyncio
import contextlib
import errno
import time
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from hitsend.load.sample import Outcome, Sample
from hitsend.load.sse import DONE, BadStream, Events, Piece, Usage, read_piece
from hitsend.load.target import Target
from hitsend.load.workload import Ask

Clock = Callable[[], float]
KEEP_TEXT = 1_000_000
"""Characters of an answer that are kept; one that goes on is still counted."""
MOST_ANSWER_BYTES = 16_000_000
"""Of a list of models or of tokens."""
IDLE_S = 2.0
"""A connection that was idle for longer isn't used again: servers close theirs after some five seconds."""
END_S = 1.0
"""How long the end of a body may lag behind `[DONE]` before its connection is given up."""
PLAIN_S = 10.0
"""For a question beside the test: a server that stalls there must not keep the test from ending."""
_OWN_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS))
"""What this machine has too few of: descriptors, ports, buffers."""


class Unreachable(Exception):
    """No answer to a plain question; the text says why."""


class Client:
    """One target's connections. `now` is the clock in seconds; instants in samples are relative to `start_s`."""

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float = 120.0,
        keeps_connections: bool = True,
        now: Clock = time.perf_counter,
    ) -> None:
        self.target = target
        self.start_s = 0.0
        self._now = now
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
        connector = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            if keeps_connections
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**18,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    def body(self, ask: Ask) -> dict[str, Any]:
        """What goes out for it."""
        target, dialect = self.target, self.target.dialect
        fields: dict[str, Any] = {"model": target.model, "stream": True}
        if dialect.gives_usage:
            fields["stream_options"] = {"include_usage": True}
        made = "max_tokens" not in ask.body and "max_completion_tokens" not in ask.body
        if made and ask.output_tokens is not None:
            fields[dialect.limit] = ask.output_tokens
            if dialect.ignores_end:
                fields["ignore_eos"] = True
        if target.temperature is not None and "temperature" not in ask.body:
            fields["temperature"] = target.temperature
        return fields | ask.body | target.extra

    async def send(self, ask: Ask, intended_s: float, number: int = 0) -> Sample:
        """Send it and read to its end. Never raises for what the server does; cancelling it gives no sample."""
        body = self.body(ask)
        run = _Run(self._now, self.start_s, ask, _allowed(body))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(run, msgspec.json.encode(body))
        except TimeoutError:
            run.fail("timeout", f"no end within {self._timeout_s:g} s")
        except BadStream as error:
            run.fail("bad_stream", str(error))
        except aiohttp.ClientConnectorError as error:
            run.fail("client_limit" if error.os_error.errno in _OWN_LIMITS else "connect", str(error))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            run.fail("broken", str(error) or type(error).__name__)
        return run.sample(intended_s, number)

    async def _exchange(self, run: "_Run", body: bytes) -> None:
        path = "chat/completions" if self.target.endpoint == "chat" else "completions"
        headers = self._headers | {"content-type": "application/json"}
        run.sent()
        async with self._session.post(
            self.target.api(path), data=body, headers=headers, allow_redirects=False
        ) as response:
            run.status, run.request_id = response.status, response.headers.get("x-request-id")
            if response.status != 200:
                said = _redirect(response) or (await _start(response)).decode("utf-8", "replace")
                run.fail(f"http_{response.status}", said)
                return
            if not _may_stream(kind := response.headers.get("content-type", "")):
                run.fail("bad_stream", f"content-type {kind[:60]}")
                return
            async for received in response.content.iter_any():
                if run.take(received):
                    break
            if run.is_cut:
                response.close()
            elif run.is_done and not response.content.at_eof():
                await _finish(response)

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (None where it is none) of a whole address. Raises Unreachable."""
        return await self._ask("GET", path, None, self._timeout_s)

    async def post(self, path: str, document: Any) -> tuple[int, Any]:
        """The same for a POST, within `PLAIN_S`."""
        return await self._ask("POST", path, msgspec.json.encode(document), min(PLAIN_S, self._timeout_s))

    async def _ask(self, method: str, address: str, raw: bytes | None, timeout_s: float) -> tuple[int, Any]:
        headers = self._headers | ({} if raw is None else {"content-type": "application/json"})
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(
                    method, address, data=raw, headers=headers, allow_redirects=False
                ) as response:
                    if (said := _redirect(response)) is not None:
                        raise Unreachable(f"{response.status}: {said}")
                    return response.status, _json(await _start(response, MOST_ANSWER_BYTES))
        except TimeoutError as error:
            raise Unreachable(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error


def _redirect(response: aiohttp.ClientResponse) -> str | None:
    """Where it sends whoever follows; None where it doesn't."""
    where = response.headers.get("location") if 300 <= response.status < 400 else None
    return where and f"it redirects to {where[:200]}, and redirects aren't followed: give the address that answers"


def _may_stream(kind: str) -> bool:
    """Frameworks that were told nothing send no type, or that of plain text; what isn't a stream has no events."""
    return not kind or kind.lower().startswith(("text/event-stream", "text/plain", "application/octet-stream"))


def _allowed(body: dict[str, Any]) -> int | None:
    """The most tokens that an answer to it may have: of all its choices."""
    limit, choices = body.get("max_completion_tokens") or body.get("max_tokens"), body.get("n") or 1
    return limit * choices if isinstance(limit, int) and isinstance(choices, int) else None


async def _finish(response: aiohttp.ClientResponse) -> None:
    """The body's last bytes, which say nothing: with them unread the connection couldn't be used again."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            async for _ in response.content.iter_any():
                pass


async def _start(response: aiohttp.ClientResponse, most: int = 2000) -> bytes:
    """The first bytes of a body: nobody says how long it is."""
    found = b""
    while len(found) < most and (piece := await response.content.read(most - len(found))):
        found += piece
    return found


def _json(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


class _Run:
    """One request while it runs."""

    def __init__(self, now: Clock, start_s: float, ask: Ask, allowed: int | None) -> None:
        self._now, self._start_s, self._ask, self._allowed = now, start_s, ask, allowed
        self._events = Events()
        self._arrivals = array("d")
        self._sent_s = now()
        self._text: list[str] = []
        self._content: list[str] = []
        self._num_kept = 0
        self._usage = Usage()
        self._finish_reason: str | None = None
        self._done_s: float | None = None
        self._error: str | None = None
        self._detail = ""
        self.status: int | None = None
        self.request_id: str | None = None
        self.is_cut = False

    @property
    def is_done(self) -> bool:
        """Whether `[DONE]` came."""
        return self._done_s is not None

    def sent(self) -> None:
        """The request goes out now."""
        self._sent_s = self._now()

    def fail(self, kind: str, detail: str) -> None:
        """How it ended badly; the first reason counts."""
        if self._error is None:
            self._error, self._detail = kind, detail[:300]

    def take(self, received: bytes) -> bool:
        """Whether nothing more is wanted. All events of one read came at one instant. Raises BadStream."""
        at = self._now()
        for data in self._events.feed(received):
            if data == DONE:
                self._done_s = at
                return True
            if self._event(read_piece(data), at):
                return True
        return False

    def _event(self, piece: Piece, at: float) -> bool:
        if piece.error is not None:
            self.fail("error_frame", piece.error)
            return True
        if piece.usage is not None:
            self._usage = piece.usage
        self._finish_reason = piece.finish_reason or self._finish_reason
        if not piece.text:
            return False
        self._arrivals.append(at - self._start_s)
        if self._num_kept < KEEP_TEXT:
            self._num_kept += len(piece.text)
            self._text.append(piece.text)
            self._content.append(piece.content)
        self.is_cut = self._ask.cut_after is not None and len(self._arrivals) >= self._ask.cut_after
        return self.is_cut

    def sample(self, intended_s: float, number: int) -> Sample:
        """What it was."""
        if self._error is None and not self.is_cut:
            self._judge()
        outcome: Outcome = "error" if self._error is not None else "aborted" if self.is_cut else "ok"
        usage = self._usage
        return Sample(
            outcome,
            intended_s,
            self._sent_s - self._start_s,
            (self._now() if self._done_s is None else self._done_s) - self._start_s,
            self._arrivals,
            number=number,
            turn=self._ask.turn,
            conversation=self._ask.conversation,
            error=self._error,
            detail=self._detail,
            status=self.status,
            finish_reason=self._finish_reason,
            asked_input=self._ask.input_tokens,
            asked_output=self._allowed,
            claimed_input=usage.prompt_tokens,
            claimed_output=usage.completion_tokens,
            claimed_cached=usage.cached_tokens,
            request_id=self.request_id,
            text="".join(self._text),
            content="".join(self._content),
        )

    def _judge(self) -> None:
        """A stream that ends without `[DONE]` and without a reason broke off; one without text is no answer."""
        if not self.is_done and self._finish_reason is None:
            self.fail("broken", "the stream ended before its answer did")
        elif not self._arrivals:
            self.fail("empty", f"no text, finish reason {self._finish_reason}")
