"""What a rank needs besides weights and cache: context, communication buffers, activations, graphs.

Enters: the checkpoint's widths and the engine's batch. Leaves: an `Overhead` by part, in bytes. Always true: these are
estimates and are called that; weights and cache are exact, this is not; it grows with the batch and never with the
traffic. The constants are fitted to logs that print what was left over (kv_rules 6), not to one of them alone. Next:
`memory.py`.
"""

import msgspec

from hitsend.plan.checkpoint import Checkpoint
from hitsend.plan.facts import Gpu
from hitsend.plan.hardware import is_large
from hitsend.plan.versions import has_chunked_prefill, has_graphs_in_pool

GIB = 2**30
CONTEXT_BYTES, SMALL_CONTEXT_BYTES = int(0.7 * GIB), int(0.35 * GIB)
"""Driver context and libraries on large and small GPUs: 0.35 GiB on a 3090 (vllm#10517)."""
LINKED_BYTES, SMALL_LINKED_BYTES = int(2.3 * GIB), int(1.2 * GIB)
"""More than one rank: NCCL's channels and the all-reduce workspace (logs at TP4 and TP8 leave 1.7 to 2.5 GiB)."""
VISION_BYTES = int(1.5 * GIB)
"""The encoder's profiled batch, where there is a vision tower."""
LLAMA_BYTES = int(0.35 * GIB)
"""llama.cpp's context beside its compute buffer: what its loader leaves on a GPU."""
HIDDEN_COPIES, WIDTH_COPIES = 4, 3
"""Buffers alive at the peak of a profiled step: hidden states (residual, normed, attention's output), and the MLP's
gate, up and product. At 20,000 tokens of Llama-3.1-8B: 2.2 GiB, logged are 2.07 (vllm#10517)."""
GRAPH_BYTES, SMALL_GRAPH_BYTES = int(1.2 * GIB), int(0.5 * GIB)
"""Captured graphs, which vLLM takes off the pool since 0.21."""
LOGIT_COPIES = 2
"""Logits in f32 and the sampler's sort."""


class Overhead(msgspec.Struct, frozen=True):
    """Bytes on one rank."""

    context: int
    links: int
    activations: int
    graphs: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.context + self.links + self.activations + self.graphs


def default_batch_tokens(engine: str, version: str | None, gpu: Gpu | None, max_model_len: int) -> int:
    """`--max-num-batched-tokens` where nobody says: vLLM 8,192 on large GPUs and 2,048 else, before chunked prefill was
    its default the whole length; llama.cpp's ubatch 512."""
    if engine in {"llama.cpp", "hitsend"}:
        return 512
    if engine == "vllm" and not has_chunked_prefill(version):
        return max(2048, max_model_len)
    return 8192 if gpu is None or is_large(gpu) else 2048


def default_sequences(engine: str, gpu: Gpu | None) -> int:
    """Sequences in one step where nobody says: vLLM 1,024 on large GPUs and 256 else."""
    if engine in {"llama.cpp", "hitsend"}:
        return 8
    return 1024 if gpu is None or is_large(gpu) else 256


def graph_bytes(engine: str, version: str | None, gpu: Gpu | None) -> int:
    """What captured graphs take off the pool: vLLM only, and only where its version counts them."""
    if engine != "vllm" or not has_graphs_in_pool(version):
        return 0
    return GRAPH_BYTES if gpu is None or is_large(gpu) else SMALL_GRAPH_BYTES


def estimate_overhead(
    checkpoint: Checkpoint, engine: str, *, tp: int, batch: int, sequences: int, graphs: int, is_small: bool
) -> Overhead | None:
    """None where the widths aren't known.

    Activations of a step of T tokens: T * (4 * hidden + 3 * width / TP) * 2 bytes, with experts T * chosen * (2 *
    hidden + 3 * expert width / TP) * 2 more, and the logits of the sequences that sample, twice in f32. Source: the
    shapes, and the logs named above.
    """
    if checkpoint.hidden is None or checkpoint.vocab is None:
        return None
    is_llama = engine in {"llama.cpp", "hitsend"}
    width = checkpoint.intermediate or checkpoint.hidden
    step = batch * (HIDDEN_COPIES * checkpoint.hidden + WIDTH_COPIES * width // tp) * 2
    each = 2 * checkpoint.hidden + WIDTH_COPIES * checkpoint.expert_width // tp
    step += batch * checkpoint.experts_per_token * each * 2
    logits = sequences * checkpoint.vocab * 4 * LOGIT_COPIES
    vision = VISION_BYTES if checkpoint.top is not None and checkpoint.top.other and not is_llama else 0
    return Overhead(
        context=LLAMA_BYTES if is_llama else SMALL_CONTEXT_BYTES if is_small else CONTEXT_BYTES,
        links=(SMALL_LINKED_BYTES if is_small else LINKED_BYTES) if tp > 1 else 0,
        # SGLang's static fraction is weights and cache; a step works in what the fraction leaves
        activations=0 if engine == "sglang" else step + logits + vision,
        graphs=graphs,
    )
