"""What every reader of calls has in common: announcing a call, its arguments, and what doesn't work out.

Enters: the name and pieces of arguments that a reader found. Leaves: `ToolCallDelta`s. Always true: a call is announced
once, with its name and a fresh id, before its arguments; nothing that was announced is taken back or repaired.
Next: `tool_calls.py`.
"""

from collections.abc import Callable, Mapping

from hitsend.core.request import Tool, ToolCallDelta


class Malformed(Exception):
    """Here the text stopped being a call. What was read of it and not sent is ordinary text."""


class OneTooMany(Exception):
    """A further call begins where the client allows only one."""


class Calls:
    """The calls of one choice. `known` are the tools that were offered."""

    def __init__(self, known: Mapping[str, Tool], make_id: Callable[[], str], *, is_parallel: bool) -> None:
        self.known = known
        self._make_id = make_id
        self._is_parallel = is_parallel
        self._out: list[tuple[str | None, str | None, int, list[str]]] = []
        self.count = 0
        self.is_open = False
        self.is_broken = False
        self.unknown = 0

    def announce(self, name: str) -> None:
        """A call begins. Raises OneTooMany."""
        if self.count and not self._is_parallel:
            raise OneTooMany
        self.unknown += name not in self.known
        self._out.append((self._make_id(), name, self.count, []))
        self.count += 1
        self.is_open = True

    def arguments(self, text: str) -> None:
        """The open call's arguments go on."""
        if not text:
            return
        index = self.count - 1
        if not self._out or self._out[-1][2] != index:
            self._out.append((None, None, index, []))
        self._out[-1][3].append(text)

    def complete(self) -> None:
        """The open call is whole."""
        self.is_open = False

    def take(self) -> tuple[ToolCallDelta, ...]:
        """What is new since the last time."""
        out, self._out = self._out, []
        return tuple(ToolCallDelta(index, call_id, name, "".join(texts)) for call_id, name, index, texts in out)
