"""What one step moves and computes on one GPU, and which of the two bounds it.

Enters: a checkpoint, a weight format, a layout over GPUs, and the sequences of a step. Leaves: bytes, floating-point
operations, and the time below which no step can be. Always true: `floor_s` counts only the bytes that one token needs,
so nothing measured can beat it; a latent cache and a recurrent state are counted as `sizes.py` counts them; experts are
read once each however many tokens chose them. Next: `terms.py`.
"""

from collections import Counter
from fractions import Fraction
from functools import cache

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Checkpoint, KvLayer
from hitsend.plan.facts import Gpu
from hitsend.plan.formats import weight_format, weights_name
from hitsend.plan.sizes import Ranks, kv_bytes_per_token, params_bytes, state_bytes

FALLBACK_LINK_BYTES_PER_S = 32_000_000_000
"""PCIe 4.0 x16, where the facts name no link."""
_FP4 = ("nvfp4", "mxfp4", "nvfp4-experts", "fp4-experts")


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """`tp` GPUs hold one copy of the model per pipeline stage. With `attention_dp` each of them has its own sequences
    and whole attention weights, and only the experts are divided; `ep`: experts are divided by expert, not by width."""

    tp: int = 1
    pp: int = 1
    ep: bool = False
    attention_dp: bool = False

    @property
    def attention_ranks(self) -> int:
        """Over how many GPUs attention is divided."""
        return 1 if self.attention_dp else self.tp


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as far as its speed depends on it. Bytes are of the whole model."""

    name: str
    layers: int
    moe_layers: int
    recurrent_layers: int
    hidden: int
    shared_bytes: float
    """Weights that every token reads: all but the routed experts and the table tokens are looked up in."""
    routed_bytes: float
    share_of_experts: float
    """Experts one token uses / experts; 0 without experts."""
    experts_per_token: int
    active_params: int
    weights: str


def shape_of(model: Checkpoint, weights: str | None) -> Shape:
    """Raises ConfigError where the model's shapes aren't known."""
    params = model.params
    if params is None or model.hidden is None:
        raise ConfigError(f"{model.name}: its widths aren't known, so its speed can't be planned")
    name = weights_name(weights, model.weights, has_experts=model.experts_per_token > 0)
    form = weight_format("bf16" if name == "gguf" else name)
    read = msgspec.structs.replace(params, routed_experts=0, other=0, embedding=0 if params.head else params.embedding)
    return Shape(
        name=model.name,
        layers=len(model.layers),
        moe_layers=sum(1 for layer in model.layers if layer.params is not None and layer.params.routed_experts),
        recurrent_layers=sum(1 for layer in model.layers if layer.state is not None),
        hidden=model.hidden,
        shared_bytes=float(params_bytes(read, form, Ranks())),
        routed_bytes=float(params.routed_experts * form.bytes_per_param),
        share_of_experts=params.active_experts / params.routed_experts if params.routed_experts else 0.0,
        experts_per_token=model.experts_per_token,
        active_params=params.active,
        weights=name,
    )


def touched_share(shape: Shape, tokens: float) -> float:
    """Of the experts, those that at least one of so many tokens chooses, where each is as likely: 1 - (1 - k/E)^T."""
    return 1 - (1 - shape.share_of_experts) ** max(1.0, tokens) if shape.share_of_experts else 0.0


def step_weight_bytes(shape: Shape, layout: Layout, tokens: float) -> float:
    """What a step of so many tokens reads of the weights, on one GPU; all pipeline stages, one after the other."""
    routed = shape.routed_bytes * touched_share(shape, tokens) / layout.tp
    return shape.shared_bytes / layout.attention_ranks + routed


@cache
def _kv_parts(model: Checkpoint, kv_dtype: str, ranks: int) -> tuple[tuple[float, int | None, int], ...]:
    """Bytes a token, window and number, of each kind of layer that keeps tokens."""
    counts: dict[tuple[float, int | None], int] = {}
    for layer in model.layers:
        if layer.kv is None:
            continue
        cost = float(kv_bytes_per_token(layer, kv_dtype, Ranks(ranks), is_uncompressed=model.is_uncompressed_mla))
        key = (cost, layer.kv.window_tokens)
        counts[key] = counts.get(key, 0) + 1
    return tuple((cost, window, count) for (cost, window), count in counts.items())


@cache
def sequence_state_bytes(model: Checkpoint, layout: Layout) -> int:
    """Recurrent state of one sequence on one GPU."""
    ranks = Ranks(layout.attention_ranks)
    return sum(state_bytes(layer.state, "vllm", ranks).total for layer in model.layers if layer.state is not None)


def sequence_kv_bytes(model: Checkpoint, layout: Layout, kv_dtype: str, tokens: float) -> float:
    """Keys and values of one sequence of so many tokens on one GPU: what a decode step reads for it."""
    parts = _kv_parts(model, kv_dtype, layout.attention_ranks)
    return sum(cost * count * min(tokens, window or tokens) for cost, window, count in parts)


@cache
def _attention_parts(model: Checkpoint) -> tuple[tuple[KvLayer, int], ...]:
    return tuple(Counter(layer.kv for layer in model.layers if layer.kv is not None).items())


def attention_flops(model: Checkpoint, fresh: float, cached: float = 0.0) -> float:
    """Scores and mix of a prompt: sum over layers 2 * T * (cached + T / 2) * heads * (key + value) (FlashAttention-2,
    arXiv 2307.08691, section 4.1, causal), windows at most; compressed tokens count once for several, with the newest
    beside them."""
    reach = cached + fresh / 2

    def read(kv: KvLayer) -> float:
        if kv.compress_ratio > 1:
            return min(reach, reach / kv.compress_ratio + kv.beside_window)
        return min(reach, kv.window_tokens or reach)

    return sum(
        2 * fresh * read(kv) * kv.heads * (kv.key_dim + kv.value_dim) * count for kv, count in _attention_parts(model)
    )


def peak_flops(gpu: Gpu, weights: str) -> float:
    """Dense peak of the arithmetic that these weights are multiplied in. Raises ConfigError where none is known.

    4-bit floats need a GPU that has them; integers and GGUF types are unpacked to 16 bit.
    """
    low = weights.casefold()
    found = None
    if low in _FP4:
        found = gpu.fp4_flops
    elif low.startswith("fp8"):
        found = gpu.fp8_flops
    elif low in {"int8", "w8a8"}:
        found = gpu.int8_ops
    found = found or gpu.bf16_flops
    if found is None:
        raise ConfigError(f"{gpu.name}: no peak rate is known; give one with --facts FILE")
    return found


def link_bytes_per_s(gpu: Gpu) -> int:
    """Between two GPUs, one direction."""
    return gpu.link_bytes_per_s or gpu.pcie_bytes_per_s or FALLBACK_LINK_BYTES_PER_S


def floor_s(shape: Shape, layout: Layout, gpu: Gpu) -> float:
    """No decode step is faster: the weights that one token needs, over the peak bandwidth (roofline, Williams 2009)."""
    routed = shape.routed_bytes * shape.share_of_experts / layout.tp
    return (shape.shared_bytes / layout.attention_ranks + routed) / gpu.bandwidth_bytes_per_s


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one step on one GPU. `ridge`: operations per byte at which the two bounds meet."""

    name: str
    flops: float
    bytes: float
    peak_flops: float
    bandwidth_bytes_per_s: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    @property
    def ridge(self) -> float:
        """Operations per byte at which computing takes as long as reading."""
        return self.peak_flops / self.bandwidth_bytes_per_s

    @property
    def side(self) -> str:
        """Which bound is the nearer one."""
        return "compute" if self.intensity > self.ridge else "memory"

    @property
    def ideal_s(self) -> float:
        """The longer of the two."""
        return max(self.flops / self.peak_flops, self.bytes / self.bandwidth_bytes_per_s)


