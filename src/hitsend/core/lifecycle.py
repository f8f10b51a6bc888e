"""The states a request passes through, and the only transitions there are.

Enters: a state and what happened. Leaves: the next state. Always true: every change of state in hitsend goes through
`advance`, the three last states have no way out, and this file knows nothing of who calls it. Next: `events.py`.

    received ──► prepared ──► reserved ──► waiting ──► running ──► finished
        │            │            │           ▲ │          │
        │            │            │           │ │          ├──► failed
        └────────────┴────────────┴───────────┼─┴──────────┴──► cancelled
                                          preempted

Reserved, waiting and running lead back to prepared where a route gives an engine up and asks the next one.
"""

from enum import StrEnum


class State(StrEnum):
    """Where a request is."""

    RECEIVED = "received"
    PREPARED = "prepared"
    RESERVED = "reserved"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why one choice ended. The first four go to clients; the others only to the record and the ledger."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CANCELLED = "cancelled"
    ERROR = "error"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.RECEIVED: frozenset({State.PREPARED, State.FAILED, State.CANCELLED}),
    State.PREPARED: frozenset({State.RESERVED, State.FAILED, State.CANCELLED}),
    State.RESERVED: frozenset({State.PREPARED, State.WAITING, State.RUNNING, State.FAILED, State.CANCELLED}),
    State.WAITING: frozenset({State.PREPARED, State.RUNNING, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.PREPARED, State.PREEMPTED, State.FINISHED, State.FAILED, State.CANCELLED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED, State.FAILED, State.CANCELLED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

ENDED = frozenset(state for state, ways in TRANSITIONS.items() if not ways)


class IllegalTransition(Exception):
    """A bug in hitsend: somebody asked for a way that the table doesn't have."""


def advance(state: State, to: State) -> State:
    """Return `to` if the table has the way from `state`; a repeated state is no transition and passes."""
    if to is state or to in TRANSITIONS[state]:
        return to
    raise IllegalTransition(f"no way from {state} to {to}")
