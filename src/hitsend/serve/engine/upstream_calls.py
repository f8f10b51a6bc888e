"""Calls as upstreams stream them: which piece belongs to which call, and when it may be passed on.

Enters: the pieces of one choice's calls, and the words between them, in their order. Leaves: pieces that are numbered
from 0 in the order in which their calls began. Always true: the first piece of a call has its id and its name, no later
one has either; one call is given out at a time, to its end, and words that come inside of it after it, because that is
how every dialect tells them; two calls never become one, though an upstream gives them one number, one id, or none; no
two calls have the same id; no call ends without arguments; nothing is lost. Next: `openai_wire.py`.
"""

import json
import secrets
from typing import Any

import msgspec

from hitsend.core.request import ToolCallDelta

MOST_CHARS = 4 * 1024 * 1024
"""Of one choice's calls, and of words that wait for their end."""


class FunctionIn(msgspec.Struct, frozen=True, gc=False):
    """Its name, and JSON text. Some send an object in place of its text."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class CallIn(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call."""

    index: int | None = None
    id: str | None = None
    function: FunctionIn | None = None


class _Call:
    """One call as far as it came, by the upstream's id and index. `number` is there once it began to be given out,
    `num_given` pieces were."""

    def __init__(self, given_id: str | None, index: int | None) -> None:
        self.number: int | None = None
        self.id = given_id
        self.index = index
        self.name: str | None = None
        self.num_given = 0
        self._pieces: list[str] = []
        self._is_whole: bool | None = False

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    @property
    def is_whole(self) -> bool:
        """Whether nothing can be missing. An object may be empty, so a call without arguments isn't."""
        if self._is_whole is None:  # asked for by every word beside it, so looked at once
            self._is_whole = self._pieces[-1].rstrip().endswith("}") and _is_json(self.arguments)
        return self._is_whole

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._is_whole = None

    def give(self, number: int, taken: set[str]) -> ToolCallDelta | None:
        """What of it wasn't given out yet; an id that another call has is none."""
        text = "".join(self._pieces[self.num_given :])
        self.num_given = len(self._pieces)
        if self.number is not None:
            return ToolCallDelta(self.number, arguments=text) if text else None
        self.number = number
        call_id = self.id if self.id and self.id not in taken else f"call_{secrets.token_hex(12)}"
        taken.add(call_id)
        return ToolCallDelta(number, call_id, self.name, text)


class Calls:
    """The calls of one choice. `fault`: what of them can't be read."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._all: list[_Call] = []
        self._by_index: dict[int | None, _Call] = {}
        self._at = 0
        self._num_numbers = 0
        self._ids: set[str] = set()
        self._num_chars = 0
        self._held: tuple[list[str], list[str]] = ([], [])

    @property
    def has_begun(self) -> bool:
        """Whether a call has."""
        return bool(self._all)

    @property
    def has_any(self) -> bool:
        """Whether there is one with a name."""
        return any(call.name is not None for call in self._all)

    @property
    def is_cut(self) -> bool:
        """Whether arguments break off: whatever the upstream says, that call didn't come to its end."""
        return any(_breaks_off(call.arguments.strip()) for call in self._all)

    def take(self, piece: CallIn) -> list[ToolCallDelta]:
        """What can be given out now."""
        function = piece.function or FunctionIn()
        call = self._of(piece, function.name or None)
        given = function.arguments or ""
        text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        if call in self._all[: self._at]:
            self.fault = "a call that went on after its end" if text.strip() else self.fault
            return []
        call.add(text)
        self._count(len(text))
        if call.name is None:
            call.id, call.name = call.id or piece.id or None, function.name or None
        return self._ready()

    def words(self, text: str, reasoning: str) -> tuple[str, str]:
        """What of them may be told now; the rest comes with `let_go`."""
        if not self._all or not (text or reasoning):
            return text, reasoning
        if self._is_open:
            self._count(len(text) + len(reasoning))
            self._held[0].append(text)
            self._held[1].append(reasoning)
            return "", ""
        self._at = len(self._all)
        return text, reasoning

    def let_go(self, *, is_end: bool) -> tuple[str, str]:
        """Words that were held, once no call is open any more."""
        if not any(self._held) or (self._is_open and not is_end):
            return "", ""
        self._at = len(self._all)
        text, reasoning = map("".join, self._held)
        self._held = ([], [])
        return text, reasoning

    def end(self) -> list[ToolCallDelta]:
        """What is missing when the choice ends: arguments of none are those of an empty object."""
        out: list[ToolCallDelta | None] = []
        for call in self._all[self._at :]:
            is_blank = not call.arguments.strip()
            if call.name is None:
                self.fault = self.fault if is_blank else "a call without a name"
                continue
            if is_blank:
                call.add("{}")
            out.append(self._give(call))
        return [one for one in out if one is not None]

    @property
    def _is_open(self) -> bool:
        """Whether more has to come of a call; all but the last are closed, or wait behind the one that is open."""
        num_left = len(self._all) - self._at
        return num_left > 1 or (num_left == 1 and not self._all[-1].is_whole)

    def _count(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._num_chars > MOST_CHARS:
            self.fault = f"calls of more than {MOST_CHARS} characters"

    def _ready(self) -> list[ToolCallDelta]:
        """Of the open call, and of those behind it once it is whole."""
        out: list[ToolCallDelta | None] = []
        while self._at < len(self._all) and (call := self._all[self._at]).name is not None:
            out.append(self._give(call))
            if self._at + 1 == len(self._all) or not call.is_whole:
                break
            self._at += 1
        return [one for one in out if one is not None]

    def _give(self, call: _Call) -> ToolCallDelta | None:
        if call.number is None:
            self._num_numbers += 1
        return call.give(self._num_numbers - 1, self._ids)

    def _of(self, piece: CallIn, name: str | None) -> _Call:
        numbered = self._by_index.get(piece.index) if piece.index is not None else None
        known = next((one for one in reversed(self._all) if piece.id and one.id == piece.id), None)
        if known is not None and numbered is not None and numbered.id == piece.id:
            known = numbered  # several have this id
        last = self._all[-1] if self._all else None
        under_way = known or (numbered if piece.index is not None else last)
        if under_way is not None and not _begins(piece, name, under_way):
            return under_way
        call = _Call(piece.id or None, piece.index)
        self._all.append(call)
        self._by_index[piece.index] = call
        return call


def _begins(piece: CallIn, name: str | None, before: _Call) -> bool:
    """Whether a piece with the number or the id of a call that is under way is another call's first one.

    Some repeat name and id on every piece, some give each piece an id of its own, some give all calls the same id: then
    what came decides.
    """
    if name is None or before.name is None:
        return False
    if name != before.name:
        return True
    is_same = bool(piece.id) and piece.id == before.id
    if is_same and (piece.index is None or before.index is None or piece.index == before.index):
        return False
    return _is_json(before.arguments) if before.arguments.strip() else bool(piece.id)


def _breaks_off(text: str) -> bool:
    try:
        msgspec.json.decode(text or "{}")
    except msgspec.DecodeError as error:
        return "truncated" in str(error) and not _is_json(text)
    except RecursionError:
        pass
    return False


def _is_json(text: str) -> bool:
    """Also with halves of surrogate pairs, which only look like the end of a text to the stricter reader."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
