"""From a row of logits to one token.

Order, for every token: the grammar's mask (`grammar.py`), under which a forbidden token stays at -inf; tokens that may
not come yet (`min_tokens`, `ignore_eos`; a grammar that leaves nothing else wins); logit_bias; penalties (repetition
over prompt and output, then presence and frequency over the output only, as OpenAI defines them); DRY; temperature;
top_k; typical_p; top_p (within what these left); min_p (relative to the best of it); XTC; one draw. Log-probabilities
are those of the raw logits, before all of this. Tokens tied with the last one that a filter keeps are kept too. A
temperature below `MIN_TEMPERATURE`, or top_k 1, is greedy; among equals the lowest id wins.

Enters: float32 logits, which are changed in place. Leaves: a `SampledToken`, or None where the logits are no numbers.
Always true: a token drawn by chance takes exactly one uniform from the sequence's own PCG64 (with XTC exactly two, its
own first), greedy takes none, and nothing of other rows is looked at: the same seed gives the same tokens whoever
shares the batch. Next: `rows.py` and `filters.py`, then `step.py`.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hitsend.core.request import SampledToken, SamplingParams, TokenLogprob
from hitsend.serve.loop.filters import Repeats, without_atypical, without_top_choices
from hitsend.serve.loop.grammar import Constraint
from hitsend.serve.loop.rows import Counts, Ids, Row, draw_place, largest, nucleus_edge, weigh

MIN_TEMPERATURE = 1e-5
"""Logits are float32: dividing their differences by less than this says nothing that argmax doesn't."""

MOST_TOP_CHOICES = 0.5
"""No two tokens can both have a larger share: an XTC threshold above it excludes nothing, and takes no uniform."""

_SEED_RANGE = 2**64
_FLOAT = np.finfo(np.float32)


class Sampler:
    """Draws the tokens of one sequence and remembers what its penalties need."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Iterable[int],
        *,
        constraint: Constraint | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        breaker_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`breaker_ids`: the tokens over which DRY follows no repeat."""
        self.params = params
        self._constraint = constraint
        self._generator = np.random.Generator(np.random.PCG64(seed % _SEED_RANGE))
        self._bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._seen = Counts(prompt_token_ids) if params.repetition_penalty != 1.0 else None
        has_output_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._produced = Counts(()) if has_output_penalty else None
        self._repeats = Repeats(params, prompt_token_ids, breaker_ids) if params.dry_multiplier > 0 else None
        self._ends = end_token_ids
        self._num_noted = 0
        self._banned = self._to_ban()
        self._is_greedy = not params.temperature >= MIN_TEMPERATURE or params.top_k == 1
        self._has_xtc = params.xtc_probability > 0.0 and params.xtc_threshold <= MOST_TOP_CHOICES
        has_penalty = self._seen is not None or has_output_penalty or self._repeats is not None
        self._edits = bool(params.logit_bias) or has_penalty

    @property
    def is_argmax(self) -> bool:
        """Whether the answer is the row's argmax and nothing else is asked."""
        is_free = not self._edits and not len(self._banned) and self._constraint is None
        return self._is_greedy and is_free and not self.params.logprobs

    def note(self, token_id: int) -> None:
        """A token was added to the output."""
        self._num_noted += 1
        if self._num_noted == self.params.min_tokens:
            self._banned = self._to_ban()
        for counts in (self._seen, self._produced, self._repeats):
            if counts is not None:
                counts.add(token_id)

    def choose(self, row: Row) -> SampledToken | None:
        """The next token; None if the logits (as given, or after the edits) have no finite maximum. Changes `row`."""
        raw = row.copy() if self.params.logprobs else None
        if self._constraint is not None:
            self._constraint.restrict(row)
            if self._constraint.failure is not None:
                return None
        if len(self._banned):
            self._ban(row)
        if self._edits:
            self._edit(row)
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return None
        token_id = best if self._is_greedy else self._draw(row, float(row[best]))
        if raw is None:
            return SampledToken(token_id)
        return _with_logprobs(raw, token_id, self.params.top_logprobs)

    def _to_ban(self) -> Ids:
        """Tokens that may not come now."""
        ids = self._ends if self.params.ignore_eos else frozenset()
        if self._num_noted < self.params.min_tokens:
            ids = self._ends | frozenset(self.params.stop_token_ids)
        return np.array(sorted(ids), dtype=np.intp)

    def _ban(self, row: Row) -> None:
        allowed = row[self._banned]
        row[self._banned] = -np.inf
        if self._constraint is not None and not math.isfinite(row.max()):
            row[self._banned] = allowed  # the grammar is at its end: nothing but an end can follow

    def _edit(self, row: Row) -> None:
        params = self.params
        np.add.at(row, self._bias_ids, self._bias)
        if self._seen is not None:
            ids = self._seen.ids
            values = row[ids]
            penalty = np.float32(min(max(params.repetition_penalty, float(_FLOAT.tiny)), float(_FLOAT.max)))
            row[ids] = np.where(values > 0, values / penalty, values * penalty).clip(_FLOAT.min, _FLOAT.max)
        if self._produced is not None:
            cost = params.presence_penalty + params.frequency_penalty * self._produced.counts
            row[self._produced.ids] -= cost.astype(np.float32)
        if self._repeats is not None:
            self._repeats.penalise(row)

    def _draw(self, row: Row, peak: float) -> int:
        params = self.params
        ids = largest(row, params.top_k) if 0 < params.top_k < row.size else None
        weights = weigh(row if ids is None else row[ids], peak, params.temperature)
        if params.typical_p < 1.0:
            weights = without_atypical(weights, params.typical_p)
        edge = nucleus_edge(weights, params.top_p) if params.top_p < 1.0 else 0.0
        edge = max(edge, min(params.min_p, 1.0))
        if edge > 0.0:
            weights *= weights >= np.float32(edge)
        if self._has_xtc and self._generator.random() < params.xtc_probability:
            weights = without_top_choices(weights, params.xtc_threshold)
        place = draw_place(weights, self._generator.random())
        return place if ids is None else int(ids[place])


def sample(logits: NDArray[np.float32], samplers: list[Sampler]) -> list[SampledToken | None]:
    """One token per row; row i belongs to `samplers[i]`. None: the row has no finite maximum. Changes `logits`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        if all(sampler.is_argmax for sampler in samplers):
            best = logits.argmax(axis=1)
            is_number = np.isfinite(logits[np.arange(len(samplers)), best])
            return [SampledToken(int(b)) if ok else None for b, ok in zip(best, is_number, strict=True)]
        return [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]


def _with_logprobs(raw: Row, token_id: int, num_top: int) -> SampledToken:
    peak = raw.max()
    log_total = float(peak) + math.log(float(np.exp(raw - peak).sum()))
    top: tuple[TokenLogprob, ...] = ()
    if num_top > 0:
        ids = largest(raw, min(num_top, raw.size))
        order = np.lexsort((ids, -raw[ids]))[:num_top]
        pairs = [(int(i), float(raw[i]) - log_total) for i in ids[order]]
        top = tuple(TokenLogprob(i, logprob) for i, logprob in pairs if math.isfinite(logprob))
    return SampledToken(token_id, float(raw[token_id]) - log_total, top)