def ridge_point(peak: float, bandwidth_bytes_per_s: float) -> Fraction:
    """Operations per byte: peak / bandwidth (Williams, Waterman, Patterson 2009)."""
    return Fraction(peak) / Fraction(bandwidth_bytes_per_s)


def phases(
    model: Checkpoint,
    shape: Shape,
    gpu: Gpu,
    layout: Layout,
    *,
    kv_dtype: str,
    batch: float,
    fresh: float,
    context: float,
) -> tuple[Phase, Phase]:
    """A prompt of `fresh` tokens by itself, and a decode step of `batch` sequences that have `context` tokens each."""
    peak, bandwidth = peak_flops(gpu, shape.weights), float(gpu.bandwidth_bytes_per_s)
    own = batch / layout.tp if layout.attention_dp else batch
    per_sequence = sequence_kv_bytes(model, layout, kv_dtype, context) + 2 * sequence_state_bytes(model, layout)
    prefill_flops = (
        2 * fresh * shape.active_params + attention_flops(model, fresh, max(0.0, context - fresh))
    ) / layout.tp
    reads = attention_flops(model, 1.0, context) / layout.attention_ranks
    return (
        Phase(
            name="prefill",
            flops=prefill_flops,
            bytes=step_weight_bytes(shape, layout, fresh) + sequence_kv_bytes(model, layout, kv_dtype, fresh),
            peak_flops=peak,
            bandwidth_bytes_per_s=bandwidth,
        ),
        Phase(
            name="decode",
            flops=2 * batch * shape.active_params / layout.tp + own * reads,
            bytes=step_weight_bytes(shape, layout, batch) + own * per_sequence,
            peak_flops=peak,
            bandwidth_bytes_per_s=bandwidth,
        ),
    )
