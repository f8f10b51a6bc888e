"""libllama's C declarations, written from its headers: structs with the values that fresh ones have, and functions.

Enters: nothing. Leaves: ctypes structures and tables of names with their types. Always true: it is all of one build,
`libllama.BUILD`; nothing here calls, loads or checks anything. Next: `libllama.py`.
"""

import ctypes as c
from typing import Any

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
MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
CONTEXT_DEFAULTS = {
    **dict.fromkeys(("n_ctx", "n_ubatch"), 512),
    "n_batch": 2048,
    **dict.fromkeys(("n_seq_max", "n_outputs_max_per_seq", "type_k", "type_v"), 1),
    **dict.fromkeys(("n_threads", "n_threads_batch"), 4),
    **dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"), -1),
    **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "defrag_thold"), -1.0),
    **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
}

_P, _I, _U, _B, _S, _Z = c.c_void_p, c.c_int32, c.c_uint32, c.c_bool, c.c_char_p, c.c_size_t
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
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
    "llama_n_threads_batch": (_I, [_P]),
    "llama_set_n_threads": (None, [_P, _I, _I]),
}
CONVERTING: dict[str, tuple[Any, list[Any]]] = {
    "ggml_quantize_chunk": (_Z, [_I, _P, _P, c.c_int64, c.c_int64, c.c_int64, _P]),
    **{
        f"dequantize_row_{name}": (None, [_P, _P, c.c_int64])
        for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs")
    },
}
"""What only changing a layout needs: a build without it serves all the same. Found when used."""

HEAD: dict[str, tuple[str, Any, list[Any]]] = {
    "llama_set_embeddings_nextn": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [_P, _B, _B]),
    "llama_get_embeddings_nextn": ("_Z26llama_get_embeddings_nextnP13llama_context", _P, [_P]),
}
"""What only an MTP head needs, under its C++ name: it isn't C yet."""


class Padded(c.Structure):
    """Room for a bigger struct than ours, so that a foreign library can't write past the end before we looked."""

    _fields_ = [("bytes", c.c_ubyte * 1024)]


LAYOUTS: dict[str, tuple[type[c.Structure], dict[str, Any]]] = {
    "llama_model_default_params": (ModelParams, MODEL_DEFAULTS),
    "llama_context_default_params": (ContextParams, CONTEXT_DEFAULTS),
}
