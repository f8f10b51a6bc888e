"""One choice's tokens become the deltas that clients see: tokens → text → stop → thoughts → calls.

Enters: `SampledToken`s in any portions, then the reason why they end. Leaves: `Delta`s, and the events that tell what
was held back. Always true: the texts joined are the answer; the logprob entries joined cover every token up to and
including the one that completed a stop string, each sent with its text or before it; after the finishing delta nothing
follows.
Control tokens have no text: a client never sees a turn marker, and in logprobs they carry their name but no bytes;
those that are markup of calls or thoughts go to the reader. An answer that ended by itself and whose calls are all
whole ends with `tool_calls`; one that was cut off inside a call keeps the reason why.
Next: `../stream/sse.py`.
"""

from collections.abc import Iterable

from hitsend.core.events import Event, Held, StopMatched
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, SampledToken, TextLogprob
from hitsend.serve.output.detokenize import Detokenizer
from hitsend.serve.output.logprobs import TokenTable, text_logprob
from hitsend.serve.output.reader import AnswerReader, Shown, joined
from hitsend.serve.output.stop import StopMatcher

_NOTHING = Shown()


class Assembler:
    """The text of one choice. Feed it until `is_finished`, or call `finish`; never both to the end."""

    def __init__(
        self,
        vocabulary: TokenTable,
        stop: tuple[str, ...] = (),
        *,
        want_logprobs: bool = False,
        want_ids: bool = False,
        index: int = 0,
        shows_stop: bool = False,
        min_tokens: int = 0,
        reader: AnswerReader | None = None,
    ) -> None:
        """`shows_stop`: the stop string that matched is text. The first `min_tokens` tokens are searched for none."""
        self._table = vocabulary
        self._bytes = vocabulary.token_bytes
        self._control = vocabulary.control_ids
        self._want_logprobs = want_logprobs
        self._want_ids = want_ids
        self._index = index
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher(stop, shows_match=shows_stop)
        self._min_tokens = min_tokens
        self._logprobs: list[TextLogprob] = []
        self._ids: list[int] = []
        self._reader = reader
        self._held = (0, "")  # bytes and text that wait for more, as after the last token
        self.num_tokens = 0
        self.is_finished = False
        self.finish_reason: FinishReason | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended this choice."""
        return self._stops.matched

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts, their tags included."""
        return self._reader.num_thoughts if self._reader is not None else 0

    @property
    def faults(self) -> tuple[str, ...]:
        """What went wrong with calls, complete once this choice has finished."""
        return tuple(self._reader.faults) if self._reader is not None else ()

    def feed(self, tokens: Iterable[SampledToken]) -> tuple[Delta | None, tuple[Event, ...]]:
        """Take tokens, return what can be shown now (None: nothing yet) and what there is to record.

        When a stop string completes (or a second call begins where one is allowed), the delta is the finishing one,
        `num_tokens` stops at that token and the rest of `tokens` (and everything fed later) is ignored: computed, but
        nobody's answer.
        """
        if self.is_finished:
            return None, ()
        shown: list[Shown] = []
        events: list[Event] = []
        for token in tokens:
            shown.append(self._read(token, events))
            if self._stops.matched is not None or (self._reader is not None and self._reader.is_over):
                self.is_finished = True
                return self._end(shown, FinishReason.STOP), tuple(events)
        whole = joined(shown)
        if whole == _NOTHING:
            return None, tuple(events)
        return self._delta(whole, None), tuple(events)

    def finish(self, reason: FinishReason) -> Delta:
        """No more tokens will come. Releases what was held; text that this completes to a stop string still stops."""
        if self.is_finished:
            raise ValueError(f"choice {self._index} has already finished")
        text = self._stops.feed(self._detokenizer.finish())
        self.is_finished = True
        if self._stops.matched is not None:
            reason = FinishReason.STOP
        else:
            text += self._stops.finish()
        return self._end([self._show(text)], reason)

    def _end(self, shown: list[Shown], reason: FinishReason) -> Delta:
        if self._reader is None:
            return self._delta(joined(shown), reason)
        whole = joined([*shown, self._reader.finish()])
        has_calls = reason is FinishReason.STOP and self._reader.has_whole_calls
        return self._delta(whole, FinishReason.TOOL_CALLS if has_calls else reason)

    def _show(self, text: str) -> Shown:
        return Shown(text) if self._reader is None else self._reader.feed(text)

    def _read(self, token: SampledToken, events: list[Event]) -> Shown:
        """One token through everything."""
        text = self._take(token, events)
        if self._reader is None:
            return Shown(text)
        if token.token_id in self._reader.hidden:
            text += self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
            self._held = (0, "")
        return self._reader.feed_token(text, token.token_id)

    def _take(self, token: SampledToken, events: list[Event]) -> str:
        self.num_tokens += 1
        if self._want_logprobs:
            self._logprobs.append(text_logprob(self._table, token))
        if self._want_ids:
            self._ids.append(token.token_id)
        if token.token_id in self._control:
            return ""
        had_bytes, had_text = self._held
        text = self._detokenizer.feed(self._bytes[token.token_id])
        if self.num_tokens > self._min_tokens:
            text = self._stops.feed(text)
        if self._stops.matched is not None:
            events.append(StopMatched(choice=self._index, stop=self._stops.matched, num_tokens=self.num_tokens))
            return text
        held_bytes, held_text = self._held = self._detokenizer.num_held_bytes, self._stops.held
        if held_bytes and not had_bytes:
            events.append(Held(choice=self._index, num_bytes=held_bytes, reason="partial_utf8"))
        if held_text and not had_text:
            events.append(Held(choice=self._index, num_bytes=len(held_text.encode()), reason="partial_stop"))
        return text

    def _delta(self, shown: Shown, reason: FinishReason | None) -> Delta:
        logprobs, self._logprobs = tuple(self._logprobs), []
        ids, self._ids = tuple(self._ids), []
        self.finish_reason = reason or self.finish_reason
        return Delta(
            index=self._index,
            text=shown.text,
            logprobs=logprobs,
            finish_reason=reason,
            matched_stop=self._stops.matched if reason is not None else None,
            reasoning=shown.reasoning,
            tool_calls=shown.tool_calls,
            token_ids=ids,
        )
