"""Log-probabilities as upstreams tell them.

Enters: what a piece of an answer has of them, in the shape of chats or of completions. Leaves: `TextLogprob`s. Always
true: what is missing is the least that there is, never a certainty. Next: `upstream_calls.py`.
"""

import msgspec

from hitsend.core.request import TextLogprob

_LEAST_LOGPROB = -9999.0
"""What OpenAI says of a token that can't be; some say null."""


class _LogprobIn(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float | None = None
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple["_LogprobIn", ...] | None = None


class LogprobsIn(msgspec.Struct, frozen=True, gc=False):
    """Of the tokens in this piece."""

    content: tuple[_LogprobIn, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float | None] | None, ...] | None = None


def logprobs_of(given: LogprobsIn) -> tuple[TextLogprob, ...]:
    """In the shape of chats, or of completions: columns beside each other."""
    if given.content is not None or given.tokens is None:
        return tuple(_logprob(one) for one in given.content or ())
    tops = given.top_logprobs or (None,) * len(given.tokens)
    columns = zip(given.tokens, given.token_logprobs or (), tops, strict=False)
    return tuple(_spelled(token, value, top or {}) for token, value, top in columns)


def _spelled(token: str, value: float | None, top: dict[str, float | None]) -> TextLogprob:
    ranked = sorted(((one, _told(at)) for one, at in top.items()), key=lambda one: -one[1])
    others = tuple(TextLogprob(one, at, _bytes(one)) for one, at in ranked)
    return TextLogprob(token, _told(value), _bytes(token), others)


def _told(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else logprob


def _bytes(token: str) -> tuple[int, ...]:
    return tuple(token.encode("utf-8", "replace"))


def _logprob(one: _LogprobIn) -> TextLogprob:
    spelled = _bytes(one.token) if one.bytes is None else one.bytes
    return TextLogprob(one.token, _told(one.logprob), spelled, tuple(_logprob(top) for top in one.top_logprobs or ()))
