"""An answer's text becomes thoughts, answer and calls.

Enters: text that is safe to show, and markup that the vocabulary keeps as control tokens. Leaves: `Shown`. Always true:
thoughts are split off first and calls are looked for only in the answer; a control token's spelling reaches no client:
here it is one private character, which the formats' markers are written with too. Next: `logprobs.py`.
"""

from collections.abc import Callable, Sequence

import msgspec

from hitsend.core.request import Tool, ToolCallDelta
from hitsend.core.tool_format import ReasoningFormat, ToolFormat
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.output.reasoning import ReasoningSplitter
from hitsend.serve.output.tool_calls import ToolCallParser

_FIRST_PRIVATE = 0xFDD0


class Shown(msgspec.Struct, frozen=True):
    """What is certain now."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def joined(parts: Sequence[Shown]) -> Shown:
    """Several in a row as one: pieces of the same call become one piece."""
    if len(parts) == 1:
        return parts[0]
    calls: list[ToolCallDelta] = []
    for call in (call for part in parts for call in part.tool_calls):
        if calls and calls[-1].index == call.index:
            last = calls[-1]
            calls[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + call.arguments)
        else:
            calls.append(call)
    return Shown("".join(p.text for p in parts), "".join(p.reasoning for p in parts), tuple(calls))


class Markup(msgspec.Struct, frozen=True):
    """How one model marks calls and thoughts. `hidden`: control tokens that are markup → their private character."""

    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    hidden: dict[int, str] = {}


class Wanted(msgspec.Struct, frozen=True):
    """What one request wants to be read: calls of these tools (none: calls stay text), thoughts, or not."""

    tools: tuple[Tool, ...] = ()
    is_parallel: bool = True
    is_thinking_open: bool = False
    is_thinking_wanted: bool = True


def markup(vocabulary: Vocabulary, tool_format: ToolFormat | None, reasoning_format: ReasoningFormat | None) -> Markup:
    """The formats as this vocabulary writes them: a marker that is a control token becomes a private character."""
    spelled = {vocabulary.spelling(token): token for token in vocabulary.control_ids}
    hidden: dict[int, str] = {}

    def written(form: ToolFormat | ReasoningFormat) -> dict[str, str]:
        found: dict[str, str] = {}
        for field in form.__struct_fields__:
            marker = getattr(form, field)
            if field != "name" and isinstance(marker, str) and marker in spelled:
                token = spelled[marker]
                found[field] = hidden.setdefault(token, chr(_FIRST_PRIVATE + len(hidden)))
        return found

    if tool_format is not None:
        tool_format = msgspec.structs.replace(tool_format, **written(tool_format))
    if reasoning_format is not None:
        reasoning_format = msgspec.structs.replace(reasoning_format, **written(reasoning_format))
    return Markup(tool_format, reasoning_format, hidden)


class AnswerReader:
    """Reads one choice. `hidden` says which control tokens to feed, and as what."""

    def __init__(self, marks: Markup, wanted: Wanted, make_id: Callable[[], str]) -> None:
        self._splitter: ReasoningSplitter | None = None
        self._calls: ToolCallParser | None = None
        self.hidden = marks.hidden
        self._strange = {ord(char): "\ufffd" for char in marks.hidden.values()}
        self._private = {ord(char): None for char in marks.hidden.values()}
        if marks.reasoning_format is not None:
            self._splitter = ReasoningSplitter(
                marks.reasoning_format, is_open=wanted.is_thinking_open, is_wanted=wanted.is_thinking_wanted
            )
        if marks.tool_format is not None and wanted.tools:
            self._calls = ToolCallParser(marks.tool_format, wanted.tools, make_id, is_parallel=wanted.is_parallel)
        self._counts_thoughts = wanted.is_thinking_wanted
        self._num_undecided = 0
        self.num_thoughts = 0

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls and each one is complete."""
        return self._calls is not None and self._calls.has_whole_calls

    @property
    def is_over(self) -> bool:
        """Whether the answer ends here, whatever the model goes on to say."""
        return self._calls is not None and self._calls.is_over

    @property
    def faults(self) -> list[str]:
        """What went wrong with calls, in order."""
        return self._calls.faults if self._calls is not None else []

    def feed(self, text: str) -> Shown:
        """Take text as it would be shown without any formats."""
        return self._read(text.translate(self._strange) if self._strange else text)

    def feed_token(self, text: str, token_id: int) -> Shown:
        """Take one token: its text (and what was held before it), and itself where it is a control token's markup.

        Counts it where it is a thought's; blanks before a begin tag are counted once the tag is there.
        """
        splitter = self._splitter
        was_thinking = splitter is not None and splitter.is_thinking
        shown = self.feed(text)
        if token_id in self.hidden:
            shown = joined((shown, self._read(self.hidden[token_id])))
        if splitter is not None and self._counts_thoughts:
            if was_thinking or splitter.is_thinking:
                self.num_thoughts += 1 + self._num_undecided
            self._num_undecided = self._num_undecided + 1 if splitter.is_undecided else 0
        return shown

    def finish(self) -> Shown:
        """No more will come."""
        reasoning, answer = self._splitter.finish() if self._splitter is not None else ("", "")
        if self._calls is None:
            return self._cleaned(answer, (), reasoning)
        first = self._cleaned(*self._calls.feed(answer), reasoning)
        return joined((first, self._cleaned(*self._calls.finish(), "")))

    def _read(self, text: str) -> Shown:
        reasoning, answer = self._splitter.feed(text) if self._splitter is not None else ("", text)
        if self._calls is None:
            return self._cleaned(answer, (), reasoning)
        return self._cleaned(*self._calls.feed(answer), reasoning)

    def _cleaned(self, text: str, calls: tuple[ToolCallDelta, ...], reasoning: str) -> Shown:
        if not self._private:
            return Shown(text, reasoning, calls)
        bare = tuple(
            ToolCallDelta(
                call.index,
                call.id,
                call.name.translate(self._private) if call.name else None,
                call.arguments.translate(self._private),
            )
            for call in calls
        )
        return Shown(text.translate(self._private), reasoning.translate(self._private), bare)
