"""From a row of logits to one token.

Order, for every token: logit_bias; penalties (repetition over prompt and output, then presence and frequency over the
output only, as OpenAI defines them); temperature; top_k; top_p (within what top_k left); min_p (relative to the best);
one draw. Log-probabilities are those of the raw logits, before all of this. Tokens tied with the last one that a filter
keeps are kept too. A temperature below `MIN_TEMPERATURE`, or top_k 1, is greedy; among equals the lowest id wins.

Enters: float32 logits, which are changed in place. Leaves: a `SampledToken`, or None where the logits are no numbers.
Always true: a token drawn by chance takes exactly one uniform from the sequence's own PCG64, greedy takes none, and
nothing of other rows is looked at: the same seed gives the same tokens whoever shares the batch. Next: `step.py`.
"""

import math
from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hitsend.core.request import SampledToken, SamplingParams, TokenLogprob

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
Sums = NDArray[np.float64]

MIN_TEMPERATURE = 1e-5
"""Logits are float32: dividing their differences by less than this says nothing that argmax doesn't."""

COLUMNS = 1024
"""A long row is looked at as a matrix of this width, so that column maxima or sums stand for it."""

HEAD_WEIGHT = 3e-5
"""top_p first looks among the tokens that weigh more than this share of the best one: on SmolLM2's own logits at
temperature 1, 98 % of the nuclei of 0.95 lie there, among 60 to 6,000 tokens, and finding their edge takes half the
time that sorting the whole row takes.
"""

BLOCK = 256
"""Sorted weights are summed in blocks first: running sums are the slowest thing that numpy does here."""

_SEED_RANGE = 2**64
_FLOAT = np.finfo(np.float32)


class Sampler:
    """Draws the tokens of one sequence and remembers what its penalties need."""

    def __init__(self, params: SamplingParams, seed: int, prompt_token_ids: Iterable[int]) -> None:
        self.params = params
        self._generator = np.random.Generator(np.random.PCG64(seed % _SEED_RANGE))
        self._bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._seen = _Counts(prompt_token_ids) if params.repetition_penalty != 1.0 else None
        has_output_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._produced = _Counts(()) if has_output_penalty else None
        self._is_greedy = not params.temperature >= MIN_TEMPERATURE or params.top_k == 1
        self._edits = bool(params.logit_bias) or self._seen is not None or has_output_penalty

    @property
    def is_argmax(self) -> bool:
        """Whether the answer is the row's argmax and nothing else is asked."""
        return self._is_greedy and not self._edits and not self.params.logprobs

    def note(self, token_id: int) -> None:
        """A token was added to the output."""
        for counts in (self._seen, self._produced):
            if counts is not None:
                counts.add(token_id)

    def choose(self, row: Row) -> SampledToken | None:
        """The next token; None if the logits (as given, or after the edits) have no finite maximum. Changes `row`."""
        raw = row.copy() if self.params.logprobs else None
        if self._edits:
            self._edit(row)
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return None
        token_id = best if self._is_greedy else self._draw(row, float(row[best]))
        if raw is None:
            return SampledToken(token_id)
        return _with_logprobs(raw, token_id, self.params.top_logprobs)

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

    def _draw(self, row: Row, peak: float) -> int:
        params = self.params
        ids = largest(row, params.top_k) if 0 < params.top_k < row.size else None
        weights = _weigh(row if ids is None else row[ids], peak, params.temperature)
        edge = _nucleus_edge(weights, params.top_p) if params.top_p < 1.0 else 0.0
        edge = max(edge, min(params.min_p, 1.0))
        if edge > 0.0:
            weights *= weights >= np.float32(edge)
        place = _draw_place(weights, self._generator.random())
        return place if ids is None else int(ids[place])


