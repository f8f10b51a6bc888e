"""The flight record of a made-up request on a made-up clock."""

import pytest

from hitsend.core import events as ev
from hitsend.core.drafts import Drafted
from hitsend.core.errors import ClientGone, EngineFailed
from hitsend.core.lifecycle import State
from hitsend.core.record import Flight
from hitsend.core.request import Delta, SamplingParams, TextLogprob, ToolCallDelta
from hitsend.core.route_events import Abandoned


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return 1_700_000_000.0 + self.at


def _fly(clock: HandClock, max_steps: int = 512) -> Flight:
    flight = Flight("req_1", clock, max_steps=max_steps)
    flight.cells_total = 1000
    clock.at = 100.010
    flight.record(ev.Rendered(100.001, 100.003, "ab", 10, {}))
    flight.record(ev.Tokenized(100.003, 100.004, 5, 2, ()))
    flight.record(ev.Fitted(10, (ev.LimitCheck("context", 15, 100),), SamplingParams(), {}))
    flight.record(ev.Reserved("h", 5, 10, 0, "p"))
    flight.record(ev.Queued(100.010, 1, 0))
    flight.record(ev.Admitted(100.020, 0, 0, 1000, 69))
    flight.record(ev.Step(1, 100.020, 100.030, 5, 0, 5, 0, 1))
    flight.record(ev.FirstToken(100.030, 0))
    flight.record(ev.Step(2, 100.031, 100.040, 0, 1, 0, 3, 3))
    return flight


def test_segments_of_a_whole_request() -> None:
    clock = HandClock()
    flight = _fly(clock)
    clock.at = 100.050
    flight.record(ev.Released(100.040, 7))
    flight.record(ev.Settled(100.045, 100.047, "h", 5, 2, 12, "stop"))
    flight.enter(State.FINISHED)
    flight.close()
    spent = flight.segments()
    expected = {"render": 2, "tokenize": 1, "wait": 10, "prefill_own": 10, "decode_shared": 10, "settle": 2, "edge": 15}
    for name, ms in expected.items():
        assert spent[name] == pytest.approx(ms), name
    shown = flight.snapshot()
    assert sum(part["ms"] for part in shown["segments"]) == pytest.approx(shown["wall_ms"], rel=0.001)
    assert shown["cells"] == {"before": 0, "held": 69, "after": 7}
    assert shown["limits"] == [{"name": "context", "value": 15, "limit": 100}]
    assert shown["cost_microusd"] == 12
    at = [event["at_ms"] for event in shown["events"]]
    assert at == sorted(at)


def test_step_events_are_bounded_but_segments_stay_whole() -> None:
    clock = HandClock()
    flight = _fly(clock, max_steps=1)
    clock.at = 100.040
    flight.close()
    shown = flight.snapshot()
    assert [event["type"] for event in shown["events"]].count("step") == 1
    assert shown["steps_dropped"] == 1
    assert flight.segments()["decode_shared"] == pytest.approx(10)


def test_only_the_first_ending_counts() -> None:
    clock = HandClock()
    flight = _fly(clock)
    flight.fail(ClientGone("the client hung up"))
    flight.fail(EngineFailed("too late"))
    assert flight.state is State.CANCELLED
    assert flight.snapshot()["error"]["code"] == "client_gone"
    cancelled = [e for e in flight.events() if isinstance(e, ev.Cancelled)]
    assert [c.during for c in cancelled] == ["running"]


def test_a_pause_is_the_clients_time() -> None:
    clock = HandClock()
    flight = _fly(clock)
    flight.record(ev.Paused(100.041))
    flight.record(ev.Resumed(100.061))
    clock.at = 100.061
    flight.close()
    assert flight.segments()["client_wait"] == pytest.approx(20)


def test_a_request_may_finish_while_its_place_is_lost() -> None:
    clock = HandClock()
    flight = _fly(clock)
    flight.record(ev.Preempted(100.041, 0, 5))
    flight.enter(State.FINISHED)
    assert flight.state is State.FINISHED


