"""The lines of a batch's file: hostile until proven otherwise.

Enters: a file. Leaves: its lines, or what is wrong with them. Always true: no more than one line is held, and of a line
not more than its limit; every line has a custom_id of its own before any of them runs. Next: `gate.py`.
"""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from hitsend.serve.usage.batches import Fault

MAX_FAULTS = 100
"""So many are told; the file is refused by the first."""
_SKIP_BYTES = 1024 * 1024


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line as the wire has it. `body` is exactly what was sent."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: Annotated[str, Meta(max_length=128)]
    body: msgspec.Raw


class Wants(msgspec.Struct, frozen=True):
    """What has to be known of a body before it begins; everything else is the route's business."""

    model: Any = None
    n: Any = 1
    stream: Any = None


class Limits(msgspec.Struct, frozen=True):
    """Of one file."""

    max_lines: int
    max_line_bytes: int


class Checked(msgspec.Struct, frozen=True):
    """How many lines there are, and what is wrong with them."""

    num_lines: int
    faults: tuple[Fault, ...]


def check(path: Path, endpoint: str, limits: Limits) -> Checked:
    """Look at every line once. Raises OSError. Takes a while: not for the event loop."""
    faults: list[Fault] = []
    seen: set[bytes] = set()
    num = num_blank = 0
    with path.open("rb") as opened:
        for number, raw in lines(opened, limits.max_line_bytes):
            is_blank = raw == b""
            num, num_blank = num + (not is_blank), num_blank + is_blank
            if max(num, num_blank) > limits.max_lines:  # blank ones are passed over on the event loop later on
                kind = "blank lines" if is_blank else "lines"
                text = f"the file has more than {limits.max_lines} {kind} (limit batches.max_lines)"
                faults.append(Fault("too_many_lines", text, number, "input_file_id"))
                break
            if not is_blank and (fault := _fault(number, raw, endpoint, seen, limits)) is not None:
                faults.append(fault)
            if len(faults) >= MAX_FAULTS:
                break
    if not num and not faults:
        faults.append(Fault("empty_file", "the file has no lines", None, "input_file_id"))
    return Checked(num, tuple(faults))


def lines(opened: BinaryIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """(number, line); b"" in the place of a blank one, None in that of one with more than `most` bytes.

    A byte order mark, with which some editors begin a file in UTF-8, is no part of its first line.
    """
    number = 0
    if opened.read(len(BOM_UTF8)) != BOM_UTF8:
        opened.seek(0)
    while raw := opened.readline(most + 2):
        number += 1
        is_too_long = len(raw.rstrip(b"\r\n")) > most
        if not raw.endswith(b"\n"):
            while rest := opened.readline(_SKIP_BYTES):
                is_too_long = True
                if rest.endswith(b"\n"):
                    break
        if is_too_long:
            yield number, None
        else:
            yield number, b"" if raw.isspace() else raw


def parse(raw: bytes) -> Line:
    """Raises ValueError, with a text that may be shown."""
    try:
        line = msgspec.json.decode(raw, type=Line)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a JSON object in UTF-8") from None
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise ValueError("body: expected object")
    return line


def wants(line: Line) -> Wants:
    """What its body asks for; nothing, where it can't be read: then its route will say so."""
    try:
        return msgspec.json.decode(line.body, type=Wants)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Wants()


def _fault(number: int, raw: bytes | None, endpoint: str, seen: set[bytes], limits: Limits) -> Fault | None:
    if raw is None:
        text = f"the line has more than {limits.max_line_bytes} bytes (limit access.max_body_bytes)"
        return Fault("line_too_long", text, number)
    try:
        line = parse(raw)
    except ValueError as error:
        return Fault("invalid_line", str(error)[:300], number)
    if line.method != "POST":
        return Fault("invalid_method", f"method: {line.method[:16]!r}, expected 'POST'", number, "method")
    if line.url != endpoint:
        return Fault("invalid_url", f"url: {line.url!r}, the batch is for {endpoint!r}", number, "url")
    digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        text = f"custom_id: {line.custom_id[:80]!r} is that of an earlier line"
        return Fault("duplicate_custom_id", text, number, "custom_id")
    seen.add(digest)
    return None
