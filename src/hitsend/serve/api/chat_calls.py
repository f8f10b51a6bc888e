"""Calls as OpenAI's wire has them: in pieces, and whole.

Enters: `ToolCallDelta`s. Leaves: what stands in `delta.tool_calls` and `message.tool_calls`. Always true: only a call's
first piece has its id, type and name; the pieces of `arguments` joined are the arguments of the whole call.
Next: `chat_response.py`.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hitsend.core.request import ToolCallDelta


class FunctionDeltaOut(msgspec.Struct, frozen=True):
    """The name comes once, with the first piece."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDeltaOut(msgspec.Struct, frozen=True):
    """A piece of a call; only the first one says what it is."""

    index: int
    function: FunctionDeltaOut
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class FunctionOut(msgspec.Struct, frozen=True):
    """What to call; `arguments` is the model's JSON, as it wrote it."""

    name: str
    arguments: str


class CallOut(msgspec.Struct, frozen=True):
    """One call of an unstreamed answer."""

    id: str
    function: FunctionOut
    type: Literal["function"] = "function"


def call_delta(call: ToolCallDelta) -> CallDeltaOut:
    """One piece."""
    if call.id is None or call.name is None:
        return CallDeltaOut(call.index, FunctionDeltaOut(call.arguments))
    return CallDeltaOut(call.index, FunctionDeltaOut(call.arguments, call.name), call.id, "function")


def whole_calls(pieces: Sequence[ToolCallDelta]) -> tuple[CallOut, ...]:
    """All calls of one choice."""
    heads = {piece.index: piece for piece in pieces if piece.id is not None}
    arguments: dict[int, list[str]] = {index: [] for index in heads}
    for piece in pieces:
        arguments[piece.index].append(piece.arguments)
    return tuple(
        CallOut(head.id or "", FunctionOut(head.name or "", "".join(arguments[index]))) for index, head in heads.items()
    )
