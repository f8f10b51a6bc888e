"""Zamba2: Mamba-2 in every layer, and every so often one of few shared transformer blocks before it.

Enters: a config's keys and a layer's index. Leaves: what a layer has beside its Mamba-2 mixer, as `Params`. Always
true: a shared block is counted at its first use, adapters and the projection behind it at every one; keys and values
are kept at every use. Source: the published modelling code (transformers, `zamba2`; arXiv 2411.15242). Next:
`config.py`.
"""

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import KvLayer, Params
from hitsend.plan.keys import Keys


def names(keys: Keys) -> dict[str, object]:
    """Its keys in the usual names: a block reads the hidden state beside the embedding, so it is twice as wide."""
    heads, hidden = keys.number("num_attention_heads"), keys.number("hidden_size")
    wide = keys.maybe("attention_hidden_size", default=2 * hidden)
    if wide % heads:
        raise ConfigError(f"{keys.source}: attention_hidden_size is {wide}, which {heads} heads don't divide")
    kinds = {"hybrid": "parallel", "m": "mamba", "g": "parallel"}
    told = keys.words("layers_block_type")
    return {
        "layer_kinds": [kinds.get(kind, kind) for kind in told] or _numbered(keys),
        "num_key_value_heads": heads,
        "mamba_d_head": keys.find("mamba_headdim"),
        "mamba_n_heads": keys.find("n_mamba_heads"),
        "mamba_n_groups": keys.find("mamba_ngroups"),
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "attention_hidden_size": wide,
        "attention_head_dim": wide // heads,
        "intermediate_size": keys.maybe("ffn_hidden_size", default=4 * hidden),
        "adapter_rank": keys.maybe("lora_rank", default=128),
    }


def hybrid_params(keys: Keys, order: int, kv: KvLayer, hidden: int) -> Params:
    """The `order`-th use (from 0) of a shared block."""
    wide, width = keys.number("attention_hidden_size"), keys.number("intermediate_size")
    rank, blocks = keys.number("adapter_rank"), keys.maybe("num_mem_blocks", default=1)
    query, each = kv.heads * kv.key_dim, kv.kv_heads * kv.key_dim
    found = Params(attention=hidden * hidden, mlp=rank * (hidden + 2 * width))
    if keys.flag("use_shared_attention_adapter", "use_shared_attention_lora"):
        found += Params(attention=3 * 2 * wide * rank)
    if order < blocks:
        found += Params(attention=wide * (query + 2 * each) + query * hidden, mlp=3 * hidden * width)
        found += Params(norms=wide + hidden)
    return found


def _numbered(keys: Keys) -> list[str]:
    uses = set(keys.whole_numbers("hybrid_layer_ids"))
    if not uses:
        raise ConfigError(f"{keys.source}: the key 'layers_block_type' is missing, and zamba2 needs it")
    return ["parallel" if layer in uses else "mamba" for layer in range(keys.number("num_hidden_layers"))]
