"""What Python costs in a step of 32 sequences: schedule, build the batch, sample, report; everything but libllama.

Enters: nothing. Leaves: a table on stdout, microseconds per step. Always true: the loop is the real one; the decoder
only copies logits shaped like a model's (a vocabulary of 49,152, some tokens far above the rest), and that copy is not
counted. Next: `serving.py`.

    .venv/bin/python -m bench.loop_cost
"""

import statistics
import time

import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import SystemClock
from hitsend.core.request import SamplingParams
from hitsend.serve.loop.decoder import Batch
from hitsend.serve.loop.messages import Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop

SEQUENCES = 32
VOCAB = 49_152
STEPS = 60

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_k 20, top_p 0.95": SamplingParams(top_k=20, top_p=0.95),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_k 20 and penalties": SamplingParams(top_k=20, presence_penalty=1.5, repetition_penalty=1.1),
    "top_k 20, 20 logprobs": SamplingParams(top_k=20, logprobs=True, top_logprobs=20),
}


class CopyingDecoder:
    """Gives the same logits every time and counts the seconds that this takes."""

    vocab_size = VOCAB
    num_slots = SEQUENCES
    cells_per_slot = 2048
    num_cells = SEQUENCES * 2048
    max_batch_tokens = 512
    end_token_ids = frozenset({2})
    adapter_names: frozenset[str] = frozenset()
    can_go_back = True

    def __init__(self) -> None:
        generator = np.random.Generator(np.random.PCG64(0))
        self._logits = (generator.standard_normal((SEQUENCES, VOCAB)) * 2.5).astype(np.float32)
        self._logits[:, 10:60] += 8.0
        self._logits[:, 2] = -20.0
        self.spent_s = 0.0

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """As many rows as are wanted."""
        started = time.perf_counter()
        rows = self._logits[: int(batch.wants_logits.sum())].copy()
        self.spent_s += time.perf_counter() - started
        return rows

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def move(self, source: int, target: int) -> None:
        """Nothing to move."""


def measure(sampling: SamplingParams) -> list[float]:
    """Microseconds of each step in which all sequences decode."""
    decoder = CopyingDecoder()
    loop = Loop(decoder, LoopLimits(), SystemClock())
    for number in range(SEQUENCES):
        loop.handle(Submit(f"r{number}", tuple(range(100, 228)), sampling, (number,), 10**6, 60.0))
    while loop.pulse().decode_tokens_total < SEQUENCES:
        loop.step()
    spent = []
    for _ in range(STEPS):
        decoder.spent_s = 0.0
        started = time.perf_counter()
        loop.step()
        spent.append((time.perf_counter() - started - decoder.spent_s) * 1e6)
    return spent


def main() -> None:
    """Print the table."""
    print(f"{SEQUENCES} sequences, vocabulary {VOCAB}: microseconds per step without the decoder")
    for name, sampling in KINDS.items():
        spent = measure(sampling)
        print(f"{name:24s} median {statistics.median(spent):6.0f}   best {min(spent):6.0f}")


if __name__ == "__main__":
    main()
