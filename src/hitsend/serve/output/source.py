"""Text that arrives in pieces, for parsers written as if it were all there.

Enters: pieces of text. Leaves: nothing; a parser is a generator that looks and skips here, and yields where it needs
more. Always true: a character is copied a bounded number of times whatever the pieces are (`work` counts it), because
what is looked at ahead is bounded; what was skipped since the last `commit` can be given back as it was.
Next: `reasoning.py`.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]
"""A parser that returns a T and yields where more text is needed."""

BLANKS = re.compile(r"[ \t\r\n]*")


class Source:
    """What of the text has come and isn't parsed yet. `text[at:]` is next; after `is_ended` nothing more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self.work = 0
        self._raw: list[str] = []

    def add(self, piece: str) -> None:
        """More text."""
        left = self.text[self.at :]
        self.work += len(left) + len(piece)
        self.text, self.at = left + piece, 0

    def more(self) -> Parse[bool]:
        """Wait until there is an unread character; False at the end."""
        while self.at == len(self.text):
            if self.is_ended:
                return False
            yield
        return True

    def peek(self) -> Parse[str]:
        """The next character, "" at the end."""
        return self.text[self.at] if (yield from self.more()) else ""

    def starts(self, marker: str, shift: int = 0) -> Parse[bool]:
        """Whether the text goes on with the marker (after `shift` characters). Waits no longer than it has to."""
        while True:
            begin = self.at + shift
            self.work += len(marker)
            if self.text.startswith(marker, begin):
                return True
            if self.is_ended or not marker.startswith(self.text[begin : begin + len(marker)]):
                return False
            yield

    def skip(self, count: int) -> str:
        """Go past some characters and return them; they can be given back until `commit`."""
        piece = self.text[self.at : self.at + count]
        self.work += count
        self.at += count
        self._raw.append(piece)
        return piece

    def blanks(self) -> Parse[None]:
        """Skip blanks."""
        while (yield from self.more()):
            found = BLANKS.match(self.text, self.at)
            end = found.end() if found else self.at
            if end == self.at:
                return
            self.skip(end - self.at)

    def until(self, *markers: str) -> Parse[tuple[str, bool]]:
        """Skip text that is certainly before any marker; (it, whether one is next). ("", False) at the end."""
        if not (yield from self.more()):
            return "", False
        while True:
            found = [at for at in (self.text.find(marker, self.at) for marker in markers) if at >= 0]
            overlap = 0 if self.is_ended else max(map(self.overlap, markers))
            safe = len(self.text) - self.at - overlap
            if found and min(found) - self.at <= safe:
                return self.skip(min(found) - self.at), True
            if safe or self.is_ended:
                return self.skip(safe), False
            yield

    def overlap(self, marker: str) -> int:
        """How many of the last characters may be the beginning of the marker."""
        longest = min(len(self.text) - self.at, len(marker) - 1)
        self.work += longest
        return next((n for n in range(longest, 0, -1) if self.text.endswith(marker[:n])), 0)

    def commit(self) -> None:
        """What was skipped so far is understood."""
        self._raw.clear()

    def give_back(self) -> str:
        """What was skipped since the last `commit`."""
        raw = "".join(self._raw)
        self._raw.clear()
        return raw
