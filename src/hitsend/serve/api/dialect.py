"""What makes a dialect: how it reads a body, and how it writes an answer.

Enters: nothing. Leaves: types. Always true: dialects differ in how they read and write, never in what happens to a
request; `chat_completions.py` serves them all. Next: `chat_request.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import msgspec

from hitsend.core.errors import ServeError
from hitsend.core.events import Parsed
from hitsend.core.request import Request
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.services import Answer


class Encoder(Protocol):
    """Writes one answer in one dialect."""

    def stream(self, answer: Answer, /) -> AsyncGenerator[bytes, None]:
        """SSE frames, one or more whole ones at a time. Closing it closes the answer."""
        ...

    def whole(self, answer: Answer, /) -> Awaitable[bytes]:
        """The body of an unstreamed answer."""
        ...

    def error_frame(self, error: ServeError, /) -> bytes:
        """How a stream ends that broke after its first byte."""
        ...


class Functions(msgspec.Struct, frozen=True):
    """An encoder out of three functions."""

    stream: Callable[[Answer], AsyncGenerator[bytes, None]]
    whole: Callable[[Answer], Awaitable[bytes]]
    error_frame: Callable[[ServeError], bytes]


class Reading(msgspec.Struct, frozen=True):
    """What a body turned out to ask for, and how the answer is to be written."""

    request: Request
    parsed: Parsed
    encoder: Encoder


Read = Callable[[Exchange, bytes], Awaitable[Reading]]
