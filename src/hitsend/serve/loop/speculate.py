"""Guessing what a sequence says next, and deciding when it pays to have the guess checked.

A draft is a few tokens that may follow. One pass computes the sequence's pending token and its draft together, and
`verify.py` keeps what the sampler itself would have drawn. Drafts come from the sequence's own text: where its last
tokens stood before, what followed them may follow again (quotes, edits, code, lists, loops).

How often that is right is measured on every token, drafted or not: each sampled token is compared with what would have
been guessed, at no cost. How much longer a pass takes with more tokens is measured on every pass (`StepCosts`). Drafts
are as long as both figures together say that they should be, and none where they would not win `MIN_GAIN`.

Enters: what each sequence knows, and how long passes took. Leaves: draft lengths and drafts. Always true: nothing here
calls a model or changes a sequence's output; work per token doesn't grow with the sequence's length; a sequence's
index is bounded by `MAX_INDEXED`. Next: `verify.py`.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from hitsend.core.drafts import MAX_DRAFT

GRAM = 3
"""So many equal tokens in a row are taken for the same place in the text."""

NEAR = 8
"""After a wrong guess the text usually goes on a few tokens further: so far is looked for its next token."""

MAX_INDEXED = 32_768
"""Of a longer sequence only the last tokens are looked up: an index takes about 130 bytes per token."""

LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, MAX_DRAFT)
"""Draft lengths that are considered."""

MIN_GAIN = 1.06
"""Drafts have to promise so many times the tokens per second: the promise is an estimate."""

MEMORY = 0.94
"""What a guess still counts after the next one: some 16 guesses are remembered."""

FIRST_CHANCE = 0.2
"""Nobody is drafted for on this alone: a first guess has to have been right."""

_BITS = 21
_MASK = (1 << (_BITS * GRAM)) - 1
_LARGEST = 1 << _BITS


class Lookup:
    """One sequence's guesses from its own text. `token_ids` is the sequence's own list, which only grows."""

    __slots__ = ("_expected", "_hits", "_ids", "_index", "_key", "_lost_at", "_lost_for", "_seen", "_trials")

    def __init__(self, token_ids: list[int]) -> None:
        self._ids = token_ids
        self._index: dict[int, int] = {}
        self._key = 0
        self._seen = 0
        self._expected: int | None = None  # the place whose token is expected next
        self._lost_at: int | None = None
        self._lost_for = 0
        self._hits = FIRST_CHANCE
        self._trials = 1.0

    @property
    def chance(self) -> float:
        """How likely the next guess is right, as far as the last ones tell; 0 where there is none."""
        return 0.0 if self._expected is None else self._hits / self._trials

    def catch_up(self) -> None:
        """Look at the tokens that came since the last call."""
        if not self._seen:
            self._read_prompt()
            return
        ids = self._ids
        for place in range(self._seen, len(ids)):
            self._compare(place, ids[place])
        self._seen = len(ids)

    def draft(self, length: int) -> tuple[int, ...]:
        """The next tokens, if the text goes on as it did there; it goes round where that place is the text's end."""
        start = self._expected
        if start is None:
            return ()
        ids = self._ids
        period = len(ids) - start
        return tuple(ids[start + step % period] for step in range(length))

    def _read_prompt(self) -> None:
        ids = self._ids
        self._seen = len(ids)
        first = max(0, len(ids) - MAX_INDEXED)
        known = np.array(ids[first:], dtype=np.int64) % _LARGEST
        keys = known[: max(0, known.size - GRAM + 1)].copy()
        for offset in range(1, GRAM):
            keys <<= _BITS
            keys |= known[offset : offset + keys.size]
        if not keys.size:
            return
        listed = keys.tolist()
        self._key = listed.pop()
        self._index = dict(zip(listed, range(first + GRAM, len(ids)), strict=True))
        self._expected = self._index.get(self._key)
        self._index[self._key] = len(ids)

    def _compare(self, place: int, token: int) -> None:
        expected = self._expected
        if expected is not None:
            is_hit = self._ids[expected] == token
            self._hits = MEMORY * self._hits + is_hit
            self._trials = MEMORY * self._trials + 1.0
            if not is_hit:
                self._lost_at, self._lost_for, self._expected = expected, 0, None
        found = self._note(place, token)
        if self._expected is not None:
            self._expected += 1
        elif found is not None:
            self._expected = found
        elif self._lost_at is not None:
            self._look_near(place, token)

    def _note(self, place: int, token: int) -> int | None:
        """Where the last tokens stood before, that is: the place behind; from now on they stand here."""
        self._key = (self._key << _BITS | token % _LARGEST) & _MASK
        if place + 1 < GRAM:
            return None
        if len(self._index) >= 2 * MAX_INDEXED:
            self._index.clear()
        found = self._index.get(self._key)
        self._index[self._key] = place + 1
        return found

    def _look_near(self, place: int, token: int) -> None:
        lost_at = self._lost_at
        if lost_at is None:
            return
        self._lost_for += 1
        near = self._ids[lost_at : min(lost_at + NEAR, place)]
        if token in near:
            self._expected = lost_at + near.index(token) + 1
        elif self._lost_for >= NEAR:
            self._lost_at = None


_FEW = 8


