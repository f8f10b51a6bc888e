"""Which layer is of which kind.

Enters: a config's keys. Leaves: one word per layer, and which layers share an earlier one's keys and values. Always
true: the config's own list goes before its pattern, and its pattern before the family's; a word that nobody knows is
refused. Next: `matrices.py`.
"""

from collections.abc import Sequence

from hitsend.core.errors import ConfigError
from hitsend.plan.families import Family
from hitsend.plan.keys import Keys

ATTENTION = frozenset(
    {"attention", "full_attention", "sliding_attention", "chunked_attention", "deepseek_sparse_attention", "parallel"}
)
"""`parallel`: attention and a recurrent mixer beside each other in one layer (Falcon-H1)."""
RECURRENT = frozenset({"mamba", "mamba1", "linear_attention", "short_conv", "parallel"})
_NEITHER = frozenset({"moe", "mlp"})
MAX_LAYERS = 10_000
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Nemotron-H writes one letter per block."""


def kinds_of_layers(keys: Keys, family: Family) -> list[str]:
    """One word per layer. Raises ConfigError for an unknown word or a list of the wrong length."""
    layers = keys.number("num_hidden_layers", "n_layer")
    if layers > MAX_LAYERS:
        raise ConfigError(f"{keys.source}: num_hidden_layers is {layers}, the most is {MAX_LAYERS:,}")
    kinds = _listed(keys) or _patterned(keys, family, layers)
    if len(kinds) != layers:
        raise ConfigError(f"{keys.source}: {len(kinds)} layer types for num_hidden_layers = {layers}")
    unknown = sorted(set(kinds) - ATTENTION - RECURRENT - _NEITHER)
    if unknown:
        raise ConfigError(f"{keys.source}: unknown layer types {', '.join(unknown)}")
    return kinds


def _listed(keys: Keys) -> list[str]:
    if keys.find("layer_kinds"):
        return keys.words("layer_kinds")
    pattern = keys.find("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    linear = keys.find("linear_attn_config")
    if isinstance(linear, dict) and keys.find("layer_types") is None:
        # Kimi Linear counts its layers from 1
        full = set(Keys(linear, keys.source).whole_numbers("full_attn_layers"))
        layers = keys.number("num_hidden_layers")
        return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
    if keys.find("attn_layer_indices") is not None:
        attention = keys.whole_numbers("attn_layer_indices")
        layers = keys.number("num_hidden_layers")
        if max(attention, default=0) >= layers:
            raise ConfigError(f"{keys.source}: attn_layer_indices names layer {max(attention)} of {layers}")
        return ["full_attention" if layer in attention else "mamba" for layer in range(layers)]
    return keys.words("layer_types", "layers_block_type")


def _patterned(keys: Keys, family: Family, layers: int) -> list[str]:
    if family.full_interval:
        every = _interval(keys, "full_attention_interval", family.full_interval)
        return ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]
    if family.chunked_interval:
        every = _interval(keys, "no_rope_layer_interval", family.chunked_interval)
        return ["full_attention" if (layer + 1) % every == 0 else "chunked_attention" for layer in range(layers)]
    if family.sliding_pattern and keys.find("sliding_window") is not None:
        name = "sliding_window_pattern" if keys.find("sliding_every") is None else "sliding_every"
        every = _interval(keys, name, family.sliding_pattern)
        return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    if family.kind_throughout:
        return [family.kind_throughout] * layers
    if family.is_one_mixer_per_block:
        keys.number("hybrid_override_pattern")  # says that it is missing
    if family.is_sliding_throughout and keys.find("sliding_window") is not None:
        return ["sliding_attention"] * layers
    if keys.find("use_sliding_window") is True:
        first = keys.number("max_window_layers")
        return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return ["full_attention"] * layers


def _interval(keys: Keys, name: str, usual: int) -> int:
    """Every so-many-th layer: 1 or more."""
    return usual if keys.find(name) is None else keys.number(name)


def shared_from(keys: Keys, kinds: Sequence[str]) -> frozenset[int]:
    """Layers that keep nothing of their own: Gemma's last `num_kv_shared_layers`, or all but each n-th (cross-layer).

    Source: Gemma 3n and Gemma 4 E2B/E4B configs; arXiv 2405.12981 for cross-layer attention.
    """
    layers = len(kinds)
    last = keys.maybe("num_kv_shared_layers")
    if last and last >= layers:
        raise ConfigError(f"{keys.source}: num_kv_shared_layers is {last}, needed is fewer than the {layers} layers")
    shared = frozenset(range(layers - last, layers))
    factor = keys.maybe("cla_share_factor") if keys.flag("use_cla") else 0
    return shared | (frozenset(layer for layer in range(layers) if layer % factor) if factor > 1 else frozenset())
