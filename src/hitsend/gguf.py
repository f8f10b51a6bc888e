"""A GGUF file's header, read and judged before libllama may see it, and read by the planner.

Enters: a path. Leaves: a `GgufHeader`: the metadata that sizing needs, and what tensors there are. Always
true: pure Python over a read-only mapping, every length is compared with what the file really holds before it is
used, and a tensor that reaches beyond the end of the file (the way heap contents leak out of parsers) is refused.
In front of libllama it is a sieve, not a replacement of its own parser: there both run in a child process. Next:
`serve/engine/shape.py`, `plan/weights.py`.

    header     magic "GGUF", u32 version, u64 number of tensors, u64 number of keys
    keys       string key, u32 type, value (arrays: u32 element type, u64 count, elements)
    tensors    string name, u32 number of dimensions, u64 dimensions, u32 type, u64 offset from the data's start
    data       from the next multiple of `general.alignment`
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hitsend.core.errors import ConfigError

MAX_KEYS = 65_536
MAX_TENSORS = 1_000_000
MAX_ELEMENTS = 2**48
MAX_STRING_BYTES = 64 * 1024 * 1024
KEPT_ELEMENTS = 4096
"""Longer arrays (token lists) are measured and skipped."""

_ARRAY, _STRING = 9, 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# ggml type → (elements in a block, bytes of a block)
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    30: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    20: (32, 18),
    39: (32, 17),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    29: (256, 56),
    34: (256, 54),
    35: (256, 66),
    40: (64, 36),
    41: (128, 18),
}
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""What ggml calls them, as far as it gave them a name when this was written."""


class GgufTensor(NamedTuple):
    """One tensor: the first 80 characters of its name, where it starts, and how large it is."""

    name: str
    offset: int
    num_bytes: int
    kind: int
    elements: int
    dimensions: tuple[int, ...] = ()


class GgufHeader(msgspec.Struct, frozen=True):
    """What the header says. `metadata` holds scalars, strings and short arrays; long arrays only as their length."""

    metadata: dict[str, Any]
    array_lengths: dict[str, int]
    num_tensors: int
    tensor_bytes: int
    tensors: tuple[GgufTensor, ...] = ()

    @property
    def architecture(self) -> str:
        """`llama`, `qwen35` and so on."""
        return str(self.metadata.get("general.architecture", ""))


class GgufMap(msgspec.Struct, frozen=True):
    """Where things lie in the file: bytes [keys_at, keys_end) are its keys, tensors count from `data_at`."""

    num_keys: int
    keys_at: int
    keys_end: int
    data_at: int
    alignment: int
    tensors: tuple[GgufTensor, ...]


class _Broken(Exception):
    """What is wrong with the file."""


class _Cursor:
    """A place in the file that can't leave it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.size = len(data)

    def take(self, form: str) -> Any:
        """One little-endian value."""
        width = struct.calcsize("<" + form)
        self.need(width)
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += width
        return value

    def need(self, width: int) -> None:
        if width > self.size - self.at:
            raise _Broken(f"it ends at byte {self.size}, inside a value of {width} bytes that starts at byte {self.at}")

    def text(self) -> bytes:
        length = self.take("Q")
        if length > MAX_STRING_BYTES:
            raise _Broken(f"a string of {length} bytes at byte {self.at}, limit {MAX_STRING_BYTES}")
        self.need(length)
        value = bytes(self.data[self.at : self.at + length])
        self.at += length
        return value

    def skip_strings(self, count: int) -> None:
        # The one hot loop: a quarter of a million tokens and merges.
        unpack, data, at, size = struct.Struct("<Q").unpack_from, self.data, self.at, self.size
        for _ in range(count):
            if at + 8 > size:
                at = size + 1
                break
            at += 8 + unpack(data, at)[0]
        if at > size:
            raise _Broken(f"a list of {count} strings reaches beyond its end at byte {size}")
        self.at = at


def read_header(path: str, setting: str = "engine.model") -> GgufHeader:
    """Read and judge the file's header. Raises ConfigError that says what is wrong with the file of `setting`."""
    return read_map(path, setting)[0]


