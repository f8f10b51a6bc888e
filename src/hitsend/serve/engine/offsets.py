"""Q4_1 as Q4_0 and a low-rank adapter: the same weights, on the kernels that libllama has for Q4_0.

    w = d q + m  =  d (q - 8)  +  (m + 8 d)          in every block of 32
    W x          =  Q4_0's product  +  B (A x)

Enters: rows of Q4_1. Leaves: rows of Q4_0 with the same d and q, and an adapter file in which A adds x up by blocks
(ones, exact) and B holds the blocks' offsets m + 8 d, to 8 bits. Always true: the adapter lies beside its weights under
a name made of theirs, both say what they came from, and weights without their own adapter are refused: they would be
another model; only matrices of architectures are taken whose products all go through libllama's code for adapters.
Next: `convert.py` writes them, `adapters.py` loads them.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, GgufTensor, bytes_of, read_header
from hitsend.serve.engine.libllama import Library
from hitsend.serve.engine.requantise import Q8_0, Bytes, Floats, quantise

LAYOUT_KEY, SOURCE_KEY, FILE_KEY = "hitsend.layout", "hitsend.layout.source_sha256", "hitsend.layout.source_file"
"""Metadata of a converted file: its recipe, and the file that it came from."""

RECIPE = "q4_0+offsets"

ARCHITECTURES = frozenset(("llama", "qwen2", "qwen3"))
"""Their graphs were read: every matrix below is multiplied where adapters apply."""

MATRICES = frozenset(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))

TIMES = 1024.0
"""B is stored so many times bigger, and the adapter applied with 1 / `TIMES`: small weights would otherwise have scales
below what 16 bits resolve."""

ALIGNMENT = 32
"""Of the adapter's tensors, in bytes: what GGUF has where nothing else is said."""

_BLOCK = 32
_MOST = 8000.0
_STRING, _FLOAT = 8, 6


def is_splittable(tensor: GgufTensor) -> bool:
    """Whether its products go where adapters apply. Its type is another question."""
    layer, _, name = tensor.name.removeprefix("blk.").partition(".")
    is_matrix = len(tensor.dimensions) == 2 and tensor.name.startswith("blk.")
    return is_matrix and layer.isdigit() and name.removesuffix(".weight") in MATRICES


def without_offsets(rows: Bytes) -> Bytes:
    """Rows of Q4_1 as rows of Q4_0 with the same scales and steps. Raises ConfigError."""
    offsets_of(rows)
    blocks = rows.reshape(len(rows), -1, 20)
    return np.concatenate([blocks[..., :2], blocks[..., 4:]], -1).reshape(len(rows), -1)


def offsets_of(rows: Bytes) -> Floats:
    """What Q4_0 leaves out of rows of Q4_1: m + 8 d of each block, [rows, blocks]. Raises ConfigError."""
    blocks = rows.reshape(len(rows), -1, 20)
    head = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
    found: Floats = head[..., 1] + 8 * head[..., 0]
    if not np.isfinite(head).all():
        raise ConfigError("engine.layout: a weight is not a finite number")
    if np.abs(found).max(initial=0.0) > _MOST:
        raise ConfigError(f"engine.layout: a block lies {np.abs(found).max():g} beside zero, limit {_MOST:g}")
    return found


def rank_of(width: int) -> int:
    """Rows of A and columns of B: one for each block of a row, and zeros until B's rows are whole blocks too."""
    return math.ceil(width / _BLOCK / _BLOCK) * _BLOCK


def block_sums(width: int) -> Bytes:
    """A, [rank, bytes], in Q8_0: row b is one in block b and zero elsewhere."""
    one = np.concatenate([np.array([1.0], "<f2").view(np.uint8), np.ones(_BLOCK, np.uint8)])
    blocks = width // _BLOCK
    built = np.zeros((rank_of(width), blocks, len(one)), np.uint8)
    built[np.arange(blocks), np.arange(blocks)] = one
    return built.reshape(len(built), -1)


def stored_offsets(library: Library, rows: Bytes, width: int) -> Bytes:
    """B's rows, in Q8_0. Raises ConfigError."""
    values = np.zeros((len(rows), rank_of(width)), np.float32)
    values[:, : width // _BLOCK] = offsets_of(rows) * TIMES
    return quantise(library, values, Q8_0)


def head_of(header: GgufHeader, tensors: list[GgufTensor], keys: list[tuple[str, str]]) -> bytes:
    """Everything before the adapter's first tensor."""
    texts = [
        ("general.type", "adapter"),
        ("general.architecture", header.architecture),
        ("adapter.type", "lora"),
        *keys,
    ]
    out = [struct.pack("<4sIQQ", b"GGUF", 3, 2 * len(tensors), len(texts) + 1)]
    out += [text(key) + struct.pack("<I", _STRING) + text(value) for key, value in texts]
    out.append(text("adapter.lora.alpha") + struct.pack("<If", _FLOAT, 0.0))
    offset = 0
    for tensor in tensors:
        for name, shape in _pair(tensor):
            out.append(text(name) + struct.pack("<I2QIQ", 2, *shape, Q8_0, offset))
            offset += -(-bytes_of(Q8_0, math.prod(shape)) // ALIGNMENT) * ALIGNMENT
    return b"".join(out)


def num_bytes(tensors: list[GgufTensor]) -> int:
    """What A and B of all of them take."""
    return sum(bytes_of(Q8_0, math.prod(shape)) for tensor in tensors for _, shape in _pair(tensor))


def offsets_path(weights: Path) -> Path:
    """Where the adapter of these weights lies."""
    return weights.with_suffix(".offsets.gguf")


def offsets_beside(path: str, header: GgufHeader, where: str = "engine.layout") -> Path | None:
    """The adapter that these weights need; None where they need none. Raises ConfigError where it isn't theirs."""
    if header.metadata.get(LAYOUT_KEY) != RECIPE:
        return None
    file = offsets_path(Path(path))
    if not file.is_file():
        raise ConfigError(f"{where}: {path} is {RECIPE}, and its offsets are missing: {file}")
    found = read_header(str(file), where).metadata
    expected = {key: header.metadata.get(key) for key in (LAYOUT_KEY, SOURCE_KEY, "general.architecture")}
    if {key: found.get(key) for key in expected} != expected:
        raise ConfigError(f"{where}: the offsets {file} belong to other weights than {path}")
    return file


def check_whole(path: str, header: GgufHeader, where: str) -> None:
    """Raises ConfigError for weights without their offsets and for offsets, where the two can't be brought together."""
    if header.metadata.get(LAYOUT_KEY) == RECIPE:
        raise ConfigError(f"{where}: {path} is a part of a model in the layout {RECIPE}: use the file it was made from")


def offsets_bytes(path: str, header: GgufHeader, where: str = "engine.layout") -> int:
    """What the adapter of these weights takes; 0 where they need none. Raises ConfigError."""
    file = offsets_beside(path, header, where)
    return 0 if file is None else read_header(str(file), where).tensor_bytes


def text(words: str) -> bytes:
    """A string as GGUF stores it."""
    stored = words.encode()
    return struct.pack("<Q", len(stored)) + stored


def _pair(tensor: GgufTensor) -> Iterator[tuple[str, tuple[int, int]]]:
    width, rows = tensor.dimensions
    yield f"{tensor.name}.lora_a", (width, rank_of(width))
    yield f"{tensor.name}.lora_b", (rank_of(width), rows)
