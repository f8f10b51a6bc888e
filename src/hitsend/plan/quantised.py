"""What a config says its weights are quantised to, in the planner's names.

Enters: a decoded config.json. Leaves: a format's name, or None for 16 bit. Always true: a method or a width that isn't
known is refused with its value, since taking it for another would give wrong bytes. Next: `formats.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

from hitsend.core.errors import ConfigError

_BY_BITS = frozenset({"awq", "gptq", "auto-round", "autoround"})
_BY_GROUPS = frozenset({"fp8", "fbgemm_fp8", "modelopt", "compressed-tensors"})
_WIDTHS = frozenset({"4", "8", "16"})


def weights_of(config: Mapping[str, Any]) -> str | None:
    """What the config says the weights are quantised to; None: 16 bit. Raises ConfigError for an unknown method."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    quantised = config.get("quantization_config") or inner.get("quantization_config")
    if "fp4" in (config.get("expert_dtype"), inner.get("expert_dtype")):
        return "nvfp4-experts" if "nvfp4" in str(quantised).lower() else "fp4-experts"
    if not quantised:
        return None
    if not isinstance(quantised, Mapping):
        raise ConfigError(f"quantization_config is {str(quantised)[:40]}, needed is an object")
    method = str(quantised.get("quant_method") or quantised.get("quant_algo") or "").lower()
    if "mxfp4" in method or "mxfp4" in str(quantised.get("format")).lower():
        return "mxfp4"
    if "nvfp4" in str(quantised).lower() or "fp4" in method:
        return "nvfp4"
    if method in _BY_BITS:
        return _by_bits(quantised.get("bits"))
    if method == "fp8" and str(inner.get("model_type") or config.get("model_type")).startswith("glm5_next"):
        return "fp8-dynamic"  # its recurrent layers stay 16 bit
    if method in _BY_GROUPS:
        return _by_groups(quantised)
    raise ConfigError(f"quantization_config.quant_method is {method!r}; say --weights bf16, fp8, int8, int4 or nvfp4")


def _by_bits(bits: object) -> str:
    if bits not in (None, 4, 8):
        raise ConfigError(f"quantization_config.bits is {bits!r}, known are 4 and 8; say --weights or give the folder")
    return "int8" if bits == 8 else "int4"


def _by_groups(quantised: Mapping[str, Any]) -> str:
    text = str(quantised).lower()
    told = sorted(set(re.findall(r"'num_bits': (\d+)", text)))
    if set(told) - _WIDTHS:
        raise ConfigError(f"quantization_config has num_bits {', '.join(told)}, known are 4 and 8; say --weights")
    is_int4 = "'num_bits': 4" in text
    if is_int4 and "self_attn" in str(quantised.get("ignore")):
        return "int4-experts"
    return "int4" if is_int4 else "int8" if "'type': 'int'" in text else "fp8"
