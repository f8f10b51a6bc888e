"""Logprobs as a chat answer shows them.

Enters: `TextLogprob`s. Leaves: OpenAI's list of tokens with their alternatives. Always true: every number is one that
JSON has; a token without bytes of its own (a control token) has null there. Next: `chat_response.py`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from hitsend.core.request import TextLogprob

LOWEST_LOGPROB = -9999.0
"""JSON has no -Infinity; OpenAI's documentation gives this value for "very unlikely"."""


class TopLogprobOut(msgspec.Struct, frozen=True):
    """One alternative; `bytes` is null where a token has none (control tokens)."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class LogprobOut(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[TopLogprobOut]


class LogprobsOut(msgspec.Struct, frozen=True):
    """What a choice's `logprobs` holds when they were asked for."""

    content: list[LogprobOut]
    refusal: None = None


def logprobs_out(entries: Iterable[TextLogprob]) -> LogprobsOut:
    """As the wire has it."""
    return LogprobsOut(
        [
            LogprobOut(**_common(entry), top_logprobs=[TopLogprobOut(**_common(other)) for other in entry.top])
            for entry in entries
        ]
    )


def _common(entry: TextLogprob) -> dict[str, Any]:
    logprob = max(LOWEST_LOGPROB, entry.logprob)
    return {"token": entry.token, "logprob": logprob, "bytes": entry.bytes or None}
