"""An answer as a row of blocks: runs of reasoning, runs of text, calls.

Enters: one choice's `Delta`s. Leaves: steps (a block opens, grows, closes), from which dialects make their events.
Always true: at most one block is open; a block closes before the next opens and never opens again; joined, the pieces
of the steps are what the deltas held, whatever their cut. Next: `responses_stream.py`.
"""

from contextlib import aclosing
from typing import Literal

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, Started, TextLogprob, ToolCallDelta
from hitsend.serve.api.chat_response import IncompleteAnswer
from hitsend.serve.api.services import Answer

Kind = Literal["reasoning", "text", "call"]


class Block(msgspec.Struct):
    """One run, as far as it is known. `call_index`, `call_id` and `name` are a call's."""

    index: int
    kind: Kind
    pieces: list[str]
    logprobs: list[TextLogprob]
    call_index: int | None = None
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """The reasoning, the text or the call's arguments."""
        return "".join(self.pieces)


class Step(msgspec.Struct, frozen=True):
    """What happened to a block; `piece` and `logprobs` are what it grew by."""

    what: Literal["open", "grow", "close"]
    block: Block
    piece: str = ""
    logprobs: tuple[TextLogprob, ...] = ()


async def in_order(answer: Answer, /) -> Answer:
    """The answer's items: Started first, Completed last, which is handed on once nothing comes after it, so when the
    bill is settled. Raises IncompleteAnswer where they come otherwise, and what the pipeline raises; closing it closes
    the answer."""
    completed: Completed | None = None
    has_started = False
    async with aclosing(answer):
        async for item in answer:
            has_started = has_started or isinstance(item, Started)
            if not has_started:
                raise IncompleteAnswer("the pipeline's first word was not Started")
            if isinstance(item, Completed):
                completed = item
            else:
                yield item
    if completed is None:
        raise IncompleteAnswer("the pipeline ended without Completed")
    yield completed


class Blocks:
    """The blocks of one answer. `reason` and `matched_stop` are there once the choice has ended."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.reason: FinishReason | None = None
        self.matched_stop: str | None = None
        self._open: Block | None = None
        self._unplaced: list[TextLogprob] = []

    def feed(self, delta: Delta) -> list[Step]:
        """What the delta changes. Raises IncompleteAnswer for one that can't come now."""
        if self.reason is not None or delta.index != 0:
            raise IncompleteAnswer(f"a delta of choice {delta.index} after the end, or of a choice nobody asked for")
        steps: list[Step] = []
        if delta.reasoning:
            steps += self._run("reasoning", delta.reasoning)
        if delta.text:
            self._unplaced += delta.logprobs
            steps += self._run("text", delta.text)
        elif not delta.reasoning and not delta.tool_calls:
            self._unplaced += delta.logprobs  # their text is still held back
        for piece in delta.tool_calls:
            steps += self._call(piece)
        self.reason, self.matched_stop = delta.finish_reason, delta.matched_stop
        return steps

    def end(self, *, wants_text: bool = False) -> list[Step]:
        """Close what is open. `wants_text`: an answer of nothing becomes one empty text. Raises IncompleteAnswer."""
        if self.reason in (None, FinishReason.CANCELLED, FinishReason.ERROR):
            raise IncompleteAnswer(f"{self.reason} is no end of an answer")
        opened = [self._begin("text")] if wants_text and not self.all else []
        return opened + self._close()

    def _run(self, kind: Kind, piece: str) -> list[Step]:
        steps: list[Step] = []
        if self._open is None or self._open.kind != kind:
            steps = [*self._close(), self._begin(kind)]
        return [*steps, self._grow(piece)]

    def _call(self, piece: ToolCallDelta) -> list[Step]:
        steps: list[Step] = []
        if self._open is None or self._open.call_index != piece.index:
            if piece.id is None or piece.name is None or any(b.call_index == piece.index for b in self.all):
                raise IncompleteAnswer(f"call {piece.index} went on after its end, or began without id and name")
            steps = [*self._close(), self._begin("call", piece)]
        return [*steps, self._grow(piece.arguments)] if piece.arguments else steps

    def _begin(self, kind: Kind, piece: ToolCallDelta | None = None) -> Step:
        block = Block(len(self.all), kind, [], [])
        if piece is not None:
            block.call_index, block.call_id, block.name = piece.index, piece.id or "", piece.name or ""
        self.all.append(block)
        self._open = block
        return Step("open", block)

    def _grow(self, piece: str) -> Step:
        assert self._open is not None
        logprobs: tuple[TextLogprob, ...] = ()
        if self._open.kind == "text":
            logprobs, self._unplaced = tuple(self._unplaced), []
        self._open.pieces.append(piece)
        self._open.logprobs += logprobs
        return Step("grow", self._open, piece, logprobs)

    def _close(self) -> list[Step]:
        if self._open is None:
            return []
        late = [self._grow("")] if self._open.kind == "text" and self._unplaced else []
        closed, self._open = self._open, None
        return [*late, Step("close", closed)]