def sample(logits: NDArray[np.float32], samplers: list[Sampler]) -> list[SampledToken | None]:
    """One token per row; row i belongs to `samplers[i]`. None: the row has no finite maximum. Changes `logits`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        if all(sampler.is_argmax for sampler in samplers):
            best = logits.argmax(axis=1)
            is_number = np.isfinite(logits[np.arange(len(samplers)), best])
            return [SampledToken(int(b)) if ok else None for b, ok in zip(best, is_number, strict=True)]
        return [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]


def largest(row: Row, k: int) -> Ids:
    """Ids, rising, of the k largest values and of all that tie with the smallest of them; 0 < k <= row.size.

    k of the column maxima lie at or above the k-th of them, so it bounds the k-th value of the row from below, and
    only the few values above that bound have to be partitioned: about 5 times faster than partitioning the row.
    """
    if k <= COLUMNS // 4 and row.size >= 8 * COLUMNS:
        whole = row.size - row.size % COLUMNS
        maxima = row[:whole].reshape(-1, COLUMNS).max(axis=0)
        bound = np.partition(maxima, COLUMNS - k)[COLUMNS - k]
        ids = np.flatnonzero(row >= bound)
    else:
        ids = np.arange(row.size)
    values = row[ids]
    edge = np.partition(values, values.size - k)[values.size - k]
    return cast("Ids", ids[values >= edge])


class _Counts:
    """How often each token occurred, as two arrays that grow without being rebuilt for every token."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        ids, counts = np.unique(np.fromiter(token_ids, dtype=np.intp), return_counts=True)
        self._places = {int(token): place for place, token in enumerate(ids)}
        self._ids = np.concatenate([ids, np.zeros(64, dtype=np.intp)])
        self._counts = np.concatenate([counts.astype(np.float64), np.zeros(64)])

    @property
    def ids(self) -> Ids:
        """Each token that occurred, once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Sums:
        """How often, in the order of `ids`."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1.0


def _weigh(values: Row, peak: float, temperature: float) -> Row:
    """Probabilities up to a common factor, in place; the best one weighs exactly 1."""
    values -= np.float32(peak)
    values /= np.float32(temperature)
    return cast("Row", np.exp(values, out=values))


def _nucleus_edge(weights: Row, top_p: float) -> float:
    """The weight of the last token that is needed, in falling order, to reach the share `top_p` of all weight."""
    needed = top_p * float(weights.sum())
    if weights.size > COLUMNS:
        head = weights[np.flatnonzero(weights >= np.float32(HEAD_WEIGHT))]
        if float(head.sum()) >= needed:
            weights = head
    falling = np.sort(weights)[::-1]
    sums = np.add.reduceat(falling, np.arange(0, falling.size, BLOCK)).astype(np.float64)
    cumulative = sums.cumsum()
    place = min(int(np.searchsorted(cumulative, needed)), sums.size - 1)
    block = falling[place * BLOCK : (place + 1) * BLOCK]
    within = needed - float(cumulative[place] - sums[place])
    last = min(int(np.searchsorted(block.astype(np.float64).cumsum(), within)), block.size - 1)
    return float(block[last])


def _pick(cumulative: Sums, uniform: float) -> int:
    """Where the uniform falls; never on a weight of zero, whatever rounding does at the upper end."""
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return place if place < cumulative.size else int(np.searchsorted(cumulative, cumulative[-1]))


def _draw_place(weights: Row, uniform: float) -> int:
    """Draw one place; in a long row first a column, then a token in it: running sums over all of it would cost more."""
    if weights.size <= COLUMNS:
        return _pick(weights.astype(np.float64).cumsum(), uniform)
    whole = weights.size - weights.size % COLUMNS
    columns = weights[:whole].reshape(-1, COLUMNS).sum(axis=0)
    sums = np.concatenate([columns, weights[whole:]]).astype(np.float64)
    cumulative = sums.cumsum()
    place = _pick(cumulative, uniform)
    if place >= COLUMNS:
        return whole + place - COLUMNS
    within = float(uniform * cumulative[-1] - (cumulative[place] - sums[place])) / float(sums[place])
    column = weights[place:whole:COLUMNS].astype(np.float64).cumsum()
    return place + COLUMNS * _pick(column, min(max(within, 0.0), 1.0))


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
