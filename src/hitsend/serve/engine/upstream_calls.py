"""Calls as upstreams stream them: which piece belongs to which call.

Enters: the pieces of one choice's calls, in their order. Leaves: pieces that are numbered from 0 in the order in which
their calls began. Always true: the first piece of a call has its id and its name, no later one has either; two calls
never become one, though an upstream gives them one number, or none; no call ends without arguments. Next:
`openai_wire.py`.
"""

import json
import secrets
from typing import Any

import msgspec

from hitsend.core.request import ToolCallDelta


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
    """One call, as far as it came. Nothing of it is given out before its name is known."""

    def __init__(self, number: int, given_id: str | None) -> None:
        self.number = number
        self.id = given_id
        self.name: str | None = None
        self.texts: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self.texts)


class Calls:
    """The calls of one choice."""

    def __init__(self) -> None:
        self._all: list[_Call] = []
        self._by_index: dict[int | None, _Call] = {}

    def take(self, piece: CallIn) -> ToolCallDelta | None:
        """What can be given out of it; None while its call has no name."""
        function = piece.function or FunctionIn()
        call = self._of(piece, function.name or None)
        given = function.arguments or ""
        text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        if text:
            call.texts.append(text)
        if call.name is not None:
            return ToolCallDelta(call.number, arguments=text)
        call.id = call.id or piece.id or None
        if not function.name:
            return None
        call.name = function.name
        call.id = call.id or f"call_{secrets.token_hex(12)}"
        return ToolCallDelta(call.number, call.id, call.name, call.arguments)

    def end(self) -> tuple[ToolCallDelta, ...]:
        """What is missing when the choice ends: arguments of none are those of an empty object."""
        return tuple(
            ToolCallDelta(call.number, arguments="{}")
            for call in self._all
            if call.name is not None and not call.arguments.strip()
        )

    @property
    def has_any(self) -> bool:
        """Whether a call was given out."""
        return any(call.name is not None for call in self._all)

    @property
    def is_cut(self) -> bool:
        """Whether the last call's arguments break off: whatever the upstream says, that call didn't come to its end."""
        text = self._all[-1].arguments.strip() if self._all else ""
        try:
            msgspec.json.decode(text or "{}")
        except msgspec.DecodeError as error:
            return "truncated" in str(error) and not _is_json(text)
        except RecursionError:
            pass
        return False

    def _of(self, piece: CallIn, name: str | None) -> _Call:
        known = next((one for one in self._all if piece.id and one.id == piece.id), None)
        open_one = known or (self._by_index.get(piece.index) if piece.index is not None else self._last)
        if open_one is not None and not _begins(piece, name, open_one):
            return open_one
        call = _Call(len(self._all), piece.id or None)
        self._all.append(call)
        self._by_index[piece.index] = call
        return call

    @property
    def _last(self) -> _Call | None:
        return self._all[-1] if self._all else None


def _begins(piece: CallIn, name: str | None, before: _Call) -> bool:
    """Whether a piece with the number of a call that is under way is another call's first one.

    Some repeat name and id on every piece, some give each piece an id of its own: then what came decides.
    """
    if name is None or before.name is None or (piece.id and piece.id == before.id):
        return False
    if name != before.name:
        return True
    arguments = before.arguments.strip()
    if not arguments:
        return bool(piece.id)
    return _is_json(arguments)


def _is_json(text: str) -> bool:
    """Also with halves of surrogate pairs, which only look like the end of a text to the stricter reader."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
