"""What a recurrent layer keeps per sequence, read from a config.

Enters: a config's keys and a layer's kind. Leaves: a `StateLayer`. Always true: a dimension that the config doesn't
name comes from the modelling code's own rule, and one that doesn't divide is refused. Next: `matrices.py`.
"""

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import StateLayer
from hitsend.plan.keys import Keys

STATE_DTYPES = frozenset({"auto", "float32", "f32", "bfloat16", "float16"})


def state_of(keys: Keys, kind: str) -> StateLayer:
    """One layer. Raises ConfigError that names the key."""
    dtype = keys.word("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if dtype is not None and dtype.removeprefix("torch.") not in STATE_DTYPES:
        raise ConfigError(f"{keys.source}: mamba_ssm_dtype is {dtype!r}, known are {', '.join(sorted(STATE_DTYPES))}")
    if kind in {"mamba", "parallel"}:
        return _mamba_two(keys, dtype)
    if kind == "mamba1":
        return _mamba_one(keys, dtype)
    if kind == "short_conv":
        # no matrix: the newest inputs of one convolution over the hidden size (LFM2)
        return StateLayer("short_conv", keys.number("conv_L_cache"), 0, 0, keys.number("hidden_size"), 1)
    linear = keys.find("linear_attn_config")
    if isinstance(linear, dict):
        inner = Keys({**linear, "model_type": keys.model_type}, keys.source)
        heads, dim = inner.number("num_heads"), inner.number("head_dim")
        kernel = inner.number("short_conv_kernel_size")
        return StateLayer("kda", kernel, groups=heads, key_dim=dim, value_heads=heads, value_dim=dim, dtype="float32")
    return StateLayer(
        kind="gdn",
        kernel=keys.number("linear_conv_kernel_dim"),
        groups=keys.number("linear_num_key_heads"),
        key_dim=keys.number("linear_key_head_dim"),
        value_heads=keys.number("linear_num_value_heads"),
        value_dim=keys.number("linear_value_head_dim"),
        dtype=dtype,
    )


def _mamba_two(keys: Keys, dtype: str | None) -> StateLayer:
    return StateLayer(
        kind="mamba2",
        kernel=keys.number("conv_kernel", "mamba_d_conv"),
        groups=keys.number("n_groups", "mamba_n_groups"),
        key_dim=keys.number("ssm_state_size", "mamba_d_state", "state_size"),
        value_heads=keys.number("mamba_num_heads", "mamba_n_heads", "num_heads"),
        value_dim=_mamba_head(keys),
        dtype=dtype,
    )


def _mamba_one(keys: Keys, dtype: str | None) -> StateLayer:
    """Mamba (arXiv 2312.00752): every inner channel has a state of its own; the convolution runs over them alone."""
    inner = keys.maybe("intermediate_size") if keys.find("mamba_expand") is None else 0
    inner = inner or keys.maybe("mamba_expand", "expand", default=2) * keys.number("hidden_size")
    return StateLayer(
        kind="mamba1",
        kernel=keys.number("mamba_d_conv", "conv_kernel"),
        groups=0,
        key_dim=keys.number("mamba_d_state", "state_size"),
        value_heads=inner,
        value_dim=1,
        dtype=dtype,
    )


def _mamba_head(keys: Keys) -> int:
    """Bamba's and Granite's modelling code reads "auto", its default, as expand * hidden / heads."""
    told = keys.find("mamba_head_dim", "mamba_d_head")
    if told is None and keys.find("mamba_expand") is None and keys.find("head_dim") is not None:
        return keys.number("head_dim")
    if told != "auto" and (told is not None or keys.find("mamba_expand") is None):
        return keys.number("mamba_head_dim", "mamba_d_head")
    inner = keys.maybe("mamba_expand", default=2) * keys.number("hidden_size")
    heads = keys.number("mamba_num_heads", "mamba_n_heads")
    if inner % heads:
        raise ConfigError(f"{keys.source}: mamba_d_head is {told!r}, and {inner} / {heads} is no whole number")
    return inner // heads
