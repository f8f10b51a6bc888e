"""A model's config.json as a `Checkpoint`: which layer keeps what, and how many parameters it has.

Enters: the decoded JSON and where it came from. Leaves: a `Checkpoint`. Always true: an architecture that isn't in
`FAMILIES` is refused by name, and so is a key that is missing; a layer is attention, latent attention, recurrent or
neither, and that comes from the config's own list or pattern. Next: `matrices.py`.
"""

from collections.abc import Mapping
from typing import Any

from hitsend.core.errors import ConfigError
from hitsend.plan import compressed, gemma, matrices, nas, zamba
from hitsend.plan.checkpoint import Checkpoint, KvLayer, Layer, Params, StateLayer
from hitsend.plan.dialects import in_usual_names
from hitsend.plan.families import FAMILIES, IN_KNOWN_TERMS, UNKNOWN, Family
from hitsend.plan.keys import Keys
from hitsend.plan.patterns import ATTENTION, RECURRENT, kinds_of_layers, shared_from
from hitsend.plan.quantised import weights_of
from hitsend.plan.states import state_of

MAX_DRAFT_LAYERS = 64


def checkpoint_of(
    config: Mapping[str, Any], source: str, *, name: str | None = None, uncertain: tuple[str, ...] = ()
) -> Checkpoint:
    """Read a config. Raises ConfigError that names the architecture or the key."""
    keys = in_usual_names(Keys(config, source))
    family = _family(keys)
    kinds = kinds_of_layers(keys, family)
    shared = shared_from(keys, kinds)
    layers = tuple(_layer(keys, family, kind, index, is_shared=index in shared) for index, kind in enumerate(kinds))
    if keys.model_type == "zamba2":
        layers = _with_shared_blocks(keys, layers)
    return Checkpoint(
        name=name or str(keys.find("_name_or_path") or source),
        architecture=keys.model_type,
        source=source,
        layers=layers,
        mtp_layers=_draft_layers(keys, family, kinds),
        hidden=None if keys.flag("kv_only") else keys.number("hidden_size"),
        vocab=keys.maybe("vocab_size") or None,
        context=keys.maybe("max_position_embeddings") or None,
        top=_top(keys, family),
        intermediate=_widest(keys),
        experts_per_token=keys.maybe("num_experts_per_tok", "top_k_experts", "moe_topk") if num_experts(keys) else 0,
        expert_width=keys.maybe("moe_intermediate_size", "intermediate_size") if num_experts(keys) else 0,
        expert_hidden=keys.maybe("moe_latent_size"),
        media_tokens=gemma.media_tokens(keys),
        weights=weights_of(config),
        uncertain=(*uncertain, *_unsure(keys)),
    )


def _family(keys: Keys) -> Family:
    found = FAMILIES.get(keys.model_type) or FAMILIES.get(keys.outer_type)
    if found is None:
        what = keys.model_type or "(no model_type)"
        why = next((UNKNOWN[name] for name in UNKNOWN if what.startswith(name)), "")
        raise ConfigError(
            f"{keys.source}: the planner doesn't know the architecture {what!r} and won't guess"
            + (f": {why}" if why else "")
            + f"; {IN_KNOWN_TERMS}; it knows {', '.join(sorted(FAMILIES))}"
        )
    return found


def _layer(keys: Keys, family: Family, kind: str, index: int, *, is_shared: bool) -> Layer:
    kv = _kv(keys, family, kind, index) if kind in ATTENTION else None
    state = state_of(keys, kind) if kind in RECURRENT else None
    if keys.flag("kv_only"):
        return Layer(kv=kv, state=state, shares_kv=is_shared)
    hidden = keys.number("hidden_size")
    params = Params()
    if kv is not None and keys.model_type != "zamba2":
        params += _attention(keys, family, kv, hidden)
    if nas.has_blocks(keys):
        return Layer(kv=kv, params=nas.layer_params(keys, index, kv, hidden))
    if state is not None:
        params += _recurrent(keys, state, hidden)
    if family.is_one_mixer_per_block:
        params += _experts(keys, family, hidden) if kind == "moe" else Params()
        params += Params(mlp=_width(keys, ("intermediate_size", index), hidden, family)) if kind == "mlp" else Params()
        params += Params(norms=hidden)
    else:
        params += _feed_forward(keys, family, index, hidden, is_shared=is_shared)
        params += Params(norms=family.norms_per_layer * hidden) + gemma.layer_params(keys, hidden)
        params += compressed.streams_of(keys, hidden)
    return Layer(kv=kv, state=state, shares_kv=is_shared, params=params)


