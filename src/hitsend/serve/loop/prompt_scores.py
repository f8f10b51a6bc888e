"""Log-probabilities of a prompt's own tokens, taken while the prompt is computed.

The logits behind token p say how likely token p + 1 was. A prompt that asks for them is computed in short chunks
(`SCORED_TOKENS` of all prompts together in a step), and each row becomes a `ScoredToken` in the step that computed it.

Enters: a step's shares, and the rows that the decoder returned for them. Leaves: the rows from which tokens are
sampled, and the scores of each share. Always true: no more rows are asked for than a step may have, whatever the
prompt's length; each prompt token but the first is scored once and in order, whichever choice computes it and however
often it is preempted; the rows that tokens are sampled from are the decoder's own. Next: `step.py`.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hitsend.core.request import ScoredToken, TokenLogprob
from hitsend.serve.loop.rows import Row, largest

if TYPE_CHECKING:
    from hitsend.serve.loop.roster import Share

SCORED_TOKENS = 128
"""Most tokens of such prompts in one step: with a vocabulary of 150,000 their logits take 77 MB."""


class PromptScores:
    """What one request's choices know together: `done` is the first prompt token that has no score yet."""

    __slots__ = ("done", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.done = 1

    def places(self, start: int, end: int, num_prompt_tokens: int) -> range:
        """The positions in [start, end) whose logits are wanted."""
        return range(max(start, self.done - 1), min(end, num_prompt_tokens - 1))


def take_scores(
    shares: "list[Share]", logits: NDArray[np.float32]
) -> tuple[NDArray[np.float32], dict[int, tuple[ScoredToken, ...]]]:
    """The rows to sample from, and the scores by the share's place. Call it before anything counts as computed."""
    found: dict[int, tuple[ScoredToken, ...]] = {}
    if not any(share.scored for share in shares):
        return logits, found
    kept: list[int] = []
    at = 0
    for number, share in enumerate(shares):
        sequence, rows = share.sequence, logits[at : at + len(share.scored)]
        at += len(share.scored)
        scores = sequence.scores
        if scores is not None and share.scored:
            tokens = []
            for place, row in zip(share.scored, rows, strict=True):
                if place + 1 == scores.done:
                    tokens.append(score(row, sequence.token_ids[place + 1], scores.num_top))
                    scores.done += 1
            found[number] = tuple(tokens)
        if share.is_last:
            kept.append(at)
            at += 1
    return (logits[kept] if found else logits), found


def score(row: Row, token_id: int, num_top: int) -> ScoredToken:
    """How likely the token was under this row, and the `num_top` likeliest. Rank 1: no other was likelier."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        peak = row.max()
        log_total = float(peak) + math.log(max(float(np.exp(row - peak).sum()), 1.0))
        value = row[token_id]
        rank = 1 + int(np.count_nonzero(row > value))
        top: tuple[TokenLogprob, ...] = ()
        if num_top > 0 and math.isfinite(log_total):
            ids = largest(row, min(num_top, row.size))
            order = np.lexsort((ids, -row[ids]))[:num_top]
            pairs = [(int(i), float(row[i]) - log_total) for i in ids[order]]
            top = tuple(TokenLogprob(i, logprob) for i, logprob in pairs if math.isfinite(logprob))
    return ScoredToken(token_id, float(value) - log_total, rank, top)
