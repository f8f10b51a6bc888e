"""How many prompt tokens a step may compute while others decode.

Without decodes: the whole budget. With them, each step earns the prompts some of the machine's time, in seconds: what
a step of the decodes alone leaves of `tpot_target_s`, and never less than `FLOOR` times that step. A chunk may go
while the account is above zero and is charged what it costs, so that a piece longer than what was earned is followed
by steps without any. A long prompt (`is_long`) earns no more than `LONG_SHARE` of the decodes' time, and is
cut finer than `PIECE` where a piece would overdraw: its steps stay below twice what they are without it.

So neither starves. Decodes take part in every step, and over any run of steps prompts take on average at most
max(tpot_target_s - d, FLOOR * d) per step, where d is a step of decodes alone, and one chunk more. Prompts get at
least FLOOR / (1 + FLOOR), a fifth, of the time, so those of one tenant are done after at most five times what they
would take alone, and a chunk. A short prompt that has waited for half of `ttft_target_s` and can still be on time
goes ahead with the whole budget: mean time per token can be made up for, a first token that is late can't.

Holding prompts back helps nobody where decodes can't keep the target whatever is done: with more of them than a step of
`tpot_target_s` bears (`is_too_full`), short prompts have the whole budget, in the order in which they came. So does a
crowd (`crowds`), most of which can't be on time: beside the pace of the few that decode already, all would be later.

The costs are learnt from the steps themselves: a fixed part, one per decoded token, one per prompt token. Each step
moves them by a bounded part of itself, so that a machine that stood still for a second is no lesson, and a slower one
is.

Enters: what steps computed and how long they took. Leaves: numbers of tokens. Always true: pure arithmetic, no clock;
more decodes never mean more prompt tokens; a prompt that waits is never given nothing for ever. Next: `scheduler.py`.
"""

from math import inf

PIECE = 64
"""Chunks end at multiples of this (see `../engine/calls.py`) wherever the pace allows it."""

BLAS_PIECE = 256
"""The least that goes at once of short prompts where products are a BLAS library's: half as much takes more than half
of the time (measured at 8 at once: 157 tokens/s, with 128 154, with 64 143; tokens of decodes keep their mean)."""

FINEST = 8
"""Fewest tokens of a chunk: shorter ones cost more per token than decoding does. Far into a long prompt, where
attention makes that few take longer than the decodes beside them and than `UNSEEN` of the target, fewer."""

UNSEEN = 0.2
"""Of `tpot_target_s`: a gap that is longer by so much isn't worth finer chunks."""

LONG_TOKENS, LONGEST_SHORT = 1024, 3072
"""A prompt is long that has more than so many to compute and can't be on time with the whole machine either; with more
than the second, in any case: what it does to the gaps between others' tokens lasts."""

FLOOR = 0.25
"""What prompts earn at least, in steps of the decodes alone."""

LONG_SHARE = 0.6
"""What a long prompt earns at most, in steps of the decodes alone: with what its finer chunks cost, less than twice."""

YIELD_S, YIELD = 20.0, 10.0
"""A prompt that can't be on time goes behind those that can and come within so many seconds, and so many times its own
work, after it."""

CROWD = 10
"""Fewer prompts than these are no crowd."""

MOST_BEHIND = 1.5
"""A decode whose tokens took so many times the target on average counts as lost."""

_GAIN = 0.05
"""How much of an error one step corrects at most."""

_SCALE = 8.0
"""Decodes of a typical step: makes the fixed part and that per decode learn equally fast."""


