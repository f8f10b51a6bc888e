"""A decoder whose steps only take time, and that says what the simulator wants said.

Enters: batches of the loop. Leaves: logits whose largest is the next token of an answer made beforehand. Always true:
no model, no wall clock; what a slot holds is a number of tokens and whose they are; a cache that is brought costs what
`StepTiming.copy_s` says. Next: `simulate.py`.
"""

import random
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hitsend.plan.fleet import Place
from hitsend.plan.steps import Answers, calls_of
from hitsend.plan.timing import StepTiming, Work
from hitsend.serve.loop.decoder import Batch

PLAIN = 512
"""Tokens of texts; those above end prompts, and say whose answer follows."""
VOCAB = 1472
WORDS = 64
"""Of these are answers that nobody knows."""
PERIODS = (4, 40)
"""A repeat goes back so many tokens, from and to."""


class CountedClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def wall(self) -> float:
        """The same: nothing here is shown to people."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let them pass."""
        self._now += seconds


class Saved(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes that nobody wrote: only how many they are, and what they would have been."""

    held: tuple[int, int]


class TimedDecoder:
    """Behind the loop's `Decoder`."""

    def __init__(self, clock: CountedClock, timing: StepTiming, place: Place) -> None:
        self.vocab_size = VOCAB
        self.num_slots = place.slots
        self.cells_per_slot = place.cells_per_slot
        self.num_cells = place.cells
        self.max_batch_tokens = place.step_tokens
        self.end_token_ids: frozenset[int] = frozenset()
        self.adapter_names: frozenset[str] = frozenset()
        self.can_go_back = True
        self.token_bytes = tuple(bytes([token % 256]) for token in range(VOCAB))
        self._clock, self.timing = clock, timing
        self._bytes_per_token = max(1, place.kv_bytes_per_token)
        self._held = np.zeros(place.slots, dtype=np.int64)
        self._whose = np.zeros(place.slots, dtype=np.int64)
        self._moved = 0
        self._answers: dict[int, tuple[int, Sequence[int]]] = {}

    def expect(self, code: int, prompt_tokens: int, answer: Sequence[int]) -> None:
        """What follows the prompt of so many tokens that ends with `code`."""
        self._answers[code] = (prompt_tokens, answer)

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Let the step's time pass."""
        self._clock.advance(self.timing.step_s(self._work(batch)))
        self._moved = 0
        np.maximum.at(self._held, batch.slots, batch.positions + 1)
        for at in np.flatnonzero(batch.token_ids >= PLAIN):
            self._whose[batch.slots[at]] = batch.token_ids[at]
        wanted = batch.wants_logits
        logits = np.zeros((int(wanted.sum()), VOCAB), dtype=np.float32)
        for row, (slot, position) in enumerate(zip(batch.slots[wanted], batch.positions[wanted], strict=True)):
            logits[row, self._next(int(slot), int(position))] = 1.0
        return logits

    def _work(self, batch: Batch) -> Work:
        """A slot all of whose rows want logits decodes, with a draft or without."""
        rows = np.bincount(batch.slots, minlength=self.num_slots)
        wanted = np.bincount(batch.slots[batch.wants_logits], minlength=self.num_slots)
        decodes = (rows > 0) & (rows == wanted)
        is_prompt = ~decodes[batch.slots]
        prompts = np.flatnonzero((rows > 0) & ~decodes)
        cells = batch.positions.astype(np.int64) + 1
        return Work(
            decodes=int(decodes.sum()),
            drafted=int(rows[decodes].sum() - decodes.sum()),
            held=int(cells[~is_prompt].sum()),
            passes=len(set(rows[decodes].tolist())),
            pieces=calls_of((int(self._held[slot]), int(rows[slot])) for slot in prompts),
            prefill=int(is_prompt.sum()),
            attended=int(cells[is_prompt].sum()),
            moved=self._moved,
        )

    def _next(self, slot: int, position: int) -> int:
        prompt_tokens, answer = self._answers.get(int(self._whose[slot]), (0, ()))
        place = position + 1 - prompt_tokens
        return answer[place] if 0 <= place < len(answer) else 0

    def release(self, slot: int) -> None:
        """Forget what it holds."""
        self._held[slot] = self._whose[slot] = 0

    def move(self, source: int, target: int) -> None:
        """What was there is here. As in libllama, the next step does it."""
        self._held[target], self._whose[target] = self._held[source], self._whose[source]
        self._moved += 1
        self.release(source)

    def copy(self, source: int, target: int) -> None:
        """The same in both."""
        self._bring(target, int(self._held[source]), int(self._whose[source]))

    def truncate(self, slot: int, num_tokens: int) -> bool:
        """Always possible."""
        self._held[slot] = min(int(self._held[slot]), num_tokens)
        return True

    def save(self, slot: int) -> NDArray[np.uint8]:
        """As many bytes as it would have."""
        size = int(self._held[slot]) * self._bytes_per_token
        saved = np.broadcast_to(np.uint8(0), (size,)).view(Saved)
        saved.held = (int(self._held[slot]), int(self._whose[slot]))
        return saved

    def restore(self, slot: int, saved: NDArray[np.uint8]) -> None:
        """What `save` gave."""
        assert isinstance(saved, Saved)
        self._bring(slot, *saved.held)

    def _bring(self, slot: int, held: int, whose: int) -> None:
        self._clock.advance(self.timing.copy_s(held))
        self._held[slot], self._whose[slot] = held, whose


def plain(ids: Iterable[int]) -> tuple[int, ...]:
    """Equal ones stay equal; that others become so is rare enough for three in a row to tell the same place."""
    return tuple(2 + token % (PLAIN - 2) for token in ids)


def answer(tokens: int, how: Answers, seed: int) -> list[int]:
    """Tokens that repeat themselves as answers were seen to: a repeat goes on with what stood a while before."""
    # made up to be simulated with, nothing secret
    rng = random.Random(seed)  # noqa: S311
    found: list[int] = []
    period = 0
    for _ in range(tokens):
        if period and rng.random() < how.leave:
            period = 0
        elif not period and len(found) > PERIODS[0] and rng.random() < how.enter:
            period = rng.randint(PERIODS[0], min(PERIODS[1], len(found)))
        found.append(found[-period] if period else rng.randrange(2, WORDS))
    return found
