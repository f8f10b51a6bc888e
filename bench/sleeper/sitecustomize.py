"""An engine that sleeps where it would compute: for `python -m bench.simulator --sleep`, and for nothing else.

Python imports this file at its start where its folder is on PYTHONPATH. In the engine's child it puts a wait, as long
as a fixed formula says, where the model's computing would be, and tokens that never repeat where its answer would be.
The edge, the scheduler, the prefix cache, the wire and the client stay what they are: how long steps take depends much
less on who else uses the machine, so what is left between measured and simulated is the simulator's own error.
"""

import sys
import time

import numpy as np
from numpy.typing import NDArray

STEP_MS, ROW_MS, WIDE_MS, TILE_MS, PIECE_MS, PREFILL_MS, ATTENDED_NS = 8.0, 1.0, 3.0, 2.0, 2.0, 1.2, 1.5
FIRST_TOKEN, TOKENS = 1000, 20_000
"""Plain words of the bundled vocabulary."""


def _sleep_instead() -> None:
    # not at the file's top: every Python that starts imports it
    from hitsend.serve.engine.llama_decoder import LlamaDecoder  # noqa: PLC0415
    from hitsend.serve.loop.decoder import Batch  # noqa: PLC0415

    def decode(decoder: LlamaDecoder, batch: Batch) -> NDArray[np.float32]:
        began = time.monotonic()
        rows = np.bincount(batch.slots, minlength=decoder.num_slots)
        wanted = np.bincount(batch.slots[batch.wants_logits], minlength=decoder.num_slots)
        decodes = (rows > 0) & (rows == wanted)
        is_prompt = ~decodes[batch.slots]
        count, places = int(rows[decodes].sum()), batch.positions[batch.wants_logits].astype(np.int64)
        spent_ms = STEP_MS + ROW_MS * count + PIECE_MS * int(((rows > 0) & ~decodes).sum())
        # as libllama's kernels take rows: two at once
        spent_ms += (WIDE_MS + TILE_MS * -(-count // 2)) * (count > 1)
        spent_ms += PREFILL_MS * int(is_prompt.sum())
        spent_ms += ATTENDED_NS * float((batch.positions[is_prompt].astype(np.int64) + 1).sum()) / 1e3
        logits = np.zeros((len(places), decoder.vocab_size), dtype=np.float32)
        tokens = batch.token_ids[batch.wants_logits].astype(np.int64) * 7919 + places * 104_729
        logits[np.arange(len(places)), FIRST_TOKEN + tokens % TOKENS] = 1.0
        time.sleep(max(0.0, spent_ms / 1e3 - (time.monotonic() - began)))
        return logits

    type.__setattr__(LlamaDecoder, "decode", decode)


if any("hitsend.serve.engine.worker" in word for word in sys.orig_argv):
    _sleep_instead()
