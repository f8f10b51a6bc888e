"""What one request did, as the client saw it.

Enters: instants on the client's clock, in seconds from the start of its stage. Leaves: latencies in ms. Always true:
`ttft_ms` and `e2e_ms` count from `intended_s`, the instant at which the request was to go out; the same from `sent_s`
stand beside them; TPOT = (E2E - TTFT) / (tokens - 1), None for one token, so E2E ends with the last token's arrival;
`done_s` is the end of the stream. Next: `sse.py`.
"""

from array import array
from itertools import pairwise
from typing import Literal

import msgspec

Outcome = Literal["ok", "aborted", "error", "interrupted"]


class Sample(msgspec.Struct, frozen=True):
    """`arrivals_s`: when pieces with text came. `error`: its kind (`http_429`, `connect`, `timeout`, `broken`, ...).
    `claimed_*`: the server's usage. `text`: all that came, where it is kept."""

    outcome: Outcome
    intended_s: float
    sent_s: float
    done_s: float
    arrivals_s: "array[float]"
    number: int = 0
    turn: int = 1
    conversation: int = 0
    error: str | None = None
    detail: str = ""
    status: int | None = None
    finish_reason: str | None = None
    asked_input: int | None = None
    asked_output: int | None = None
    claimed_input: int | None = None
    claimed_output: int | None = None
    claimed_cached: int | None = None
    request_id: str | None = None
    text: str = ""
    content: str = ""

    @property
    def output_tokens(self) -> int:
        """The server's count; where it gives none, pieces that came."""
        return len(self.arrivals_s) if self.claimed_output is None else self.claimed_output

    @property
    def ttft_ms(self) -> float | None:
        """From the intended instant to the first piece with text."""
        return (self.arrivals_s[0] - self.intended_s) * 1000 if self.arrivals_s else None

    @property
    def ttft_sent_ms(self) -> float | None:
        """The same from when it was really sent."""
        return (self.arrivals_s[0] - self.sent_s) * 1000 if self.arrivals_s else None

    @property
    def e2e_ms(self) -> float | None:
        """From the intended instant to the last piece with text."""
        return (self.arrivals_s[-1] - self.intended_s) * 1000 if self.arrivals_s else None

    @property
    def e2e_sent_ms(self) -> float | None:
        """The same from when it was really sent."""
        return (self.arrivals_s[-1] - self.sent_s) * 1000 if self.arrivals_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first."""
        if not self.arrivals_s or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) * 1000 / (self.output_tokens - 1)

    def gaps_ms(self) -> list[float]:
        """Between one piece with text and the next."""
        times = self.arrivals_s
        return [(after - before) * 1000 for before, after in pairwise(times)]
