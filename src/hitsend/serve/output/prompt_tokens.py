"""A prompt's tokens as clients see them who asked for its log-probabilities.

Enters: the ids of one prompt, then their `ScoredToken`s in order and in any portions. Leaves: all of its tokens at
once, when the last one is scored. Always true: the first token has nothing before it, so it has no logprob; a control
token carries its name. Next: `assemble.py`.
"""

from collections.abc import Iterable, Sequence

from hitsend.core.request import PromptToken, SampledToken, ScoredToken
from hitsend.serve.output.logprobs import TokenTable, text_logprob


class PromptTokens:
    """One prompt, while its scores come in."""

    def __init__(self, table: TokenTable, token_ids: Sequence[int]) -> None:
        self._table = table
        self._num_tokens = len(token_ids)
        self._tokens = [self._token(token_ids[0], None, None)]

    def add(self, scored: Iterable[ScoredToken]) -> tuple[PromptToken, ...]:
        """Take the next ones. Returns the whole prompt when this was the last, else nothing."""
        for each in scored:
            top = tuple(self._token(best.token_id, best.logprob, rank) for rank, best in enumerate(each.top, 1))
            self._tokens.append(self._token(each.token_id, each.logprob, each.rank, top))
        return tuple(self._tokens) if len(self._tokens) == self._num_tokens else ()

    def _token(
        self, token_id: int, logprob: float | None, rank: int | None, top: tuple[PromptToken, ...] = ()
    ) -> PromptToken:
        text = text_logprob(self._table, SampledToken(token_id, logprob))
        return PromptToken(token_id, text, logprob, rank, top)
