"""hitsend's own scheduler on a clock that only counts: what becomes of requests, without a model.

Enters: arrivals, how long steps take, slots and cells. Leaves: one `Served` per request. Always true: the scheduler is
`serve/loop/` itself, with its prefix cache and its drafts, through `Loop`, `LoopLimits`, `Speculator` and `Decoder` and
nothing else, so what changes there changes here; no wall clock and no chance: the same arrivals give the same figures.
With `timed_decoder.py` the part of the planner that may import the loop (pyproject.toml says so); both and numpy are
loaded only where something is simulated. Next: `fleet.py`.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from hitsend.core.request import SamplingParams
from hitsend.plan.fleet import Place, Served
from hitsend.plan.steps import Answers, Edge
from hitsend.plan.timed_decoder import PLAIN, VOCAB, CountedClock, TimedDecoder, answer
from hitsend.plan.timing import StepTiming, Work
from hitsend.plan.traffic import Arrival
from hitsend.serve.loop.messages import Done, Report, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.speculate import KnownCosts
from hitsend.serve.loop.step import Loop
from hitsend.serve.loop.verify import PromptLookup, Speculator

HEADER_TOKENS = 6
"""Tokens that make a prompt unlike any other: a number in plain tokens."""
TRIED = 7
"""Tokens more, by which the engine finds at its start what a token more costs (`serve/engine/speculating.py`)."""
_SAMPLING = SamplingParams(temperature=0.0)
DEADLINE_S = 120.0
"""Of waiting for a place; whoever waits longer is refused, and counts as missed."""


def simulate(
    arrivals: Sequence[Arrival],
    timing: StepTiming,
    place: Place,
    *,
    concurrency: int | None = None,
    answers: Answers | None = None,
    edge: Edge | None = None,
) -> list[Served]:
    """One replica, all arrivals, to the end; in their order. `concurrency`: a closed loop, in which so many clients take
    one conversation (or lone request) after the other, whatever their `at_s`."""
    return _Run(arrivals, timing, place, concurrency, (answers or Answers(), edge or Edge())).served()


class _Run:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        timing: StepTiming,
        place: Place,
        concurrency: int | None,
        around: tuple[Answers, Edge],
    ) -> None:
        self._clock = CountedClock()
        self._decoder = TimedDecoder(self._clock, timing, place)
        self._loop = Loop(self._decoder, _limits(place), self._clock, speculator=_speculator(timing, place))
        self._arrivals, self._place, self._between_s = arrivals, place, getattr(timing, "between_ms", 0.0) / 1e3
        self._answers, self._edge = around
        self._sent_s = [0.0] * len(arrivals)
        self._first: dict[int, float] = {}
        self._done: dict[int, Done] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        self._due: list[tuple[float, int]] = []
        self._edge_free_s = 0.0
        self._follows, firsts = _turns(arrivals)
        self._waiting: Iterator[int] = iter(firsts)
        if concurrency is None:
            for number in firsts:
                self._send(number, arrivals[number].at_s)
        else:
            for _, number in zip(range(concurrency), self._waiting, strict=False):
                self._send(number, 0.0)
        self._is_closed = concurrency is not None
        self._run()

    def served(self) -> list[Served]:
        """What became of each."""
        after_s = self._edge.after_ms / 1e3
        found = []
        for number, sent_s in enumerate(self._sent_s):
            done, first = self._done[number], self._first.get(number)
            if done.code is not None or first is None:
                found.append(Served(sent_s, None, None, 0, done.at))
                continue
            tokens = done.num_output_tokens
            tpot = (done.at - first) / (tokens - 1) if tokens > 1 else None
            found.append(
                Served(sent_s, first + after_s - sent_s, tpot, tokens, done.at + after_s, done.num_cached_tokens)
            )
        return found

    def _send(self, number: int, at_s: float) -> None:
        """The client sends it; the edge takes one after the other."""
        self._sent_s[number] = at_s
        self._edge_free_s = max(at_s + self._edge.before_ms / 1e3, self._edge_free_s + self._edge.each_ms / 1e3)
        heapq.heappush(self._due, (self._edge_free_s, number))

    def _run(self) -> None:
        while len(self._done) < len(self._arrivals):
            now = self._clock.now()
            while self._due and self._due[0][0] <= now:
                self._submit(heapq.heappop(self._due)[1])
            if self._loop.has_work:
                reports = self._loop.step()
                self._take(reports)
                if any(isinstance(report, StepReport) for report in reports):
                    self._clock.advance(self._between_s)
            elif self._due:
                self._clock.advance(self._due[0][0] - now)
            else:
                # somebody waits for a deadline
                self._clock.advance(1.0)

    def _take(self, reports: Iterable[Report]) -> None:
        for report in reports:
            if isinstance(report, Done):
                self._end(report)
            elif isinstance(report, StepReport):
                for row in report.rows:
                    if row.sampled:
                        self._first.setdefault(int(row.request_id), report.ended_at)
                for done in report.done:
                    self._end(done)

    def _end(self, done: Done) -> None:
        """Its client goes on: with the next turn, or with somebody else's first."""
        number = int(done.request_id)
        self._done[number] = done
        following = self._follows.get(number)
        if following is None and self._is_closed:
            following = next(self._waiting, None)
        if following is not None:
            self._send(following, done.at + self._edge.after_ms / 1e3)

    def _submit(self, number: int) -> None:
        one = self._arrivals[number]
        code = PLAIN + number % (VOCAB - PLAIN)
        before = self._known.get(one.conversation or "", ())[: one.repeated]
        prompt = _prompt(number, one, before, code)
        says = answer(one.output, self._answers, number)
        self._decoder.expect(code, len(prompt), says)
        if one.conversation is not None:
            self._known[one.conversation] = (*prompt, *says)
        salt = "everybody" if self._place.prefix_cache_bytes else None
        self._loop.handle(
            Submit(str(number), prompt, _SAMPLING, (1,), one.output, deadline_s=DEADLINE_S, cache_salt=salt)
        )


