"""Events that differ from an earlier one in nothing but their text: most of a stream is that.

Enters: an event's JSON, and what it was found to say. Leaves: the text of the next one, or of all that follow each
other in one read, where it can be no other.
Always true: whatever isn't exactly what was learned, byte for byte around a text without quotes, escapes or control
characters, is left to the real reader. Next: `openai_wire.py`.
"""

_KEYS = (b'"content":"', b'"content": "')


class Alike:
    """What stands before and after the text in events of one choice."""

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._between = self._start = self._end = b""
        self._least = 0
        self.index = 0

    @property
    def is_learned(self) -> bool:
        """Whether it is known how an event looks."""
        return self._least > 0

    def learn(self, document: bytes, text: str, index: int) -> None:
        """This event brought `text` for that choice, and nothing else."""
        if b"\\" in document or document.count(b'"content"') != 1:
            return
        for key in _KEYS:
            head, found, rest = document.partition(key)
            middle, quote, tail = rest.partition(b'"')
            if found and quote and middle == text.encode():
                self._head, self._tail, self.index = head + found, quote + tail, index
                self._least = len(self._head) + len(self._tail) + 1
                self._start, self._end = b"data: " + self._head, self._tail + b"\n\n"
                self._between = self._end + self._start

    def text(self, document: bytes) -> str | None:
        """What it brings for `index`, and there is nothing else in it; None: read it."""
        if not self._least or len(document) < self._least:
            return None
        if not (document.startswith(self._head) and document.endswith(self._tail)):
            return None
        return _plain(document[len(self._head) : len(document) - len(self._tail)])

    def run(self, events: bytes) -> tuple[str, int, bytes]:
        """What as many events as are alike, from the beginning, bring together; how many they are; and what is left."""
        if not self._least or not events.startswith(self._start):
            return "", 0, events
        *texts, last = events[len(self._start) :].split(self._between)
        middle, end, rest = last.partition(self._end)
        if end:
            texts.append(middle)
        else:  # it isn't whole, or another kind of event
            rest = self._start + last
        found = _plain(b"".join(texts))
        if found is None or b"" in texts or not (found.isascii() or all(_plain(text) for text in texts)):
            return "", 0, events
        return found, len(texts), rest


def _plain(middle: bytes) -> str | None:
    """The text, if JSON would read it as it stands here."""
    if b'"' in middle or b"\\" in middle:
        return None
    try:
        found = middle.decode()
    except UnicodeDecodeError:
        return None
    return found if found.isprintable() else None
