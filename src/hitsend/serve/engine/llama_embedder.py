"""libllama as an encoder: token ids in, one vector of length 1 per text out.

Enters: a `LoadedModel` and the longest text to take. Leaves: rows of float32. Always true: pooling is what the file's
metadata says (a model without any is refused: guessing would give vectors that mean nothing); a text's vector does not
depend on its neighbours in the batch but for the last bits; nothing of a batch is kept after it. Next:
`embedding_worker.py`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ConfigError, EngineFailed
from hitsend.serve.engine.libllama import floats_at, new_batch
from hitsend.serve.engine.vocabulary import LoadedModel

BATCH_TOKENS = 512
"""Texts are joined to batches of so many tokens: on CPUs more is no faster, and a batch can't be interrupted."""

BATCH_INPUTS = 64
LONGEST_CONTEXT = 8192

_NO_POOLING, _RANKING = 0, 4


class LlamaEmbedder:
    """One loaded embedding model and its context. Raises ConfigError for a model that is none."""

    def __init__(self, model: LoadedModel, *, context: int, num_threads: int) -> None:
        self._lib = model.library
        trained: int = self._lib.llama_model_n_ctx_train(model.handle)
        self.max_tokens = min(context or LONGEST_CONTEXT, trained)
        self.max_batch_tokens = max(BATCH_TOKENS, self.max_tokens)
        self.dimensions: int = self._lib.llama_model_n_embd_out(model.handle)
        params = self._lib.default_context_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.max_batch_tokens
        params.n_seq_max = BATCH_INPUTS
        params.n_threads = params.n_threads_batch = num_threads
        params.embeddings = True
        params.kv_unified = True
        self._lib.take_lines()
        self._context: int = self._lib.llama_init_from_model(model.handle, params) or 0
        if not self._context:
            raise ConfigError(f"engine.embedding_model: {self._lib.take_lines() or 'libllama gave no reason'}")
        pooling: int = self._lib.llama_pooling_type(self._context)
        if pooling in (_NO_POOLING, _RANKING):
            raise ConfigError(
                f"engine.embedding_model: the file's pooling is {pooling}, it makes no vector per text: "
                "use a GGUF whose metadata has pooling_type 1 (mean), 2 (first) or 3 (last)"
            )
        self._memory: int = self._lib.llama_get_memory(self._context) or 0

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: int) -> NDArray[np.float32]:
        """One row per input, cut to `dimensions` and of length 1. Raises EngineFailed."""
        sizes = [len(ids) for ids in inputs]
        count = sum(sizes)
        token = np.concatenate([np.asarray(ids, np.int32) for ids in inputs])
        position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        slot = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        pointers = slot.ctypes.data + np.arange(count, dtype=np.uint64) * slot.itemsize
        ones = np.ones(count, np.int32)
        arrays = (token, position, ones, pointers.astype(np.uint64), np.ones(count, np.int8))
        code: int = self._lib.llama_decode(self._context, new_batch(arrays, 0, count))
        if code != 0:
            raise EngineFailed(f"the embedding model failed ({code}) {self._lib.take_lines()}".strip())
        rows = np.empty((len(sizes), dimensions), np.float32)
        for number in range(len(sizes)):
            address: int = self._lib.llama_get_embeddings_seq(self._context, number) or 0
            if not address:
                raise EngineFailed("the embedding model gave no vector")
            rows[number] = floats_at(address, 1, self.dimensions)[0, :dimensions]
        if self._memory:
            self._lib.llama_memory_clear(self._memory, True)
        return normalised(rows)

    def close(self) -> None:
        """Free the context (before the model)."""
        if self._context:
            self._lib.llama_free(self._context)
            self._context = 0


def normalised(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row with length 1. Raises EngineFailed for rows that aren't numbers; a row of zeros stays."""
    if not np.isfinite(rows).all():
        raise EngineFailed("the embedding model gave something that is no number")
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths == 0.0, 1.0, lengths), "<f4")
