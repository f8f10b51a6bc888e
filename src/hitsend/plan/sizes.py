"""Bytes of one layer on one rank: per token, per sequence, and of its weights.

Enters: a `Layer`, the parallelism and the formats. Leaves: exact bytes. Always true: keys and values of grouped heads
are divided over the ranks until there is one head each, then copied; a latent vector is on every rank whole; a layer
that shares an earlier one's keys and values costs nothing; recurrent heads are divided. Next: `blocks.py`.
"""

from collections import Counter
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Checkpoint, KvLayer, Layer, Params, StateLayer
from hitsend.plan.formats import (
    DEEPSEEK_V4_ROW_BYTES,
    F16_BYTES,
    F32_BYTES,
    FP8_DS_MLA_BYTES,
    INDEXER_SCALE_BYTES,
    WeightFormat,
    kv_bytes,
)

MAX_RANKS = 4096


class Ranks(msgspec.Struct, frozen=True):
    """How the model is divided: tensor parallel, pipeline stages, decode context parallel (latent caches only).

    `dp`: so many groups of tensor ranks, each with its own sequences; what isn't an expert is there once per group, and
    experts are divided over all `tp * dp` ranks: by width, or with `ep` whole ones (vLLM's documentation, "Data
    parallel deployment" and "Expert parallel deployment"; SGLang's DP attention divides alike).
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    dp: int = 1
    ep: bool = False

    def check(self) -> None:
        """Raises ConfigError for counts below 1, or a decode context that isn't a part of the tensor ranks."""
        for name, value in (("--tp", self.tp), ("--pp", self.pp), ("--dcp", self.dcp), ("--dp", self.dp)):
            if not 1 <= value <= MAX_RANKS:
                raise ConfigError(f"{name} is {value}, needed is 1 to {MAX_RANKS:,}")
        if self.tp % self.dcp:
            raise ConfigError(f"--dcp is {self.dcp}, which doesn't divide --tp {self.tp}")


def kv_bytes_per_token(layer: Layer, kv_dtype: str, ranks: Ranks, *, is_uncompressed: bool = False) -> Fraction:
    """One layer on one rank. Grouped: 2 * max(1, kv_heads / TP) * head_dim * b (arXiv 2305.13245; kv_rules 1).

    Latent: (kv_lora_rank + rope) * b on every rank, divided by decode context parallelism only, plus an indexer's fp8
    key and its scale (arXiv 2405.04434; DeepSeek-V3.2). Uncompressed latent (a GGUF without the tensors): heads * (key
    + value).
    """
    kv = layer.kv
    if kv is None or layer.shares_kv:
        return Fraction(0)
    element = kv_bytes(kv_dtype)
    if kv.latent_dim is not None and is_uncompressed:
        return _heads(kv.heads, ranks.tp) * (kv.key_dim + kv.value_dim) * element
    if kv.latent_dim is not None:
        row = latent_row_bytes(kv, kv_dtype) / kv.compress_ratio
        return (row + indexer_bytes(kv)) / ranks.dcp
    return _heads(kv.kv_heads, ranks.tp) * (kv.key_dim + kv.value_dim) * element


def latent_row_bytes(kv: KvLayer, kv_dtype: str) -> Fraction:
    """One latent vector with its position, packed or element by element; DeepSeek-V4's is always packed."""
    if kv.beside_window:
        return Fraction(DEEPSEEK_V4_ROW_BYTES)
    if kv_dtype.casefold() == "fp8_ds_mla":
        return Fraction(FP8_DS_MLA_BYTES)
    return ((kv.latent_dim or 0) + kv.rope_dim) * kv_bytes(kv_dtype)


def indexer_bytes(kv: KvLayer) -> Fraction:
    """An indexer's fp8 key and its scale, per token: one key may stand for several tokens."""
    each = kv.indexer_dim + INDEXER_SCALE_BYTES if kv.indexer_dim else 0
    return Fraction(each, max(kv.compress_ratio, kv.indexer_pool))


def _heads(kv_heads: int, tp: int) -> Fraction:
    """Heads on one rank: divided, and copied once there are fewer than ranks."""
    return max(Fraction(1), Fraction(kv_heads, tp))


class StateBytes(msgspec.Struct, frozen=True):
    """What one recurrent layer keeps for one sequence on one rank: the convolution's inputs and the matrices."""

    conv: int
    matrix: int

    @property
    def total(self) -> int:
        """Both."""
        return self.conv + self.matrix