def test_events_that_are_read_late_belong_to_the_record_but_not_to_the_state() -> None:
    clock = HandClock()
    flight = Flight("req_1", clock)
    flight.record(ev.Fitted(10, (), SamplingParams(), {}))
    flight.record(ev.Reserved("h", 5, 10, 0, "p"))
    flight.fail(ClientGone("the client hung up"))
    flight.record(ev.Queued(100.010, 1, 0))
    flight.record(ev.Admitted(100.020, 0, 0, 1000, 69))
    flight.record(ev.Released(100.030, 0))
    assert flight.state is State.CANCELLED
    assert [type(event) for event in flight.events()][-3:] == [ev.Queued, ev.Admitted, ev.Released]


def test_text_thoughts_and_calls_are_captured_apart_and_only_where_asked() -> None:
    pieces = (
        Delta(0, reasoning="hm"),
        Delta(0, text="a", reasoning="m"),
        Delta(1, text="other"),
        Delta(0, tool_calls=(ToolCallDelta(0, "c1", "f", '{"x"'), ToolCallDelta(0, arguments=": 1}"))),
        Delta(0, text="b", tool_calls=(ToolCallDelta(1, "c2", "g", "{"),)),
    )
    kept, silent = (Flight("r", HandClock(), keep_text=keeps) for keeps in (True, False))
    for flight in (kept, silent):
        for piece in pieces:
            flight.capture_output(piece)
        flight.capture_tokens(0, (7, 8))
        flight.capture_tokens(0, (9,))
    shown = kept.snapshot()
    assert shown["output_text"] == {"0": "ab", "1": "other"}
    assert shown["output_reasoning"] == {"0": "hmm"}
    assert shown["output_token_ids"] == {"0": [7, 8, 9]}
    assert shown["output_tool_calls"] == {
        "0": [{"id": "c1", "name": "f", "arguments": '{"x": 1}'}, {"id": "c2", "name": "g", "arguments": "{"}]
    }
    assert not [name for name in silent.snapshot() if name.startswith("output_")]


def test_drafts_are_told_by_position_and_their_tokens_came_at_once() -> None:
    clock = HandClock()
    flight = _fly(clock, max_steps=3)
    assert flight.snapshot()["drafts"] is None
    flight.record(ev.Step(3, 100.040, 100.050, 0, 3, 0, 3, 1, (Drafted(0, 4, 2, "mtp"),)))
    flight.record(ev.Step(4, 100.050, 100.060, 0, 1, 0, 1, 1, (Drafted(0, 2, 0),)))
    shown = flight.snapshot()
    counts = {"proposed": [2, 2, 1, 1], "accepted": [1, 1, 0, 0], "drafters": ["mtp"]}
    assert shown["drafts"] == counts, "steps that aren't kept count, too"
    assert shown["steps_dropped"] == 1
    kept = [event["drafts"] for event in shown["events"] if event["type"] == "step"]
    assert [list(drafts) for drafts in kept] == [
        [],
        [],
        [{"choice": 0, "proposed": 4, "accepted": 2, "drafter": "mtp"}],
    ]
    assert flight.token_gaps_s == pytest.approx([0.010, 0.010, 0.0, 0.0, 0.010])


def test_nothing_of_an_answer_that_was_given_up_is_captured_as_the_answer() -> None:
    clock = HandClock()
    flight = Flight("req_1", clock, keep_text=True)
    flight.record(ev.Step(1, 100.0, 100.010, 5, 0, 5, 0, 1))
    for text, token in (("draft", 7), ("final", 8)):
        flight.capture_tokens(0, (token,))
        flight.capture_output(Delta(0, text, logprobs=(TextLogprob(text, -1.0, ()),)))
        if text == "draft":
            flight.record(Abandoned(100.020, "e", "m", "rejected", "the draft was rejected"))
            assert flight.last_step is None, "the next engine counts its own steps"
    shown = flight.snapshot()
    assert shown["output_text"] == {"0": "final"}
    assert shown["output_token_ids"] == {"0": [8]}
    assert [token["token"] for token in shown["output_tokens"]["0"]] == ["final"]
