"""What a step report costs between the processes: encode, socket pair, decode; for docs/decisions/002-ipc.md.

Enters: nothing. Leaves: a table on stdout. Always true: the frames are those of `core/frames.py` and the structs those
of `serve/loop/messages.py`; the other codecs carry the same values. Next: `docs/decisions/002-ipc.md`.

    .venv/bin/python -m bench.ipc
"""

import json
import pickle
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hitsend.core.frames import FrameReader, frame

ROUNDS = 2000
SEQUENCES = 32


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step."""

    request_id: str
    choice: int
    token_id: int
    logprob: float


class Report(msgspec.Struct, frozen=True, tag=True):
    """One step."""

    step: int
    started_at: float
    ended_at: float
    rows: tuple[Row, ...]


def report() -> Report:
    """A step of 32 decoding sequences."""
    rows = tuple(Row(f"chatcmpl-{number:032x}", 0, 1000 + number, -0.5 * number) for number in range(SEQUENCES))
    return Report(7, 1000.25, 1000.45, rows)


def as_plain(value: Report) -> dict[str, Any]:
    """The same for codecs that know no structs."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def cost_us(encode: Callable[[], bytes], decode: Callable[[bytes], Any]) -> tuple[float, int]:
    """Median microseconds for one report from one end of a socket pair to the other, and its bytes."""
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    times = []
    size = 0
    with ours, theirs:
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            framed = frame(encode())
            ours.sendall(framed)
            bodies: list[bytes] = []
            while not bodies:
                bodies = reader.feed(theirs.recv(1 << 16))
            decode(bodies[0])
            times.append(time.perf_counter() - begun)
            size = len(framed)
    return statistics.median(times) * 1e6, size


def main() -> None:
    """Print one line per codec."""
    value = report()
    plain = as_plain(value)
    pack, unpack = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Report)
    codecs: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]] = {
        "msgspec msgpack, typed": (lambda: pack.encode(value), unpack.decode),
        "json (standard library), untyped": (lambda: json.dumps(plain).encode(), json.loads),
        "pickle": (lambda: pickle.dumps(value), pickle.loads),  # noqa: S301  # only here: what is compared with
    }
    for name, (encode, decode) in codecs.items():
        us, size = cost_us(encode, decode)
        print(f"{name:34} {us:7.1f} us  {size:6} bytes")


if __name__ == "__main__":
    main()
