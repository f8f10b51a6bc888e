"""What a rank needs besides weights and cache: context, communication buffers, activations, graphs.

Enters: the checkpoint's widths and the engine's batch. Leaves: an `Overhead` by part, in bytes. Always true: these are
estimates and are called that; weights and cache are exact, this is not; it grows with the batch and never with the
traffic. The constants are fitted to logs that print what was left over (kv_rules 6), not to one of them alone. Next:
`memory.py`.
"""

import msgspec

from hitsend.plan.checkpoint import Checkpoint
from hitsend.plan.facts import Gpu
from hitsend.plan.hardware import is_a100, is_large, is_unified
from hitsend.plan.versions import (
    first_batch_tokens,
    has_chunked_prefill,
    has_dense_pages,
    has_graphs_in_pool,
    has_large_batch,
    has_light_sampler,
    has_second_runner,
    has_short_videos,
    has_workspace,
    is_unified_large,
)

GIB = 2**30
CONTEXT_BYTES, OLD_CONTEXT_BYTES, FIRST_CONTEXT_BYTES = int(0.25 * GIB), int(0.1 * GIB), int(0.35 * GIB)
"""Driver context and libraries of one rank, "non-torch memory" in vLLM's log: 0.23 to 0.3 GiB since 0.16, 0.02 to 0.1
before, 0.35 of V0 (vllm#10517)."""
LINKED_BYTES, SMALL_LINKED_BYTES = int(0.8 * GIB), int(0.4 * GIB)
"""More than one rank: NCCL's channels. On large GPUs vLLM 0.14 to 0.25 kept an all-reduce workspace besides."""
WORKSPACE_BYTES = int(1.2 * GIB)
SGLANG_CONTEXT_BYTES, SGLANG_LINKED_BYTES = int(0.7 * GIB), int(2.3 * GIB)
VISION_BYTES = int(1.5 * GIB)
"""An encoder's profiled batch, where there is a vision tower: images of the greatest size."""
VIDEO_BYTES, VIDEO_DIVIDED_BYTES = int(4.0 * GIB), int(1.2 * GIB)
"""Before 0.12 Qwen3-VL's batch was its longest video: 5 GiB on one rank, 4.3 on each of four."""
LLAMA_BYTES = int(0.35 * GIB)
"""llama.cpp's context beside its compute buffer: what its loader leaves on a GPU."""
HIDDEN_COPIES, WIDTH_COPIES = 4, 3
"""Buffers alive at the peak of a profiled step: hidden states (residual, normed, attention's output), and the MLP's
gate, up and product. At 20,000 tokens of Llama-3.1-8B: 2.2 GiB, logged are 2.07 (vllm#10517)."""
GRAPH_BYTES, SMALL_GRAPH_BYTES = int(0.8 * GIB), int(0.5 * GIB)
"""Captured graphs, which vLLM takes off the pool since 0.21: 0.1 to 1.9 GiB, nothing where none are captured."""
SORTED_LOGIT_BYTES, LOGIT_BYTES, SECOND_LOGIT_BYTES = 38.6, 16.4, 6.5
"""Per sequence that samples and word: logits in f32, probabilities and what sorting them takes (1.40 GiB at 256 x
151,936 and 5.58 at 1,024 x 151,936 are logged until 0.15); about four copies since 0.16 sorts no more, and hardly two
of the second model runner."""

COMPRESSED_BYTES = int(5.0 * GIB)
"""What DeepSeek-V4 kept beside all that until 0.26, whatever the step's tokens (three logs of 0.20.2 and 0.26.0)."""


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


def default_batch_tokens(
    engine: str, version: str | None, gpu: Gpu | None, max_model_len: int, media_tokens: int = 0
) -> int:
    """`--max-num-batched-tokens` where nobody says, and at least what one image takes that isn't divided (2,048 failed
    to start, vllm#42687): vLLM's server 8,192 on large GPUs (16,384 since 0.27, vllm#51726)
    and 2,048 else; V0 the whole length up to 32,768 tokens and 2,048 (512 before 0.6.5, vllm#10544) beyond, where it
    computed prompts in pieces; llama.cpp's ubatch 512."""
    if engine in {"llama.cpp", "hitsend"}:
        return 512
    if engine == "vllm" and not has_chunked_prefill(version):
        return first_batch_tokens(version, max_model_len)
    if engine == "vllm" and has_large_batch(version) and (gpu is None or is_large(gpu) or is_a100(gpu)):
        return 16384
    tokens = 8192 if gpu is None or _is_large(gpu, version) else 2048
    return max(tokens, media_tokens) if engine == "vllm" else tokens


