"""JSON as other languages write it, made JSON that can be read.

Enters: a document that the reader refused. Leaves: the same one without what JSON has no word for; None where there is
none of that in it. Always true: nothing else of it changes; the work is in proportion to its length. JavaScript writes
halves of surrogate pairs as they stand in its strings, so a character in which a text was cut comes in two documents:
it is put together in the second one. A half without another is U+FFFD, or nothing where a text ended with it. Python
writes NaN and Infinity: they are null. Next: `openai_wire.py`.
"""

import re

_IS_LOOSE = re.compile(rb"\\u[dD][89a-fA-F]|NaN|Infinity").search
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|-?(?:NaN|Infinity)', re.DOTALL)
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[dD][89a-fA-F]..|.)", re.DOTALL)
_NUM_HALF = len(rb"\ud83d")
_UNKNOWN = rb"\ufffd"


class LooseJson:
    """The documents of one stream, one after the other."""

    def __init__(self) -> None:
        self._half = b""

    def mended(self, document: bytes) -> bytes | None:
        """What is meant by it."""
        return _TOKENS.sub(self._token, document) if _IS_LOOSE(document) else None

    def _token(self, found: re.Match[bytes]) -> bytes:
        text = found[0]
        return _ESCAPES.sub(self._escape, text) if text.startswith(b'"') else b"null"

    def _escape(self, found: re.Match[bytes]) -> bytes:
        said = found[0]
        if len(said) != _NUM_HALF:
            return said
        if said[3:4] in b"89abAB":
            if found.end() < len(found.string) - 1:
                return _UNKNOWN
            self._half = said
            return b""
        first, self._half = self._half if found.start() == 1 else b"", b""
        return first + said if first else _UNKNOWN