def read_map(path: str, setting: str = "engine.model") -> tuple[GgufHeader, GgufMap]:
    """The same, and where everything lies. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(_Cursor(data))
    except _Broken as broken:
        raise ConfigError(f"{setting}: {path} is not a usable GGUF file: {broken}") from None
    except ValueError:
        raise ConfigError(f"{setting}: {path} is not a usable GGUF file: it is empty") from None
    except OSError as failure:
        raise ConfigError(f"{setting}: can't read {path}: {failure.strerror}") from None


def _header(cursor: _Cursor) -> tuple[GgufHeader, GgufMap]:
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise _Broken(f"it starts with {magic!r}, not b'GGUF'")
    cursor.at = 4
    version = cursor.take("I")
    if version not in {2, 3}:
        raise _Broken(f"version {version}, readable are 2 and 3")
    num_tensors, num_keys = cursor.take("Q"), cursor.take("Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise _Broken(f"{num_tensors} tensors and {num_keys} keys, limits {MAX_TENSORS} and {MAX_KEYS}")
    metadata: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    keys_at = cursor.at
    for _ in range(num_keys):
        _key(cursor, metadata, lengths)
    keys_end = cursor.at
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise _Broken(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    for name, offset, num_bytes, *_ in tensors:
        if offset % alignment:
            raise _Broken(f"tensor {name!r} starts at offset {offset}, no multiple of {alignment}")
        if start + offset + num_bytes > cursor.size:
            raise _Broken(f"tensor {name!r} ends at byte {start + offset + num_bytes}, the file at byte {cursor.size}")
    _apart(tensors)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    header = GgufHeader(metadata, lengths, num_tensors, num_bytes, tuple(tensors))
    return header, GgufMap(num_keys, keys_at, keys_end, start, alignment, header.tensors)


def _key(cursor: _Cursor, metadata: dict[str, Any], lengths: dict[str, int]) -> None:
    key = cursor.text().decode("utf-8", "replace")
    if key in metadata or key in lengths:
        raise _Broken(f"key {key[:80]!r} stands in it twice")
    kind = cursor.take("I")
    if kind != _ARRAY:
        metadata[key] = _scalar(cursor, kind, key)
        return
    kind, count = cursor.take("I"), cursor.take("Q")
    lengths[key] = count
    if kind == _STRING:
        cursor.skip_strings(count)
    elif kind in _SCALARS:
        width = struct.calcsize(_SCALARS[kind]) * count
        cursor.need(width)
        if count <= KEPT_ELEMENTS:
            metadata[key] = struct.unpack_from(f"<{count}{_SCALARS[kind]}", cursor.data, cursor.at)
        cursor.at += width
    else:
        raise _Broken(f"key {key[:80]!r} is an array of unknown type {kind}")


def _scalar(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.text().decode("utf-8", "replace")
    if kind not in _SCALARS:
        raise _Broken(f"key {key[:80]!r} has unknown type {kind}")
    return cursor.take(_SCALARS[kind])


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.text().decode("utf-8", "replace")[:80]
    num_dimensions = cursor.take("I")
    if not 1 <= num_dimensions <= 4:
        raise _Broken(f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = [cursor.take("Q") for _ in range(num_dimensions)]
    kind, offset = cursor.take("I"), cursor.take("Q")
    if kind not in _BLOCKS:
        raise _Broken(f"tensor {name!r} has unknown type {kind}")
    elements = 1
    for dimension in dimensions:
        elements *= dimension
    if not 1 <= elements <= MAX_ELEMENTS:
        raise _Broken(f"tensor {name!r} has {elements} elements, limit {MAX_ELEMENTS}")
    per_block, block_bytes = _BLOCKS[kind]
    if dimensions[0] % per_block:
        raise _Broken(f"tensor {name!r} has rows of {dimensions[0]} elements, no multiple of its block of {per_block}")
    return GgufTensor(name, offset, elements // per_block * block_bytes, kind, elements, tuple(dimensions))


def bytes_of(kind: int, num_elements: int) -> int:
    """What so many elements of a type take; a whole number of its blocks."""
    per_block, block_bytes = _BLOCKS[kind]
    return num_elements // per_block * block_bytes


def _apart(tensors: list[GgufTensor]) -> None:
    end, before = 0, ""
    for name, offset, num_bytes, *_ in sorted(tensors, key=lambda tensor: tensor.offset):
        if offset < end:
            raise _Broken(f"tensors {before!r} and {name!r} overlap")
        end, before = offset + num_bytes, name
