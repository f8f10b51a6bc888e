"""A model's own head for guessing ahead (MTP): one more layer, which goes on from what the last layer said.

For the token at position p it takes the token and the last layer's state at p - 1, and says which token follows; its
own state stands in for the last layer's when it goes on from its own guess. It has a context and a cache of its own,
over the model's weights. It sees at most the last `HEAD_CELLS` tokens of a sequence, and of those that were computed
before the sequence came into its slot (a prefix that was used again) none: that costs guesses, nothing else.

Enters: what the decoder computes, as it does. Leaves: guesses. Always true: nothing here changes what the model says;
states wait in memory, at most `WINDOW` of each slot, until somebody wants a guess; a failure empties the head's cache.
Next: `../loop/own_head.py`, which decides when it is asked.
"""

from collections import deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock
from hitsend.core.drafts import MAX_DRAFT
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.libllama import Library, floats_at, new_batch
from hitsend.serve.engine.shape import HEAD_WINDOW, CellPlan
from hitsend.serve.engine.slots import Run, Slots
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import DecoderFailed

_MTP = 1
_CALL_TOKENS = 512
_TRIES = 5
_NOTED_STEPS = 64

Ids = NDArray[np.int32]
States = NDArray[np.float32]


class _Rows(NamedTuple):
    """What goes through the head: tokens, the states before them, and whether their successors are wanted."""

    ids: Ids
    positions: Ids
    slots: Ids
    states: States
    wants: NDArray[np.int8]