def default_sequences(engine: str, version: str | None, gpu: Gpu | None) -> int:
    """Sequences in one step where nobody says: vLLM 1,024 on large GPUs and 256 else."""
    if engine in {"llama.cpp", "hitsend"}:
        return 8
    return 1024 if gpu is None or _is_large(gpu, version) else 256


def _is_large(gpu: Gpu, version: str | None) -> bool:
    return is_large(gpu) and (not is_unified(gpu) or is_unified_large(version))


def graph_bytes(engine: str, version: str | None, gpu: Gpu | None) -> int:
    """What captured graphs take off the pool: vLLM only, and only where its version counts them."""
    if engine != "vllm" or not has_graphs_in_pool(version):
        return 0
    return GRAPH_BYTES if gpu is None or is_large(gpu) else SMALL_GRAPH_BYTES


class Step(msgspec.Struct, frozen=True):
    """What the engine profiles when it starts: tokens of a step, and sequences that sample in it."""

    engine: str
    tokens: int
    sequences: int
    tp: int = 1
    version: str | None = None
    is_small: bool = False


def estimate_overhead(checkpoint: Checkpoint, step: Step, graphs: int = 0) -> Overhead | None:
    """None where the widths aren't known.

    Activations are the greatest of three that vLLM profiles one after the other, so they don't add up: a step of T
    tokens, T * (4 * hidden + 3 * width / TP) * 2 bytes, with experts T * chosen * (2 * hidden + 3 * expert width / TP)
    * 2 more; the logits of the sequences that sample; an encoder's batch. Source: the shapes, and the logs named above.
    """
    if checkpoint.hidden is None or checkpoint.vocab is None:
        return None
    if step.engine == "sglang":
        # its static fraction is weights and cache; a step works in what the fraction leaves
        links = SGLANG_LINKED_BYTES if step.tp > 1 else 0
        return Overhead(SGLANG_CONTEXT_BYTES, links, activations=0, graphs=graphs)
    peak = _step_bytes(checkpoint, checkpoint.hidden, step)
    is_llama = step.engine in {"llama.cpp", "hitsend"}
    sequences = min(step.sequences, step.tokens)
    if is_llama:
        # one compute buffer holds both
        return Overhead(LLAMA_BYTES, 0, peak + sequences * checkpoint.vocab * 4 * 2, graphs)
    context, links = _context_bytes(step.version), _link_bytes(step)
    if _is_second_runner(checkpoint, step):
        logits = round(sequences * checkpoint.vocab * SECOND_LOGIT_BYTES)
        return Overhead(context, links, max(_step_bytes(checkpoint, checkpoint.hidden, step, copies=1), logits), 0)
    if any(layer.kv is not None and layer.kv.beside_window for layer in checkpoint.layers):
        context += 0 if has_dense_pages(step.version) else COMPRESSED_BYTES
    each = LOGIT_BYTES if has_light_sampler(step.version) else SORTED_LOGIT_BYTES
    logits = round(sequences * checkpoint.vocab * each)
    return Overhead(context, links, max(peak, logits, _encoder_bytes(checkpoint, step)), graphs)


def _is_second_runner(checkpoint: Checkpoint, step: Step) -> bool:
    is_plain = not checkpoint.experts_per_token and not (checkpoint.top is not None and checkpoint.top.other)
    is_plain = is_plain and not any(layer.state is not None for layer in checkpoint.layers)
    return step.engine == "vllm" and is_plain and has_second_runner(step.version)


def _step_bytes(checkpoint: Checkpoint, hidden: int, step: Step, copies: int = HIDDEN_COPIES) -> int:
    width = checkpoint.intermediate or hidden
    # LatentMoE computes its experts in a smaller space
    inner = checkpoint.expert_hidden or hidden
    each = 2 * inner + WIDTH_COPIES * checkpoint.expert_width // step.tp
    dense = copies * hidden + WIDTH_COPIES * width // step.tp
    return step.tokens * (dense + checkpoint.experts_per_token * each) * 2


def _encoder_bytes(checkpoint: Checkpoint, step: Step) -> int:
    if checkpoint.top is None or not checkpoint.top.other:
        return 0
    has_video = checkpoint.architecture.startswith("qwen3_vl") and not has_short_videos(step.version)
    return VIDEO_BYTES + VIDEO_DIVIDED_BYTES // step.tp if has_video else VISION_BYTES


def _context_bytes(version: str | None) -> int:
    if not has_chunked_prefill(version):
        return FIRST_CONTEXT_BYTES
    return CONTEXT_BYTES if has_light_sampler(version) else OLD_CONTEXT_BYTES


def _link_bytes(step: Step) -> int:
    if step.tp < 2:
        return 0
    if step.is_small:
        return SMALL_LINKED_BYTES
    return LINKED_BYTES + (WORKSPACE_BYTES if has_workspace(step.version) else 0)
