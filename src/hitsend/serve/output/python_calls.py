"""Calls written as Python: a list of function calls with keyword arguments that are literals.

Enters: a `Source` that stands before the opening bracket. Leaves: calls with compact JSON arguments, passed on as they
come. Always true: nothing is evaluated; what is understood is texts, numbers, True, False, None, lists and dictionaries
with text keys; everything else ends the call where it stands. Next: `reader.py`.
"""

import json
import re

from hitsend.core.tool_format import ToolFormat
from hitsend.serve.output.calls import Calls, Malformed
from hitsend.serve.output.json_value import MAX_DEPTH
from hitsend.serve.output.source import Parse, Source

MAX_NAME = 256
MAX_NUMBER = 400

_NAME = re.compile(r"[^\W\d][\w.]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


class PythonCalls:
    """Reads one list of calls."""

    def __init__(self, source: Source, calls: Calls, form: ToolFormat) -> None:
        self._source = source
        self._calls = calls
        self._separator = form.separator

    def read(self, *, is_certain: bool) -> Parse[None]:
        """All calls of one list. Raises Malformed, OneTooMany."""
        source = self._source
        yield from source.blanks()
        yield from self._take("[")
        while True:
            yield from source.blanks()
            yield from self._call(is_certain=is_certain)
            yield from source.blanks()
            if (yield from self._take("]" + self._separator)) == "]":
                source.commit()
                return

    def _call(self, *, is_certain: bool) -> Parse[None]:
        source, calls = self._source, self._calls
        name = yield from self._word()
        if not _NAME.fullmatch(name) or not (is_certain or name in calls.known):
            raise Malformed("this is not a call")
        yield from self._take("(")
        calls.announce(name)
        source.commit()
        calls.arguments("{")
        seen: set[str] = set()
        yield from source.blanks()
        while (yield from source.peek()) != ")":
            key = yield from self._word()
            if not _NAME.fullmatch(key) or key in seen:
                raise Malformed("a call's argument has no name of its own")
            yield from source.blanks()
            yield from self._take("=")
            calls.arguments(f"{',' if seen else ''}{json.dumps(key, ensure_ascii=False)}:")
            seen.add(key)
            source.commit()
            yield from self._value()
            yield from source.blanks()
            if (yield from source.peek()) != ")":
                yield from self._take(",")
                yield from source.blanks()
        source.skip(1)
        calls.arguments("}")
        calls.complete()
        source.commit()

    def _value(self) -> Parse[None]:
        """One literal, without recursion: `stack` holds the brackets that are open."""
        source, calls = self._source, self._calls
        stack: list[str] = []
        is_fresh = False
        while True:
            yield from source.blanks()
            char = yield from source.peek()
            if stack and char == stack[-1]:
                source.skip(1)
                calls.arguments(stack.pop())
            else:
                if stack:
                    calls.arguments("" if is_fresh else ",")
                    if stack[-1] == "}":
                        yield from self._key()
                        char = yield from source.peek()
                if char and char in "[{":
                    source.skip(1)
                    calls.arguments(char)
                    stack.append("]" if char == "[" else "}")
                    is_fresh = True
                    if len(stack) > MAX_DEPTH:
                        raise Malformed("a call's arguments are nested too deeply")
                    source.commit()
                    continue
                yield from self._atom(char)
            source.commit()
            is_fresh = False
            if not stack:
                return
            yield from source.blanks()
            if (yield from source.peek()) != stack[-1]:
                yield from self._take(",")

    def _key(self) -> Parse[None]:
        if (yield from self._source.peek()) not in ("'", '"'):
            raise Malformed("a dictionary's key is no text")
        yield from self._string()
        yield from self._source.blanks()
        yield from self._take(":")
        self._calls.arguments(":")
        yield from self._source.blanks()

    def _atom(self, char: str) -> Parse[None]:
        if char and char in "'\"":
            yield from self._string()
            return
        word = yield from self._word()
        if word not in _WORDS and (not _NUMBER.fullmatch(word) or len(word) > MAX_NUMBER):
            raise Malformed("a call's argument is no literal")
        self._calls.arguments(_WORDS.get(word, word))

    def _word(self) -> Parse[str]:
        """A name or a number: everything up to a character that can be in neither."""
        parts: list[str] = []
        while (yield from self._source.more()):
            char = self._source.text[self._source.at]
            if not (char.isalnum() or char in "_.+-"):
                break
            parts.append(self._source.skip(1))
            if len(parts) > MAX_NUMBER:
                raise Malformed("a name or number is too long")
        if not parts:
            is_over = not (yield from self._source.peek())
            raise Malformed("the answer ends inside a call" if is_over else "a name or a value was expected")
        return "".join(parts)

    def _string(self) -> Parse[None]:
        source, calls = self._source, self._calls
        quote = source.skip(1)
        plain = re.compile(f"[^\\\\{quote}]+")
        calls.arguments('"')
        while True:
            if not (yield from source.more()):
                raise Malformed("the answer ends inside a call")
            found = plain.match(source.text, source.at)
            if found is not None:
                text = source.skip(found.end() - source.at)
            elif source.text[source.at] == quote:
                source.skip(1)
                calls.arguments('"')
                source.commit()
                return
            else:
                source.skip(1)
                text = yield from self._escape()
            is_half = "\ud800" <= text[:1] <= "\udfff"  # of a surrogate pair: only JSON's own escape can carry it
            calls.arguments(json.dumps(text, ensure_ascii=is_half)[1:-1])
            source.commit()

    def _escape(self) -> Parse[str]:
        source = self._source
        if not (yield from source.more()):
            raise Malformed("the answer ends inside a call")
        char = source.skip(1)
        if char not in _HEX:
            return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
        digits = ""
        while len(digits) < _HEX[char]:
            digit = yield from source.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                raise Malformed("a text's escape is cut off")
            digits += source.skip(1)
        if int(digits, 16) > 0x10FFFF:
            raise Malformed("a text's escape is no character")
        return chr(int(digits, 16))

    def _take(self, chars: str) -> Parse[str]:
        char = yield from self._source.peek()
        if not char:
            raise Malformed("the answer ends inside a call")
        if char not in chars:
            raise Malformed(f"one of {chars} was expected")
        return self._source.skip(1)
