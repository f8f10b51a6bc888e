"""The architectures that the planner knows, by the `model_type` of their config.json, and how they differ.

Enters: nothing. Leaves: `FAMILIES`. Always true: what isn't here is refused; what a family's config leaves out because
its modelling code has a default for it stands here. Next: `patterns.py`.
"""

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """How one family's modelling code differs from Llama's."""

    head_dim: int | None = None
    """The modelling code's own default, where it isn't hidden / heads."""
    is_mha_by_default: bool = False
    """No `num_key_value_heads` means as many as query heads."""
    is_latent: bool = False
    is_compressed: bool = False
    """Latent vectors of several tokens in one, as `compress_ratios` lists them (DeepSeek-V4)."""
    is_gated_attention: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_sinks: bool = False
    is_gated_mlp: bool = True
    has_mlp_bias: bool = False
    has_expert_bias: bool = False
    has_mlp_beside_experts: bool = False
    has_shared_gate: bool = False
    has_router_bias: bool = False
    shared_experts: int = 0
    norms_per_layer: int = 2
    final_norms: int = 1
    has_learned_positions: bool = False
    is_tied_by_default: bool = False
    is_one_mixer_per_block: bool = False
    dense_width: str = "intermediate_size"
    sliding_pattern: int = 0
    """Every so-many-th layer reads everything, the others a window, where the config has no list of its own."""
    is_sliding_throughout: bool = False
    kind_throughout: str = ""
    """One kind for all layers, where the config lists none."""
    full_interval: int = 0
    """Every so-many-th layer is attention, the others recurrent, where the config doesn't say."""
    chunked_interval: int = 0


