"""`hitsend` without flight records: what the cost of recording is measured against.

Usage: python -m bench.unrecorded serve …
The same server, but for this: a request's state still moves and its first token is still seen, since the pipeline and
the client's `timings` need them; no event and no step is kept, no segment reckoned, no record packed, kept in memory or
written. There is no setting for it: a server that can't say what happened isn't offered.
"""

from hitsend.cli import main
from hitsend.core import events as ev
from hitsend.core.record import Flight
from hitsend.core.segments import SEGMENTS
from hitsend.serve import flights
from hitsend.serve.usage.records import RecordStore

_NEEDED = (
    ev.Fitted,
    ev.Reserved,
    ev.Routed,
    ev.Queued,
    ev.Admitted,
    ev.Preempted,
    ev.Sent,
    ev.Answered,
    ev.FirstToken,
    ev.Settled,
)
"""Events that move the state, or say what a bill or a client needs."""

_NOTHING = dict.fromkeys(SEGMENTS, 0.0)


class Unrecorded(Flight):
    """Keeps its state and nothing else."""

    def record(self, event: ev.Event) -> None:
        """Only what the pipeline can't do without."""
        if isinstance(event, _NEEDED):
            super().record(event)
            self._events.clear()

    def segments(self) -> dict[str, float]:
        """None."""
        return _NOTHING

    def pack(self) -> bytes:
        """Nothing."""
        return b""


class NoStore(RecordStore):
    """Takes nothing."""

    def put(self, summary: object, body: bytes) -> None:
        """Leave it."""


if __name__ == "__main__":
    setattr(flights, "Flight", Unrecorded)  # noqa: B010  # mypy needn't be told that this is on purpose
    setattr(RecordStore, "put", NoStore.put)  # noqa: B010  # the same
    main()
