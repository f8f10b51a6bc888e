"""Whole outputs through the readers, cut anywhere."""

import itertools
from collections.abc import Sequence

import msgspec

from hitsend.core.request import Tool, ToolCallDelta
from hitsend.core.tool_format import REASONING_FORMATS, TOOL_FORMATS
from hitsend.serve.output.reader import AnswerReader, Markup, Shown, Wanted, joined

TOOLS = (
    Tool("f", parameters={"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}),
    Tool("g", parameters={}),
    Tool("write", parameters={"properties": {"text": {"type": "string"}, "n": {"anyOf": [{"type": "number"}]}}}),
)


class Read(msgspec.Struct, frozen=True):
    """What a client has after the last delta."""

    text: str
    reasoning: str
    calls: tuple[tuple[str | None, str], ...]
    faults: tuple[str, ...]
    has_whole_calls: bool


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def reader(form: str | None, reasoning: str | None = None, **wanted: object) -> AnswerReader:
    markup = Markup(
        TOOL_FORMATS[form] if form else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
    )
    ids = itertools.count()
    return AnswerReader(markup, Wanted(**({"tools": TOOLS} | wanted)), lambda: f"call_{next(ids)}")


def read(parts: Sequence[str], form: str | None, reasoning: str | None = None, **wanted: object) -> Read:
    reading = reader(form, reasoning, **wanted)
    shown = [reading.feed(part) for part in parts]
    shown.append(reading.finish())
    return collected(shown, reading)


def collected(shown: Sequence[Shown], reading: AnswerReader) -> Read:
    deltas = [call for one in shown for call in one.tool_calls]
    check_order(deltas)
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, []).append(delta)
    whole = joined(shown)
    return Read(
        whole.text,
        whole.reasoning,
        tuple((parts[0].name, "".join(part.arguments for part in parts)) for parts in calls.values()),
        tuple(reading.faults),
        reading.has_whole_calls,
    )


def check_order(deltas: Sequence[ToolCallDelta]) -> None:
    """Indices rise by one, and only the first piece of each has the name and an id of its own."""
    seen: list[str | None] = []
    for delta in deltas:
        if delta.index == len(seen):
            assert delta.id is not None
            assert delta.name is not None
            seen.append(delta.id)
        else:
            assert delta.index == len(seen) - 1
            assert delta.id is None
            assert delta.name is None
    assert len(set(seen)) == len(seen)
