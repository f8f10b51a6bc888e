"""What Gemma's small models have beside a transformer's usual matrices.

Enters: a config's keys. Leaves: `Params` on top of a layer's and of the model's own. Always true: each function is the
list of the matrices that the published modelling code creates (transformers, its Gemma 3n
and Gemma 4 modules); a key that isn't there adds nothing. Next: `memory.py`.
"""

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Params
from hitsend.plan.keys import Keys

MEDIA_TOKENS = 2496
"""Of Gemma 4's largest image or video, as vLLM counts it (vllm#42687)."""


def media_tokens(keys: Keys) -> int:
    """Tokens of one image that a step must hold whole: those of Gemma 4's larger models see each other."""
    is_mutual = keys.find("use_bidirectional_attention") == "vision"
    return MEDIA_TOKENS if is_mutual and keys.model_type.startswith("gemma4") else 0


def layer_params(keys: Keys, hidden: int) -> Params:
    """Per-layer inputs (gate, projection, norm); AltUp's coefficients and router (arXiv 2301.13310) and LAUREL's
    low-rank residual (arXiv 2411.07501) where the config has them."""
    found = Params()
    width = keys.maybe("hidden_size_per_layer_input")
    if width:
        found += Params(mlp=2 * hidden * width, norms=hidden)
    copies = keys.maybe("altup_num_inputs")
    if copies:
        found += Params(mlp=copies**2 + copies**3 + hidden * copies, norms=2 * hidden)
    rank = keys.maybe("laurel_rank")
    if rank:
        found += Params(mlp=2 * hidden * rank, norms=hidden)
    return found


def top_params(keys: Keys, hidden: int, layers: int) -> Params:
    """The table of per-layer inputs (looked up, never multiplied with), its projection, and AltUp's two sets of
    projections between the copies of the hidden state."""
    found = Params()
    width = keys.maybe("hidden_size_per_layer_input")
    if width:
        table = keys.number("vocab_size_per_layer_input") * width * layers
        found += Params(other=table, mlp=hidden * width * layers, norms=width)
    copies = keys.maybe("altup_num_inputs")
    if copies > 1:
        found += Params(mlp=2 * (copies - 1) * hidden**2)
    return found


def mlp_width(keys: Keys, key: str, index: int, *, is_shared: bool) -> int:
    """One layer's: the config's number or list; twice as wide in layers that share keys and values (Gemma 4 E2B)."""
    value = keys.find(key)
    if isinstance(value, list):
        if index >= len(value) or not isinstance(value[index], int) or isinstance(value[index], bool):
            raise ConfigError(f"{keys.source}: {key} has no whole number for layer {index}")
        width = int(value[index])
        if width < 1:
            raise ConfigError(f"{keys.source}: {key}[{index}] is {width}, needed is a whole number above 0")
    else:
        width = keys.number(key, "intermediate_size", "ffn_dim")
    return 2 * width if is_shared and keys.flag("use_double_wide_mlp") else width
