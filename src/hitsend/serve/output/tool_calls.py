"""Calls found in the text of an answer, whatever way the model writes them.

Enters: text, cut anywhere. Leaves: text that is no call, pieces of calls, and what didn't work out. Always true: any
cuts give the same texts and calls when joined; each character costs a bounded amount of work; what looks like a call
and isn't one comes back as text, exactly as it was written; a call that was announced before it broke keeps what was
sent of it, and the rest comes back as text. Blank text between calls, and before the first, belongs to the markup.
Next: `json_value.py`.
"""

from collections.abc import Callable

from hitsend.core.request import Tool, ToolCallDelta
from hitsend.core.tool_format import ToolFormat
from hitsend.serve.output.calls import Calls, Malformed, OneTooMany
from hitsend.serve.output.json_calls import JsonCalls
from hitsend.serve.output.python_calls import PythonCalls
from hitsend.serve.output.source import BLANKS, Parse, Source
from hitsend.serve.output.xml_calls import XmlCalls

ONE_TOO_MANY = "parallel_tool_calls is false: the answer ends where the model began a second call"


class ToolCallParser:
    """The calls of one choice. Feed text, then `finish`. `faults` says what went wrong, in order.

    `is_over`: nothing more is wanted, because a second call began and only one is allowed.
    """

    def __init__(
        self, form: ToolFormat, tools: tuple[Tool, ...], make_id: Callable[[], str], *, is_parallel: bool = True
    ) -> None:
        self._form = form
        self._source = Source()
        self._calls = Calls({tool.name: tool for tool in tools}, make_id, is_parallel=is_parallel)
        self._texts: list[str] = []
        self._blanks: list[str] = []
        self._has_text = False
        self._is_fresh = True
        self.faults: list[str] = []
        self.is_over = False
        self._parse = self._answer()
        next(self._parse)

    @property
    def work(self) -> int:
        """Characters copied and compared so far."""
        return self._source.work

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls and each one is complete."""
        return self._calls.count > 0 and not self._calls.is_broken and not self._calls.is_open

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Take text; return text and pieces of calls that are certain now."""
        if not self.is_over:
            self._source.add(text)
            next(self._parse, None)
        return self._take()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """No more text will come."""
        if not self.is_over:
            self._source.is_ended = True
            next(self._parse, None)
        if not self._calls.count:
            self._texts += self._blanks
        self._blanks.clear()
        if self._calls.unknown:
            self.faults.append(f"{self._calls.unknown} calls name a function that was not offered")
        return self._take()

    def _take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        text = "".join(self._texts)
        self._texts.clear()
        return text, self._calls.take()

    def _answer(self) -> Parse[None]:
        while (is_bare := (yield from self._find())) is not None:
            before = self._calls.count
            try:
                yield from self._call(is_bare=is_bare)
                self._blanks.clear()
                self._is_fresh = True
                self._say(self._source.give_back())
            except OneTooMany:
                self.faults.append(ONE_TOO_MANY)
                self.is_over = True
                return
            except Malformed as fault:
                is_call = self._calls.count > before
                if is_call or not is_bare:
                    self.faults.append(str(fault))
                self._give_back(is_call=is_call)

    def _give_back(self, *, is_call: bool) -> None:
        if is_call:
            self._blanks.clear()
            self._is_fresh = True
        if self._calls.is_open:
            self._calls.is_broken = True
            self._calls.complete()
        self._say(self._source.give_back())

    def _call(self, *, is_bare: bool) -> Parse[None]:
        source, form = self._source, self._form
        source.commit()
        if not is_bare:
            source.skip(len(form.begin))
        if form.body == "json":
            yield from JsonCalls(source, self._calls, form).read(is_certain=not is_bare)
        elif form.body == "xml":
            yield from XmlCalls(source, self._calls, form).read(is_certain=not is_bare)
        else:
            yield from PythonCalls(source, self._calls, form).read(is_certain=not is_bare)
        if form.end and (form.function_begin or not is_bare):
            yield from source.blanks()
            if (yield from source.starts(form.end)):
                source.skip(len(form.end))
                source.commit()
            elif not is_bare and (yield from source.more()):
                raise Malformed(f"{form.end} was expected")

    def _find(self) -> Parse[bool | None]:
        """Pass text on up to the next call: False it has a marker, True it has none, None at the end."""
        source, form = self._source, self._form
        while (yield from source.more()):
            if form.bare and not self._has_text:
                found = BLANKS.match(source.text, source.at)
                if found is not None and found.end() > source.at:
                    self._say(source.skip(found.end() - source.at))
                    continue
                if source.text[source.at] == form.bare:
                    return True
            if not form.begin:
                self._say(source.skip(len(source.text) - source.at))
                continue
            text, is_next = yield from source.until(*filter(None, (form.begin, form.function_begin)))
            self._say(text)
            if is_next:
                return not (yield from source.starts(form.begin))
        return None

    def _say(self, text: str) -> None:
        """Ordinary text; blanks beside markup wait for what comes."""
        self._source.commit()
        if not text:
            return
        if self._is_fresh and text.isspace():
            self._blanks.append(text)
            return
        if self._is_fresh and self._blanks:
            self._texts += self._blanks
            self._blanks.clear()
        self._texts.append(text)
        self._is_fresh = False
        self._has_text = True
