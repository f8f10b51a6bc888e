"""Server-sent events, as bytes.

Enters: JSON documents, already encoded. Leaves: frames. Always true: a frame is whole, holds one `data:` line (after an
`event:` line, where a dialect names its events) and one empty line, and no character in it can be taken for a line end:
JSON escapes the ASCII ones, this file the three others (U+0085, U+2028, U+2029) at which some readers split text.
Next: `deliver.py`.
"""

import re

PING = b": ping\n\n"
"""A comment: readers skip it, proxies see a byte. Never sent inside a frame, because frames are written whole."""

DONE = b"data: [DONE]\n\n"
"""The last frame of a stream that ended well; a stream that ended badly has none."""

_END = re.compile(
    rb"(data: \[DONE\]|event: (message_stop|response\.(completed|incomplete|failed)|error)\ndata: [^\n]*)\n\n\Z"
)

CONTENT_TYPE = b"text/event-stream; charset=utf-8"

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", CONTENT_TYPE),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""nginx reads `x-accel-buffering` and lets the frames through; `no-transform` keeps proxies from compressing them."""

_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def is_end(frames: bytes) -> bool:
    """Whether these frames are the last ones of their dialect: nothing may follow them, not even a comment."""
    return _END.search(frames) is not None


def event(name: str, document: bytes) -> bytes:
    """The document as an event with a name, as dialects want it whose readers look at the name first."""
    return b"event: " + name.encode() + b"\n" + frame(document)


def frame(document: bytes) -> bytes:
    """One JSON document (no raw line breaks, which no JSON encoder leaves inside strings) as one event."""
    return b"data: " + safe(document) + b"\n\n"


def safe(document: bytes) -> bytes:
    """A JSON document, or a part of it, without what could be taken for a line's end."""
    if b"\xe2\x80" in document or b"\xc2\x85" in document:
        for raw, escaped in _LINE_ENDS:
            document = document.replace(raw, escaped)
    return document
