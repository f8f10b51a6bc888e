"""A model's own head for guessing ahead (MTP): one more layer, which goes on from what the last layer said.

For the token at position p it takes the token and the last layer's state at p - 1, and says which token follows; its
own state stands in for the last layer's when it goes on from its own guess. It has a context and a cache of its own,
over the model's weights. It sees at most the last `HEAD_CELLS` tokens of a sequence, and of those that were computed
before the sequence came into its slot (a prefix that was used again) none: that costs guesses, nothing else.

Enters: what the decoder computes, as it does. Leaves: guesses. Always true: nothing here changes what the model says;
states wait in memory, at most `WINDOW` of each slot, until somebody wants a guess; a failure empties the head's cache.
Next: `../loop/own_head.py`, which decides when it is asked.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.libllama import Library, floats_at, new_batch
from hitsend.serve.engine.shape import HEAD_WINDOW, CellPlan
from hitsend.serve.engine.slots import Run, Slots
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import DecoderFailed

_MTP = 1
_CALL_TOKENS = 512
_TRIES = 5

Ids = NDArray[np.int32]
States = NDArray[np.float32]


class _Rows(NamedTuple):
    """What goes through the head: tokens, the states before them, and whose successors are wanted."""

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
        self._first: dict[int, int] = {}  # the lowest position in the head's cache, by slot
        self._pass_s = 0.0
        self._lib.llama_set_embeddings_nextn(context, True, False)  # of all tokens
        self._lib.llama_set_embeddings_nextn(self._context, True, True)  # of those that are wanted

    def computed(self, ids: Ids, positions: Ids, slots: Ids) -> None:
        """The decoder's last call computed these rows, sorted by slot."""
        states = floats_at(self._lib.llama_get_embeddings_nextn(self._trunk), len(ids), self._width)
        starts = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(ids)]):
            self._follow(int(slots[start]), int(positions[start]), ids[start:end], states[start:end])

    def draft(self, asked: dict[int, int], length: int) -> dict[int, tuple[int, ...]]:
        """Slot to its pending token: up to so many that may follow, for the slots that it knows enough of."""
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
            self._context = 0

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
        guesses: dict[int, list[int]] = {}
        states: dict[int, States] = {}
        for slots in self._shared_out(asked):
            found = self._compute(self._catch_up({slot: asked[slot] for slot in slots}))
            for slot, guess, state in zip(slots, *found, strict=True):
                guesses[slot], states[slot] = [guess], state
        slots_of_all = np.array(list(guesses), np.int32)
        for step in range(1, length if guesses else 0):
            rows = _Rows(
                np.array([each[-1] for each in guesses.values()], np.int32),
                np.array([self._trails[slot].start - 1 + step for slot in guesses], np.int32),
                slots_of_all,
                np.stack(list(states.values())),
                np.ones(len(guesses), np.int8),
            )
            for slot, guess, state in zip(guesses, *self._compute(rows), strict=True):
                guesses[slot].append(guess)
                states[slot] = state
        for slot in guesses:  # what it guessed may be wrong
            self._slots.truncate(slot, self._trails[slot].start)
        return {slot: tuple(each) for slot, each in guesses.items()}

    def _shared_out(self, asked: dict[int, int]) -> list[list[int]]:
        """The slots by call: each brings what it has not told the head yet, and its pending token."""
        calls: list[list[int]] = []
        room = 0
        for slot in asked:
            count = self._trails[slot].count + 1
            if count > room:
                calls.append([])
                room = _CALL_TOKENS
            calls[-1].append(slot)
            room -= count
        return calls

    def _catch_up(self, asked: dict[int, int]) -> _Rows:
        parts = []
        for slot, token in asked.items():
            trail = self._trails[slot]
            count = trail.count + 1
            self._make_room(slot, trail, count)
            wants = np.zeros(count, np.int8)
            wants[-1] = 1
            ids = np.append(trail.ids[: trail.count], np.int32(token))
            positions = np.arange(trail.start, trail.start + count, dtype=np.int32)
            states = np.concatenate([trail.states[: trail.count], trail.last[None]])
            parts.append((ids, positions, np.full(count, slot, np.int32), states, wants))
            trail.start, trail.count = trail.end + 1, 0
        ids, positions, slots, states, wants = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _Rows(ids, positions, slots, states, wants)

    def _make_room(self, slot: int, trail: _Trail, count: int) -> None:
        """Forget the older half where the next tokens and a draft wouldn't fit."""
        first = self._first.setdefault(slot, trail.start)
        if trail.start + count + HEAD_WINDOW // 8 - first > self._cells:
            first = max(first, trail.start + count + HEAD_WINDOW // 8 - self._cells, (first + trail.start) // 2)
            self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), slot, 0, first)
            self._first[slot] = first

    def _compute(self, rows: _Rows) -> tuple[list[int], list[States]]:
        """The likeliest successor and the head's state for each wanted row."""
        count = len(rows.ids)
        pointers = rows.slots.ctypes.data + np.arange(count, dtype=np.uint64) * rows.slots.itemsize
        arrays = (rows.ids, rows.positions, np.ones(count, np.int32), pointers, rows.wants)
        states = np.ascontiguousarray(rows.states)
        code: int = self._lib.llama_decode(self._context, new_batch(arrays, 0, count, states))
        if code != 0:
            raise DecoderFailed(f"the MTP head failed with {code}: {self._lib.take_lines()}", is_fatal=False)
        wanted = np.flatnonzero(rows.wants).tolist()
        logits = floats_at(self._lib.llama_get_logits(self._context), len(wanted), self._vocab_size)
        best = logits.argmax(axis=1).tolist()
        state_of = self._lib.llama_get_embeddings_nextn_ith
        return best, [floats_at(state_of(self._context, row), 1, self._width)[0].copy() for row in wanted]

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
