"""Models that a search made, each layer as it came out: fewer key heads, narrower, linear, or nothing (Nemotron-NAS).

Enters: a config's `block_configs`, one entry per layer with `attention` and `ffn`. Leaves: the kind, the key heads and
the `Params` of a layer. Always true: an entry that says neither how wide nor that it is nothing is refused by its
index. Source: the published modelling code of DeciLM and Nemotron-NAS (arXiv 2411.19146). Next: `config.py`.
"""

from collections.abc import Mapping
from typing import Any

from hitsend.core.errors import ConfigError
from hitsend.plan import matrices
from hitsend.plan.checkpoint import KvLayer, Params
from hitsend.plan.keys import Keys

NAMES = frozenset({"nemotron-nas", "deci"})
WIDTH_STEP = 256
"""Widths are rounded up to it."""


def has_blocks(keys: Keys) -> bool:
    """Whether each layer is described by itself."""
    return keys.model_type in NAMES


def kinds(keys: Keys) -> list[str]:
    """`full_attention`, or `mlp` where attention is nothing or one matrix."""
    return ["mlp" if _is_replaced(block, "attention") else "full_attention" for block in _blocks(keys)]


def kv_heads(keys: Keys, index: int) -> int:
    """Key heads of one layer. Raises ConfigError."""
    heads = keys.number("num_attention_heads")
    told = _part(_blocks(keys)[index], "attention").get("n_heads_in_group")
    if isinstance(told, bool) or not isinstance(told, int) or told < 1 or heads % told:
        raise ConfigError(
            f"{keys.source}: block_configs[{index}].attention.n_heads_in_group is {told!r}, needed is a number that "
            f"divides the {heads} attention heads"
        )
    return heads // told


def widest(keys: Keys) -> int | None:
    """The widest MLP of all layers; None where there is none."""
    hidden = keys.number("hidden_size")
    return max((_width(keys, index, hidden) for index in range(len(_blocks(keys)))), default=0) or None


def layer_params(keys: Keys, index: int, kv: KvLayer | None, hidden: int) -> Params:
    """Attention or one matrix or nothing, an MLP or one matrix or nothing, a norm before each that is there."""
    block = _blocks(keys)[index]
    found = Params()
    if kv is not None:
        found += matrices.grouped_attention(hidden, kv, is_gated=False, has_qk_norm=False, biases=0)
    elif _part(block, "attention").get("replace_with_linear"):
        found += Params(attention=hidden * hidden)
    if _part(block, "ffn").get("replace_with_linear"):
        found += Params(mlp=hidden * hidden)
    else:
        found += Params(mlp=matrices.gated_mlp(hidden, _width(keys, index, hidden)))
    is_there = [not _part(block, part).get("no_op") for part in ("attention", "ffn")]
    return found + Params(norms=hidden * sum(is_there))


def _width(keys: Keys, index: int, hidden: int) -> int:
    """`ffn_mult` counts as Llama's: two thirds of it, times the hidden size, rounded up."""
    block = _blocks(keys)[index]
    if _is_replaced(block, "ffn"):
        return 0
    part = _part(block, "ffn")
    width, times = part.get("intermediate_size"), part.get("ffn_mult")
    if isinstance(width, int) and not isinstance(width, bool) and width > 0:
        return width
    if isinstance(times, bool) or not isinstance(times, int | float) or not 0 < times <= 1000:
        raise ConfigError(
            f"{keys.source}: block_configs[{index}].ffn has ffn_mult {times!r}, needed is a number from 0 to 1,000, "
            "an intermediate_size, no_op or replace_with_linear"
        )
    return -(-int(2 * times * hidden / 3) // WIDTH_STEP) * WIDTH_STEP


def _blocks(keys: Keys) -> list[Mapping[str, Any]]:
    blocks = keys.find("block_configs")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ConfigError(
            f"{keys.source}: the key 'block_configs' is missing or no list, and {keys.model_type} needs it"
        )
    return blocks


def _part(block: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = block.get(name)
    return part if isinstance(part, Mapping) else {}


def _is_replaced(block: Mapping[str, Any], name: str) -> bool:
    part = _part(block, name)
    return bool(part.get("no_op") or part.get("replace_with_linear"))
