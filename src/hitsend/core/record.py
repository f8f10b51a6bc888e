"""The flight record: everything that happened to one request, in order, on one clock.

Enters: events, as the stages return them. Leaves: the record as it is kept (`shown.py` makes it readable).
Always true: the state follows `lifecycle.TRANSITIONS`; segments add up to the wall time; events are bounded (step
events beyond `max_steps` are counted and keep feeding the segments, but are not kept); text is there only when it was
captured. Next: `serve/pipeline.py`, which records.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from hitsend.core import events as ev
from hitsend.core import route_events, shown
from hitsend.core.clock import Clock
from hitsend.core.drafts import DraftCounts
from hitsend.core.errors import Ended, ServeError
from hitsend.core.lifecycle import ENDED, State, advance
from hitsend.core.limits import RateWindows
from hitsend.core.request import Delta, Principal, TextLogprob, Usage
from hitsend.core.segments import Interval, Timeline

_MAX_SCORED = 1024
"""Captured tokens of a choice that are kept with their alternatives."""

_MAX_GAPS = 4096
"""Times between tokens kept for the metrics: more than that of one request say nothing new."""


class CapturedCall(msgspec.Struct):
    """A call as the model wrote it; `arguments` is text, which need not be whole where the answer was cut off."""

    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Flight:
    """One request's record while it is being written, and after."""

    def __init__(self, request_id: str, clock: Clock, *, keep_text: bool = False, max_steps: int = 512) -> None:
        self.request_id = request_id
        self.keep_text = keep_text
        self.state = State.RECEIVED
        self.principal = Principal()
        self.windows = RateWindows()
        self.model: str | None = None
        self.engine: str | None = None
        self.finish_reason: str | None = None
        self.usage = Usage()
        self.cost_microusd = 0
        self.ledger: object | None = None
        self.error: ServeError | None = None
        self.received_at = clock.now()
        self.received_wall = clock.wall()
        self.closed_at: float | None = None
        self.first_token_at: float | None = None
        self.token_gaps_s: list[float] = []
        self.drafts = DraftCounts()
        self.traceparent: str | None = None
        self.output_text: dict[int, list[str]] = {}
        self.output_reasoning: dict[int, list[str]] = {}
        self.output_calls: dict[int, dict[int, CapturedCall]] = {}
        self.output_token_ids: dict[int, list[int]] = {}
        self.prompt_token_ids: dict[int, tuple[int, ...]] = {}
        self.output_logprobs: dict[int, list[TextLogprob]] = {}
        self.cells_total: int | None = None
        self._clock = clock
        self._max_steps = max_steps
        self._events: list[tuple[float, ev.Event]] = []
        self._steps_kept = 0
        self._steps_dropped = 0
        self._timeline = Timeline()
        self._spent: dict[str, float] | None = None
        self._waiting_since: float | None = None
        self._paused_since: float | None = None
        self.num_prefilled = self.num_decoded = 0
        self.last_step: ev.Step | None = None
        self._last_token_at: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can happen to it."""
        return self.closed_at is not None

    def record(self, event: ev.Event) -> None:
        """Append an event, stamped now; its own instants say when it really happened."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
            self._spent = None
        if isinstance(event, ev.Step):
            if self._steps_kept >= self._max_steps:
                self._steps_dropped += 1
                return
            self._steps_kept += 1
        self._events.append((self._clock.now(), event))

    def enter(self, state: State) -> None:
        """Move along the life cycle. Raises IllegalTransition: a bug."""
        self.state = advance(self.state, state)

    def fail(self, error: ServeError) -> None:
        """The request ended in an error (an `Ended` one counts as cancelled); only the first is kept."""
        if self.state in ENDED:
            return
        self.error = error
        if isinstance(error, Ended):
            self.record(ev.Cancelled(reason=error.code, during=str(self.state)))
            self.enter(State.CANCELLED)
            self.finish_reason = "cancelled"
        else:
            self.record(ev.Failed(code=error.code, message=error.message, param=error.param))
            self.enter(State.FAILED)
            self.finish_reason = "error"

    def client_blocked(self, started_at: float, ended_at: float) -> None:
        """A write to the client had to wait."""
        self._spent = None
        self._timeline.add("client_blocked", started_at, ended_at)

    def capture_output(self, delta: Delta) -> None:
        """Keep the answer's text, its thoughts and its calls, each apart, where capture is on."""
        if not self.keep_text:
            return
        if delta.prompt_ids:
            self.prompt_token_ids[delta.index] = delta.prompt_ids
        if delta.text:
            self.output_text.setdefault(delta.index, []).append(delta.text)
        if delta.reasoning:
            self.output_reasoning.setdefault(delta.index, []).append(delta.reasoning)
        scored = self.output_logprobs.setdefault(delta.index, [])
        scored.extend(delta.logprobs[: max(0, _MAX_SCORED - len(scored))])
        for piece in delta.tool_calls:
            calls = self.output_calls.setdefault(delta.index, {})
            call = calls.setdefault(piece.index, CapturedCall())
            call.id, call.name = call.id or piece.id, call.name or piece.name
            call.arguments += piece.arguments

    def capture_tokens(self, choice: int, token_ids: Iterable[int]) -> None:
        """Keep what was sampled, where capture is on: `hitsend replay` compares it."""
        if self.keep_text:
            self.output_token_ids.setdefault(choice, []).extend(token_ids)

    def close(self) -> None:
        """Stop the clock. Later events are still kept but no longer change the wall time."""
        if self.closed_at is None:
            self.closed_at = self._clock.now()
            self._spent = None

    @property
    def wall_ms(self) -> float:
        """From arrival to close, or to now while it is open."""
        return ((self.closed_at or self._clock.now()) - self.received_at) * 1000.0

    def segments(self) -> dict[str, float]:
        """Milliseconds per segment; they add up to `wall_ms`."""
        end = self.closed_at or self._clock.now()
        if self._waiting_since is not None:
            self._timeline.add("wait", self._waiting_since, end)
            if self.is_closed:
                self._waiting_since = None
        if self._spent is None or not self.is_closed:
            self._spent = self._timeline.partition(self.received_at, end)
        return self._spent

    def intervals(self) -> tuple[Interval, ...]:
        """What the segments are made of: named stretches of the clock's seconds."""
        return self._timeline.intervals

    def timings(self) -> dict[str, float]:
        """The short form for the response: ttft_ms, wall_ms and the segments that took any time, in ms."""
        spent = {f"{name}_ms": round(ms, 3) for name, ms in self.segments().items() if ms > 0}
        if self.first_token_at is not None:
            spent["ttft_ms"] = round((self.first_token_at - self.received_at) * 1000.0, 3)
        spent["wall_ms"] = round(self.wall_ms, 3)
        return spent

    def events(self) -> list[ev.Event]:
        """The events kept so far, in order."""
        return [event for _, event in self._events]

    def snapshot(self) -> dict[str, Any]:
        """The record as JSON values: DESIGN's shape, with `events[].at_ms` counted from arrival."""
        return shown.whole(self._kept())

    def pack(self) -> bytes:
        """The record as it is stored: its facts as they are. `shown.as_json` makes the shape that is shown of it."""
        return shown.pack(self._kept())

    def _kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = {
            "request_id": self.request_id,
            "received_at": self.received_at,
            "received_wall": self.received_wall,
            "state": str(self.state),
            "finish_reason": self.finish_reason,
            "error": _error(self.error),
            "wall_ms": self.wall_ms,
            "segments": self.segments(),
            "at": [at for at, _ in self._events],
            "events": [event for _, event in self._events],
            "steps_dropped": self._steps_dropped,
            "usage": self.usage,
            "cost_microusd": self.cost_microusd,
            "engine": self.engine,
            "model": self.model,
            "trace_id": self.traceparent[3:35] if self.traceparent else None,
            "principal": _shown(self.principal),
            "cells_total": self.cells_total,
            "drafts": self.drafts.shown(),
            "ledger": self.ledger,
        }
        for name, found in (("output_text", self.output_text), ("output_reasoning", self.output_reasoning)):
            if found:
                kept[name] = {str(choice): "".join(parts) for choice, parts in found.items()}
        if self.output_token_ids:
            kept["output_token_ids"] = {str(choice): ids for choice, ids in self.output_token_ids.items()}
        if self.prompt_token_ids:
            kept["prompt_token_ids"] = {str(choice): ids for choice, ids in self.prompt_token_ids.items()}
        if any(self.output_logprobs.values()):
            scored = self.output_logprobs.items()
            kept["output_tokens"] = {str(choice): [each.shown() for each in tokens] for choice, tokens in scored}
        if self.output_calls:
            calls = self.output_calls.items()
            kept["output_tool_calls"] = {str(choice): list(each.values()) for choice, each in calls}
        return kept

    def _on_rendered(self, event: ev.Rendered) -> None:
        self._timeline.add("render", event.started_at, event.ended_at)

    def _on_tokenized(self, event: ev.Tokenized) -> None:
        self._timeline.add("tokenize", event.started_at, event.ended_at)

    def _follow(self, state: State) -> None:
        """What an event says of the state; events read after the end (the engine's come late) change nothing."""
        if self.state not in ENDED:
            self.enter(state)

    def _on_fitted(self, _: ev.Fitted) -> None:
        self._follow(State.PREPARED)

    def _on_reserved(self, _: ev.Reserved) -> None:
        self._follow(State.RESERVED)

    def _on_routed(self, event: ev.Routed) -> None:
        self.engine = event.engine

    def _on_queued(self, event: ev.Queued) -> None:
        self._follow(State.WAITING)
        self._waiting_since = event.at

    def _on_admitted(self, _: ev.Admitted) -> None:
        self._follow(State.RUNNING)

    def _on_preempted(self, event: ev.Preempted) -> None:
        self._follow(State.PREEMPTED)
        self._waiting_since = event.at

    def _on_paused(self, event: ev.Paused) -> None:
        self._paused_since = event.at

    def _on_resumed(self, event: ev.Resumed) -> None:
        if self._paused_since is not None:
            self._timeline.add("client_wait", self._paused_since, event.at)
            self._paused_since = None

    def _on_step(self, event: ev.Step) -> None:
        start = event.started_at
        if self._waiting_since is not None:
            self._timeline.add("wait", self._waiting_since, event.started_at)
            self._waiting_since = None
        elif self.last_step is not None and event.step == self.last_step.step + 1:
            start = self.last_step.ended_at
        self._timeline.add(_segment(event), start, event.ended_at)
        self.last_step = event
        self.num_prefilled += event.prefill_tokens
        self.num_decoded += event.decode_tokens
        if event.decode_tokens and self._last_token_at is not None:
            if len(self.token_gaps_s) < _MAX_GAPS:
                self.token_gaps_s.append(event.ended_at - self._last_token_at)
                self.token_gaps_s += [0.0] * sum(drafted.accepted for drafted in event.drafts)
            self._last_token_at = event.ended_at
        for drafted in event.drafts:
            self.drafts.add(drafted)

    def _on_first_token(self, event: ev.FirstToken) -> None:
        if self.first_token_at is None:
            self.first_token_at = self._last_token_at = event.at

    def _on_sent(self, event: ev.Sent) -> None:
        self._follow(State.WAITING)
        self._waiting_since = event.at if self._waiting_since is None else self._waiting_since

    def _on_answered(self, event: ev.Answered) -> None:
        if event.reason != "ok":
            return
        if self._waiting_since is not None:
            self._timeline.add("upstream", self._waiting_since, event.at)
            self._waiting_since = None
        self._follow(State.RUNNING)

    def _on_streamed(self, event: ev.Streamed) -> None:
        self._timeline.add("upstream", event.started_at, event.ended_at)
        if self.first_token_at is not None and event.num_chunks > 1:
            # one mean instead of every gap: reads hold several chunks, so single gaps would mean nothing
            self.token_gaps_s.append((event.ended_at - self.first_token_at) / (event.num_chunks - 1))

    def _on_abandoned(self, event: route_events.Abandoned) -> None:
        """Back to before the hold: another engine is asked, and nothing of this one's answer was anybody's."""
        self._on_released(ev.Released(event.at, 0))
        self._follow(State.PREPARED)
        self.first_token_at = self._last_token_at = self.last_step = None
        self.token_gaps_s.clear()
        for captured in (self.output_text, self.output_reasoning, self.output_calls):
            captured.clear()
        self.output_token_ids.clear()
        self.prompt_token_ids.clear()
        self.output_logprobs.clear()

    def _on_judged(self, event: route_events.Judged) -> None:
        if event.accepted:  # the client gets its first token now
            self.first_token_at = event.at
            self.token_gaps_s.clear()

    def _on_released(self, event: ev.Released) -> None:
        for since, name in ((self._waiting_since, "wait"), (self._paused_since, "client_wait")):
            if since is not None:
                self._timeline.add(name, since, event.at)
        self._waiting_since = self._paused_since = None

    def _on_settled(self, event: ev.Settled) -> None:
        self._timeline.add("settle", event.started_at, event.ended_at)
        self.cost_microusd = event.cost_microusd