_LLAMA = Family(is_mha_by_default=True)
_MISTRAL = Family(is_sliding_throughout=True)
_QWEN_BIASED = Family(has_qkv_bias=True)
_QWEN_NORMED = Family(has_qk_norm=True, head_dim=128)
_HYBRID_QWEN = Family(has_qk_norm=True, is_gated_attention=True, has_shared_gate=True, full_interval=4, head_dim=256)
_GEMMA = Family(has_qk_norm=True, norms_per_layer=4, is_tied_by_default=True, sliding_pattern=6, head_dim=256)
_GEMMA_FOUR = Family(
    has_qk_norm=True, norms_per_layer=4, is_tied_by_default=True, sliding_pattern=6, has_mlp_beside_experts=True
)
_GEMMA_THREE_N = Family(has_qk_norm=True, norms_per_layer=4, is_tied_by_default=True, sliding_pattern=5, head_dim=256)
_PLAIN_MLP = Family(
    is_mha_by_default=True,
    has_qkv_bias=True,
    has_out_bias=True,
    is_gated_mlp=False,
    has_mlp_bias=True,
    norms_per_layer=4,
)
_LEARNED_POSITIONS = msgspec.structs.replace(
    _PLAIN_MLP, final_norms=2, has_learned_positions=True, is_tied_by_default=True
)
_GLM = Family(has_qkv_bias=True)
_LATENT = Family(is_latent=True)
_LATENT_BIASED = Family(is_latent=True, has_router_bias=True)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "llava": _LLAMA,
    "phi3": Family(is_mha_by_default=True, is_sliding_throughout=True),
    "granite": _LLAMA,
    "smollm3": Family(),
    "mistral": _MISTRAL,
    "mistral3": _MISTRAL,
    "ministral3": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen2": _QWEN_BIASED,
    "qwen2_vl": _QWEN_BIASED,
    "qwen2_5_vl": _QWEN_BIASED,
    "qwen2_moe": Family(has_qkv_bias=True, has_shared_gate=True),
    "qwen3": _QWEN_NORMED,
    "qwen3_moe": _QWEN_NORMED,
    "qwen3_vl": _QWEN_NORMED,
    "qwen3_vl_text": _QWEN_NORMED,
    "qwen3_vl_moe": _QWEN_NORMED,
    "qwen3_vl_moe_text": _QWEN_NORMED,
    "qwen3_next": _HYBRID_QWEN,
    "qwen3_5": _HYBRID_QWEN,
    "qwen3_5_text": _HYBRID_QWEN,
    "qwen3_5_moe": _HYBRID_QWEN,
    "qwen3_5_moe_text": _HYBRID_QWEN,
    "gemma": Family(head_dim=256, is_tied_by_default=True),
    "gemma2": Family(norms_per_layer=4, is_tied_by_default=True, sliding_pattern=2, head_dim=256),
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma3n": _GEMMA_THREE_N,
    "gemma3n_text": _GEMMA_THREE_N,
    "gemma4": _GEMMA_FOUR,
    "gemma4_text": _GEMMA_FOUR,
    "gpt_oss": Family(
        has_qkv_bias=True,
        has_out_bias=True,
        has_sinks=True,
        has_expert_bias=True,
        has_router_bias=True,
        sliding_pattern=2,
        head_dim=64,
    ),
    "opt": _LEARNED_POSITIONS,
    "minimax_m2": Family(),
    "laguna": Family(has_qk_norm=True),
    "glm4_moe": Family(has_qkv_bias=True),
    "llama4": Family(dense_width="intermediate_size_mlp", shared_experts=1, chunked_interval=4),
    "llama4_text": Family(dense_width="intermediate_size_mlp", shared_experts=1, chunked_interval=4),
    "deepseek_v2": _LATENT,
    "mistral4": _LATENT,
    "deepseek_v3": _LATENT_BIASED,
    "deepseek_v32": _LATENT_BIASED,
    "glm_moe_dsa": _LATENT_BIASED,
    "kimi_k2": _LATENT_BIASED,
    "kimi_k25": _LATENT_BIASED,
    "kimi_linear": _LATENT_BIASED,
    "bailing_hybrid": _LATENT_BIASED,
    "nemotron-nas": Family(),
    "deci": Family(),
    "zamba2": Family(is_tied_by_default=True, is_one_mixer_per_block=True, is_mha_by_default=True),
    "sarvam_mla": _LATENT,
    "deepseek_v4": Family(is_compressed=True, has_router_bias=True),
    "glm5_next": _LATENT_BIASED,
    "glm5_next_text": _LATENT_BIASED,
    "nemotron_h": Family(is_one_mixer_per_block=True, is_gated_mlp=False),
    "bamba": Family(),
    "hunyuan": Family(has_qk_norm=True, is_tied_by_default=True),
    "granitemoehybrid": Family(dense_width="shared_intermediate_size"),
    "falcon_h1": Family(kind_throughout="parallel"),
    "jamba": Family(),
    "lfm2": Family(has_qk_norm=True, is_tied_by_default=True, dense_width="dense_intermediate_size"),
    "lfm2_moe": Family(has_qk_norm=True, is_tied_by_default=True, dense_width="dense_intermediate_size"),
    "mamba": Family(kind_throughout="mamba1", is_one_mixer_per_block=True, is_tied_by_default=True),
    "falcon_mamba": Family(kind_throughout="mamba1", is_one_mixer_per_block=True, is_tied_by_default=True),
    "mamba2": Family(kind_throughout="mamba", is_one_mixer_per_block=True),
    "afmoe": Family(has_qk_norm=True, is_gated_attention=True, norms_per_layer=4, sliding_pattern=4),
    "mimo": _QWEN_BIASED,
    "mimo_v2": Family(has_router_bias=True),
    "mimo_v2_flash": Family(has_router_bias=True),
    "bailing_moe": Family(has_qk_norm=True),
    "bailing_moe_v2": Family(has_qk_norm=True),
    "dots1": Family(has_qk_norm=True),
    "deepseek": _LLAMA,
    "ernie4_5": Family(is_tied_by_default=True),
    "ernie4_5_moe": Family(is_tied_by_default=True),
    "seed_oss": Family(has_qkv_bias=True),
    "hunyuan_v1_dense": _QWEN_NORMED,
    "exaone": _LLAMA,
    "exaone4": Family(has_qk_norm=True, sliding_pattern=4),
    "olmo": _LLAMA,
    "olmo2": Family(is_mha_by_default=True, has_qk_norm=True),
    "olmo3": Family(is_mha_by_default=True, has_qk_norm=True, sliding_pattern=4),
    "olmoe": Family(is_mha_by_default=True, has_qk_norm=True),
    "internlm2": _LLAMA,
    "internlm3": _LLAMA,
    "baichuan": _LLAMA,
    "aquila": _LLAMA,
    "minicpm": Family(is_mha_by_default=True, is_tied_by_default=True),
    "stablelm": _LLAMA,
    "starcoder2": Family(
        has_qkv_bias=True,
        has_out_bias=True,
        is_gated_mlp=False,
        has_mlp_bias=True,
        norms_per_layer=4,
        is_tied_by_default=True,
        is_sliding_throughout=True,
    ),
    "nemotron": Family(is_gated_mlp=False, norms_per_layer=4),
    "apertus": Family(has_qk_norm=True, is_gated_mlp=False),
    "chatglm": _GLM,
    "glm": _GLM,
    "glm4": Family(norms_per_layer=4),
    "glm4v_text": Family(norms_per_layer=4, has_qkv_bias=True),
    "glm4v_moe_text": _GLM,
    "glm4_moe_lite": _LATENT_BIASED,
    "qwen": Family(has_qkv_bias=True, dense_width="dense_intermediate_size"),
    "qwen2_vl_text": _QWEN_BIASED,
    "qwen2_5_vl_text": _QWEN_BIASED,
    "qwen2_5_omni_text": _QWEN_BIASED,
    "qwen3_omni_moe_text": _QWEN_NORMED,
    "gemma4_unified": _GEMMA_FOUR,
    "gemma4_unified_text": _GEMMA_FOUR,
    "phi": _PLAIN_MLP,
    "phimoe": Family(has_qkv_bias=True, has_out_bias=True, norms_per_layer=4),
    "phi4mm": Family(is_mha_by_default=True),
    "gpt2": _LEARNED_POSITIONS,
    "gpt_bigcode": _LEARNED_POSITIONS,
    "gpt_neox": _PLAIN_MLP,
    "bloom": msgspec.structs.replace(_PLAIN_MLP, is_tied_by_default=True),
    "falcon": Family(is_gated_mlp=False, norms_per_layer=4, is_tied_by_default=True),
    "cohere": Family(norms_per_layer=1, is_tied_by_default=True),
    "cohere2": Family(norms_per_layer=1, is_tied_by_default=True, sliding_pattern=4),
}

UNKNOWN: dict[str, str] = {
    "mllama": (
        "its cross-attention layers keep an image's tokens instead of the text's, and how the engines that still serve "
        "it divide a pool between the two isn't known here"
    ),
    "qwen4_exp": (
        "what its sparse attention keeps beside keys and values, and how engines page that, wasn't found in a "
        "published config.json"
    ),
}
"""What isn't known about an architecture that is refused, by its `model_type`."""
IN_KNOWN_TERMS = (
    'where you know what a token takes, pass that in known terms, as {"model_type": "llama", "kv_only": true, '
    '"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128} in a file, with '
    "--available-kv-gib"
)
