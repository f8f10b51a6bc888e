"""The only ctypes: libllama as a plain shared library, declared by us and checked before it is trusted.

Enters: the path of a shared library (default: the one inside the xllamacpp wheel, whose Python classes stay unused).
Leaves: a `Library` whose functions are typed and whose struct layout is proved. Always true: the C ABI moves between
builds, so nothing is called before every needed symbol was found and the default parameters had the known values at the
known offsets; a build with RPC or one older than the GGUF parser's fixes is refused; the library's log never reaches a
terminal, its last lines go into our error messages. Next: `vocabulary.py`, `llama_decoder.py`.
"""

import contextlib
import ctypes as c
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ConfigError

BUILD = 11549
"""The llama.cpp build of the pinned wheel, whose struct layout is declared below."""

PACKAGE_VERSION = f"2026.10.{BUILD}"

OLDEST_BUILD = 8146
"""The first build with all known fixes of the GGUF parser."""

UNKNOWN, CONTROL, USER_DEFINED, STRIPS_LEFT, STRIPS_RIGHT = 1, 8, 16, 128, 256
"""Token attributes, bits of `llama_vocab_get_attr`."""

SPIN_COUNT = 300
"""How long threads spin at a barrier before they sleep. Milliseconds per decode step of 8 sequences on two cores, alone
and beside a second engine on the same cores: 0 gives 44 and 61, 300: 32 and 66, 1000: 30 and 77, 3000: 34 and 115, and
libgomp's own 300,000: 31 and more than a second."""

_KEPT_LINES = 40
_WARN = 3
_PR_SET_PDEATHSIG = 1
_OVERRIDE_BOOL = 2

LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


class ModelParams(c.Structure):
    """`llama_model_params`."""

    _fields_ = [
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    ]


class ContextParams(c.Structure):
    """`llama_context_params`."""

    _fields_ = [
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("moe_cache_size", c.c_size_t),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    ]


class _OverrideValue(c.Union):
    _fields_ = [("integer", c.c_int64), ("boolean", c.c_bool), ("text", c.c_char * 128)]


class KvOverride(c.Structure):
    """`llama_model_kv_override`: a metadata key that the loader shall read as something else."""

    _fields_ = [("tag", c.c_int32), ("key", c.c_char * 128), ("value", _OverrideValue)]


class BatchStruct(c.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.c_void_p),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.c_void_p),
    ]


# Non-zero defaults of build 11549; every other field is zero there. Read from the library itself.
_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
_CONTEXT_DEFAULTS = {
    **dict.fromkeys(("n_ctx", "n_ubatch"), 512),
    "n_batch": 2048,
    **dict.fromkeys(("n_seq_max", "n_outputs_max_per_seq", "type_k", "type_v"), 1),
    **dict.fromkeys(("n_threads", "n_threads_batch"), 4),
    **dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"), -1),
    **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "defrag_thold"), -1.0),
    **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
}

_P, _I, _U, _B, _S, _Z = c.c_void_p, c.c_int32, c.c_uint32, c.c_bool, c.c_char_p, c.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_supports_rpc": (_B, []),
    "llama_log_set": (None, [_P, _P]),
    "llama_model_load_from_file": (_P, [_S, ModelParams]),
    "llama_model_free": (None, [_P]),
    "llama_model_get_vocab": (_P, [_P]),
    "llama_model_n_ctx_train": (_I, [_P]),
    "llama_model_size": (c.c_uint64, [_P]),
    "llama_model_has_encoder": (_B, [_P]),
    "llama_model_has_decoder": (_B, [_P]),
    "llama_model_is_hybrid": (_B, [_P]),
    "llama_model_is_recurrent": (_B, [_P]),
    "llama_model_is_diffusion": (_B, [_P]),
    "llama_model_meta_count": (_I, [_P]),
    "llama_model_meta_key_by_index": (_I, [_P, _I, _P, _Z]),
    "llama_model_meta_val_str_by_index": (_I, [_P, _I, _P, _Z]),
    "llama_model_chat_template": (_S, [_P, _S]),
    "llama_vocab_n_tokens": (_I, [_P]),
    "llama_vocab_get_attr": (_I, [_P, _I]),
    "llama_vocab_is_eog": (_B, [_P, _I]),
    "llama_vocab_bos": (_I, [_P]),
    "llama_vocab_eos": (_I, [_P]),
    "llama_vocab_get_add_bos": (_B, [_P]),
    "llama_tokenize": (_I, [_P, _S, _I, _P, _I, _B, _B]),
    "llama_token_to_piece": (_I, [_P, _I, _P, _I, _I, _B]),
    "llama_init_from_model": (_P, [_P, ContextParams]),
    "llama_free": (None, [_P]),
    "llama_n_ctx": (_U, [_P]),
    "llama_n_ctx_seq": (_U, [_P]),
    "llama_n_batch": (_U, [_P]),
    "llama_n_ubatch": (_U, [_P]),
    "llama_n_seq_max": (_U, [_P]),
    "llama_n_rs_seq": (_U, [_P]),
    "llama_get_memory": (_P, [_P]),
    "llama_memory_seq_rm": (_B, [_P, _I, _I, _I]),
    "llama_memory_seq_cp": (None, [_P, _I, _I, _I, _I]),
    "llama_memory_seq_pos_max": (_I, [_P, _I]),
    "llama_memory_clear": (None, [_P, _B]),
    "llama_state_seq_get_size_ext": (_Z, [_P, _I, _U]),
    "llama_state_seq_get_data_ext": (_Z, [_P, _P, _Z, _I, _U]),
    "llama_state_seq_set_data_ext": (_Z, [_P, _P, _Z, _I, _U]),
    "llama_adapter_lora_init": (_P, [_P, _S]),
    "llama_set_adapters_lora": (_I, [_P, _P, _Z, _P]),
    "llama_decode": (_I, [_P, BatchStruct]),
    "llama_get_logits": (_P, [_P]),
    "llama_get_embeddings_seq": (_P, [_P, _I]),
    "llama_model_n_embd": (_I, [_P]),
    "llama_model_n_embd_out": (_I, [_P]),
    "llama_pooling_type": (_I, [_P]),
    "llama_n_threads": (_I, [_P]),
}
_CONVERTING: dict[str, tuple[Any, list[Any]]] = {
    "ggml_quantize_chunk": (_Z, [_I, _P, _P, c.c_int64, c.c_int64, c.c_int64, _P]),
    **{
        f"dequantize_row_{name}": (None, [_P, _P, c.c_int64])
        for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs")
    },
}
"""What only changing a layout needs: a build without it serves all the same. Found when used."""

