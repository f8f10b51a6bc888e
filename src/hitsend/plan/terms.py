"""What a token's time is made of: terms that are added, each with a constant that measurements gave.

Enters: a shape, a GPU, a layout, the load. Leaves: named terms in milliseconds before their constants. Always true:
times are added and never multiplied by one "efficiency" (per-layer time doesn't shrink with more GPUs, so a constant
efficiency can't work; throughput_rules); every term grows or stays as batch and prompt grow, and constants aren't
negative, so a plan does too. Next: `fit.py`.

    weights, kv        bytes over bandwidth: the constant says by how much peaks are missed
    flops, mix_*       operations over the peak; `mix`: prompts computed in the steps between two tokens of an answer,
    on
                       average input / output tokens per sequence and step
    layers … ranks     microseconds per layer: launches, norms, and waiting for other GPUs
    reduce             bytes of the all-reduces of a layer (2 * hidden * 2 bytes * 2 (n - 1) / n a token) over the link
"""

import msgspec

from hitsend.plan.checkpoint import Checkpoint
from hitsend.plan.facts import Gpu
from hitsend.plan.roofline import (
    Layout,
    Shape,
    attention_flops,
    link_bytes_per_s,
    peak_flops,
    sequence_kv_bytes,
    sequence_state_bytes,
    step_weight_bytes,
)

REDUCES_PER_LAYER = 2
"""After attention and after the MLP (Megatron-LM, arXiv 1909.08053)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`running` sequences of one copy of the model at once, with whole prompts of `input` tokens of which `cached` are
    found in a prefix cache. `tokens_per_pass`: tokens a decode step computes for each, drafts included."""

    running: float
    input: float
    output: float
    cached: float = 0.0
    tokens_per_pass: float = 1.0
    expected_per_pass: float = 1.0
    """Tokens a decode step yields for each."""

    @property
    def fresh(self) -> float:
        """Prompt tokens that are computed."""
        return max(1.0, self.input - self.cached)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per unit, for one model on one layout."""

    token_ms: float
    """One token's operations at the peak."""
    reduce_ms: float
    """One token's all-reduces at the link's rate."""


def _costs(shape: Shape, gpu: Gpu, layout: Layout) -> Costs:
    ranks = layout.tp
    moved = REDUCES_PER_LAYER * shape.layers * shape.hidden * 2 * 2 * (ranks - 1) / ranks
    return Costs(
        token_ms=2 * shape.active_params / (ranks * peak_flops(gpu, shape.weights)) * 1e3,
        reduce_ms=moved / link_bytes_per_s(gpu) * 1e3,
    )


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A model on GPUs."""

    model: Checkpoint
    shape: Shape
    gpu: Gpu
    layout: Layout
    kv_dtype: str = "auto"


def step_terms(system: System, load: Load) -> dict[str, float]:
    """Of one decode step, in milliseconds or in counts that a constant in microseconds multiplies."""
    model, shape, gpu, layout = system.model, system.shape, system.gpu, system.layout
    costs, ranks = _costs(shape, gpu, layout), layout.tp
    running = load.running / layout.pp
    own = running / ranks if layout.attention_dp else running
    tokens = running * load.tokens_per_pass
    steps = max(1.0, load.output / load.expected_per_pass)
    mixed = running * load.fresh / steps
    rate = gpu.bandwidth_bytes_per_s
    context = load.input + load.output / 2
    keeps = sequence_kv_bytes(model, layout, system.kv_dtype, context) + 2 * sequence_state_bytes(model, layout)
    attention = attention_flops(model, load.fresh, load.cached) / (ranks * peak_flops(gpu, "bf16")) * 1e3
    return {
        "weights": step_weight_bytes(shape, layout, tokens) / rate * 1e3,
        "kv": own * keeps / rate * 1e3,
        "layers": shape.layers / 1e3,
        "moe_layers": shape.moe_layers / 1e3,
        "ranks": (ranks > 1) * shape.layers / 1e3,
        "recurrent_layers": shape.recurrent_layers / 1e3,
        "sequence_layers": running * shape.layers / 1e6,
        "sequences": running / 1e3,
        "flops": tokens * costs.token_ms,
        "mix_flops": mixed * costs.token_ms,
        "mix_attention": running / steps * attention,
        "reduce": tokens * costs.reduce_ms,
        "mix_reduce": mixed * costs.reduce_ms,
        "expert_parallel": layout.ep * shape.layers / 1e3,
        "mix_experts": min(1.0, running / steps) * shape.routed_bytes / ranks / rate * 1e3,
        "mix_layers": mixed * shape.layers / 1e6,
    }


def first_token_terms(system: System, load: Load) -> dict[str, float]:
    """Of the time to the first token, without waiting for memory.

    `*_others`: prompts of the others that are computed meanwhile; a closed loop of N clients that all start at once and
    then drift apart lies between none (constant) and all of them (times N), hence both and the root.
    """
    model, shape, gpu, layout = system.model, system.shape, system.gpu, system.layout
    costs, ranks = _costs(shape, gpu, layout), layout.tp
    others, fresh = load.running, load.fresh
    own = fresh * costs.token_ms
    attention = attention_flops(model, fresh, load.cached) / (ranks * peak_flops(gpu, "bf16")) * 1e3
    reduce = fresh * costs.reduce_ms
    layers = shape.layers / 1e3
    return {
        "constant": 1.0,
        "prefill": own,
        "prefill_some_others": own * others**0.5,
        "prefill_others": own * others,
        "attention_others": attention * others,
        "reduce": reduce,
        "reduce_others": reduce * others,
        "layers": layers,
        "moe_layers": shape.moe_layers / 1e3,
        "ranks": (ranks > 1) * layers,
        "sequence_layers": others * layers,
        "sequences": others,
        "some_sequences": others**0.5,
        "token_layers": fresh * layers / 1e3,
        "token_layers_others": fresh * others * layers / 1e3,
        "tokens": fresh / 1e3,
        "tokens_others": fresh * others / 1e3,
        "tokens_some_others": fresh * others**0.5 / 1e3,
        "experts": shape.routed_bytes / ranks / gpu.bandwidth_bytes_per_s * 1e3,
        "expert_parallel": layout.ep * fresh / 1e3,
    }
