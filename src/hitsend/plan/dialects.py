"""Configs that say the same things by other names, in the usual ones.

Enters: a config's keys. Leaves: the same with Llama's names beside its own. Always true: a value that has the usual
name already stays; what a modelling code fixes without a key (a falcon's one head) stands here with the rule it has; a
family that isn't here is passed through. Next: `families.py`.
"""

from collections.abc import Callable
from typing import Any

from hitsend.core.errors import ConfigError
from hitsend.plan import nas, zamba
from hitsend.plan.keys import Keys

Names = dict[str, Any]


def in_usual_names(keys: Keys) -> Keys:
    """Raises ConfigError for an odd value that can't be translated."""
    rule = _DIALECTS.get(keys.model_type)
    if rule is None:
        return keys
    told = {name: value for name, value in rule(keys).items() if value is not None}
    return keys.beneath(told)


def _renamed(**names: str) -> Callable[[Keys], Names]:
    return lambda keys: {usual: keys.find(own) for usual, own in names.items()}


def _chatglm(keys: Keys) -> Names:
    heads = keys.number("num_attention_heads")
    groups = keys.number("multi_query_group_num") if keys.flag("multi_query_attention") else heads
    own = _renamed(
        num_hidden_layers="num_layers",
        head_dim="kv_channels",
        intermediate_size="ffn_hidden_size",
        vocab_size="padded_vocab_size",
        max_position_embeddings="seq_length",
    )(keys)
    return own | {"num_key_value_heads": groups}


def _falcon(keys: Keys) -> Names:
    heads = keys.number("num_attention_heads", "n_head")
    if keys.flag("new_decoder_architecture"):
        groups = keys.maybe("num_kv_heads", "n_head_kv", default=heads)
    else:
        groups = 1 if keys.flag("multi_query", default=True) else heads
    hidden = keys.number("hidden_size")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": keys.find("n_layer"),
        "intermediate_size": keys.maybe("ffn_hidden_size", default=4 * hidden),
        "max_position_embeddings": keys.maybe("max_position_embeddings", default=2048),
    }


def _gpt(keys: Keys) -> Names:
    hidden = keys.number("n_embd")
    return {
        "hidden_size": hidden,
        "num_attention_heads": keys.find("n_head"),
        "num_hidden_layers": keys.find("n_layer"),
        "num_key_value_heads": 1 if keys.flag("multi_query") else None,
        "intermediate_size": keys.maybe("n_inner", default=4 * hidden),
        "max_position_embeddings": keys.find("n_positions"),
    }


def _bloom(keys: Keys) -> Names:
    hidden = keys.number("hidden_size", "n_embed")
    return {
        "hidden_size": hidden,
        "num_attention_heads": keys.find("n_head"),
        "num_hidden_layers": keys.find("n_layer"),
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": keys.maybe("seq_length", default=2048),
    }


def _qwen_one(keys: Keys) -> Names:
    """Its `intermediate_size` counts gate and up together."""
    return {"num_key_value_heads": keys.find("num_attention_heads"), "head_dim": keys.find("kv_channels")} | {
        "dense_intermediate_size": keys.number("intermediate_size") // 2
    }


