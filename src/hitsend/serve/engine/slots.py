"""What lies in a context's slots: forgetting it, copying it, saving it, and going back a little.

A model with recurrent layers keeps one state per sequence. It can go back in two ways. *Snapshots*: the library keeps
the states behind the last tokens of each sequence's last call. It believes whoever asks that the call was long enough,
and snapshots stay where they were when a later call moves a sequence's state; so `Slots` remembers which sequences
were in the last call and from where on, and refuses what can't be right. A *checkpoint*: the recurrent state before a
draft is copied into host memory; going back restores it and computes again what is to be kept.

Enters: a context. Leaves: bytes. Always true: a slot holds what was computed of it, or the caller is told that it can't
be. Next: `llama_decoder.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hitsend.serve.engine.libllama import Library
from hitsend.serve.loop.decoder import DecoderFailed

_PARTIAL_ONLY = 1
_NOWHERE = 2**31


class Run(NamedTuple):
    """Tokens of one slot that are computed in a row, the first of them at position `start`."""

    slot: int
    start: int
    token_ids: NDArray[np.int32]


class _Checkpoint(NamedTuple):
    run: Run
    saved: NDArray[np.uint8]


class Slots:
    """Of one context. `num_snapshots`: so many tokens the library takes back (`is_recurrent` models only).

    `again(run)` computes tokens once more, nobody wants their logits.
    """

    def __init__(
        self, library: Library, context: int, *, is_unified: bool, is_recurrent: bool, again: Callable[[Run], None]
    ) -> None:
        self._lib, self._context, self._is_unified = library, context, is_unified
        self._memory: int = library.llama_get_memory(context)
        self.is_recurrent = is_recurrent
        self.num_snapshots = int(library.llama_n_rs_seq(context)) if is_recurrent else 0
        self._compute_again = again
        self._last: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        self._other: set[int] = set()
        self._gone_back: set[int] = set()
        self._checkpoint: _Checkpoint | None = None

    @property
    def context(self) -> int:
        """The library's handle."""
        return self._context

    def called(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """A call of the library computed these rows. Recurrent models only."""
        self._last = slots.copy(), positions.copy()
        self._other.clear()
        if self._gone_back:
            self._gone_back.difference_update(slots.tolist())

    def expect(self, drafted: list[Run], last_call: int) -> bool:
        """These runs may be taken back in part; False where that is impossible. The last call has so many rows."""
        self._checkpoint = None
        if not self.is_recurrent or not drafted:
            return True
        if self.num_snapshots:
            is_one_call = sum(len(run.token_ids) for run in drafted) <= last_call
            return is_one_call and all(len(run.token_ids) <= 1 + self.num_snapshots for run in drafted)
        if len(drafted) > 1:
            return False
        self._checkpoint = _Checkpoint(drafted[0], self._save(drafted[0].slot, _PARTIAL_ONLY))
        return True

    def release(self, slot: int) -> None:
        """Forget everything that the slot holds."""
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._changed(slot)
        self._gone_back.discard(slot)

    def copy(self, source: int, target: int) -> None:
        """Give an empty slot a copy of what the source holds. In unified mode both use the same cells."""
        if self._is_unified and source not in self._gone_back:  # the library's copy knows nothing of that
            self._lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        else:
            # seq_cp between streams copies the stream's whole buffer; saved state holds only the used cells.
            self.restore(target, self.save(source))

    def truncate(self, slot: int, num_tokens: int) -> bool:
        """Forget what the slot holds from position `num_tokens` on; False, and nothing changed, where it can't."""
        held = self.cells_used(slot)
        if num_tokens >= held:
            return True
        if not num_tokens:
            self.release(slot)
            return True
        if not self.is_recurrent:
            return bool(self._lib.llama_memory_seq_rm(self._memory, slot, num_tokens, -1))
        if self._last_from(slot) < num_tokens and held - num_tokens <= self.num_snapshots:
            self._changed(slot)  # it can be done once
            self._gone_back.add(slot)
            return bool(self._lib.llama_memory_seq_rm(self._memory, slot, num_tokens, -1))
        return self._go_to_checkpoint(slot, num_tokens)

    def save(self, slot: int) -> NDArray[np.uint8]:
        """All that the slot holds, as bytes in host memory."""
        return self._save(slot, 0)

    def restore(self, slot: int, saved: NDArray[np.uint8]) -> None:
        """Fill an empty slot with what `save` gave."""
        self._restore(slot, saved, 0)

    def cells_used(self, slot: int) -> int:
        """What the library itself says that the slot holds, in cells."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def state_bytes(self, slot: int, *, is_partial: bool = False) -> int:
        """Size of the slot's saved state; partial leaves the attention cells out (hybrid models)."""
        flags = _PARTIAL_ONLY if is_partial else 0
        return int(self._lib.llama_state_seq_get_size_ext(self._context, slot, flags))

    def _last_from(self, slot: int) -> int:
        """Where the last call's tokens of a slot begin; behind everything, where it had none or isn't as it left it."""
        if self._last is None or slot in self._other:
            return _NOWHERE
        first = self._last[1][self._last[0] == slot]
        return int(first[0]) if first.size else _NOWHERE

    def _changed(self, slot: int) -> None:
        if self._last is not None:
            self._other.add(slot)

    def _go_to_checkpoint(self, slot: int, num_tokens: int) -> bool:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None or checkpoint.run.slot != slot or checkpoint.run.start >= num_tokens:
            return False
        start = checkpoint.run.start
        self._restore(slot, checkpoint.saved, _PARTIAL_ONLY)
        if not self._lib.llama_memory_seq_rm(self._memory, slot, start, -1):
            raise DecoderFailed("the library can't go on from a checkpoint", is_fatal=True)
        self._compute_again(checkpoint.run._replace(token_ids=checkpoint.run.token_ids[: num_tokens - start]))
        return True

    def _save(self, slot: int, flags: int) -> NDArray[np.uint8]:
        saved = np.empty(self.state_bytes(slot, is_partial=bool(flags)), np.uint8)
        written = self._lib.llama_state_seq_get_data_ext(self._context, saved.ctypes.data, saved.size, slot, flags)
        if written != saved.size:
            raise DecoderFailed(f"could not save a sequence: {written} of {saved.size} bytes", is_fatal=True)
        return saved

    def _restore(self, slot: int, saved: NDArray[np.uint8], flags: int) -> None:
        self._changed(slot)
        self._gone_back.discard(slot)
        read = self._lib.llama_state_seq_set_data_ext(self._context, saved.ctypes.data, saved.size, slot, flags)
        if read != saved.size:
            raise DecoderFailed(f"could not restore a sequence: {read} of {saved.size} bytes", is_fatal=True)
