"""hitsend's own scheduler on a clock that only counts: what becomes of requests, without a model.

Enters: arrivals, how long steps take, slots and cells. Leaves: one `Served` per request. Always true: the scheduler is
`serve/loop/` itself, through `Loop`, `LoopLimits` and `Decoder` and nothing else, so what changes there changes here;
no wall clock and no randomness: the same arrivals give the same figures. The one module of the planner that may
import the loop (pyproject.toml says so); it and numpy are loaded only where something is simulated. Next: `fleet.py`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hitsend.core.request import SamplingParams
from hitsend.plan.fleet import Place, Served
from hitsend.plan.timing import StepTiming
from hitsend.plan.traffic import Arrival
from hitsend.serve.loop.decoder import Batch
from hitsend.serve.loop.messages import Done, Report, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop

VOCAB = 64
HEADER_TOKENS = 6
"""Tokens that make a prompt unlike any other: a base-62 number."""
_SAMPLING = SamplingParams(temperature=0.0)


class CountedClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def wall(self) -> float:
        """The same: nothing here is shown to people."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let them pass."""
        self._now += seconds


class TimedDecoder:
    """A decoder whose steps only take time. The shared beginning of prompts costs time once."""

    def __init__(self, clock: CountedClock, timing: StepTiming, place: Place, *, shared: int) -> None:
        self.vocab_size = VOCAB
        self.num_slots = place.slots
        self.cells_per_slot = place.cells_per_slot
        self.num_cells = place.cells
        self.max_batch_tokens = place.step_tokens
        self.end_token_ids: frozenset[int] = frozenset()
        self.adapter_names: frozenset[str] = frozenset()
        self.can_go_back = True
        self.token_bytes = tuple(bytes([token]) for token in range(VOCAB))
        self._clock, self._timing = clock, timing
        self._shared, self._has_shared = shared, False
        self._held = np.zeros(place.slots, dtype=np.int64)

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Let the step's time pass. A slot with one token has a sequence that decodes, or a prompt's last piece."""
        counts = np.bincount(batch.slots, minlength=self.num_slots)
        single = counts == 1
        decodes = int(single.sum())
        computed = ~single[batch.slots]
        if self._has_shared and self._shared:
            computed &= batch.positions >= self._shared
        context = int(self._held[single].sum())
        self._clock.advance(self._timing.step_s(decodes, int(computed.sum()), context))
        np.maximum.at(self._held, batch.slots, batch.positions + 1)
        self._has_shared = self._has_shared or bool((batch.positions >= self._shared).any())
        return np.zeros((int(batch.wants_logits.sum()), VOCAB), dtype=np.float32)

    def release(self, slot: int) -> None:
        """Forget what it holds."""
        self._held[slot] = 0

    def move(self, source: int, target: int) -> None:
        """The length is all there is."""
        self._held[target], self._held[source] = self._held[source], 0

    def copy(self, source: int, target: int) -> None:
        """The length is all there is."""
        self._held[target] = self._held[source]

    def truncate(self, slot: int, num_tokens: int) -> bool:
        """Always possible."""
        self._held[slot] = min(int(self._held[slot]), num_tokens)
        return True

    def save(self, slot: int) -> NDArray[np.uint8]:
        """The length, as bytes."""
        return np.frombuffer(int(self._held[slot]).to_bytes(8, "little"), dtype=np.uint8).copy()

    def restore(self, slot: int, saved: NDArray[np.uint8]) -> None:
        """What `save` gave."""
        self._held[slot] = int.from_bytes(saved.tobytes(), "little")


def simulate(arrivals: Sequence[Arrival], timing: StepTiming, place: Place) -> list[Served]:
    """One replica, all arrivals, to the end. In the order of arrival."""
    return _Run(arrivals, timing, place).served()


class _Run:
    def __init__(self, arrivals: Sequence[Arrival], timing: StepTiming, place: Place) -> None:
        self._clock = CountedClock()
        shared = max((one.shared for one in arrivals), default=0)
        decoder = TimedDecoder(self._clock, timing, place, shared=shared)
        limits = LoopLimits(
            step_tokens=place.step_tokens,
            max_waiting=place.max_waiting,
            tpot_target_s=place.tpot_target_s,
            ttft_target_s=place.ttft_target_s,
        )
        self._loop = Loop(decoder, limits, self._clock)
        self._arrivals = arrivals
        self._first: dict[str, float] = {}
        self._done: dict[str, Done] = {}
        self._run()

    def served(self) -> list[Served]:
        """What became of each."""
        found = []
        for number, one in enumerate(self._arrivals):
            done, first = self._done[str(number)], self._first.get(str(number))
            if done.code is not None or first is None:
                found.append(Served(one.at_s, None, None, 0, done.at))
                continue
            tokens = done.num_output_tokens
            tpot = (done.at - first) / (tokens - 1) if tokens > 1 else None
            found.append(Served(one.at_s, first - one.at_s, tpot, tokens, done.at))
        return found

    def _run(self) -> None:
        number = 0
        while len(self._done) < len(self._arrivals):
            now = self._clock.now()
            while number < len(self._arrivals) and self._arrivals[number].at_s <= now:
                self._loop.handle(_submit(number, self._arrivals[number]))
                number += 1
            if self._loop.has_work:
                self._take(self._loop.step())
            elif number < len(self._arrivals):
                self._clock.advance(self._arrivals[number].at_s - now)
            else:
                # somebody waits for a deadline
                self._clock.advance(1.0)

    def _take(self, reports: Iterable[Report]) -> None:
        for report in reports:
            if isinstance(report, Done):
                self._done[report.request_id] = report
            elif isinstance(report, StepReport):
                for row in report.rows:
                    if row.sampled:
                        self._first.setdefault(row.request_id, report.ended_at)
                for done in report.done:
                    self._done[done.request_id] = done


def _submit(number: int, one: Arrival) -> Submit:
    return Submit(str(number), _prompt(number, one), _SAMPLING, (1,), one.output, deadline_s=DEADLINE_S)


DEADLINE_S = 120.0
"""Of waiting for a place; whoever waits longer is refused, and counts as missed."""


def _prompt(number: int, one: Arrival) -> tuple[int, ...]:
    """What all share, then a number of its own, then filling."""
    header = []
    for _ in range(HEADER_TOKENS):
        number, digit = divmod(number, VOCAB - 2)
        header.append(digit + 2)
    return ((1,) * one.shared + tuple(header) + (1,) * one.input)[: one.input]
