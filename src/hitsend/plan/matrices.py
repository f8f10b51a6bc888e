"""Parameters, counted from the shapes of the matrices.

Enters: dimensions. Leaves: `Params` of one layer. Always true: each function is the list of the matrices that the
published modelling code of the family creates, in that order; nothing is fitted. Next: `memory.py`.
"""

from hitsend.plan.checkpoint import KvLayer, Params, StateLayer

OVERLAPPING = 4
"""The ratio at which DeepSeek-V4 compresses with overlap, and has an indexer."""


def grouped_attention(hidden: int, kv: KvLayer, *, is_gated: bool, has_qk_norm: bool, biases: int) -> Params:
    """Grouped-query attention (arXiv 2305.13245): q, k, v, o. Gated (Qwen3-Next): q twice as wide. `biases`:
    elements."""
    query = hidden * kv.heads * kv.key_dim * (2 if is_gated else 1)
    keys_values = hidden * kv.kv_heads * (kv.key_dim + kv.value_dim)
    out = kv.heads * kv.value_dim * hidden
    norms = 2 * kv.key_dim if has_qk_norm else 0
    return Params(attention=query + keys_values + out + biases, norms=norms)


def latent_attention(hidden: int, kv: KvLayer, query_rank: int | None, index_heads: int) -> Params:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): q_a, q_b, kv_a, kv_b, o and their norms.

    The down-projections are on every rank. The indexer (DeepSeek-V3.2) is q, k, weights and k's norm.
    """
    latent = kv.latent_dim or 0
    nope = kv.key_dim - kv.rope_dim
    down = hidden * (latent + kv.rope_dim)
    if query_rank:
        down += hidden * query_rank
        up_query = query_rank * kv.heads * kv.key_dim
    else:
        up_query = hidden * kv.heads * kv.key_dim
    up = latent * kv.heads * (nope + kv.value_dim) + kv.heads * kv.value_dim * hidden
    indexer = 0
    if kv.indexer_dim:
        indexer = (query_rank or hidden) * index_heads * kv.indexer_dim + hidden * (kv.indexer_dim + index_heads)
    return Params(attention=down + up_query + up + indexer, norms=latent + (query_rank or 0), replicated=down + indexer)


def compressed_attention(hidden: int, kv: KvLayer, query_rank: int, out: tuple[int, int], index_heads: int) -> Params:
    """DeepSeek-V4's attention: q_a, q_b, one latent key for all heads, an output of two steps (`out`: groups, rank),
    a sink per head; where tokens are compressed, two projections and a position table, twice as wide with overlap; the
    indexer has a compressor of its own. Source: the published modelling code (transformers, `deepseek_v4`)."""
    groups, rank = out
    up = query_rank * kv.heads * kv.key_dim + kv.heads
    up += kv.heads * kv.key_dim * rank + groups * rank * hidden
    whole = hidden * (query_rank + kv.key_dim)
    if kv.compress_ratio > 1:
        wide = kv.key_dim * overlap(kv)
        whole += 2 * hidden * wide + kv.compress_ratio * wide
    if kv.indexer_dim:
        narrow = kv.indexer_dim * overlap(kv)
        whole += query_rank * index_heads * kv.indexer_dim + hidden * index_heads
        whole += 2 * hidden * narrow + kv.compress_ratio * narrow
    return Params(attention=whole + up, norms=query_rank + kv.key_dim, replicated=whole)


def overlap(kv: KvLayer) -> int:
    """Neighbouring groups of four tokens overlap, so their compressor is two groups wide."""
    return 2 if kv.compress_ratio == OVERLAPPING else 1


def recurrent(hidden: int, state: StateLayer) -> Params:
    """The matrices of one recurrent layer, by its kind."""
    make = {"mamba2": mamba, "mamba1": mamba_one, "short_conv": short_conv}.get(state.kind, delta_net)
    return make(hidden, state)


def delta_net(hidden: int, state: StateLayer) -> Params:
    """Gated DeltaNet (arXiv 2412.06464): q, k, v, gate, beta, decay, convolution, A, dt, norm, out."""
    value = state.value_heads * state.value_dim
    into = hidden * (state.conv_channels + value + 2 * state.value_heads)
    return Params(
        recurrent=into + state.conv_channels * state.kernel + 2 * state.value_heads + value * hidden,
        norms=state.value_dim,
    )


def kda(hidden: int, state: StateLayer, decay_rank: int | None, gate_rank: int | None) -> Params:
    """Kimi Delta Attention (arXiv 2510.26692): q, k, v, beta, convolutions, A, dt, norm, out; decay and gate as two
    thin matrices of a rank each, or one whole one (None)."""
    value = state.value_heads * state.value_dim
    ranks = sum(hidden * value if rank is None else rank * (hidden + value) for rank in (decay_rank, gate_rank))
    into = hidden * (state.conv_channels + state.value_heads) + ranks
    small = state.conv_channels * state.kernel + state.value_heads + value
    return Params(recurrent=into + small + value * hidden, norms=state.value_dim)


def mamba(hidden: int, state: StateLayer) -> Params:
    """Mamba-2 (arXiv 2405.21060): one projection to z, x, B, C and dt, convolution with bias, A, D, dt, norm, out."""
    inner = state.value_heads * state.value_dim
    into = hidden * (inner + state.conv_channels + state.value_heads)
    return Params(
        recurrent=into + state.conv_channels * (state.kernel + 1) + 3 * state.value_heads + inner * hidden, norms=inner
    )


def mamba_one(hidden: int, state: StateLayer) -> Params:
    """Mamba (arXiv 2312.00752): into two branches, convolution with bias, x to step, B and C (a step's rank is
    hidden / 16), step, A, D, out."""
    inner, rank = state.value_heads, -(-hidden // 16)
    small = inner * (rank + 2 * state.key_dim) + (rank + 1) * inner + inner * state.key_dim + inner
    return Params(recurrent=2 * hidden * inner + inner * (state.kernel + 1) + small + inner * hidden)


def short_conv(hidden: int, state: StateLayer) -> Params:
    """LFM2's: into three, a convolution per channel, out (its modelling code in transformers)."""
    return Params(recurrent=4 * hidden * hidden + hidden * state.kernel)


def gated_mlp(hidden: int, intermediate: int) -> int:
    """Gate, up and down (arXiv 2002.05202)."""
    return 3 * hidden * intermediate


def plain_mlp(hidden: int, intermediate: int) -> int:
    """Up and down."""
    return 2 * hidden * intermediate