def state_bytes(state: StateLayer, engine: str, ranks: Ranks, *, drafts: int = 0) -> StateBytes:
    """kv_rules 2: conv = (k - 1 + drafts) * channels, matrix = value_heads * key_dim * value_dim.

    Element sizes: conv 2 B in vLLM and SGLang, 4 B in llama.cpp; matrix 4 B where the config says float32, always in
    llama.cpp, and in SGLang where it says nothing (its `--mamba-ssm-dtype` defaults to that), else 2 B. Drafts widen
    the convolution in vLLM only: llama.cpp keeps whole copies instead.
    """
    groups = max(state.groups, ranks.tp) if state.kind == "mamba2" else state.groups
    channels = 2 * groups * state.key_dim + state.value_heads * state.value_dim
    is_wide = is_llama(engine)
    unsaid = "float32" if engine == "sglang" else "16 bit"
    wide_matrix = is_wide or str(state.dtype or unsaid) in {"float32", "f32", "torch.float32"}
    columns = state.kernel - 1 + (drafts if engine == "vllm" else 0)
    return StateBytes(
        conv=columns * channels * (F32_BYTES if is_wide else F16_BYTES) // ranks.tp,
        matrix=state.matrix_values * (F32_BYTES if wide_matrix else F16_BYTES) // ranks.tp,
    )


def is_llama(engine: str) -> bool:
    """hitsend's own engine is libllama underneath."""
    return engine in {"llama.cpp", "hitsend"}


def stages(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage. What doesn't divide goes to the stages before the last (vLLM's
    `get_pp_indices`)."""
    if pp > num_layers:
        raise ConfigError(f"--pp is {pp}, the model has {num_layers} layers")
    sizes = [num_layers // pp] * pp
    for step in range(num_layers % pp):
        sizes[-(step + 2)] += 1
    found, start = [], 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return found


def expert_share(ranks: Ranks, experts: int) -> Fraction:
    """Of a layer's routed experts, on the rank that has most: 1 / (TP * DP), or ceil(E / (TP * DP)) of E whole ones."""
    count = ranks.tp * ranks.dp
    return Fraction(-(-experts // count), experts) if ranks.ep and experts else Fraction(1, count)


def params_bytes(params: Params, form: WeightFormat, ranks: Ranks, experts: int = 0) -> Fraction:
    """One rank's share: matrices are divided by TP but for those that every rank needs whole; norms and routers are
    whole everywhere and 16 bit; embedding and head stay 16 bit unless the format is for everything, recurrent layers
    where the format's usual makers leave them out."""
    tp = ranks.tp
    quantised = form.bytes_per_param
    plain = quantised if form.is_everything else Fraction(2)
    matrix = form.beside_experts if form.is_experts_only else quantised
    divided = params.attention - params.replicated + params.mlp + params.shared_experts
    return (
        divided * matrix / tp
        + params.recurrent * (Fraction(2) if form.leaves_recurrent or form.is_experts_only else quantised) / tp
        + params.replicated * matrix
        + params.routed_experts * quantised * expert_share(ranks, experts)
        + (params.embedding + params.head) * plain / tp
        + (params.router + params.norms) * 2
        + Fraction(params.other * 2, tp)
    )


def copied_heads_bytes(kv: KvLayer | None, hidden: int, form: WeightFormat, tp: int) -> Fraction:
    """The key and value matrices that are copied where there are fewer KV heads than ranks."""
    if kv is None or kv.latent_dim is not None or kv.kv_heads >= tp:
        return Fraction(0)
    extra = Fraction(1) - Fraction(kv.kv_heads, tp)
    return (
        hidden
        * (kv.key_dim + kv.value_dim)
        * extra
        * (form.beside_experts if form.is_experts_only else form.bytes_per_param)
    )


def num_experts(checkpoint: Checkpoint, params: Params) -> int:
    """Routed experts of a layer, from how many of them one token uses; 0 without."""
    return checkpoint.experts_per_token * params.routed_experts // params.active_experts if params.active_experts else 0


def weights_bytes(
    checkpoint: Checkpoint, form: WeightFormat, layers: range, ranks: Ranks, *, drafts: int
) -> Fraction | None:
    """One rank of one pipeline stage. The first stage holds the embedding, the last the head; speculation layers are
    loaded only with speculation. None where the shapes aren't known."""
    if checkpoint.top is None or checkpoint.hidden is None:
        return None
    top, total = checkpoint.top, Fraction(0)
    is_first, is_last = layers.start == 0, layers.stop == len(checkpoint.layers)
    if is_first:
        total += params_bytes(Params(embedding=top.embedding, other=top.other, mlp=top.mlp), form, ranks)
    if is_last:
        # a tied head is the embedding once more where it isn't on the same rank
        head = top.head or (0 if is_first else top.embedding)
        total += params_bytes(Params(head=head, norms=top.norms), form, ranks)
    own = [checkpoint.layers[index] for index in layers]
    for layer, count in Counter([*own, *(checkpoint.mtp_layers if drafts and is_last else ())]).items():
        if layer.params is None:
            return None
        total += params_bytes(layer.params.times(count), form, ranks, num_experts(checkpoint, layer.params))
        total += count * copied_heads_bytes(layer.kv, checkpoint.hidden, form, ranks.tp)
    return total
