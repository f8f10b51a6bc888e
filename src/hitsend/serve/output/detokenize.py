"""Token bytes become text, a whole character at a time.

Enters: the bytes of tokens, cut anywhere. Leaves: text. Always true: all texts joined equal
`b"".join(everything).decode("utf-8", "replace")`, so bytes that can never become a character turn into one U+FFFD per
maximal subpart (Unicode 15, section 3.9, U+FFFD substitution), and so does a character that the end cuts off: one
U+FFFD, streamed or not. Next: `stop.py`.
"""

import codecs

_Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Keeps at most the three bytes of an unfinished character."""

    def __init__(self) -> None:
        self._decoder = _Decoder("replace")

    @property
    def num_held_bytes(self) -> int:
        """Bytes of an unfinished character that wait for the rest."""
        return len(self._decoder.getstate()[0])

    def feed(self, data: bytes) -> str:
        """Take the next bytes, return the text that is now certain."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """No more bytes will come: an unfinished character becomes one U+FFFD."""
        return self._decoder.decode(b"", final=True)
