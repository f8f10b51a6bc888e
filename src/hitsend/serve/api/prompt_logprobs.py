"""`prompt_logprobs` as vLLM writes it: a list with one entry per prompt token.

Enters: `PromptToken`s. Leaves: null for the first token, which nothing stands before, then a dictionary from token id
to logprob, rank and text. Always true: the token that stands in the prompt is the first entry of its dictionary,
whatever its rank; numbers are finite. Next: `chat_response.py`.
"""

from collections.abc import Sequence

import msgspec

from hitsend.core.request import PromptToken
from hitsend.serve.api.logprobs import LOWEST_LOGPROB


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate. Rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]


def prompt_logprobs_out(tokens: Sequence[PromptToken], num_top: int) -> PromptLogprobs:
    """As the wire has it, with `num_top` alternatives at most."""
    return tuple(None if token.logprob is None else _candidates(token, num_top) for token in tokens)


def _candidates(token: PromptToken, num_top: int) -> dict[str, PromptLogprob]:
    found: dict[str, PromptLogprob] = {}
    for each in (token, *token.top[:num_top]):
        if each.logprob is not None and each.rank is not None:
            shown = PromptLogprob(max(LOWEST_LOGPROB, each.logprob), each.rank, each.text.token)
            found.setdefault(str(each.token_id), shown)
    return found
