"""A schema's pattern in words that mean the same to everybody who may validate the answer.

Enters: a regular expression as JSON schemas have them (ECMA-262, in practice also Python's or Rust's). Leaves: one for
the grammar library, or a ValueError that says what isn't portable. Always true: what the result matches is matched by
the original in all of these dialects, so classes that they read differently (`\\W`, `\\s`, `.`) become their
intersection; NUL is never matched, since the library takes a class of all control characters for one with quotes in it.
Next: `enforceable.py`.
"""

import re

_SPACE = r" \t\n\r\f\v\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_ANY_SPACE = r"\s\x{1c}-\x{1f}\x{85}\x{180e}\x{feff}"
_ANY_WORD = r"\p{L}\p{N}\p{M}\p{Pc}"
_ANY_DIGIT = r"\p{Nd}"
_DOT = r"[^\n\r\x{2028}\x{2029}\x00]"

_NARROW = {
    "s": f"[{_SPACE}]", "S": f"[^{_ANY_SPACE}]", "W": f"[^{_ANY_WORD}]", "D": f"[^{_ANY_DIGIT}]",
    "w": "[0-9A-Za-z_]", "d": "[0-9]",
}  # fmt: skip
_WIDE = {
    "s": _ANY_SPACE, "S": f"[^{_SPACE}]", "W": "[^0-9A-Za-z_]", "D": "[^0-9]", "w": _ANY_WORD, "d": _ANY_DIGIT,
}  # fmt: skip

_PAIR = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_ESCAPE = re.compile(
    r"\\(?:u\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,6}\}|c[A-Za-z]|[pP](?:\{[^}]*\}|.)|.)",
    re.DOTALL,
)
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>|[is]+[:)])")
_REPEAT = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")


def portable(pattern: str) -> str:
    """The pattern for the library. Raises ValueError."""
    return _Reader(pattern).read()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = _PAIR.sub(_joined_pair, pattern)
        self._at = 0

    def read(self) -> str:
        out: list[str] = []
        is_repeated = False
        while self._at < len(self._text):
            repeat = _REPEAT.match(self._text, self._at)
            if repeat is not None:
                if is_repeated and repeat[0] != "?":
                    raise ValueError("a repetition of a repetition means different things to different validators")
                out.append(self._take(repeat[0]))
                is_repeated = True
                continue
            is_repeated = False
            out.append(self._atom())
        return "".join(out)

    def _take(self, text: str) -> str:
        self._at += len(text)
        return text

    def _atom(self) -> str:
        char = self._text[self._at]
        if char == "\\":
            return self._escape(_NARROW)
        if char == "[":
            return self._set()
        if char == ".":
            self._at += 1
            return _DOT
        if char == "(" and self._text.startswith("(?", self._at):
            group = _GROUP.match(self._text, self._at)
            if group is None:
                raise ValueError("only (?:…), (?<name>…) and the flags i and s are supported behind (?")
            return self._take(group[0])
        if char == "\0":
            raise ValueError("NUL is not supported")
        return self._take(char)

    def _escape(self, classes: dict[str, str], *, is_in_set: bool = False) -> str:
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            raise ValueError("it ends inside an escape")
        self._take(found[0])
        name, rest = found[0][1], found[0][2:]
        if name in classes:
            return classes[name] if is_in_set else f"[{classes[name]}&&[^\\x00]]"
        if name in "pP" and not is_in_set:
            return f"[{found[0]}&&[^\\x00]]"
        code = _code_of(name, rest)
        if code is None:
            return found[0]
        if code == 0 and not is_in_set:
            raise ValueError("NUL is not supported")
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError("half of a surrogate pair is not supported")
        return f"\\x{{{code:x}}}"

    def _set(self) -> str:
        """A class in brackets: what the library would take for an operation on sets is escaped."""
        self._at += 1
        begin = "["
        if self._text.startswith("^", self._at):
            begin += self._take("^")
        if self._text.startswith("]", self._at):
            raise ValueError("a class that begins with ] means different things to different validators")
        classes = _NARROW if begin == "[" else _WIDE
        parts: list[str] = []
        while not self._text.startswith("]", self._at):
            if self._at == len(self._text):
                raise ValueError("a class has no end")
            if self._text.startswith("--", self._at):
                raise ValueError("-- in a class means different things to different validators")
            char = self._text[self._at]
            if char == "\\":
                parts.append(self._escape(classes, is_in_set=True))
            else:
                parts.append(("\\" if char in "[&~" else "") + self._take(char))
        self._at += 1
        return f"[{begin}{''.join(parts)}]&&[^\\x00]]"


def _code_of(name: str, rest: str) -> int | None:
    """The code point that an escape stands for, where the library would not read it the same way."""
    if name in "ux" and rest:
        return int(rest.strip("{}"), 16)
    if name == "c" and rest:
        return ord(rest) % 32
    return 0 if name == "0" else None


def _joined_pair(found: re.Match[str]) -> str:
    high, low = int(found[1], 16), int(found[2], 16)
    return f"\\u{{{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):x}}}"