def _segment(step: ev.Step) -> str:
    mine = step.prefill_tokens + step.decode_tokens
    alone = mine == step.batch_prefill_tokens + step.batch_decode_tokens
    return f"{'prefill' if step.prefill_tokens else 'decode'}_{'own' if alone else 'shared'}"


def _error(error: ServeError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code, "message": error.message, "param": error.param}


_HANDLERS: dict[type[ev.Event], Any] = {
    ev.Rendered: Flight._on_rendered,
    ev.Tokenized: Flight._on_tokenized,
    ev.Fitted: Flight._on_fitted,
    ev.Reserved: Flight._on_reserved,
    ev.Routed: Flight._on_routed,
    ev.Queued: Flight._on_queued,
    ev.Admitted: Flight._on_admitted,
    ev.Preempted: Flight._on_preempted,
    ev.Paused: Flight._on_paused,
    ev.Resumed: Flight._on_resumed,
    ev.Step: Flight._on_step,
    ev.FirstToken: Flight._on_first_token,
    ev.Sent: Flight._on_sent,
    ev.Answered: Flight._on_answered,
    ev.Streamed: Flight._on_streamed,
    ev.Released: Flight._on_released,
    route_events.Abandoned: Flight._on_abandoned,
    route_events.Judged: Flight._on_judged,
    ev.Settled: Flight._on_settled,
}


def _shown(principal: Principal) -> dict[str, object]:
    """Who called, without what it may do: limits change, and each one that was checked is an event."""
    named = ("key_id", "name", "user", "app", "org", "role", "tier")
    return {name: getattr(principal, name) for name in named}