def _limits(place: Place) -> LoopLimits:
    return LoopLimits(
        step_tokens=place.step_tokens,
        max_waiting=place.max_waiting,
        tpot_target_s=place.tpot_target_s,
        ttft_target_s=place.ttft_target_s,
        prefix_cache_bytes=place.prefix_cache_bytes,
        prefix_step=place.prefix_step,
    )


def _speculator(timing: StepTiming, place: Place) -> Speculator | None:
    """As the engine makes it at its start."""
    if not place.drafts:
        return None
    one, more = (timing.step_s(Work(decodes=1, drafted=drafted)) for drafted in (0, TRIED))
    token_s = max(0.0, more - one) / TRIED
    return Speculator(PromptLookup(), alone=KnownCosts(max(0.0, one - token_s), token_s))


def _turns(arrivals: Sequence[Arrival]) -> tuple[dict[int, int], list[int]]:
    """Which request follows which, and those that follow none."""
    follows: dict[int, int] = {}
    last: dict[str, int] = {}
    firsts = []
    for number, one in enumerate(arrivals):
        name = one.conversation
        if name is not None and name in last:
            follows[last[name]] = number
        else:
            firsts.append(number)
        if name is not None:
            last[name] = number
    return follows, firsts


def _prompt(number: int, one: Arrival, before: tuple[int, ...], code: int) -> tuple[int, ...]:
    """What all share, or what was said before; then a number of its own, filling, and whose answer follows."""
    header = []
    for _ in range(HEADER_TOKENS):
        number, digit = divmod(number, PLAIN - 2)
        header.append(digit + 2)
    begin = before or (1,) * one.shared
    return ((*begin, *header) + (1,) * one.input)[: one.input - 1] + (code,)
