"""libllama behind the loop's `Decoder`: batches in, logits out.

Enters: a `LoadedModel` with weights and a `CellPlan`. Leaves: rows of logits. Always true: batch arrays are allocated
once and filled by whole-array copies, logits are copied out before the library is called again (unless the batch
borrows them), a step that would take longer than `CALL_S` is cut into several calls with `on_progress` between them (a
slow machine must not look dead), and a step that failed half-way leaves every sequence as it was or says that the
process has to go. Next: `worker.py`.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.adapters import Adapters
from hitsend.serve.engine.calls import cut_by_length, cut_in_order
from hitsend.serve.engine.libllama import floats_at, new_batch
from hitsend.serve.engine.mtp import MtpHead
from hitsend.serve.engine.shape import CellPlan
from hitsend.serve.engine.slots import Run, Slots
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch, DecoderFailed

CALL_S = 4.0
"""A call that takes longer makes the next ones half as big: half of the 8 s after which /healthz turns red."""

MAX_CALL_TOKENS = 512
"""Also the library's micro-batch, so that it never cuts a call itself."""

KV_TYPES = {"f16": 1, "q8_0": 8}
"""ggml's numbers of the types that keys and values may have."""

_PREFILL_GAIN = 3
"""A batch is at least so much faster per token than a single token, on any machine we measured."""

_NO_SLOT, _ABORTED, _BAD_BATCH = 1, 2, -1