_HEAD: dict[str, tuple[str, Any, list[Any]]] = {
    "llama_set_embeddings_nextn": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [_P, _B, _B]),
    "llama_get_embeddings_nextn": ("_Z26llama_get_embeddings_nextnP13llama_context", _P, [_P]),
}
"""What only an MTP head needs, under its C++ name: it isn't C yet."""


class Library:
    """libllama, loaded and checked: `lib.llama_decode(...)` and so on. Handles are plain integers.

    `on_line` is told all that the library logs; it mustn't raise.
    """

    def __init__(self, path: str, functions: c.CDLL, build: int | None) -> None:
        self.path = path
        self.build = build
        self._functions = functions
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.on_line: Callable[[str], None] | None = None
        self._callback = LogCallback(self._log)
        functions.llama_log_set(self._callback, None)
        functions.llama_backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _FUNCTIONS and name not in _CONVERTING and name not in _HEAD:
            raise AttributeError(name)
        exported = _HEAD[name][0] if name in _HEAD else name
        if not hasattr(self._functions, exported):
            part = "engine.speculation: {} can't run MTP heads" if name in _HEAD else "engine.layout: {} can't convert"
            raise ConfigError(f"{part.format(self.path)}: it lacks {name}")
        function: Callable[..., Any] = getattr(self._functions, exported)
        return function

    @property
    def lacks_for_head(self) -> str:
        """The first function that it lacks to run an MTP head; empty: it can."""
        return next((name for name, (exported, *_) in _HEAD.items() if not hasattr(self._functions, exported)), "")

    @property
    def name(self) -> str:
        """For records: `llama.cpp b11549`."""
        return f"llama.cpp b{self.build}" if self.build else f"libllama ({Path(self.path).name})"

    def take_lines(self) -> str:
        """The warnings and errors that the library logged since the last call, on one line."""
        text = " ".join("".join(self._lines).split())
        self._lines.clear()
        return text[-1500:]

    def default_model_params(self) -> ModelParams:
        """`llama_model_default_params()`."""
        params: ModelParams = _defaults(self._functions, "llama_model_default_params", ModelParams)
        return params

    def default_context_params(self) -> ContextParams:
        """`llama_context_default_params()`."""
        params: ContextParams = _defaults(self._functions, "llama_context_default_params", ContextParams)
        return params

    def _log(self, level: int, text: bytes | None, _data: int | None) -> None:
        # Level 5 continues the line before it. An exception here would be printed by ctypes, so nothing may raise.
        if text and self.on_line is not None:
            self.on_line(text.decode("utf-8", "replace"))
        if text and level >= _WARN:
            self._lines.append(text.decode("utf-8", "replace")[:400])


