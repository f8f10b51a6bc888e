"""A screenshot with few colours: Chromium writes whole pixels, and pictures of text and bars need a palette only."""

import struct
import zlib
from pathlib import Path

import numpy as np

NUM_COLOURS = 64
_MAGIC = b"\x89PNG\r\n\x1a\n"


def shrink(path: Path) -> None:
    """Write the picture again with the colours that it has most of; others become the nearest of them."""
    pixels = _decode(path.read_bytes())
    codes = pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    every, places, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([every >> 16, every >> 8 & 255, every & 255], axis=-1).astype(np.int32)
    vividness = 1 + np.ptp(colours, axis=1)  # a small spot of colour says more than another shade of grey
    palette = colours[np.argsort(-counts * vividness, kind="stable")[:NUM_COLOURS]]
    nearest = np.array([((palette - colour) ** 2).sum(axis=1).argmin() for colour in colours], np.uint8)
    indices = nearest[places].reshape(codes.shape)
    path.write_bytes(_encode(indices, palette.astype(np.uint8)))


def _chunks(data: bytes) -> "list[tuple[bytes, bytes]]":
    assert data.startswith(_MAGIC)
    found, at = [], len(_MAGIC)
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += size + 12
    return found


def _decode(data: bytes) -> "np.ndarray":
    """Eight bits a channel, not interlaced, as Chromium writes; without what is see-through."""
    chunks = _chunks(data)
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    assert depth == 8
    assert kind in (2, 6)
    assert not interlaced
    size = 3 if kind == 2 else 4
    raw = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    rows = np.frombuffer(raw, np.uint8).reshape(height, 1 + width * size)
    shown = np.zeros((height + 1, width + 1, size), np.int32)  # a row and a column of nothing, as the filters want
    for number in range(height):
        line = rows[number, 1:].reshape(width, size).astype(np.int32)
        _unfilter(int(rows[number, 0]), line, shown[number], shown[number + 1])
    return shown[1:, 1:, :3].astype(np.uint8)


def _unfilter(kind: int, line: "np.ndarray", above: "np.ndarray", out: "np.ndarray") -> None:
    if kind in (0, 2):
        out[1:] = line + above[1:] if kind == 2 else line
        out &= 255
    elif kind == 1:
        out[1:] = np.cumsum(line, axis=0) & 255
    else:
        before, ups, given = [0] * line.shape[1], above.tolist(), line.tolist()
        for at, pixel in enumerate(given):
            guess = _mean if kind == 3 else _paeth
            before = [
                (value + guess(left, up, corner)) & 255
                for value, left, up, corner in zip(pixel, before, ups[at + 1], ups[at], strict=True)
            ]
            out[at + 1] = before


def _mean(left: int, up: int, _corner: int) -> int:
    return (left + up) // 2


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def _encode(indices: "np.ndarray", palette: "np.ndarray") -> bytes:
    height, width = indices.shape
    rows = np.hstack([np.zeros((height, 1), np.uint8), indices])

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
    return _MAGIC + chunk(b"IHDR", head) + chunk(b"PLTE", palette.tobytes()) + body + chunk(b"IEND", b"")
