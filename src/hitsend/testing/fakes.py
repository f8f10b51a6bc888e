"""Stand-ins for the slow or unpredictable parts: a clock, and a model without arithmetic.

Enters: what a test wants to happen. Leaves: objects that keep the same protocols as the real ones. Always true: no
threads, no real time, the same inputs give the same outputs, and a fake that is used wrongly raises `FakeMisused`.
Next: `../serve/loop/decoder.py`, the protocol of the largest one.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hitsend.serve.loop.decoder import Batch, DecoderFailed


class FakeMisused(AssertionError):
    """The code under test broke the protocol of the fake."""


class FakeClock:
    """Time that stands still until a test moves it."""

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        """Seconds, as far as `advance` has brought them."""
        return self._now

    def wall(self) -> float:
        """Unix seconds, moving together with `now`."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass; it can't go backwards."""
        if seconds < 0:
            raise FakeMisused(f"time can't go back by {-seconds} s")
        self._now += seconds
        self._wall += seconds


class FakeDecoder:
    """A model without arithmetic: the logits after some tokens depend on these tokens only.

    So a sequence's output can't depend on its slot, its chunks or its neighbours, unless the loop mixes them up.
    `num_cells` None is per-stream mode; fewer than num_slots * cells_per_slot is unified mode. `logits_of(tokens)`
    replaces the default, a normal deviate per token of the vocabulary; `next_token(tokens)` only says which one is the
    likeliest. `fails(batch)` returns what is to be raised instead of computing; nothing of the batch is kept then.
    Every decoded batch is in `batches`, every move in `moves`, every copy in `copies`. Token i stands for the character
    with that code point. `clock` is moved on by `step_s` in each `decode`. Not `can_go_back`: like a model with
    recurrent layers, which takes back `takes_back` tokens of a draft. Logits that a batch borrows are no numbers any
    more when the next one comes. With an adapter the default logits are others; a slot that has tokens of one adapter
    refuses those of another.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        num_slots: int = 4,
        cells_per_slot: int = 128,
        num_cells: int | None = None,
        max_batch_tokens: int = 512,
        end_token_ids: frozenset[int] = frozenset({0}),
        logits_of: Callable[[tuple[int, ...]], NDArray[np.float32]] | None = None,
        next_token: Callable[[tuple[int, ...]], int] | None = None,
        fails: Callable[[Batch], DecoderFailed | None] | None = None,
        clock: FakeClock | None = None,
        step_s: float = 0.01,
        can_go_back: bool = True,
        takes_back: int = 0,
        adapter_names: frozenset[str] = frozenset(),
    ) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.cells_per_slot = cells_per_slot
        self.num_cells = num_slots * cells_per_slot if num_cells is None else num_cells
        self.max_batch_tokens = max_batch_tokens
        self.end_token_ids = end_token_ids
        self.logits_of = logits_of
        self.next_token = next_token
        self.fails = fails
        self.clock = clock
        self.step_s = step_s
        self.can_go_back = can_go_back
        self.takes_back = takes_back
        self._before: dict[int, int] = {}
        self.adapter_names = adapter_names
        self.adapter_of: dict[int, str | None] = {}
        self._adapter: str | None = None
        self.slots: list[list[int]] = [[] for _ in range(num_slots)]
        self.batches: list[Batch] = []
        self.moves: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self._lent: NDArray[np.float32] | None = None

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The characters 0, 1, 2, … in UTF-8."""
        return tuple(chr(token).encode() for token in range(self.vocab_size))

    @property
    def cells_filled(self) -> int:
        """Tokens in the cache now, over all slots."""
        return sum(len(tokens) for tokens in self.slots)

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Append the batch to the slots' tokens, or raise what `fails` says."""
        if self._lent is not None:
            self._lent[:] = np.nan
        self._check(batch)
        self._check_adapter(batch)
        failure = self.fails(batch) if self.fails else None
        if failure is not None:
            raise failure
        if self.clock is not None:
            self.clock.advance(self.step_s)
        self.batches.append(batch)
        self._adapter = batch.adapter
        self._before = {int(slot): len(self.slots[slot]) for slot in np.unique(batch.slots)}
        rows = []
        for token, slot, wants in zip(batch.token_ids, batch.slots, batch.wants_logits, strict=True):
            self.adapter_of[int(slot)] = batch.adapter
            self.slots[slot].append(int(token))
            if wants:
                rows.append(self._logits(tuple(self.slots[slot])))
        logits = np.array(rows, dtype=np.float32).reshape(len(rows), self.vocab_size)
        self._lent = logits if batch.borrows else None
        return logits

    def release(self, slot: int) -> None:
        """Empty the slot."""
        self.slots[slot] = []

    def move(self, source: int, target: int) -> None:
        """Move the tokens of one slot to another, empty one."""
        self._transfer(source, target)
        self.slots[source] = []
        self.moves.append((source, target))

    def copy(self, source: int, target: int) -> None:
        """Copy the tokens of one slot to another, empty one."""
        self._transfer(source, target)
        self.copies.append((source, target))

    def truncate(self, slot: int, num_tokens: int) -> bool:
        """Keep the slot's first tokens. One that is not `can_go_back` forgets all of them, or, once, up to `takes_back`
        of those behind the first one of the last batch.
        """
        num_wrong = len(self.slots[slot]) - num_tokens
        if num_wrong <= 0:
            return True
        is_refused = num_wrong > self.takes_back or num_tokens <= self._before.pop(slot, num_tokens)
        if num_tokens and is_refused and not self.can_go_back:
            return False
        del self.slots[slot][num_tokens:]
        return True

    def save(self, slot: int) -> NDArray[np.uint8]:
        """The slot's tokens as bytes, and behind them which adapter they were computed with."""
        adapter = self.adapter_of.get(slot)
        number = 0 if adapter is None else 1 + sorted(self.adapter_names).index(adapter)
        return np.array([*self.slots[slot], number], np.int32).view(np.uint8)

    def restore(self, slot: int, saved: NDArray[np.uint8]) -> None:
        """Fill an empty slot with what was saved."""
        if self.slots[slot]:
            raise FakeMisused(f"slot {slot} still holds {len(self.slots[slot])} tokens")
        if self.cells_filled + saved.size // 4 - 1 > self.num_cells:
            raise FakeMisused(f"{saved.size // 4 - 1} cells more than {self.cells_filled}, {self.num_cells} there")
        *self.slots[slot], number = saved.view(np.int32).tolist()
        self.adapter_of[slot] = sorted(self.adapter_names)[number - 1] if number else None

    def _transfer(self, source: int, target: int) -> None:
        if self.slots[target]:
            raise FakeMisused(f"slot {target} still holds {len(self.slots[target])} tokens")
        if not self.slots[source]:
            raise FakeMisused(f"slot {source} holds nothing to move or copy")
        self.slots[target] = list(self.slots[source])
        self.adapter_of[target] = self.adapter_of[source]

    def _logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        if self.logits_of is not None:
            return self.logits_of(tokens)
        seeds = tokens if self._adapter is None else (*tokens, *self._adapter.encode())
        generator = np.random.Generator(np.random.PCG64(seeds))
        logits = generator.standard_normal(self.vocab_size, dtype=np.float32) * np.float32(2.0)
        if self.next_token is not None:
            logits[self.next_token(tokens)] = 40.0
        return logits

    def _check_adapter(self, batch: Batch) -> None:
        if batch.adapter is not None and batch.adapter not in self.adapter_names:
            raise FakeMisused(f"there is no adapter {batch.adapter!r}")
        for slot in np.unique(batch.slots).tolist():
            if self.slots[slot] and self.adapter_of[slot] != batch.adapter:
                raise FakeMisused(f"slot {slot} was computed with {self.adapter_of[slot]!r}, not {batch.adapter!r}")

    def _check(self, batch: Batch) -> None:
        size = len(batch.token_ids)
        if not 0 < size <= self.max_batch_tokens:
            raise FakeMisused(f"{size} tokens in a batch, limit {self.max_batch_tokens}")
        if {len(batch.positions), len(batch.slots), len(batch.wants_logits)} != {size}:
            raise FakeMisused("the arrays of a batch have different lengths")
        ends = {slot: len(tokens) for slot, tokens in enumerate(self.slots)}
        previous = 0
        for token, position, slot in zip(batch.token_ids, batch.positions, batch.slots, strict=True):
            if slot < previous:
                raise FakeMisused(f"slot {slot} comes after slot {previous}")
            if not 0 <= token < self.vocab_size:
                raise FakeMisused(f"token {token} is not in a vocabulary of {self.vocab_size}")
            if position != ends[slot]:
                raise FakeMisused(f"slot {slot} goes on at position {ends[slot]}, not {position}")
            ends[slot] += 1
            previous = slot
        if max(ends.values()) > self.cells_per_slot:
            raise FakeMisused(f"a slot would hold {max(ends.values())} tokens, limit {self.cells_per_slot}")
        if sum(ends.values()) > self.num_cells:
            raise FakeMisused(f"{sum(ends.values())} cells needed, {self.num_cells} there")
