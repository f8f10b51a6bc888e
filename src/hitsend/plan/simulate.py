"""hitsend's own scheduler on a clock that only counts: what becomes of requests, without a model.

Enters: arrivals, how long steps take, slots and cells. Leaves: one `Served` per request. Always true: the scheduler is
`serve/loop/` itself, with its prefix cache and its drafts, through `Loop`, `LoopLimits`, `Speculator` and `Decoder` and
nothing else, so what changes there changes here; no wall clock and no chance: the same arrivals give the same figures.
With `timed_decoder.py` the part of the planner that may import the loop (pyproject.toml says so); both and numpy are
loaded only where something is simulated. Next: `fleet.py`.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from hitsend.core.request import SamplingParams
from hitsend.plan.fleet import Place, Served
from hitsend.plan.steps import Answers, Edge
from hitsend.plan.timed_decoder import PLAIN, VOCAB, CountedClock, TimedDecoder, answer, plain
from hitsend.plan.timing import StepTiming, Work
from hitsend.plan.traffic import Arrival
from hitsend.serve.loop.messages import Done, Report, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.speculate import GRAM, KnownCosts
from hitsend.serve.loop.step import Loop
from hitsend.serve.loop.verify import PromptLookup, Speculator

HEADER_TOKENS = 6
"""Tokens that make a prompt unlike any other: a number in plain tokens."""
TRIED = 7
"""Tokens more, by which the engine finds at its start what a token more costs (`serve/engine/speculating.py`)."""
_SAMPLING = SamplingParams(temperature=0.0)
WARM_SIZES, WARM_INPUT, WARM_OUTPUT = (1, 4, 8), 96, 24
"""Requests at once before the first arrival: a server that just started doesn't know what its steps cost, and paces
prompts otherwise than one that has worked."""
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
    usual: StepTiming | None = None,
) -> list[Served]:
    """One replica, all arrivals, to the end; in their order.

    `concurrency`: a closed loop, in which so many clients take one conversation (or lone request) after the other,
    whatever their `at_s`. `usual`: what steps took before, if that was something else.
    """
    run = _Run(arrivals, timing, place, (answers or Answers(), edge or Edge()), usual or timing)
    run.warm_up(usual or timing)
    run.all(concurrency)
    return run.served()


class _Run:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        timing: StepTiming,
        place: Place,
        around: tuple[Answers, Edge],
        usual: StepTiming,
    ) -> None:
        self._clock = CountedClock()
        self._timing = timing
        self._zero_s = 0.0
        self._decoder = TimedDecoder(self._clock, timing, place)
        self._loop = Loop(self._decoder, _limits(place), self._clock, speculator=_speculator(usual, place))
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
        self._is_closed = False

    def warm_up(self, usual: StepTiming) -> None:
        """Steps before anything counts."""
        self._decoder.timing = usual
        most = self._place.cells_per_slot
        entry, leave = max(1, min(WARM_INPUT, most // 4)), max(1, min(WARM_OUTPUT, most // 4))
        for at_once in WARM_SIZES:
            for number in range(min(at_once, self._place.slots)):
                prompt = (1,) * (entry - 1) + (PLAIN + number,)
                self._decoder.expect(PLAIN + number, entry, self._says(leave, -1 - number))
                self._loop.handle(Submit(f"warm {number}", prompt, _SAMPLING, (1,), leave, deadline_s=DEADLINE_S))
            while self._loop.has_work:
                self._loop.step()
        self._decoder.timing = self._timing
        self._zero_s = self._clock.now()

    def all(self, concurrency: int | None) -> None:
        """Every request, to its end."""
        self._is_closed = concurrency is not None
        firsts = self._waiting if concurrency is None else islice(self._waiting, concurrency)
        for number in firsts:
            self._send(number, self._zero_s + (0.0 if self._is_closed else self._arrivals[number].at_s))
        self._run()

    def served(self) -> list[Served]:
        """What became of each."""
        after_s, zero_s = self._edge.after_ms / 1e3, self._zero_s
        found = []
        for number, sent_s in enumerate(self._sent_s):
            done, first = self._done[number], self._first.get(number)
            if done.code is not None or first is None:
                found.append(Served(sent_s - zero_s, None, None, 0, done.at - zero_s))
                continue
            tokens = done.num_output_tokens
            tpot = (done.at - first) / (tokens - 1) if tokens > 1 else None
            ended_s, cached = done.at + after_s - zero_s, done.num_cached_tokens
            found.append(Served(sent_s - zero_s, first + after_s - sent_s, tpot, tokens, ended_s, cached))
        return found

    def _send(self, number: int, at_s: float) -> None:
        """The client sends it."""
        self._sent_s[number] = at_s
        heapq.heappush(self._due, (at_s + self._edge.before_ms / 1e3, number))

    def _let_in(self, now: float) -> None:
        """The edge brings one after the other."""
        while self._due and self._due[0][0] <= now:
            due_s, number = heapq.heappop(self._due)
            at_s = max(due_s, self._edge_free_s)
            if at_s > now:
                heapq.heappush(self._due, (at_s, number))
                continue
            self._edge_free_s = at_s + self._edge.each_ms / 1e3
            self._submit(number)

    def _run(self) -> None:
        while len(self._done) < len(self._arrivals):
            now = self._clock.now()
            self._let_in(now)
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

    def _says(self, tokens: int, seed: int) -> list[int]:
        """What matters of an answer's tokens is whether they could have been guessed."""
        return answer(tokens, self._answers, seed) if self._place.drafts else [0] * tokens

    def _submit(self, number: int) -> None:
        one = self._arrivals[number]
        code = PLAIN + number % (VOCAB - PLAIN)
        before = self._known.get(one.conversation or "", ())[: one.repeated]
        prompt = _prompt(number, one, before, code)
        is_known = self._place.drafts and one.output_ids
        says = list(plain(one.output_ids)) if is_known else self._says(one.output, number)
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
    """What all share, or what was said before; then a number of its own, filling, and whose answer follows. What is
    known is taken as it is, behind what was said before; whose it is stands before the tokens that an answer's
    beginning is known by."""
    if one.prompt_ids:
        at = max(0, one.input - 1 - GRAM)
        said = plain(one.prompt_ids)
        return (*before[:at], *said[len(before[:at]) : at], code, *said[at + 1 :])
    header = []
    for _ in range(HEADER_TOKENS):
        number, digit = divmod(number, PLAIN - 2)
        header.append(digit + 2)
    begin = before or (1,) * one.shared
    filled = (*begin, *header, *(1,) * one.input)
    return (*filled[: one.input - 1], code)
