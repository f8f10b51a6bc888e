"""The line to the edge, seen from inside a child process.

Enters: the inherited descriptor. Leaves: whole message bodies; sends bodies back. Always true: nothing here blocks
longer than asked, a slow edge makes `unsent_bytes` grow instead of stopping the child, and `is_closed` means that the
edge is gone and the child has no reason to live. No event loop: a child does one thing at a time.
Next: `engine/worker.py`.

    line = ParentLine(fd)
    while not line.is_closed:
        for body in line.receive(timeout_s=1.0):      # b"" frames are bodies too; [] after a timeout
            line.send(msgspec.msgpack.encode(answer(body)))
"""

import select
import socket
from collections.abc import Iterable

from hitsend.core.frames import FrameReader, FrameTooLong, frame

_CHUNK_BYTES = 256 * 1024


class ParentLine:
    """See the module's docstring."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the edge closed its end (or spoke nonsense)."""
        return self._is_closed

    @property
    def unsent_bytes(self) -> int:
        """What the edge hasn't taken yet."""
        return len(self._unsent)

    def receive(self, timeout_s: float) -> list[bytes]:
        """Bodies that are there, waiting at most `timeout_s` for the first; unsent bytes leave meanwhile."""
        if self._is_closed:
            return []
        writable = [self._socket] if self._unsent else []
        ready, can_write, _ = select.select([self._socket], writable, [], timeout_s)
        if can_write:
            self._flush()
        return self._read() if ready else []

    def send(self, *bodies: bytes) -> None:
        """Send bodies with one write; what doesn't fit is kept and leaves during later calls."""
        self.send_all(bodies)

    def send_all(self, bodies: Iterable[bytes]) -> None:
        """As `send`."""
        for body in bodies:
            self._unsent += frame(body)
        self._flush()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is sent or the line closes; False when `timeout_s` passed first."""
        while self._unsent and not self._is_closed:
            _, can_write, _ = select.select([], [self._socket], [], timeout_s)
            if not can_write:
                return False
            self._flush()
        return True

    def _flush(self) -> None:
        while self._unsent and not self._is_closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._is_closed = True
                return
            del self._unsent[:sent]

    def _read(self) -> list[bytes]:
        bodies: list[bytes] = []
        while not self._is_closed:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
                bodies += self._reader.feed(data)
            except BlockingIOError:
                break
            except (OSError, FrameTooLong):
                self._is_closed = True
            else:
                if len(data) == 0:
                    self._is_closed = True
                if len(data) < _CHUNK_BYTES:
                    break
        return bodies