def _lfm(keys: Keys) -> Names:
    """Layers by name or, in older files, the attention's numbers; the width is two thirds, rounded up."""
    layers = keys.number("num_hidden_layers")
    attention = keys.whole_numbers("full_attn_idxs") if keys.find("full_attn_idxs") is not None else None
    kinds = keys.words("layer_types") if attention is None else []
    is_full = [index in (attention or ()) for index in range(layers)] if attention is not None else None
    named = ["full_attention" if full else "short_conv" for full in is_full] if is_full else None
    width = keys.number("intermediate_size", "block_ff_dim")
    if keys.flag("block_auto_adjust_ff_dim", default=keys.model_type == "lfm2"):
        step = keys.maybe("block_multiple_of", default=256)
        width = -(-(2 * width // 3) // step) * step
    return {
        "layer_kinds": named or [{"conv": "short_conv"}.get(kind, kind) for kind in kinds],
        "dense_intermediate_size": width,
        "first_k_dense_replace": keys.find("num_dense_layers"),
    }


def _jamba(keys: Keys) -> Names:
    layers = keys.number("num_hidden_layers")
    every, first = keys.number("attn_layer_period"), keys.maybe("attn_layer_offset")
    kinds = ["full_attention" if layer % every == first else "mamba1" for layer in range(layers)]
    period, offset = keys.maybe("expert_layer_period", default=2), keys.maybe("expert_layer_offset", default=1)
    sparse = [int(layer % max(1, period) == offset) for layer in range(layers)]
    return {"layer_kinds": kinds, "moe_layer_freq": sparse}


def _mimo(keys: Keys) -> Names:
    pattern = keys.whole_numbers("hybrid_layer_pattern")
    return {
        "layer_kinds": ["sliding_attention" if one else "full_attention" for one in pattern],
        "sliding_window": keys.find("sliding_window_size"),
    }


def _bailing_hybrid(keys: Keys) -> Names:
    """Ling 3: every `layer_group_size`-th layer is latent attention and so is an unfinished group's, the others KDA
    (its published modelling code). Ling 2.5 has the same name and Lightning attention."""
    if keys.find("short_conv_kernel_size") is None:
        raise ConfigError(
            f"{keys.source}: the key 'short_conv_kernel_size' is missing, so this is Ling 2.5 with Lightning "
            "attention; what engines keep for that isn't known here"
        )
    layers, size = keys.number("num_hidden_layers"), keys.number("layer_group_size")
    whole = layers // size * size
    full = [(layer + 1) % size == 0 or layer >= whole for layer in range(layers)]
    heads, dim = keys.number("num_attention_heads"), keys.number("head_dim")
    kernel = keys.number("short_conv_kernel_size")
    return {
        "layer_kinds": ["full_attention" if one else "linear_attention" for one in full],
        "linear_attn_config": {"num_heads": heads, "head_dim": dim, "short_conv_kernel_size": kernel},
        "moe_shared_expert_intermediate_size": keys.maybe("moe_shared_expert_intermediate_size")
        * keys.maybe("num_shared_experts", default=1)
        or None,
    }


def _nas(keys: Keys) -> Names:
    return {"layer_kinds": nas.kinds(keys)}


def _exaone_four(keys: Keys) -> Names:
    told = keys.find("sliding_window_pattern")
    if isinstance(told, str) and (told.count("G") != 1 or not told.endswith("G")):
        raise ConfigError(f"{keys.source}: sliding_window_pattern is {told!r}, known are L's and a G at the end")
    return {"sliding_every": len(told)} if isinstance(told, str) else {}


_DIALECTS: dict[str, Callable[[Keys], Names]] = {
    "chatglm": _chatglm,
    "falcon": _falcon,
    "gpt2": _gpt,
    "gpt_bigcode": _gpt,
    "bloom": _bloom,
    "qwen": _qwen_one,
    "lfm2": _lfm,
    "lfm2_moe": _lfm,
    "jamba": _jamba,
    "mimo_v2": _mimo,
    "mimo_v2_flash": _mimo,
    "exaone4": _exaone_four,
    "bailing_hybrid": _bailing_hybrid,
    "nemotron-nas": _nas,
    "deci": _nas,
    "zamba2": zamba.names,
    "kimi_linear": _renamed(num_experts_per_tok="num_experts_per_token", moe_latent_size="routed_expert_hidden_size"),
    "exaone": _renamed(num_hidden_layers="num_layers"),
    "afmoe": _renamed(sliding_every="global_attn_every_n_layers", first_k_dense_replace="num_dense_layers"),
    "ernie4_5_moe": _renamed(
        num_experts="moe_num_experts",
        num_experts_per_tok="moe_k",
        num_shared_experts="moe_num_shared_experts",
        first_k_dense_replace="moe_layer_start_index",
    ),
}
