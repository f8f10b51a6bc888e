"""An answer's text, split into thoughts and answer.

Enters: text, cut anywhere. Leaves: (thoughts, answer) as far as they are certain. Always true: any cuts give the same
two texts when joined. The rules:

    thoughts begin    where the template opened them, or with the begin tag as the answer's first words
    thoughts end      at the first end tag; a begin tag inside them is one of their words
    no end tag        everything is thoughts: a chain of thought that was cut off is no answer
    no begin tag      everything is answer
    thinking off      everything is answer; a begin tag at its start and the end tag to it are left out

Blanks around the tags belong to them. Next: `calls.py`.
"""

from hitsend.core.tool_format import ReasoningFormat
from hitsend.serve.output.source import Parse, Source


class ReasoningSplitter:
    """The thoughts of one choice. `is_open`: the prompt ends inside them. `is_wanted` False: thinking is off."""

    def __init__(self, form: ReasoningFormat, *, is_open: bool, is_wanted: bool = True) -> None:
        self._form = form
        self._source = Source()
        self._is_wanted = is_wanted
        self._thoughts: list[str] = []
        self._answer: list[str] = []
        self._blanks: list[str] = []
        self.is_undecided = not is_open
        self.is_thinking = is_open
        self._parse = self._split()
        next(self._parse)

    @property
    def work(self) -> int:
        """Characters copied and compared so far."""
        return self._source.work

    def feed(self, text: str) -> tuple[str, str]:
        """Take text; return the thoughts and the answer that are certain now."""
        self._source.add(text)
        next(self._parse, None)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """No more text will come."""
        self._source.is_ended = True
        next(self._parse, None)
        return self._take()

    def _take(self) -> tuple[str, str]:
        thoughts, answer = "".join(self._thoughts), "".join(self._answer)
        self._thoughts.clear()
        self._answer.clear()
        return thoughts, answer

    def _split(self) -> Parse[None]:
        source, form = self._source, self._form
        yield from source.blanks()
        has_tag = yield from source.starts(form.begin)
        self.is_thinking = self.is_thinking or has_tag
        self.is_undecided = False
        if has_tag:
            source.skip(len(form.begin))
            source.commit()
        if self.is_thinking:
            yield from source.blanks()
            source.commit()
            yield from self._think()
            if self._is_wanted:
                yield from source.blanks()
                source.commit()
        self._answer.append(source.give_back())
        while (yield from source.more()):
            self._answer.append(source.skip(len(source.text) - source.at))
            source.commit()

    def _think(self) -> Parse[None]:
        source, end = self._source, self._form.end
        is_end = False
        while not is_end:
            text, is_end = yield from source.until(end)
            source.commit()
            if not (text or is_end):
                return
            self._say(text)
        self._blanks.clear()
        source.skip(len(end))
        source.commit()
        self.is_thinking = False

    def _say(self, text: str) -> None:
        if not self._is_wanted:
            self._answer.append(text)
            return
        words = text.rstrip()
        if words:
            self._thoughts += [*self._blanks, words]
            self._blanks.clear()
        if len(words) < len(text):
            self._blanks.append(text[len(words) :])
