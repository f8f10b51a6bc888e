"""The stream of OpenAI's chat API as a client reads it.

Enters: bytes of an event stream. Leaves: `Delta`s and usage. Always true: bytes may be cut anywhere; what can't be read
is `Unreadable`, never skipped; a choice that called tools ends with `tool_calls`, also where the upstream calls that
`stop`, one that called none never does, and one whose last call breaks off ends with `length`; a choice's end is told
when nothing can come behind it any more, because some write a reason beside every piece.
Next: `upstream_calls.py`, and `lenient_wire.py`, for upstreams with older shapes.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.line_ends import LineEnds
from hitsend.core.request import Delta, Usage
from hitsend.serve.engine.alike import Alike
from hitsend.serve.engine.loose_json import LooseJson
from hitsend.serve.engine.mended import mended_chunk
from hitsend.serve.engine.upstream_calls import CallIn, Calls
from hitsend.serve.engine.upstream_chunks import ChoiceIn, ChunkIn, DeltaIn, PartIn
from hitsend.serve.engine.upstream_ends import BROKE, ENDS
from hitsend.serve.engine.upstream_logprobs import logprobs_of
from hitsend.serve.engine.upstream_usage import may_be_bill, usage_of

MAX_EVENT_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]"
_NULL = b"null"
_BOM = b"\xef\xbb\xbf"


class Unreadable(Exception):
    """The upstream sent something that is no chunk of a chat completion. The message quotes nothing of it."""


class UpstreamSaid(Exception):
    """The upstream ended its stream with an error of its own: `said` is what it wrote, for its code alone."""

    def __init__(self, said: Any = None) -> None:
        super().__init__("an error inside its answer")
        self.said = said


_decode = msgspec.json.Decoder(ChunkIn).decode


class ChunkReader:
    """Reads one stream. `is_done`: it said [DONE].

    `fault` is why nothing more can be read: what stood before it was given out. `num_pieces` came; where nobody reads
    along, it `merges` them: every piece only costs. With `skips_null` an event of null says nothing.
    """

    def __init__(self, n: int, *, merges: bool = False, skips_null: bool = False) -> None:
        self._rest = b""
        self._line_ends = LineEnds()
        self._merges = merges
        self._skips_null = skips_null
        self._open = set(range(n))
        self._ends: dict[int, FinishReason] = {}
        self._has_gone_on = self._is_sure = False
        self._calls = [Calls() for _ in range(n)]
        self._has_begun = False
        self._alike = Alike()
        self._loose = LooseJson()
        self._stops: dict[int, str] = {}
        self.counts = [0] * n
        self.num_pieces = 0
        self._saids: tuple[tuple[Any, int], ...] = ()
        self.is_done = False
        self.fault: Unreadable | UpstreamSaid | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish reason. Where one went on behind that, only the stream's end tells."""
        return self._open <= self._ends.keys() and (not self._has_gone_on or self._is_sure)

    @property
    def is_over(self) -> bool:
        """Whether all ends were told, and the bill: nothing else is to come but [DONE]."""
        return not self._open and self.is_used_up

    @property
    def usage(self) -> Usage | None:
        """The upstream's last word on it."""
        return self._used[0]

    @property
    def is_used_up(self) -> bool:
        """Whether `usage` was said after the last token that came: one from before it isn't the bill."""
        usage, num_counted = self._used
        return usage is not None and num_counted == sum(self.counts) and may_be_bill(usage, num_counted)

    @property
    def _used(self) -> tuple[Usage | None, int]:
        """The last one that can be meant, of two: some say it in every event, so it is read where it is asked for."""
        read = ((usage_of(said), num_counted) for said, num_counted in self._saids)
        return next((one for one in read if one[0] is not None), (None, 0))

    def feed(self, data: bytes) -> list[Delta]:
        """Take bytes, return what they bring. Look at `fault` afterwards."""
        deltas: list[Delta] = []
        try:
            self._feed(data, deltas)
        except (Unreadable, UpstreamSaid) as fault:
            self.fault = fault
        return deltas

    def feed_whole(self, body: bytes) -> list[Delta]:
        """An answer that came whole although a stream was asked for. Look at `fault` afterwards."""
        try:
            body = body.removeprefix(_BOM)
            event = msgspec.json.format(self._loose.mended(body) or body, indent=-1)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.fault = Unreadable("what is no chat completion")
            return []
        deltas = self.feed(b"data: " + event + b"\n\n")
        self.is_done = True
        return deltas + self.close(is_sure=True)

    def close(self, *, is_sure: bool = False) -> list[Delta]:
        """The ends of choices, as nothing comes any more. `is_sure`: it wasn't cut. Look at `fault` afterwards."""
        self._is_sure = self._is_sure or is_sure
        deltas: list[Delta] = []
        while self._ends and self.is_finished:
            index, said = self._ends.popitem()
            try:
                self._called(Delta(index), said, (), deltas)
            except Unreadable as fault:
                self.fault = fault
        return deltas

    def _feed(self, data: bytes, deltas: list[Delta]) -> None:
        events = self._rest + self._line_ends.feed(data)
        if self._merges and self._is_plain:
            events = self._run(events, deltas)
        *whole, self._rest = events.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Unreadable(f"an event of more than {MAX_EVENT_BYTES} bytes")
        if whole and not self._has_begun:
            self._has_begun = True
            whole[0] = whole[0].removeprefix(_BOM)
        for number, event in enumerate(whole, 1):
            was_learned = self._alike.is_learned
            document = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _document(event)
            if document == _DONE:
                self.is_done = True
                deltas += ChunkReader.close(self, is_sure=True)
            elif document and not (self._skips_null and document == _NULL):
                self._event(document, deltas)
            if self._merges and self._alike.is_learned and not was_learned:
                self._rest = b"\n\n".join((*whole[number:], self._rest))
                self._feed(b"", deltas)  # the others, now that it is known how they look
                return

    @property
    def _is_plain(self) -> bool:
        """Whether a text of the choice that has always the same looks can be passed on as it is."""
        index = self._alike.index
        return index in self._open and index not in self._ends and not self._calls[index].has_begun

    def _run(self, events: bytes, deltas: list[Delta]) -> bytes:
        """The usual read of a stream: a row of texts. Returns what comes after it."""
        text, number, rest = self._alike.run(events)
        if number:
            self.counts[self._alike.index] += number
            self.num_pieces += number
            deltas.append(Delta(self._alike.index, text))
        return rest

    def _event(self, document: bytes, deltas: list[Delta]) -> None:
        text = self._alike.text(document)
        if text is not None and self._is_plain:
            self.counts[self._alike.index] += 1
            self.num_pieces += 1
            deltas.append(Delta(self._alike.index, text))
            return
        chunk = self._read_loosely(document)
        before = len(deltas)
        self._take(chunk, deltas)
        self.num_pieces += len(deltas) - before
        choices = chunk.choices or ()
        if len(choices) == 1 and chunk.usage is choices[0].usage is None and (plain := _plain(choices[0])):
            self._alike.learn(document, plain, choices[0].index or 0)

    def _read_loosely(self, document: bytes) -> ChunkIn:
        """As JSON; as what other languages write for it; as what else can be meant."""
        try:
            return self._read(document)
        except Unreadable:
            plain = self._loose.mended(document)
            if plain is not None:
                with suppress(Unreadable):
                    return self._read(plain)
            found = self._mended(plain or document)
            if found is None:
                raise
            return found

    def _read(self, document: bytes) -> ChunkIn:
        try:
            return _decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreadable("an event that is no chat completion chunk") from error

    def _mended(self, _document: bytes) -> ChunkIn | None:
        return mended_chunk(_document)

    def _take(self, chunk: ChunkIn, deltas: list[Delta]) -> None:
        is_error = chunk.is_error
        for choice in () if is_error else chunk.choices or ():
            index = choice.index or 0
            if not 0 <= index < len(self.counts):
                raise Unreadable("a choice that was not asked for")
            ids = choice.prompt_token_ids or (chunk.prompt_token_ids if index == 0 else None)
            if ids:
                deltas.append(Delta(index, prompt_ids=ids))
            if index in self._open:
                self._choice(index, choice, deltas)
        said = chunk.usage
        if said is None and chunk.choices:
            said = chunk.choices[-1].usage  # Kimi's place for it
        if said is not None:
            self._saids = ((said, sum(self.counts)), *self._saids[:1])
        if is_error:
            is_apart = not chunk.error or isinstance(chunk.error, str)  # vLLM's older form, TGI's
            own = {"code": chunk.code, "type": chunk.type or chunk.error_type, "message": chunk.error or chunk.message}
            raise UpstreamSaid(own if is_apart else chunk.error)

    def _choice(self, index: int, choice: ChoiceIn, deltas: list[Delta]) -> None:
        whole = choice.message if not self.counts[index] else None  # beside a stream it is what came once more
        delta = choice.delta or whole or _NOTHING
        text, reasoning = _words(delta, choice)
        logprobs = () if choice.logprobs is None else logprobs_of(choice.logprobs)
        ids, pieces = choice.token_ids or (), delta.calls
        is_beside = bool(text or reasoning or pieces or logprobs or ids)
        if is_beside:
            self.counts[index] += max(1, len(logprobs), len(ids))
            self._has_gone_on = self._has_gone_on or index in self._ends
        elif not choice.finish_reason:
            return
        if choice.finish_reason and choice.stop is not None:
            self._stops[index] = choice.stop
        more = Delta(index, text, logprobs=logprobs, reasoning=reasoning, token_ids=ids)
        said = self._end_of(index, choice.finish_reason, is_beside=is_beside) if choice.finish_reason else None
        if said is not None or pieces or self._calls[index].has_begun:
            self._called(more, said, pieces, deltas)
        elif is_beside:
            deltas.append(more)

    def _end_of(self, index: int, word: str, *, is_beside: bool) -> FinishReason | None:
        """Why the choice ends, if that can be told now: beside a piece of it, or before any, it may go on."""
        said = _known(word)
        if said is None:
            return None
        if is_beside or self._has_gone_on or index not in self._ends:
            self._ends[index] = said
        may_go_on = is_beside or self._has_gone_on or not self.counts[index]
        return None if may_go_on else self._ends.pop(index)

    def _called(self, more: Delta, said: FinishReason | None, pieces: Sequence[CallIn], deltas: list[Delta]) -> None:
        """A piece of a choice that has calls: what of it can be told now, one thing after the other."""
        index, calls = more.index, self._calls[more.index]
        text, reasoning = calls.words(more.text, more.reasoning)
        taken = [one for piece in pieces for one in calls.take(piece)]
        reason = None
        if said:
            reason = self._reason(said, calls)
            taken += calls.end()
        if calls.fault is not None:
            raise Unreadable(calls.fault)
        if reason is not None:
            self._open.discard(index)
        more = msgspec.structs.replace(more, text=text, reasoning=reasoning, tool_calls=tuple(taken))
        text, reasoning = calls.let_go(is_end=reason is not None)
        late = Delta(index, text, reasoning=reasoning)
        found = [one for one in (more, late) if one != Delta(index)] or ([] if reason is None else [more])
        if found:
            stop = self._stops.get(index) if reason is FinishReason.STOP else None
            deltas += [*found[:-1], msgspec.structs.replace(found[-1], finish_reason=reason, matched_stop=stop)]

    def _reason(self, said: FinishReason, calls: Calls) -> FinishReason:
        if said in (FinishReason.STOP, FinishReason.TOOL_CALLS):
            if calls.is_cut:
                return FinishReason.LENGTH
            return FinishReason.TOOL_CALLS if calls.has_any else FinishReason.STOP
        return said


