"""The loop's view of a model: a batch of tokens goes in, logits come out.

Enters: a `Batch`. Leaves: one row of logits per token that asked for one. Always true: the loop knows nothing of
libllama; the planner's simulator and the tests drive the same scheduler through this protocol. Next: `kv.py`.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Batch(NamedTuple):
    """Tokens of one step, sorted by slot and position.

    Four arrays of the same length n: `token_ids` int32, `positions` int32, `slots` int32, `wants_logits` bool.
    `adapter`: the one that all of them are computed with; None: the model as it is. `has_drafts`: a slot that brings
    several tokens may be told to forget all of them but the first (`Decoder.truncate`), before anything else is
    computed. `borrows`: the logits may be the decoder's own memory, right until it computes again.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    wants_logits: NDArray[np.bool_]
    adapter: str | None = None
    has_drafts: bool = False
    borrows: bool = False


class DecoderFailed(Exception):
    """The step could not be computed. `is_fatal` means that the child process has to go."""

    def __init__(self, message: str, *, is_fatal: bool) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class Decoder(Protocol):
    """A loaded model with `num_slots` sequences' worth of cache.

    `cells_per_slot` bounds one sequence; `num_cells` is the sum over all slots. In per-stream mode
    num_cells == num_slots * cells_per_slot; in unified mode the slots share num_cells.
    """

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        ...

    @property
    def num_slots(self) -> int:
        """How many sequences can have cache at once."""
        ...

    @property
    def num_cells(self) -> int:
        """Cells of all slots together."""
        ...

    @property
    def cells_per_slot(self) -> int:
        """Most cells that one sequence can hold."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens in one `decode` call."""
        ...

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """What each token stands for, by id. May take a moment; the loop asks at most once."""
        ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens by which the model says that it has finished."""
        ...

    @property
    def adapter_names(self) -> frozenset[str]:
        """The adapters that a batch may name."""
        ...

    @property
    def can_go_back(self) -> bool:
        """Whether `truncate` works anywhere; recurrent layers can't."""
        ...

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Run the batch; return float32 logits [true wants_logits, vocab_size], the caller's to keep (unless it
        `borrows`) and change.

        Raises DecoderFailed; where that isn't fatal, the cache is as it was before the call.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget everything that the slot holds."""
        ...

    def move(self, source: int, target: int) -> None:
        """Move a whole sequence to an empty slot; the source is empty afterwards."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Give an empty slot a copy of what the source holds."""
        ...

    def truncate(self, slot: int, num_tokens: int) -> bool:
        """Forget what the slot holds from position `num_tokens` on; False, and nothing changed, where it can't.

        A model with recurrent layers can't go back in general: what it keeps per sequence is one state, not one per
        token. Forgetting everything (0) always works, and nothing, and, once, tokens of a draft just computed.
        """
        ...

    def save(self, slot: int) -> NDArray[np.uint8]:
        """All that the slot holds, as bytes in host memory: attention cells and recurrent state."""
        ...

    def restore(self, slot: int, saved: NDArray[np.uint8]) -> None:
        """Fill an empty slot with what `save` gave, of this model and this build. Raises DecoderFailed (fatal)."""
        ...