def _recurrent(keys: Keys, state: StateLayer, hidden: int) -> Params:
    if state.kind != "kda" or keys.model_type.startswith("glm5_next"):
        return matrices.recurrent(hidden, state)
    is_whole = keys.flag("no_kda_lora")
    linear = keys.find("linear_attn_config")
    is_gate_whole = is_whole or bool(isinstance(linear, dict) and linear.get("use_full_rank_gate"))
    return matrices.kda(
        hidden, state, None if is_whole else state.value_dim, None if is_gate_whole else state.value_dim
    )


def _with_shared_blocks(keys: Keys, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Zamba2: what the uses of shared blocks add, in the order of their uses."""
    made, order = [], 0
    for layer in layers:
        if layer.kv is not None and layer.params is not None:
            more = zamba.hybrid_params(keys, order, layer.kv, keys.number("hidden_size"))
            made.append(Layer(kv=layer.kv, state=layer.state, params=layer.params + more))
            order += 1
        else:
            made.append(layer)
    return tuple(made)


def _kv(keys: Keys, family: Family, kind: str, index: int) -> KvLayer:
    if family.is_latent:
        return _latent(keys)
    if family.is_compressed:
        return compressed.layer_of(keys, index)
    heads = _heads(keys, index)
    is_global, is_sliding = kind == "full_attention", kind == "sliding_attention"
    own = "num_global_key_value_heads" if is_global else "swa_num_key_value_heads" if is_sliding else ""
    kv_heads = (
        (nas.kv_heads(keys, index) if nas.has_blocks(keys) else 0)
        or keys.maybe(own)
        or (keys.maybe("num_key_value_heads", default=heads) if family.is_mha_by_default else 0)
        or keys.number("num_key_value_heads")
    )
    if heads % kv_heads:
        raise ConfigError(
            f"{keys.source}: num_key_value_heads is {kv_heads}, which doesn't divide the {heads} attention heads"
        )
    dim = keys.maybe("global_head_dim" if is_global else "swa_head_dim" if is_sliding else "")
    dim = dim or keys.maybe("head_dim", "attention_head_dim") or family.head_dim or 0
    if not dim:
        hidden = keys.number("hidden_size")
        if hidden % heads:
            raise ConfigError(
                f"{keys.source}: the key 'head_dim' is missing, and {hidden} / {heads} is no whole number"
            )
        dim = hidden // heads
    return KvLayer(
        kv_heads=kv_heads,
        key_dim=dim,
        value_dim=(keys.maybe("swa_v_head_dim") if is_sliding else 0) or keys.maybe("v_head_dim") or dim,
        heads=heads,
        window_tokens=keys.number("sliding_window") if is_sliding else None,
        chunk_tokens=keys.maybe("attention_chunk_size", default=8192) if kind == "chunked_attention" else None,
    )


def _heads(keys: Keys, index: int) -> int:
    """A layer's own number of query heads where the config lists them (Laguna)."""
    heads = keys.number("num_attention_heads", "n_head")
    told = keys.whole_numbers("num_attention_heads_per_layer")
    if not told:
        return heads
    if index >= len(told) or not told[index]:
        raise ConfigError(f"{keys.source}: num_attention_heads_per_layer has no number above 0 for layer {index}")
    return told[index]


def _latent(keys: Keys) -> KvLayer:
    # 0 where the latent vector has no position (GLM-5.3-Flash), and then it stands there
    rope = keys.maybe("qk_rope_head_dim") if keys.find("qk_rope_head_dim") == 0 else keys.number("qk_rope_head_dim")
    heads = keys.number("num_attention_heads")
    key = 0 if keys.flag("kv_only") else keys.number("qk_nope_head_dim") + rope
    return KvLayer(
        kv_heads=1,
        heads=heads,
        key_dim=key,
        value_dim=0 if keys.flag("kv_only") else keys.number("v_head_dim"),
        latent_dim=keys.number("kv_lora_rank"),
        rope_dim=rope,
        indexer_dim=keys.maybe("index_head_dim"),
        indexer_pool=keys.maybe("index_kpool") or 1,
    )


def _attention(keys: Keys, family: Family, kv: KvLayer, hidden: int) -> Params:
    if kv.beside_window:
        return compressed.attention_of(keys, kv, hidden)
    if kv.latent_dim is not None:
        made = matrices.latent_attention(hidden, kv, keys.maybe("q_lora_rank") or None, keys.maybe("index_n_heads"))
        return made + Params(attention=_output_gate(keys, kv, hidden))
    query, each = kv.heads * kv.key_dim, kv.kv_heads * kv.key_dim
    biases = query + 2 * each if family.has_qkv_bias or keys.flag("attention_bias") else 0
    biases += hidden if family.has_out_bias or keys.flag("attention_bias") else 0
    biases += kv.heads if family.has_sinks else 0
    # a gate for each head is one more small projection
    biases += hidden * kv.heads if keys.find("gating") == "per-head" else 0
    has_qk_norm = family.has_qk_norm or keys.flag("use_qk_norm")
    return matrices.grouped_attention(
        hidden, kv, is_gated=family.is_gated_attention, has_qk_norm=has_qk_norm, biases=biases
    )


def _output_gate(keys: Keys, kv: KvLayer, hidden: int) -> int:
    """A gate on latent attention's output: one number for each head (Ling 3) or for each element (Kimi K3)."""
    told = keys.find("gated_attention_proj_granularity_type")
    if told not in {None, "head_wise", "element_wise"}:
        raise ConfigError(
            f"{keys.source}: gated_attention_proj_granularity_type is {told!r}, known are head_wise and element_wise"
        )
    if told == "head_wise":
        return hidden * kv.heads
    return hidden * kv.heads * kv.value_dim if told or keys.flag("mla_use_output_gate") else 0


def _feed_forward(keys: Keys, family: Family, index: int, hidden: int, *, is_shared: bool) -> Params:
    is_sparse = _is_sparse(keys, index)
    dense = Params()
    if not is_sparse or family.has_mlp_beside_experts:
        dense = Params(mlp=_width(keys, (family.dense_width, index), hidden, family, is_shared=is_shared))
    return dense + _experts(keys, family, hidden) if is_sparse else dense


def _width(keys: Keys, where: tuple[str, int], hidden: int, family: Family, *, is_shared: bool = False) -> int:
    width = gemma.mlp_width(keys, *where, is_shared=is_shared)
    if family.is_gated_mlp:
        return matrices.gated_mlp(hidden, width)
    return matrices.plain_mlp(hidden, width) + (hidden + width if family.has_mlp_bias else 0)


def _widest(keys: Keys) -> int | None:
    if nas.has_blocks(keys):
        return nas.widest(keys)
    value = keys.find("intermediate_size")
    if isinstance(value, list):
        return max((width for width in value if isinstance(width, int)), default=0) or None
    return keys.maybe("intermediate_size", "moe_intermediate_size", "ffn_dim") or None


def num_experts(keys: Keys) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    return keys.maybe("num_experts", "n_routed_experts", "num_local_experts")


def _is_sparse(keys: Keys, index: int) -> bool:
    if not num_experts(keys) or index < keys.maybe("first_k_dense_replace"):
        return False
    if index in keys.whole_numbers("mlp_only_layers"):
        return False
    if keys.find("moe_layer_freq") is not None:
        return _is_in_turn(keys, index)
    step = keys.maybe("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq_step", default=1)
    return (index + 1) % max(1, step) == 0


def _is_in_turn(keys: Keys, index: int) -> bool:
    """`moe_layer_freq`: a list with 1 for each layer that has experts, or every so-many-th layer from the first on."""
    if not isinstance(keys.find("moe_layer_freq"), list):
        return index % keys.number("moe_layer_freq") == 0
    told = keys.whole_numbers("moe_layer_freq")
    if len(told) != keys.number("num_hidden_layers", "n_layer"):
        raise ConfigError(f"{keys.source}: moe_layer_freq has {len(told)} entries, needed is one per layer")
    return bool(told[index])


def _experts(keys: Keys, family: Family, hidden: int) -> Params:
    count, active = num_experts(keys), keys.number("num_experts_per_tok", "top_k_experts", "moe_topk")
    if active > count:
        raise ConfigError(f"{keys.source}: num_experts_per_tok is {active}, there are {count} experts")
    width = keys.number("moe_intermediate_size", "intermediate_size")
    # LatentMoE: the experts work in a smaller space, one projection down and one up for all of them
    latent = keys.maybe("moe_latent_size")
    inner = latent or hidden
    each = (matrices.gated_mlp if family.is_gated_mlp else matrices.plain_mlp)(inner, width)
    each += (2 * width + hidden) if family.has_expert_bias else 0
    shared_width = (
        keys.maybe("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
        or keys.maybe("n_shared_experts", "num_shared_experts", "num_shared_expert", default=family.shared_experts)
        * width
    )
    shared = (matrices.gated_mlp if family.is_gated_mlp else matrices.plain_mlp)(hidden, shared_width)
    shared += hidden if family.has_shared_gate and shared_width else 0
    return Params(
        routed_experts=count * each,
        active_experts=active * each,
        shared_experts=shared + (2 * hidden * latent),
        router=hidden * count + (count if family.has_router_bias else 0),
    )


def _top(keys: Keys, family: Family) -> Params | None:
    if keys.flag("kv_only"):
        return None
    hidden, vocab = keys.number("hidden_size"), keys.number("vocab_size")
    positions = (keys.number("max_position_embeddings") + 2) * hidden if family.has_learned_positions else 0
    own = Params(
        embedding=vocab * hidden + positions,
        head=0 if keys.flag("tie_word_embeddings", default=family.is_tied_by_default) else vocab * hidden,
        norms=hidden * family.final_norms,
        other=keys.maybe("vision_params") or _vision(keys),
    )
    return own + gemma.top_params(keys, hidden, keys.number("num_hidden_layers", "n_layer"))


def _vision(keys: Keys) -> int:
    """A vision tower's blocks, four projections and an MLP each (arXiv 2010.11929): its patches and projector are
    small."""
    tower = keys.find("vision_config")
    if not isinstance(tower, dict):
        return 0
    sizes = [
        tower.get("hidden_size"),
        tower.get("depth") or tower.get("num_hidden_layers"),
        tower.get("intermediate_size"),
    ]
    hidden, depth, width = (max(0, size) if isinstance(size, int) else 0 for size in sizes)
    return depth * (4 * hidden * hidden + 2 * hidden * width)


def _unsure(keys: Keys) -> tuple[str, ...]:
    if not isinstance(keys.find("vision_config"), dict) or keys.maybe("vision_params"):
        return ()
    counted = _vision(keys)
    if counted:
        return (f"the vision tower, counted as {counted:,} parameters in its blocks",)
    return ("the vision tower's parameters are not counted: vision_config doesn't tell its shapes",)


def _draft_layers(keys: Keys, family: Family, kinds: list[str]) -> tuple[Layer, ...]:
    mtp = keys.maybe("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")
    if mtp > MAX_DRAFT_LAYERS:
        raise ConfigError(f"{keys.source}: num_nextn_predict_layers is {mtp:,}, the most is {MAX_DRAFT_LAYERS}")
    kv_kinds = [kind for kind in kinds if kind in ATTENTION]
    if not mtp or not kv_kinds:
        return (Layer(),) * mtp
    # a draft layer stands behind the others
    behind = len(kinds) if family.is_compressed else len(kinds) - 1
    return (_mtp(keys, _layer(keys, family, kv_kinds[-1], behind, is_shared=False)),) * mtp


def _mtp(keys: Keys, last: Layer) -> Layer:
    """A whole layer more, and the projection that joins the token before with the hidden state (arXiv 2412.19437)."""
    if last.params is None:
        return last
    hidden = keys.number("hidden_size")
    return Layer(kv=last.kv, params=last.params + Params(attention=2 * hidden * hidden, norms=3 * hidden))
