"""What tests of hitsend, and of what is built on it, can use: fakes, and checks of streams.

Enters: what a test wants to happen, or what a client received. Leaves: stand-ins, or what was seen. Always true: no
threads, no real time. Next: `fakes.py`.
"""

from hitsend.testing.fakes import FakeClock, FakeDecoder, FakeMisused
from hitsend.testing.streams import (
    EventsSeen,
    StreamSeen,
    StreamViolation,
    check_messages_stream,
    check_responses_stream,
    check_stream,
)

__all__ = [
    "EventsSeen",
    "FakeClock",
    "FakeDecoder",
    "FakeMisused",
    "StreamSeen",
    "StreamViolation",
    "check_messages_stream",
    "check_responses_stream",
    "check_stream",
]
