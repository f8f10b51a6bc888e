"""Weights from one type into another: rows of stored blocks in, rows of stored blocks out.

Enters: a tensor's rows as bytes, its type, the wanted type, and libllama, which has the codecs. Leaves: the rows in the
wanted type. Always true: what isn't finite is refused, a zero stays exactly zero in the types that have one, and Q4_1
becomes Q4_K on the lattice that it has already, so that only its scales are rounded (six bits) and not its values once
more: 1/35 of the error of choosing a new lattice. Next: `convert.py`.
"""

import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.libllama import Library

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16 = 10, 11, 12, 13, 14, 20, 23, 30

_CODECS = {
    Q4_0: "q4_0",
    Q4_1: "q4_1",
    Q5_0: "q5_0",
    Q5_1: "q5_1",
    Q8_0: "q8_0",
    Q2_K: "q2_K",
    Q3_K: "q3_K",
    Q4_K: "q4_K",
    Q5_K: "q5_K",
    Q6_K: "q6_K",
    IQ4_NL: "iq4_nl",
    IQ4_XS: "iq4_xs",
}
READABLE = frozenset((F32, F16, BF16, *_CODECS))
"""Types that can be converted from."""

BLOCK = {BF16: 1, Q8_0: 32, Q4_0: 32, IQ4_NL: 32, Q4_K: 256}
"""Types that can be converted to, and the elements of their blocks: a row has to be a whole number of them."""

_SUB, _PER_SUPER = 32, 8
_MOST_SCALE, _MOST = 63, 15

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def requantise(library: Library, rows: Bytes, kind: int, wanted: int, *, width: int) -> Bytes:
    """Rows [n, bytes] of `width` elements of type `kind` in type `wanted`. Raises ConfigError."""
    values = dequantise(library, rows, kind, width=width)
    if not np.isfinite(values).all():
        raise ConfigError("engine.layout: a weight is not a finite number")
    if kind == Q4_1 and wanted == Q4_K:
        return _same_lattice(rows)
    return quantise(library, values, wanted)


def dequantise(library: Library, rows: Bytes, kind: int, *, width: int) -> Floats:
    """The numbers that stored rows stand for, [n, width]."""
    stored = np.ascontiguousarray(rows)
    if kind == F32:
        return stored.view("<f4").reshape(len(rows), width)
    if kind == F16:
        return stored.view("<f2").astype(np.float32).reshape(len(rows), width)
    if kind == BF16:
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(len(rows), width)
    values = np.empty((len(rows), width), np.float32)
    getattr(library, f"dequantize_row_{_CODECS[kind]}")(stored.ctypes.data, values.ctypes.data, values.size)
    return values


def quantise(library: Library, values: Floats, wanted: int) -> Bytes:
    """Finite numbers [n, width] as rows of the wanted type, each row for itself."""
    values = np.ascontiguousarray(values, np.float32)
    count, width = values.shape
    room = np.empty(values.nbytes, np.uint8)
    size = library.ggml_quantize_chunk(wanted, values.ctypes.data, room.ctypes.data, 0, count, width, None)
    return room[:size].reshape(count, -1).copy()


def _same_lattice(rows: Bytes) -> Bytes:
    """Q4_1 (per 32: w = d q + m) as Q4_K (per 256: w = D s q - M t, s and t of six bits)."""
    scale, least, steps = _unpacked(rows)
    weights = scale[..., None] * steps + least[..., None]
    # a block can count downwards; one that is above zero throughout has no negative offset to store
    offset = np.maximum(0.0, -weights.min(-1))
    scale = np.maximum(np.abs(scale), (weights.max(-1) + offset) / _MOST)
    super_scale, super_offset = (_half(part.max(-1) / _MOST_SCALE) for part in (scale, offset))
    scales, offsets = _sixes(scale, super_scale), _sixes(offset, super_offset)
    step = super_scale[..., None] * scales
    below = (super_offset[..., None] * offsets)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(step[..., None] > 0, np.rint((weights + below) / step[..., None]), 0.0)
    return _packed(super_scale, super_offset, scales, offsets, np.clip(found, 0, _MOST).astype(np.uint8))


def _unpacked(rows: Bytes) -> tuple[Floats, Floats, Bytes]:
    """Scale and least [n, super, 8] and steps [n, super, 8, 32] of Q4_1."""
    blocks = rows.reshape(len(rows), -1, _PER_SUPER, 20)
    head = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
    steps = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return head[..., 0], head[..., 1], steps


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _sixes(values: Floats, unit: Floats) -> Bytes:
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(unit[..., None] > 0, np.rint(values / unit[..., None]), 0.0)
    return np.clip(found, 0, _MOST_SCALE).astype(np.uint8)


def _packed(super_scale: Floats, super_offset: Floats, scales: Bytes, offsets: Bytes, steps: Bytes) -> Bytes:
    """As ggml lays a Q4_K block out: two halves, twelve bytes of sixes, then 32 bytes for two sub-blocks each."""
    block = np.empty((*super_scale.shape, 144), np.uint8)
    block[..., 0:2] = super_scale.astype("<f2")[..., None].view(np.uint8)
    block[..., 2:4] = super_offset.astype("<f2")[..., None].view(np.uint8)
    block[..., 4:8] = scales[..., :4] | ((scales[..., 4:] >> 4) << 6)
    block[..., 8:12] = offsets[..., :4] | ((offsets[..., 4:] >> 4) << 6)
    block[..., 12:16] = (scales[..., 4:] & 15) | ((offsets[..., 4:] & 15) << 4)
    pairs = steps.reshape(*super_scale.shape, 4, 2, _SUB)
    block[..., 16:] = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*super_scale.shape, 128)
    return block.reshape(len(steps), -1)
