"""Calls written as JSON: an object with a name and arguments, a list of such, or a name before its arguments.

Enters: a `Source` that stands behind the opening marker. Leaves: calls. Always true: the arguments that are sent are
the model's own characters, passed on as they come; where they were written before the name, they wait for it.
Next: `xml_calls.py`.
"""

import json

from hitsend.core.tool_format import ToolFormat
from hitsend.serve.output.calls import Calls, Malformed
from hitsend.serve.output.json_value import JsonScanner
from hitsend.serve.output.source import Parse, Source

MAX_NAME = 256
_OTHER_KEYS = ("type", "id")


def _decoded(text: str) -> str:
    value = str(json.loads(text))
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise Malformed("a call holds half of a surrogate pair")
    return value


class JsonCalls:
    """Reads what stands behind one marker. `is_certain` False: it may be an ordinary JSON answer after all."""

    def __init__(self, source: Source, calls: Calls, form: ToolFormat) -> None:
        self._source = source
        self._calls = calls
        self._form = form

    def read(self, *, is_certain: bool) -> Parse[None]:
        """All calls of this place. Raises Malformed, OneTooMany."""
        source, form = self._source, self._form
        yield from source.blanks()
        first = yield from source.peek()
        if form.has_list and first == "[":
            yield from self._list()
        elif form.arguments_begin and first != "{":
            yield from self._named()
        else:
            yield from self._object(is_certain=is_certain)
            while form.separator and (yield from self._is_separated()):
                yield from source.blanks()
                yield from self._object(is_certain=is_certain)

    def _is_separated(self) -> Parse[bool]:
        yield from self._source.blanks()
        is_next = yield from self._source.starts(self._form.separator)
        if is_next:
            self._source.skip(len(self._form.separator))
        return is_next

    def _list(self) -> Parse[None]:
        source = self._source
        source.skip(1)
        while True:
            yield from source.blanks()
            yield from self._object(is_certain=True)
            yield from source.blanks()
            char = yield from self._take("a comma or the end of the list", ",]")
            if char == "]":
                source.commit()
                return

    def _named(self) -> Parse[None]:
        """name[ARGS]{…} or name{…}; between them another such marker may stand, as in name[CALL_ID]id[ARGS]{…}."""
        source, marker = self._source, self._form.arguments_begin
        parts: list[str] = []
        is_next = False
        while not is_next:
            part, is_next = yield from source.until(marker, "{")
            parts.append(part)
            if not (part or is_next) or sum(map(len, parts)) > MAX_NAME:
                raise Malformed("a call has no arguments")
        if (yield from source.starts(marker)):
            source.skip(len(marker))
        name = "".join(parts).partition("[")[0].strip()
        if not name:
            raise Malformed("a call has no name")
        yield from source.blanks()
        if (yield from source.peek()) != "{":
            raise Malformed("a call's arguments are no object")
        self._calls.announce(name)
        source.commit()
        yield from self._stream()
        self._calls.complete()

    def _object(self, *, is_certain: bool) -> Parse[None]:
        source, calls = self._source, self._calls
        yield from self._take("a call's object", "{")
        name: str | None = None
        early: str | None = None
        has_arguments = False
        char = ","
        while char == ",":
            yield from source.blanks()
            key = yield from self._text()
            yield from source.blanks()
            yield from self._take("a colon", ":")
            yield from source.blanks()
            if key == "name" and name is None:
                name = yield from self._text()
                self._check_name(name, is_certain=is_certain)
                if early is not None:
                    calls.announce(name)
                    calls.arguments(early)
                    source.commit()
            elif key in self._form.argument_keys and not has_arguments:
                has_arguments = True
                early = yield from self._arguments(name)
            elif is_certain or key in _OTHER_KEYS:
                yield from self._value()
            else:
                raise Malformed("this is not a call")
            yield from source.blanks()
            char = yield from self._take("a comma or the end of the call", ",}")
        if name is None:
            raise Malformed("a call has no name")
        if not has_arguments:
            calls.announce(name)
            calls.arguments("{}")
        calls.complete()
        source.commit()

    def _check_name(self, name: str, *, is_certain: bool) -> None:
        if not name or not (is_certain or name in self._calls.known):
            raise Malformed("a call has no name" if not name else "this is not a call")

    def _arguments(self, name: str | None) -> Parse[str | None]:
        """Send the arguments on as they come; without a name yet, return them."""
        first = yield from self._source.peek()
        if first == "{" and name is not None:
            self._calls.announce(name)
            self._source.commit()
            yield from self._stream()
            return None
        raw = yield from self._value()
        if first == '"':
            raw = _decoded(raw)
            scanner = JsonScanner()
            if not raw.startswith("{") or scanner.scan(raw, 0) != len(raw) or not scanner.is_done:
                raise Malformed("a call's arguments are no object")
        elif first == "n":
            raw = "{}"
        elif first != "{":
            raise Malformed("a call's arguments are no object")
        if name is None:
            return raw
        self._calls.announce(name)
        self._calls.arguments(raw)
        self._source.commit()
        return None

    def _stream(self) -> Parse[None]:
        """Pass one value on while it is read."""
        source, scanner = self._source, JsonScanner()
        while not scanner.is_done:
            if not (yield from source.more()):
                raise Malformed("the answer ends inside a call")
            end = scanner.scan(source.text, source.at)
            self._calls.arguments(source.skip(end - source.at))
            source.commit()
            if scanner.is_failed:
                raise Malformed("a call's arguments are no JSON")

    def _value(self) -> Parse[str]:
        """Any value, whole."""
        source, scanner = self._source, JsonScanner()
        parts: list[str] = []
        while not scanner.is_done:
            if not (yield from source.more()):
                raise Malformed("the answer ends inside a call")
            end = scanner.scan(source.text, source.at)
            parts.append(source.skip(end - source.at))
            if scanner.is_failed:
                raise Malformed("a call is no JSON")
        return "".join(parts)

    def _text(self) -> Parse[str]:
        if (yield from self._source.peek()) != '"':
            raise Malformed("a call is no JSON")
        return _decoded((yield from self._value()))

    def _take(self, what: str, chars: str) -> Parse[str]:
        char = yield from self._source.peek()
        if not char:
            raise Malformed("the answer ends inside a call")
        if char not in chars:
            raise Malformed(f"{what} was expected")
        return self._source.skip(1)
