"""Messages between processes: a length, then msgpack.

Enters: bytes in any pieces. Leaves: whole message bodies. Always true: no sockets here, a frame longer than `MAX_BYTES`
is refused before it is buffered, and what a body may contain is decided by the typed msgspec decoder that reads it.
Next: `serve/child.py`.
"""

import struct

MAX_BYTES = 64 * 1024 * 1024
"""Longest body. A step report of 256 sequences with 20 alternatives each is below 100 KiB; a 248,320-entry vocabulary
is 5 MiB."""

_HEAD = struct.Struct("!I")


class FrameTooLong(Exception):
    """The peer announced a body over `MAX_BYTES`: it can't be ours."""


def frame(body: bytes) -> bytes:
    """One body, ready for the socket. Raises FrameTooLong."""
    if len(body) > MAX_BYTES:
        raise FrameTooLong(f"{len(body)} bytes, limit {MAX_BYTES}")
    return _HEAD.pack(len(body)) + body


class FrameReader:
    """Collects bytes until bodies are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they came, return every body that is now complete, in order. Raises FrameTooLong."""
        self._buffer += data
        bodies: list[bytes] = []
        offset = 0
        while len(self._buffer) - offset >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer, offset)
            if length > MAX_BYTES:
                raise FrameTooLong(f"{length} bytes, limit {MAX_BYTES}")
            end = offset + _HEAD.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[offset + _HEAD.size : end]))
            offset = end
        del self._buffer[:offset]
        return bodies