def _known(said: str) -> FinishReason | None:
    word = said.lower().replace("-", "_")
    if word in BROKE:
        raise UpstreamSaid
    if word not in ENDS:
        raise Unreadable("a finish_reason that nobody knows")
    return ENDS[word]


_NOTHING = DeltaIn()


def _plain(choice: ChoiceIn) -> str | None:
    """Its text, where it brings that and nothing else."""
    delta = choice.delta
    if delta is None or choice.finish_reason or choice.logprobs is not None or choice.token_ids:
        return None
    others = delta.refusal, delta.reasoning_content, delta.reasoning, delta.calls
    return delta.content if isinstance(delta.content, str) and not any(others) else None


def _words(delta: DeltaIn, choice: ChoiceIn) -> tuple[str, str]:
    """Text and thoughts."""
    content, thoughts = delta.content, delta.reasoning_content or delta.reasoning or ""
    if isinstance(content, tuple):
        thoughts += "".join(_joined(part.thinking) for part in content if part.type == "thinking")
        content = _joined(tuple(part for part in content if part.type not in ("thinking", "reference")))
    return content or delta.refusal or choice.text or "", thoughts


def _joined(parts: str | tuple[PartIn, ...] | None) -> str:
    if not isinstance(parts, tuple):
        return parts or ""
    if any(part.type != "text" for part in parts):
        raise Unreadable("a part of a type that nobody knows")
    return "".join(part.text or "" for part in parts)


def _document(event: bytes) -> bytes:
    """What an event's data lines hold; comments and other fields are no data."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()