class _Trail:
    """What one slot computed and the head doesn't know yet: rows for positions `start` on."""

    __slots__ = ("count", "ids", "last", "start", "states")

    def __init__(self, start: int, width: int) -> None:
        self.start = start
        self.count = 0
        self.ids = np.empty(HEAD_WINDOW, np.int32)
        self.states = np.empty((HEAD_WINDOW, width), np.float32)
        self.last = np.zeros(width, np.float32)  # the state of the token before the next one

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.start + self.count

    def add(self, ids: Ids, states: States) -> bool:
        """Tokens behind the last ones; False where earlier rows had to go."""
        count, is_whole = len(ids), True
        before = np.concatenate([self.last[None], states[:-1]])
        self.last[:] = states[-1]
        if count > HEAD_WINDOW - self.count:
            is_whole = False
            kept = max(0, min(self.count, HEAD_WINDOW // 2, HEAD_WINDOW - count))
            dropped = self.count - kept
            self.ids[:kept] = self.ids[dropped : self.count].copy()
            self.states[:kept] = self.states[dropped : self.count].copy()
            skipped = max(0, count - HEAD_WINDOW)
            self.start, self.count = self.end - kept + skipped, kept
            ids, before = ids[skipped:], before[skipped:]
        self.ids[self.count : self.count + len(ids)] = ids
        self.states[self.count : self.count + len(ids)] = before
        self.count += len(ids)
        return is_whole


class MtpHead:
    """The head of one model, following the decoder whose `context` it is made for. Raises ConfigError."""

    def __init__(self, model: LoadedModel, context: int, plan: CellPlan, *, num_threads: int) -> None:
        self._lib: Library = model.library
        self._trunk = context
        self._width = int(self._lib.llama_model_n_embd(model.handle))
        self._vocab_size = model.vocabulary.num_tokens
        self._cells = plan.head_cells
        self._context = self._open(model, plan, num_threads)
        self._slots = Slots(self._lib, self._context, is_unified=False, is_recurrent=False, again=_never)
        self._trails: dict[int, _Trail] = {}
        self._steps: deque[tuple[Ids, Ids, Ids, States]] = deque(maxlen=_NOTED_STEPS)
        self._first: dict[int, int] = {}  # the lowest position in the head's cache, by slot
        self._pass_s = 0.0
        self._lib.llama_set_embeddings_nextn(context, True, False)  # of all tokens
        self._lib.llama_set_embeddings_nextn(self._context, True, True)  # of those that are wanted

    def computed(self, ids: Ids, positions: Ids, slots: Ids) -> None:
        """The decoder's last call computed these rows, sorted by slot."""
        address = self._lib.llama_get_embeddings_nextn(self._trunk)
        states = floats_at(address, len(ids), self._width)
        if len(ids) == 1 or (slots[1:] > slots[:-1]).all():
            # a plain step: most of them nobody asks about, so it is only noted
            self._steps.append((ids.copy(), positions.copy(), slots.copy(), states.copy()))
            return
        self._follow_steps()
        starts = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(ids)]):
            self._follow(int(slots[start]), int(positions[start]), ids[start:end], states[start:end])

    def draft(self, asked: dict[int, int], length: int) -> dict[int, tuple[int, ...]]:
        """Slot to its pending token: up to so many that may follow, for the slots that it knows enough of."""
        self._follow_steps()
        known = {slot: token for slot, token in sorted(asked.items()) if slot in self._trails}
        try:
            return self._draft(known, length)
        except DecoderFailed:
            for slot in list(self._trails):
                self.forget(slot)
            return {}

    def seconds(self, count: int, length: int) -> float:
        """What drafting so many tokens for so many slots takes, as measured at the start."""
        return self._pass_s * length * (0.65 + 0.35 * count)

    def measure(self, clock: Clock) -> None:
        """See how long it takes for one token."""
        one, fastest = np.zeros(1, np.int32), float("inf")
        for position in range(_TRIES):
            before = clock.now()
            self._compute(_Rows(one, one + position, one, np.zeros((1, self._width), np.float32), np.ones(1, np.int8)))
            fastest = min(fastest, clock.now() - before)
        self._slots.release(0)
        self._pass_s = fastest

    def forget(self, slot: int) -> None:
        """The slot is empty."""
        self._follow_steps()
        self._trails.pop(slot, None)
        self._clear(slot)

    def move(self, source: int, target: int) -> None:
        """What was in one slot is in another one."""
        self.forget(target)
        if source in self._trails:
            self._trails[target] = self._trails.pop(source)
        if source in self._first:
            self._slots.copy(source, target)
            self._first[target] = self._first[source]

    def cut(self, slot: int, num_tokens: int) -> None:
        """The slot has only so many tokens left."""
        self._follow_steps()
        trail = self._trails.get(slot)
        if trail is None or num_tokens >= trail.end:
            return
        if num_tokens < trail.start:
            self.forget(slot)
            return
        trail.count = num_tokens - trail.start
        trail.last[:] = trail.states[trail.count]

    def close(self) -> None:
        """Free its context (before the model, and before the decoder's). Safe to call twice."""
        if self._context:
            self._lib.llama_free(self._context)
            self._lib.llama_set_embeddings_nextn(self._trunk, False, False)
            self._context = 0

    def _follow_steps(self) -> None:
        """Of plain steps, the last ones are known; where earlier ones were, the head begins anew."""
        while self._steps:
            ids, positions, slots, states = self._steps.popleft()
            for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                self._follow(slot, position, ids[row : row + 1], states[row : row + 1])

    def _follow(self, slot: int, position: int, ids: Ids, states: States) -> None:
        trail = self._trails.get(slot)
        if trail is not None and trail.end == position + 1 and not trail.count:  # its first one is known since a draft
            trail.last[:] = states[0]
            position, ids, states = position + 1, ids[1:], states[1:]
        if trail is None or trail.end != position:
            self._clear(slot)
            trail = self._trails[slot] = _Trail(position, self._width)
            if position:  # the state before its first token is nowhere
                trail.start, trail.last[:] = position + 1, states[0]
                ids, states = ids[1:], states[1:]
        if len(ids) and not trail.add(ids, states):
            self._clear(slot)

    def _draft(self, asked: dict[int, int], length: int) -> dict[int, tuple[int, ...]]:
        if not asked:
            return {}
        slots = list(asked)
        self._catch_up(slots)
        places = [self._trails[slot].start for slot in slots]
        tokens, states = list(asked.values()), np.stack([self._trails[slot].last for slot in slots])
        guesses: list[list[int]] = []
        for step in range(length):
            rows = _Rows(
                np.array(tokens, np.int32),
                np.array(places, np.int32) + np.int32(step),
                np.array(slots, np.int32),
                states,
                np.ones(len(slots), np.int8),
            )
            tokens, states = self._compute(rows)
            guesses.append(tokens)
        for slot, place in zip(slots, places, strict=True):  # what was guessed may be wrong
            self._slots.truncate(slot, place + 1)
            self._trails[slot].start = place + 1
        return dict(zip(slots, zip(*guesses, strict=True), strict=True))

    def _catch_up(self, slots: list[int]) -> None:
        """Show it what each slot computed since the last draft.

        In a call of its own: where outputs are wanted of some tokens only, the library hands out others' states.
        """
        parts: list[tuple[Ids, Ids, Ids, States]] = []
        room = _CALL_TOKENS
        for slot in slots:
            trail = self._trails[slot]
            self._make_room(slot, trail)
            if trail.count > room:
                self._show(parts)
                parts, room = [], _CALL_TOKENS
            if trail.count:
                positions = np.arange(trail.start, trail.end, dtype=np.int32)
                owners = np.full(trail.count, slot, np.int32)
                parts.append((trail.ids[: trail.count], positions, owners, trail.states[: trail.count]))
                room -= trail.count
                trail.start, trail.count = trail.end, 0
        self._show(parts)

    def _show(self, parts: list[tuple[Ids, Ids, Ids, States]]) -> None:
        if parts:
            ids, positions, slots, states = (np.concatenate(column) for column in zip(*parts, strict=True))
            self._compute(_Rows(ids, positions, slots, states, np.zeros(len(ids), np.int8)))

    def _make_room(self, slot: int, trail: _Trail) -> None:
        """Forget the older half where the next tokens and a draft wouldn't fit."""
        first, needed = self._first.setdefault(slot, trail.start), trail.end + MAX_DRAFT
        if needed - first > self._cells:
            first = max(needed - self._cells, (first + trail.start) // 2)
            self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), slot, 0, first)
            self._first[slot] = first

    def _compute(self, rows: _Rows) -> tuple[list[int], States]:
        """The likeliest successor and the head's state for each wanted row."""
        count, wanted = len(rows.ids), int(rows.wants.sum())
        pointers = rows.slots.ctypes.data + np.arange(count, dtype=np.uint64) * rows.slots.itemsize
        arrays = (rows.ids, rows.positions, np.ones(count, np.int32), pointers, rows.wants)
        states = np.ascontiguousarray(rows.states)
        code: int = self._lib.llama_decode(self._context, new_batch(arrays, 0, count, states))
        if code != 0:
            raise DecoderFailed(f"the MTP head failed with {code}: {self._lib.take_lines()}", is_fatal=False)
        if not wanted:
            return [], states[:0]
        logits = floats_at(self._lib.llama_get_logits(self._context), wanted, self._vocab_size)
        own = floats_at(self._lib.llama_get_embeddings_nextn(self._context), wanted, self._width)
        return logits.argmax(axis=1).tolist(), own.copy()

    def _clear(self, slot: int) -> None:
        if self._first.pop(slot, None) is not None:
            self._slots.release(slot)

    def _open(self, model: LoadedModel, plan: CellPlan, num_threads: int) -> int:
        lib = self._lib
        params = lib.default_context_params()
        params.n_ctx = plan.num_slots * plan.head_cells
        params.n_batch = params.n_ubatch = _CALL_TOKENS
        params.n_seq_max = plan.num_slots
        params.n_threads = params.n_threads_batch = num_threads
        params.ctx_type, params.ctx_other = _MTP, self._trunk
        lib.take_lines()
        context: int = lib.llama_init_from_model(model.handle, params) or 0
        if not context:
            raise ConfigError(f"engine.speculation: libllama can't run the model's MTP head: {lib.take_lines()}")
        return context


def _never(_: Run) -> None:
    """Attention layers go back without it."""