def open_library(path: str | None = None) -> Library:
    """Load libllama from `path` or from the xllamacpp package. Raises ConfigError."""
    where = path or _packaged()
    # Read by libgomp and ggml when they load. No debugger is started after a failed assertion.
    os.putenv("GOMP_SPINCOUNT", str(SPIN_COUNT))
    os.putenv("GGML_NO_BACKTRACE", "1")
    try:
        functions = c.CDLL(where, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as failure:
        raise ConfigError(explain(where, str(failure))) from None
    missing = [name for name in (*_FUNCTIONS, *_LAYOUTS) if not hasattr(functions, name)]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ConfigError(f"engine.libllama: {where} is not a usable libllama: it lacks {shown}")
    extras = _CONVERTING | {exported: (result, arguments) for exported, result, arguments in _HEAD.values()}
    extras = {name: types for name, types in extras.items() if hasattr(functions, name)}
    for name, (result, arguments) in (_FUNCTIONS | extras).items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    build = _packaged_build() if path is None else _build_number(functions)
    if build is not None and build < OLDEST_BUILD:
        raise ConfigError(f"engine.libllama: {where} is llama.cpp b{build}; b{OLDEST_BUILD} or newer is needed")
    for name, (layout, expected) in _LAYOUTS.items():
        _check_layout(where, name, _defaults(functions, name, layout), expected)
    if functions.llama_supports_rpc():
        raise ConfigError(f"engine.libllama: {where} was built with RPC, which has no fixed version: use one without")
    return Library(where, functions, build)


def explain(path: str, failure: str) -> str:
    """Why a library could not be loaded, in words that say what to do."""
    if "libgomp" in failure:
        return (
            "libllama needs the system library libgomp.so.1: install Debian's package libgomp1 (apt install libgomp1)"
        )
    return f"engine.libllama: can't load {path}: {failure}"


def override_bool(key: str, *, value: bool) -> Any:
    """A `kv_overrides` list with one entry; keep it until the model is loaded."""
    overrides = (KvOverride * 2)()
    overrides[0].tag, overrides[0].key, overrides[0].value.boolean = _OVERRIDE_BOOL, key.encode(), value
    return overrides


def address_of(structure: Any) -> int:
    """Where it lies, for a pointer field."""
    return c.addressof(structure)


def new_batch(
    arrays: tuple[NDArray[Any], ...], start: int, count: int, states: NDArray[np.float32] | None = None
) -> BatchStruct:
    """A `llama_batch` over `count` rows from row `start` of (token, pos, n_seq_id, seq_id pointers, logits) arrays.
    `states`: for an MTP head, what the model's last layer said of the token before. The arrays must outlive the call.
    """
    token, pos, n_seq_id, seq_id, logits = (a.ctypes.data + start * a.itemsize for a in arrays)
    return BatchStruct(count, token, None if states is None else states.ctypes.data, pos, n_seq_id, seq_id, logits)


def floats_at(address: int, num_rows: int, num_columns: int) -> NDArray[np.float32]:
    """The library's own memory as an array: copy it before the next call into the library."""
    flat = np.ctypeslib.as_array((c.c_float * (num_rows * num_columns)).from_address(address))
    return flat.reshape(num_rows, num_columns)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere the closed line does it)."""
    if sys.platform == "linux":
        c.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _packaged() -> str:
    # find_spec does not import the package: its Python classes would bring a second owner of the library's state.
    spec = find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob("xllamacpp*.so")):
            return str(file)
    raise ConfigError("engine.libllama is not set and the package xllamacpp is not installed (pip install xllamacpp)")


def _build_number(functions: c.CDLL) -> int | None:
    with contextlib.suppress(ValueError):
        return c.c_int.in_dll(functions, "LLAMA_BUILD_NUMBER").value or None
    return None


def _packaged_build() -> int:
    # The wheel's own LLAMA_BUILD_NUMBER is zero; its version ends in the build.
    found = version("xllamacpp")
    if found != PACKAGE_VERSION:
        raise ConfigError(f"xllamacpp is {found}; needed is exactly {PACKAGE_VERSION}: the C ABI moves between builds")
    return BUILD


class _Padded(c.Structure):
    """Room for a bigger struct than ours, so that a foreign library can't write past the end before we looked."""

    _fields_ = [("bytes", c.c_ubyte * 1024)]


_LAYOUTS: dict[str, tuple[type[c.Structure], dict[str, Any]]] = {
    "llama_model_default_params": (ModelParams, _MODEL_DEFAULTS),
    "llama_context_default_params": (ContextParams, _CONTEXT_DEFAULTS),
}


def _defaults(functions: c.CDLL, name: str, layout: Any) -> Any:
    function = getattr(functions, name)
    function.restype, function.argtypes = _Padded, []
    return layout.from_buffer_copy(function())


def _check_layout(path: str, name: str, found: c.Structure, expected: dict[str, Any]) -> None:
    # field descriptors know their types only through the instance, hence getattr
    for field in found._fields_:
        value, wanted = getattr(found, field[0]) or 0, expected.get(field[0], 0)
        if value != wanted:
            raise ConfigError(
                f"engine.libllama: {path} has another struct layout than llama.cpp b{BUILD}: "
                f"{name}().{field[0]} is {value}, expected {wanted}"
            )
