"""Sampled tokens as clients see them when they ask for logprobs.

Enters: a `SampledToken` and the table of tokens. Leaves: a `TextLogprob`. Always true: a control token carries its
name, but no bytes. Next: `assemble.py`.
"""

from typing import Protocol

from hitsend.core.request import SampledToken, TextLogprob


class TokenTable(Protocol):
    """The part of a vocabulary that turning tokens into text needs."""

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Each token's bytes, by id."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that steer the model and are no text."""
        ...


def text_logprob(table: TokenTable, token: SampledToken) -> TextLogprob:
    """The token and its alternatives."""
    top = tuple(_entry(table, candidate.token_id, candidate.logprob) for candidate in token.top)
    return _entry(table, token.token_id, 0.0 if token.logprob is None else token.logprob, top)


def _entry(table: TokenTable, token_id: int, logprob: float, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
    data = table.token_bytes[token_id]
    exact = () if token_id in table.control_ids else tuple(data)
    return TextLogprob(token=data.decode("utf-8", "replace"), logprob=logprob, bytes=exact, top=top)
