"""How many bytes an element takes, in weights and in caches.

Enters: names of formats. Leaves: exact fractions of a byte. Always true: a format with scales counts them; the mixtures
that llama.cpp's quantiser makes (Q4_K_M and the like) are averages and say so; an unknown name is refused. Next:
`sizes.py`.
"""

import re
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError

KV_BYTES: dict[str, Fraction] = {
    **dict.fromkeys(("auto", "bf16", "bfloat16", "f16", "fp16", "float16", "half"), Fraction(2)),
    **dict.fromkeys(("f32", "fp32", "float32"), Fraction(4)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8", "fp8_ds_mla"), Fraction(1)),
    # blocks of 32 with one f16 scale (and a minimum): ggml's types
    "q8_0": Fraction(34, 32),
    "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32),
    "q4_1": Fraction(20, 32),
    "q4_0": Fraction(18, 32),
    "iq4_nl": Fraction(18, 32),
    # 4 bits and one fp8 scale per 16 elements
    "nvfp4": Fraction(9, 16),
}

F16_BYTES, F32_BYTES = 2, 4
FP8_DS_MLA_BYTES = 656
"""DeepSeek's packed latent row: 512 fp8, four f32 scales, 64 bf16 (vLLM's and SGLang's sparse-attention cache)."""
INDEXER_SCALE_BYTES = 4
"""One f32 scale beside an indexer's fp8 key (kv_rules: 128 + 4 bytes a token and layer)."""


DEEPSEEK_V4_ROW_BYTES = 584
"""DeepSeek-V4's packed row: 448 fp8, 64 bf16 and eight 8-bit scales (vLLM's `deepseek_v4` cache layout)."""


class WeightFormat(msgspec.Struct, frozen=True):
    """Bytes per parameter of the matrices that are quantised; everything else stays 16 bit."""

    bytes_per_param: Fraction
    is_experts_only: bool = False
    beside_experts: Fraction = Fraction(2)
    """Bytes per parameter of the other matrices where the format is for experts only."""
    is_everything: bool = False
    """The embedding and the head too."""
    leaves_recurrent: bool = False
    """Recurrent layers stay 16 bit."""
    is_average: bool = False


_GGUF_BITS = {
    # blocks: exact. mixtures: averages over whole files (llama.cpp's quantize documentation, Llama-3.1-8B)
    "F32": "32",
    "F16": "16",
    "BF16": "16",
    "Q8_0": "8.5",
    "Q6_K": "6.5625",
    "Q5_K": "5.5",
    "Q4_K": "4.5",
    "Q3_K": "3.4375",
    "Q2_K": "3.16",
    "Q5_1": "6",
    "Q5_0": "5.5",
    "Q4_1": "5",
    "Q4_0": "4.5",
    "IQ4_NL": "4.5",
    "IQ4_XS": "4.46",
    "MXFP4": "4.25",
    "Q5_K_M": "5.70",
    "Q5_K_S": "5.57",
    "Q4_K_M": "4.89",
    "Q4_K_S": "4.67",
    "Q3_K_L": "4.30",
    "Q3_K_M": "4.00",
    "Q3_K_S": "3.64",
    "Q2_K_S": "2.97",
    "IQ3_M": "3.76",
    "IQ3_S": "3.66",
    "IQ3_XS": "3.50",
    "IQ3_XXS": "3.25",
    "IQ2_M": "2.93",
    "IQ2_S": "2.74",
    "IQ2_XS": "2.59",
    "IQ2_XXS": "2.38",
    "IQ1_M": "2.15",
    "IQ1_S": "2.00",
}
_MIXTURES = ("_M", "_S", "_L")
_BLOCKS_ONLY = re.compile(r"(i?q\d|tq\d).*", re.IGNORECASE)

_INT4 = WeightFormat(Fraction(1, 2) + Fraction(2, 128) + Fraction(1, 256), leaves_recurrent=True)

WEIGHTS: dict[str, WeightFormat] = {
    **dict.fromkeys(("bf16", "fp16", "f16", "none"), WeightFormat(Fraction(2), is_everything=True)),
    **dict.fromkeys(("fp32", "f32"), WeightFormat(Fraction(4), is_everything=True)),
    **dict.fromkeys(("fp8", "int8", "w8a8"), WeightFormat(Fraction(1))),
    # what llm-compressor makes of hybrids: RedHat's Qwen3.5 and Qwen3-Next logs load so much more than fp8 throughout
    "fp8-dynamic": WeightFormat(Fraction(1), leaves_recurrent=True),
    # 4 bits, a 16-bit scale per 128 and a 4-bit zero point per 128
    **dict.fromkeys(("int4", "awq", "gptq", "w4a16"), _INT4),
    "nvfp4": WeightFormat(Fraction(9, 16), leaves_recurrent=True),
    # 4 bits and one 8-bit scale per 32; what ships in it leaves attention in 16 bit
    "mxfp4": WeightFormat(Fraction(17, 32), is_experts_only=True),
    "mxfp4-linear": WeightFormat(Fraction(17, 32)),
    # 4 bits and one 16-bit scale per 32, experts only: Kimi K2 Thinking and K2.5
    "int4-experts": WeightFormat(Fraction(9, 16), is_experts_only=True),
    # experts as mxfp4, the rest fp8: DeepSeek-V4's own checkpoints (`expert_dtype`)
    "fp4-experts": WeightFormat(Fraction(17, 32), is_experts_only=True, beside_experts=Fraction(1)),
    "nvfp4-experts": WeightFormat(Fraction(9, 16), is_experts_only=True, beside_experts=Fraction(1)),
}


def weight_format(name: str) -> WeightFormat:
    """`bf16`, `fp8`, `int4`, `nvfp4`, `mxfp4`, `gguf:Q4_K_M` or `Q4_K_M` … Raises ConfigError."""
    kind, _, gguf = name.partition(":")
    if not gguf and _BLOCKS_ONLY.fullmatch(name):
        kind, gguf = "gguf", name
    if kind.casefold() == "gguf" and gguf:
        bits = _GGUF_BITS.get(gguf.upper())
        if bits is None:
            raise ConfigError(f"--weights {name}: known GGUF types are {', '.join(_GGUF_BITS)}")
        is_average = gguf.upper().endswith(_MIXTURES)
        return WeightFormat(Fraction(bits) / 8, is_everything=True, is_average=is_average)
    found = WEIGHTS.get(name.casefold())
    if found is None:
        raise ConfigError(f"--weights {name}: known are {', '.join(WEIGHTS)} and gguf:TYPE")
    return found


def weights_name(asked: str | None, own: str | None, *, has_experts: bool) -> str:
    """What was asked for, else the checkpoint's own, else 16 bit; mxfp4 of a model without experts is all its matrices.
    Raises ConfigError for a format of experts where there are none."""
    name = asked or own or "bf16"
    if has_experts or name == "gguf" or not weight_format(name).is_experts_only:
        return name
    if name.casefold() == "mxfp4":
        return "mxfp4-linear"
    raise ConfigError(f"--weights {name}: that is a format of experts, and the model has none")


def gguf_type(ending: str) -> tuple[str, bool] | None:
    """The type that `q4-k-m` at the end of a name means, and whether that's it or only the nearest whose size is known.

    Unsloth's XL files keep some tensors wider than the mixture they are named after; by how much differs from model to
    model.
    """
    wanted = ending.upper().replace("-", "_").replace("Q8_K_", "Q8_0_")
    if wanted in _GGUF_BITS:
        return wanted, True
    base = wanted.removesuffix("_XXL").removesuffix("_XL")
    nearest = next((known for known in (f"{base}_L", f"{base}_M", base) if known in _GGUF_BITS), None)
    return None if base == wanted or nearest is None else (nearest, False)


def has_cache(engine: str, kv_dtype: str) -> bool:
    """Whether the engine has such a cache: ggml's blocks are llama.cpp's and ours, 8-bit floats the others'."""
    name = kv_dtype.casefold()
    if engine in {"llama.cpp", "hitsend"}:
        return not name.startswith(("fp8", "int8", "nvfp4"))
    return _BLOCKS_ONLY.fullmatch(name) is None


def kv_bytes(name: str) -> Fraction:
    """Bytes per element of a cache. Raises ConfigError."""
    found = KV_BYTES.get(name.casefold())
    if found is None:
        raise ConfigError(f"--kv-dtype {name}: known are {', '.join(KV_BYTES)}")
    return found