class LlamaDecoder(Slots):
    """One context of `plan.num_slots` sequences. Not thread-safe. See `loop/decoder.py` for the contract.

    `num_threads_alone` compute calls of one token (0: as many as all others): in a small model, threads that meet after
    each operation can cost more than they bring. `num_outputs`: rows of logits per call; 0: any. `head` follows what is
    computed, where there is one.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: CellPlan,
        clock: Clock,
        *,
        step_tokens: int,
        num_threads: int,
        num_threads_alone: int = 0,
        is_unified: bool,
        adapters: Adapters | None = None,
        kv_type: str = "f16",
        num_outputs: int = 0,
    ) -> None:
        self._clock = clock
        self._adapters = adapters
        self._model, self._lib, self._plan, self._is_unified = model, model.library, plan, is_unified
        self.head: MtpHead | None = None
        self._max_batch = min(max(step_tokens, plan.num_slots), plan.num_cells)
        self._max_call = min(self._max_batch, MAX_CALL_TOKENS)
        context = self._open((num_threads_alone or num_threads, num_threads), KV_TYPES[kv_type], num_outputs)
        is_recurrent = model.is_recurrent
        super().__init__(self._lib, context, is_unified=is_unified, is_recurrent=is_recurrent, again=self._again)
        self._vocab_size = model.vocabulary.num_tokens
        self._end = model.vocabulary.eog
        self._call_tokens = self._max_call
        size = self._max_batch
        self._ids, self._positions, self._slots = (np.zeros(size, np.int32) for _ in range(3))
        self._wants = np.zeros(size, np.int8)
        # every token belongs to one sequence: pointer i always leads to slots[i]
        pointers = self._slots.ctypes.data + np.arange(size, dtype=np.uint64) * self._slots.itemsize
        self._arrays = (self._ids, self._positions, np.ones(size, np.int32), pointers, self._wants)
        self.on_progress: Callable[[], None] | None = None

    @property
    def model(self) -> LoadedModel:
        """What it computes with."""
        return self._model

    @property
    def plan(self) -> CellPlan:
        """Its slots and cells."""
        return self._plan

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._vocab_size

    @property
    def num_slots(self) -> int:
        """How many sequences can have cache at once."""
        return self._plan.num_slots

    @property
    def num_cells(self) -> int:
        """Cells of all slots together."""
        return self._plan.num_cells

    @property
    def cells_per_slot(self) -> int:
        """Most cells that one sequence can hold."""
        return self._plan.cells_per_slot

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens in one `decode` call."""
        return self._max_batch

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """What each token stands for, by id. Asks the library anew each time."""
        return self._model.vocabulary.token_bytes()

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens by which the model says that it has finished."""
        return self._end

    @property
    def adapter_names(self) -> frozenset[str]:
        """The adapters that a batch may name."""
        return frozenset() if self._adapters is None else self._adapters.names

    @property
    def can_go_back(self) -> bool:
        """Whether `truncate` works anywhere; recurrent layers can't."""
        return not self.is_recurrent

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Run the batch and copy its logits out. Raises DecoderFailed."""
        count = len(batch.token_ids)
        if not 0 < count <= self._max_batch:
            raise DecoderFailed(f"a batch of {count} tokens, limit {self._max_batch}", is_fatal=False)
        if self._adapters is not None:
            self._adapters.use(self._context, batch.adapter)
        drafted = _drafted(batch) if batch.has_drafts else []
        if self._is_unified and self.head is None and not (drafted and self.is_recurrent):
            calls = cut_in_order(count, self._call_tokens)
        else:
            has_blas = self._lib.has_blas
            calls = cut_by_length(batch.slots, batch.positions, self._call_tokens, has_blas=has_blas)
        if not self.expect(drafted, calls.sizes[-1]):
            raise DecoderFailed("these drafts could not be taken back", is_fatal=False)
        order = slice(None) if calls.order is None else calls.order
        self._ids[:count] = batch.token_ids[order]
        self._positions[:count] = batch.positions[order]
        self._slots[:count] = batch.slots[order]
        self._wants[:count] = batch.wants_logits[order]
        rows = (np.cumsum(batch.wants_logits) - 1)[order]
        num_rows = int(batch.wants_logits.sum())
        if batch.borrows and num_rows and len(calls.sizes) == 1 and calls.order is None:
            self._call(0, count, count)
            return floats_at(self._lib.llama_get_logits(self._context), num_rows, self._vocab_size)
        logits = np.empty((num_rows, self._vocab_size), np.float32)
        start = 0
        for size in calls.sizes:
            wanted = rows[start : start + size][self._wants[start : start + size] != 0]
            self._call(start, size, count)
            if len(wanted):
                address = self._lib.llama_get_logits(self._context)
                logits[wanted] = floats_at(address, len(wanted), self._vocab_size)
            start += size
            if start < count and self.on_progress is not None:
                self.on_progress()
        return logits

    def use_alone(self, num_threads: int) -> None:
        """So many threads for calls of one token from now on."""
        self._lib.llama_set_n_threads(self._context, num_threads, self._lib.llama_n_threads_batch(self._context))

    def release(self, slot: int) -> None:
        """Forget everything that the slot holds."""
        super().release(slot)
        if self.head is not None:
            self.head.forget(slot)

    def move(self, source: int, target: int) -> None:
        """Move a whole sequence to an empty slot."""
        self.copy(source, target)
        if self.head is not None:
            self.head.move(source, target)
        self.release(source)

    def truncate(self, slot: int, num_tokens: int) -> bool:
        """Forget what the slot holds from position `num_tokens` on; False, and nothing changed, where it can't."""
        is_done = super().truncate(slot, num_tokens)
        if is_done and self.head is not None:
            self.head.cut(slot, num_tokens)
        return is_done

    def warm_up(self) -> float:
        """Decode one token and forget it: pages the weights in. Returns the seconds of a second, warm token."""
        one = np.zeros(1, np.int32)
        seconds = 0.0
        for position in range(2):
            begin = self._clock.now()
            self.decode(Batch(one, one + position, one, np.ones(1, np.bool_)))
            seconds = self._clock.now() - begin
        self.release(0)
        if seconds > 0:
            # Nothing is known about long batches yet, and a first call must not look like a dead engine.
            self._call_tokens = self._bounded(CALL_S / seconds * _PREFILL_GAIN)
        return seconds

    def close(self) -> None:
        """Free the context (before the model). Safe to call twice."""
        if self.head is not None:
            self.head.close()
        if self._context:
            self._lib.llama_free(self._context)
            self._context = 0

    def _open(self, num_threads: tuple[int, int], kv_type: int, num_outputs: int) -> int:
        lib, plan = self._lib, self._plan
        params = lib.default_context_params()
        params.n_ctx = plan.num_cells
        params.n_batch = self._max_batch
        params.n_ubatch = self._max_call
        params.n_seq_max = plan.num_slots
        params.n_outputs_max = num_outputs
        params.n_rs_seq = plan.num_snapshots if self._model.is_recurrent else 0
        params.n_threads, params.n_threads_batch = num_threads
        params.kv_unified = self._is_unified
        params.type_k = params.type_v = kv_type
        lib.take_lines()
        context: int = lib.llama_init_from_model(self._model.handle, params) or 0
        if not context:
            raise ConfigError(
                f"libllama can't hold {plan.num_cells} cells in {plan.num_slots} slots "
                f"(engine.context, engine.num_slots, engine.kv_budget_bytes): {lib.take_lines() or 'no reason given'}"
            )
        # A struct layout that passed the check at start-up but is wrong all the same would show here.
        found = {
            "n_ctx": lib.llama_n_ctx(context),
            "n_ctx_seq": lib.llama_n_ctx_seq(context),
            "n_seq_max": lib.llama_n_seq_max(context),
            "n_batch": lib.llama_n_batch(context),
            "n_threads": lib.llama_n_threads(context),
        }
        asked = {
            "n_ctx": plan.num_cells,
            "n_ctx_seq": plan.num_cells if self._is_unified else plan.cells_per_slot,
            "n_seq_max": plan.num_slots,
            "n_batch": self._max_batch,
            "n_threads": num_threads[0],
        }
        if found != asked:
            lib.llama_free(context)
            raise ConfigError(f"{lib.name} made another context than it was asked for: {found}, asked {asked}")
        return context

    def _call(self, start: int, size: int, count: int) -> None:
        """One call of the library over rows [start, start + size) of a step of `count` rows."""
        begin = self._clock.now()
        code: int = self._lib.llama_decode(self._context, new_batch(self._arrays, start, size))
        if code != 0:
            self._failed(code, count)
        slots, positions = self._slots[start : start + size], self._positions[start : start + size]
        if self.is_recurrent:
            self.called(slots, positions)
        if self.head is not None:
            self.head.computed(self._ids[start : start + size], positions, slots)
        self._learn(size, self._clock.now() - begin)

    def _learn(self, size: int, seconds: float) -> None:
        # Halves and doubles with a wide gap between them: how a step is cut may change the last bits of its logits.
        if seconds > CALL_S:
            self._call_tokens = self._bounded(size / 2)
        elif size == self._call_tokens and seconds < CALL_S / 4:
            self._call_tokens = self._bounded(size * 2)

    def _bounded(self, tokens: float) -> int:
        size = self._max_call
        while size > max(1.0, tokens):
            size = -(-size // 2)
        return size

    def _failed(self, code: int, count: int) -> None:
        words = self._lib.take_lines()
        meaning = {_NO_SLOT: "no free cells", _ABORTED: "aborted", _BAD_BATCH: "bad batch"}.get(code, "failed")
        is_fatal = code < _BAD_BATCH or not self._undo(count)
        raise DecoderFailed(f"llama_decode returned {code} ({meaning}) {words}".strip(), is_fatal=is_fatal)

    def _undo(self, count: int) -> bool:
        """Take back what calls of this step put into the cache; False where the library can't."""
        # the first row of a slot is its lowest position, in whatever order the calls went
        slots, first = np.unique(self._slots[:count], return_index=True)
        return all(self.truncate(int(slot), int(self._positions[at])) for slot, at in zip(slots, first, strict=True))

    def _again(self, run: Run) -> None:
        count = len(run.token_ids)
        positions = np.arange(run.start, run.start + count, dtype=np.int32)
        head, self.head = self.head, None  # it has seen them
        self.decode(Batch(run.token_ids, positions, np.full(count, run.slot, np.int32), np.zeros(count, np.bool_)))
        self.head = head


def _drafted(batch: Batch) -> list[Run]:
    """The slots that bring more than one token."""
    slots, first, counts = np.unique(batch.slots, return_index=True, return_counts=True)
    return [
        Run(int(slot), int(batch.positions[at]), batch.token_ids[at : at + count])
        for slot, at, count in zip(slots, first.tolist(), counts.tolist(), strict=True)
        if count > 1
    ]