class StepCosts:
    """Seconds of a step: `fixed_s` + `decode_s` per decoded token + `prefill_s` per prompt token; `fine_s` per token of
    a long prompt's fine chunks, which grows with what is before them. 0: not measured."""

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.decode_s = 0.0
        self.prefill_s = 0.0
        self.fine_s = 0.0

    def decodes_s(self, num_decodes: int) -> float:
        """A step of so many decodes and nothing else."""
        return self.fixed_s + self.decode_s * num_decodes if num_decodes else 0.0

    def learn_fine(self, num_decodes: int, num_tokens: int, seconds: float) -> None:
        """One step with a fine chunk took so long."""
        known_s = self.fine_s or self.prefill_s
        error = max(0.0, seconds - self.decodes_s(num_decodes)) / num_tokens - known_s
        self.fine_s = known_s + _GAIN * _within(error, known_s) if known_s else error

    def learn(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """One step took so long."""
        if num_prefill_tokens:
            each_s = max(0.0, seconds - self.decodes_s(num_decodes)) / num_prefill_tokens
            weight = min(1.0, max(0.25, num_prefill_tokens / PIECE))
            error = each_s - self.prefill_s
            self.prefill_s += _GAIN * weight * _within(error, self.prefill_s) if self.prefill_s else error
        elif num_decodes and not self.decode_s:
            self.fixed_s, self.decode_s = seconds / 2, seconds / 2 / num_decodes
        elif num_decodes:
            expected = self.decodes_s(num_decodes)
            error = _GAIN * _within(seconds - expected, expected)
            scaled = num_decodes / _SCALE
            part = error / (1.0 + scaled * scaled)
            self.fixed_s = max(0.0, self.fixed_s + part)
            self.decode_s = max(1e-9, self.decode_s + part * scaled / _SCALE)


class Pace:
    """The account of one engine. With targets of inf every step has the whole budget, and prompts keep their order.

    `piece`: the fewest tokens of a short prompt that are worth a call.
    """

    def __init__(self, tpot_target_s: float = inf, ttft_target_s: float = inf, *, piece: int = PIECE) -> None:
        self._tpot_s = tpot_target_s
        self._ttft_s = ttft_target_s
        self._piece = piece
        self.costs = StepCosts()
        self._account_s = 0.0
        self._is_crowd = self._is_fine = False

    def crowds(self, num_prompts: int, num_tokens: int, *, is_lost: bool) -> bool:
        """Whether so many short prompts, with so many tokens in all, are a crowd: too many to be all on time even with
        the whole machine. To be asked in every step: it lasts until none of them is left, and then as long as `is_lost`
        says that most decodes can't keep their targets."""
        is_new = num_prompts >= CROWD and num_tokens * self.costs.prefill_s > self._ttft_s
        self._is_crowd = is_new or (self._is_crowd and (num_prompts > 0 or is_lost))
        return self._is_crowd

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute is long."""
        if num_tokens <= LONG_TOKENS:
            return False
        seconds = num_tokens * self.costs.prefill_s
        return num_tokens > LONGEST_SHORT or not 0.0 < seconds <= self._ttft_s

    def is_late(self, arrived_at: float, at: float) -> bool:
        """Whether a prompt that came then has waited as long as it should."""
        return at - arrived_at > self._ttft_s / 2

    def is_lost(self, arrived_at: float, num_tokens: int, at: float) -> bool:
        """Whether a prompt that came then, with so many tokens to compute, can't be on time any more."""
        return at - arrived_at + num_tokens * self.costs.prefill_s > self._ttft_s

    def is_too_full(self, num_running: int) -> bool:
        """Whether so many decodes alone make steps that are longer than the target."""
        return self.costs.decodes_s(num_running) > self._tpot_s

    def can_keep(self, arrived_at: float, first_at: float, num_tokens: int, at: float) -> bool:
        """Whether a decode can still keep both targets: its first token came in time, and what came since isn't so late
        that the rest couldn't make up for it."""
        is_behind = at - first_at > self._tpot_s * (MOST_BEHIND * num_tokens + 2)
        return first_at - arrived_at <= self._ttft_s and not is_behind

    def due_at(self, arrived_at: float, num_tokens: int, *, is_lost: bool) -> float:
        """Prompts of one tenant go in this order. One that can't be on time any more lets those pass that can, if they
        come within a bounded time after it."""
        return arrived_at + self._ttft_s + is_lost * (YIELD_S + YIELD * num_tokens * self.costs.prefill_s)

    def earned_s(self, num_decodes: int, *, is_long: bool) -> float:
        """What one step with so many decodes gives to prompts."""
        decodes_s = self.costs.decodes_s(num_decodes)
        if is_long:
            return min(max(self._tpot_s - decodes_s, FLOOR * decodes_s), LONG_SHARE * decodes_s)
        return max(self._tpot_s - decodes_s, FLOOR * decodes_s)

    def tokens(self, num_decodes: int, budget: int, *, is_long: bool) -> int:
        """How many the next step may compute, at most `budget`; `is_long` is said of the prompt whose turn it is.

        To be asked once per step that has a prompt: each time something is earned.
        """
        self._is_fine = is_long
        if not num_decodes or not self.costs.decode_s or self._tpot_s == inf:
            self._account_s = 0.0
            return budget
        earned_s = self.earned_s(num_decodes, is_long=is_long)
        self._account_s = min(self._account_s + earned_s, earned_s)
        if self._account_s <= 0.0:
            return 0
        token_s = max(self._token_s(is_fine=is_long), 1e-9)
        tokens = int(min(budget, self._account_s / token_s))
        if tokens >= PIECE:
            tokens -= tokens % PIECE
        bearable_s = max(self.costs.decodes_s(num_decodes), UNSEEN * self._tpot_s)
        finest = min(FINEST, max(1, int(bearable_s / token_s)))
        return min(budget, max(tokens, finest if is_long else self._piece))

    def took(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """What a step computed, and how long that took."""
        is_fine = self._is_fine and 0 < num_prefill_tokens < PIECE and num_decodes > 0
        if is_fine:
            self.costs.learn_fine(num_decodes, num_prefill_tokens, seconds)
        else:
            self.costs.learn(num_decodes, num_prefill_tokens, seconds)
        if num_decodes:
            self._account_s -= self._token_s(is_fine=is_fine) * num_prefill_tokens

    def _token_s(self, *, is_fine: bool) -> float:
        return (is_fine and self.costs.fine_s) or self.costs.prefill_s


def _within(value: float, bound: float) -> float:
    return max(-bound, min(value, bound))
