"""One JSON value in a stream of text: where it ends, and whether it is one.

Enters: text, cut anywhere. Leaves: how far the value reaches. Always true: what is accepted is exactly RFC 8259's
grammar, at most `MAX_DEPTH` deep, in constant work per character and without recursion; nothing is decoded here.
Next: `json_calls.py`.
"""

import re

MAX_DEPTH = 64

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANK = " \t\r\n"
_DIGITS = "123456789"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER = {
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "d", "1": "d"},
    "d": {"0": "d", "1": "d", "e": "e"},
    "e": {"0": "x", "1": "x", "+": "s"},
    "s": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}
"""A number's states and what leads on; the digits 1 to 9 count as `1`, a sign inside as `+`."""
_NUMBER_ENDS = frozenset("01dx")


class JsonScanner:
    """Reads one value. `is_done` and `is_failed` say when to stop; a failed one has read up to what was wrong."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_failed = False
        self._stack: list[str] = []
        self._state = "value"
        self._is_key = False
        self._left = ""
        self._num_hex = 0
        self._number = ""

    def scan(self, text: str, at: int) -> int:
        """Read on from `at`; where reading stopped."""
        while at < len(text) and not (self.is_done or self.is_failed):
            if self._state == "string" and (plain := _PLAIN.match(text, at)) is not None:
                at = plain.end()
                continue
            at += self._take(text[at])
        return at

    def end(self) -> None:
        """No more text: only a number can end by that."""
        if self._state == "number" and not self._stack and self._number in _NUMBER_ENDS:
            self.is_done = True
        elif not self.is_done:
            self.is_failed = True

    def _take(self, char: str) -> int:
        """Take one character: 1, or 0 where it doesn't belong to the value (any more)."""
        is_taken = bool(getattr(self, f"_in_{self._state}")(char))
        self.is_failed = self.is_failed or not (is_taken or self.is_done)
        return int(is_taken)

    def _in_value(self, char: str) -> bool:
        if char in _BLANK:
            return True
        if char in "{[":
            self._stack.append(char)
            self._state = "first_key" if char == "{" else "first_item"
            return len(self._stack) <= MAX_DEPTH
        if char == '"':
            self._state, self._is_key = "string", False
        elif char in _LITERALS:
            self._state, self._left = "literal", _LITERALS[char]
        elif char in "-0" or char in _DIGITS:
            self._state, self._number = "number", "1" if char in _DIGITS else char
        else:
            return False
        return True

    def _in_first_item(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._in_value(char)

    def _in_first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._in_key(char)

    def _in_key(self, char: str) -> bool:
        if char in _BLANK:
            return True
        self._state, self._is_key = "string", True
        return char == '"'

    def _in_colon(self, char: str) -> bool:
        if char == ":":
            self._state = "value"
        return char == ":" or char in _BLANK

    def _in_after(self, char: str) -> bool:
        if char in _BLANK:
            return True
        if char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
            return True
        return char in "]}" and self._close(char)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self._end_value(is_key=self._is_key)
        elif char == "\\":
            self._state = "escape"
        else:
            return False
        return True

    def _in_escape(self, char: str) -> bool:
        self._state = "hex" if char == "u" else "string"
        self._num_hex = 4
        return char in '"\\/bfnrtu'

    def _in_hex(self, char: str) -> bool:
        self._num_hex -= 1
        if not self._num_hex:
            self._state = "string"
        return char in "0123456789abcdefABCDEF"

    def _in_literal(self, char: str) -> bool:
        is_right = self._left.startswith(char)
        self._left = self._left[1:]
        if is_right and not self._left:
            self._end_value()
        return is_right

    def _in_number(self, char: str) -> bool:
        kind = "1" if char in _DIGITS else "e" if char in "eE" else char
        if self._number == "e" and char in "+-":
            kind = "+"
        following = _NUMBER[self._number].get(kind)
        if following is not None:
            self._number = following
            return True
        if self._number not in _NUMBER_ENDS:
            return False
        self._end_value()
        return False if self.is_done else self._in_after(char)

    def _close(self, char: str) -> bool:
        if self._stack[-1] != ("{" if char == "}" else "["):
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_value(self, *, is_key: bool = False) -> None:
        if is_key:
            self._state = "colon"
        elif self._stack:
            self._state = "after"
        else:
            self.is_done = True