class StepCosts:
    """How long a pass takes: so much per call of the library, and so much per token, fitted to the last passes.

    Relative errors count, old passes count less and less, and as long as passes of one size only are known, a token
    more is believed to cost `PRIOR` of what a pass of one token takes.
    """

    PRIOR = 0.35
    _WEIGHT = 0.02
    _FADE = 0.985
    _ODD = 3.0

    def __init__(self) -> None:
        self._cc = self._cn = self._nn = self._c = self._n = 0.0
        self._call_s, self._token_s = 1.0 - self.PRIOR, self.PRIOR
        self._count = 0

    def observe(self, calls: int, tokens: int, seconds: float) -> None:
        """A pass of so many tokens in so many calls took so long."""
        if seconds <= 0:
            return
        if self._count > _FEW:
            expected = self.seconds(calls, tokens)
            seconds = min(max(seconds, expected / self._ODD), expected * self._ODD)
        self._count += 1
        c, n = calls / seconds, tokens / seconds
        fade = self._FADE
        self._cc = fade * self._cc + c * c
        self._cn = fade * self._cn + c * n
        self._nn = fade * self._nn + n * n
        self._c = fade * self._c + c
        self._n = fade * self._n + n
        self._fit()

    def seconds(self, calls: int, tokens: float) -> float:
        """What such a pass would take now."""
        return self._call_s * calls + self._token_s * tokens

    @property
    def is_known(self) -> bool:
        """Whether anything was measured; until then, seconds are no seconds."""
        return self._count > 0

    @property
    def token_s(self) -> float:
        """What one more token in a pass costs."""
        return self._token_s

    def _fit(self) -> None:
        # (1 - PRIOR) * token = PRIOR * call is the belief; it has no unit, so it is weighed like the passes are.
        weight = self._WEIGHT * self._cc
        cc = self._cc + weight * self.PRIOR**2
        cn = self._cn - weight * self.PRIOR * (1 - self.PRIOR)
        nn = self._nn + weight * (1 - self.PRIOR) ** 2
        determinant = cc * nn - cn * cn
        if determinant <= 0:
            return
        call_s = (self._c * nn - self._n * cn) / determinant
        token_s = (self._n * cc - self._c * cn) / determinant
        whole = max(call_s, 0.0) + max(token_s, 0.0)
        if whole > 0:
            self._call_s, self._token_s = max(call_s, 0.0), max(token_s, whole / 200)


class KnownCosts(StepCosts):
    """Costs that stay as they are, so that what is decided by them can be decided again."""

    is_known = True

    def __init__(self, call_s: float, token_s: float) -> None:
        super().__init__()
        self._call_s, self._token_s = call_s, token_s

    def observe(self, calls: int, tokens: int, seconds: float) -> None:
        """They stay."""


def draft_lengths(
    chances: Items[float],
    most: Items[int],
    costs: StepCosts,
    proposing: Callable[[int, int], float] = lambda *_: 0.0,
    *,
    is_again: bool = False,
) -> list[int]:
    """How many tokens to draft for each sequence of a pass, given how likely each guess is and the most it may have.

    `proposing(count, length)`: seconds that go into the drafts themselves. `is_again`: what is kept of a draft that
    isn't right to its end is computed once more.

    All that get a draft in one pass get an equally long one: passes are cut into calls of equal lengths. Sequences
    without one go in a call of their own, never a single one of several: alone in a call, the library's arithmetic has
    other last bits (see `engine/calls.py`), and no answer may depend on its neighbours' drafts.
    """
    count = len(chances)
    lengths = [0] * count
    plain = count / costs.seconds(1, count)
    # Below this a token costs more than it is worth even in the same call.
    least = plain * costs.token_s
    order = sorted((i for i in range(count) if most[i] and chances[i] > least), key=lambda i: -chances[i])
    if not order or not _can_pay(count, [chances[i] for i in order], costs, plain * MIN_GAIN):
        return lengths
    best, chosen, chosen_length, last = plain * MIN_GAIN, order[:0], 0, 0.0
    for length in LENGTHS:
        able = [i for i in order if most[i] >= length]
        gained = top = 0.0
        for number, i in enumerate(able, 1):
            gained += _expected(chances[i], length)
            if number == count - 1:
                continue
            calls = 1 if number == count else 2
            seconds = costs.seconds(calls, count + number * length) + proposing(number, length)
            if is_again:
                seconds += (1.0 - chances[i] ** length) * costs.seconds(1, 1 + gained)
            rate = (count + gained) / seconds
            top = max(top, rate)
            if rate > best:
                best, chosen, chosen_length = rate, able[:number], length
        if top < last:
            break  # one token more was worth less than it cost; the next ones are less likely still
        last = top
    for i in chosen:
        lengths[i] = chosen_length
    return lengths


def _can_pay(count: int, ranked: list[float], costs: StepCosts, least: float) -> bool:
    """Whether any drafts could bring so many tokens per second: an upper bound, at a tenth of what the search takes.

    What is kept of a draft is convex in its chance, so all of them together are worth no more than `many` of the
    likeliest would be, and no pass takes less than one call.
    """
    peak = ranked[0]
    many = sum(ranked) / peak
    return any(
        count + many * _expected(peak, length) > least * costs.seconds(1, count + many * length) for length in LENGTHS
    )


def _expected(chance: float, length: int) -> float:
    """Tokens of a draft that are kept on average: one more only where all before it were right."""
    if chance >= 1.0:
        return float(length)
    return float(chance * (1.0 - chance**length) / (1.0 - chance))
