"""`multipart/form-data` with one file, read as it comes and never held whole.

Enters: pieces of a body. Leaves: the small fields as text, and the file's bytes, handed on piece by piece. Always true:
whatever comes, not more than one part's head or one field is held, and the last few bytes, which may be the beginning
of a boundary; a body that ends before its last boundary, has a part too many, or a head that isn't understood, is
refused. Next: `files.py`.
"""

import re
from collections.abc import Callable

from hitsend.core.errors import InvalidRequest, UnsupportedMediaType

MAX_HEAD_BYTES = 4096
MAX_FIELD_BYTES = 1024
MAX_PARTS = 8
MAX_NAME_CHARS = 255

_BOUNDARY = re.compile(rb'boundary=(?:"([^"\r\n]{1,70})"|([0-9A-Za-z\'()+_,./:=?-]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_NAME = re.compile(r';\s*name="([^"\r\n]{1,64})"', re.IGNORECASE)
_FILE_NAME = re.compile(r';\s*filename="([^"\r\n]*)"', re.IGNORECASE)


def boundary_of(content_type: bytes | None) -> bytes:
    """What stands between parts. Raises UnsupportedMediaType."""
    kind, _, rest = (content_type or b"").partition(b";")
    found = _BOUNDARY.search(rest)
    if kind.strip().lower() != b"multipart/form-data" or found is None:
        raise UnsupportedMediaType("the content-type must be multipart/form-data with a boundary")
    return found[1] or found[2]


class Form:
    """One body. Feed it, then `end` it; `file_name` is None until a file was seen."""

    def __init__(self, boundary: bytes, write: Callable[[bytes], None], file_field: str = "file") -> None:
        """`write` gets the bytes of the part that is called `file_field`."""
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self._delimiter = b"\r\n--" + boundary
        self._write = write
        self._file_field = file_field
        self._held = bytearray(b"\r\n")  # so that the first boundary looks like all others
        self._take: Callable[[bytes], None] | None = self._take_nothing
        self._name = ""
        self._field = bytearray()
        self._num_parts = 0
        self._is_over = False

    def feed(self, piece: bytes) -> None:
        """The next bytes of the body. Raises InvalidRequest."""
        if not self._is_over:  # an epilogue means nothing
            self._held += piece
        while self._step():
            pass

    def end(self) -> None:
        """No more will come. Raises InvalidRequest when that is too early, or there was no file."""
        if not self._is_over:
            raise InvalidRequest("the multipart body ends before its last boundary")
        if self.file_name is None:
            raise InvalidRequest(f"{self._file_field}: missing", param=self._file_field)

    def _step(self) -> bool:
        if self._is_over:
            return False
        return self._in_head() if self._take is None else self._in_content()

    def _in_content(self) -> bool:
        """Hand on what is certainly content. False when more has to come first."""
        assert self._take is not None
        at = self._held.find(self._delimiter)
        if at < 0:
            keep = len(self._delimiter) - 1
            if len(self._held) > keep:
                self._take(bytes(self._held[:-keep]))
                del self._held[:-keep]
            return False
        if len(self._held) < at + len(self._delimiter) + 2:
            return False
        self._take(bytes(self._held[:at]))
        del self._held[: at + len(self._delimiter)]
        self._end_part()
        ending = bytes(self._held[:2])
        del self._held[:2]
        if ending == b"--":
            self._is_over = True
        elif ending != b"\r\n":
            raise InvalidRequest("the multipart body has a boundary that goes on")
        self._take = None
        return True

    def _in_head(self) -> bool:
        at = self._held.find(b"\r\n\r\n")
        if at > MAX_HEAD_BYTES or (at < 0 and len(self._held) > MAX_HEAD_BYTES):
            raise InvalidRequest(f"a part's head has more than {MAX_HEAD_BYTES} bytes")
        if at < 0:
            return False
        head = bytes(self._held[:at])
        del self._held[: at + 2]  # an empty part's boundary begins with the second line break
        self._begin_part(head)
        return True

    def _begin_part(self, head: bytes) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the multipart body has more than {MAX_PARTS} parts")
        name, file_name = _disposition(head)
        if name in self.fields or (name == self._file_field and self.file_name is not None):
            raise InvalidRequest(f"{name}: more than one of them", param=name)
        self._name = name
        if name == self._file_field:
            if file_name is None:
                raise InvalidRequest(f"{name}: has to be a file", param=name)
            self.file_name = file_name
            self._take = _after_break(self._write)
        else:
            self.fields[name] = ""
            self._take = _after_break(self._take_field)

    def _end_part(self) -> None:
        if self._name and self._name != self._file_field:
            try:
                self.fields[self._name] = self._field.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"{self._name}: not UTF-8", param=self._name) from error
        self._field.clear()
        self._name = ""

    def _take_field(self, piece: bytes) -> None:
        self._field += piece
        if len(self._field) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name}: more than {MAX_FIELD_BYTES} bytes", param=self._name)

    @staticmethod
    def _take_nothing(piece: bytes) -> None:
        if piece:
            raise InvalidRequest("the multipart body doesn't begin with its boundary")


def _after_break(take: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """What is held begins with the line break that ended the head: the two bytes aren't content."""
    left = 2

    def taken(piece: bytes) -> None:
        nonlocal left
        skipped, left = min(left, len(piece)), max(0, left - len(piece))
        if len(piece) > skipped:
            take(piece[skipped:])

    return taken


def _disposition(head: bytes) -> tuple[str, str | None]:
    """The part's name, and its file's where it has one. Raises InvalidRequest."""
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("a part's head is not UTF-8") from error
    found = [line for line in lines if line.lower().startswith("content-disposition:")]
    value = found[0].partition(":")[2].strip() if len(found) == 1 else ""
    name = _NAME.search(value)
    if name is None or not value.lower().startswith("form-data"):
        raise InvalidRequest('a part needs one header `content-disposition: form-data; name="…"`')
    if any(line.lower().startswith("content-transfer-encoding:") for line in lines):
        raise InvalidRequest(f"{name[1]}: a content-transfer-encoding is not read", param=name[1])
    file_name = _FILE_NAME.search(value)
    return name[1], None if file_name is None else _shown(file_name[1])


def _shown(file_name: str) -> str:
    """What the file is called from now on: no path, nothing that can't be printed."""
    last = re.split(r"[/\\]", file_name)[-1]
    return "".join(c if c.isprintable() else "_" for c in last)[:MAX_NAME_CHARS] or "file"
