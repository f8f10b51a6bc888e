"""How many GPUs: `hitsend plan fleet`.

Enters: a peak, latency goals, traffic, and a function that simulates one replica. Leaves: a `FleetPlan`: the rate one
replica carries within the goals, replicas for the peak, one more for a failure, thresholds, money, and a range. Always
true: GPUs = peak tokens/s * safety / tokens/s of one replica *at the goal*; the range comes from the interval of the
step times and from other draws of the traffic, and is wider than either alone; the simulator is handed in, so this
module knows no scheduler. Next: `fleet_text.py`.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.timing import StepTiming, Work
from hitsend.plan.traffic import Arrival, at_rate

COUNTED = (0.4, 0.8)
"""The part of a run's requests that is counted: an empty server is fast, and so is one that nobody else comes to."""
SPANS = 4
"""A run lasts so many times what one request takes at the goal, so that as many are in flight as will be."""
MAX_REQUESTS = 4000
"""Of one run; above, it is shorter, and flatters."""
SEARCH_STEPS = 5
SLOWEST_PER_S = 1 / 3600
NEAR = 1.25
"""How far another draw's limit may lie before the search starts wider."""
MOST, MOST_DOUBLINGS = 1e9, 64.0
"""Bounds of what can be asked; traffic that doubles so often while a replica starts can't be served by starting it."""
CURVE = (0.25, 0.5, 0.75, 1.0, 1.25)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's room."""

    slots: int
    cells_per_slot: int
    cells: int
    step_tokens: int = 2048
    max_waiting: int = 256
    tpot_target_s: float = 0.1
    ttft_target_s: float = 2.0
    """What the scheduler paces its steps by (`serve/loop/pace.py`): set to the goal, as an operator would."""
    prefix_cache_bytes: int = 0
    """Of saved prefixes; 0: none is ever used again."""
    prefix_step: int = 64
    kv_bytes_per_token: int = 1
    drafts: bool = False
    """Whether answers are guessed ahead from their own text."""


class Served(msgspec.Struct, frozen=True):
    """What became of one request. `ttft_s` None: it was refused, or waited too long."""

    at_s: float
    ttft_s: float | None
    tpot_s: float | None
    tokens: int
    ended_s: float
    cached: int = 0


Simulate = Callable[[Sequence[Arrival], StepTiming, Place], list[Served]]


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at most, kept by at least this share of the requests."""

    ttft_s: float
    tpot_s: float
    share: float = 0.95

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        if self.ttft_s <= 0 or self.tpot_s <= 0:
            raise ConfigError("--slo-ttft and --slo-tpot: needed is above 0")
        if not 0 < self.share <= 1:
            raise ConfigError(f"--slo-share is {self.share}, needed is above 0 and at most 1")

    def is_kept(self, one: Served) -> bool:
        """Both, by one request."""
        return one.ttft_s is not None and one.ttft_s <= self.ttft_s and (one.tpot_s or 0.0) <= self.tpot_s


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One rate on one replica."""

    per_s: float
    kept: float
    """Share of requests within the goal."""
    goodput_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    in_flight: float


class FleetQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `draws`: the same traffic with several seeds, each of `MAX_REQUESTS`, or one trace, all of it.
    Times of steps: as planned, and at both ends of the interval."""

    peak_per_s: float
    slo: Slo
    draws: tuple[tuple[Arrival, ...], ...]
    place: Place
    timing: StepTiming
    fast: StepTiming
    slow: StepTiming
    requests: int = 100
    """At least, in one run."""
    gpus_per_replica: int = 1
    safety: float = 1.2
    cold_start_s: float = 120.0
    doubling_s: float = 900.0
    """In this time traffic can double."""
    usd_per_gpu_hour: float | None = None
    idle_hours_per_day: float = 8.0

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        self.slo.check()
        for name, value in (
            ("--peak-rps", self.peak_per_s),
            ("--doubling", self.doubling_s),
            ("--safety", self.safety),
        ):
            if not 0 < value <= MOST:
                raise ConfigError(f"{name} is {value}, needed is above 0 and at most {MOST:g}")
        for name, value, most in (
            ("--cold-start", self.cold_start_s, MOST_DOUBLINGS * self.doubling_s),
            ("--idle-hours", self.idle_hours_per_day, 24.0),
        ):
            if not 0 <= value <= most:
                raise ConfigError(f"{name} is {value}, needed is 0 to {most:g}")
        price = self.usd_per_gpu_hour
        if price is not None and not 0 <= price <= MOST:
            raise ConfigError(f"--usd-per-gpu-hour is {price}, needed is 0 to {MOST:g}")
        longest = max(one.input + one.output for draw in self.draws for one in draw)
        if longest > self.place.cells_per_slot or longest > self.place.cells:
            raise ConfigError(f"the longest request has {longest:,} tokens, a replica's cache {self.place.cells:,}")


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `per_replica_per_s` 0: no rate keeps the goal, and `replicas` is None."""

    question: FleetQuestion
    per_replica_per_s: float
    slowest_per_s: float
    fastest_per_s: float
    tokens_per_s: float
    replicas: int | None
    fewest: int | None
    most: int | None
    curve: tuple[Level, ...]
    scale_up_per_s: float
    scale_down_per_s: float
    in_flight_at_scale_up: float

    @property
    def with_spare(self) -> int | None:
        """One more, for a failure."""
        return None if self.replicas is None else self.replicas + 1


def plan_fleet(question: FleetQuestion, simulate: Simulate) -> FleetPlan:
    """Raises ConfigError that names the flag."""
    question.check()
    first = question.draws[0]
    found = sustainable(question, first, question.timing, simulate)
    others = [sustainable(question, draw, question.timing, simulate, near=found) for draw in question.draws[1:]]
    rates = [found, *others]
    middle = statistics.median(rates)
    slow = sustainable(question, first, question.slow, simulate, near=found)
    fast = sustainable(question, first, question.fast, simulate, near=found)
    low, high = min(slow, *rates), max(fast, *rates)
    curve = (
        tuple(level(question, first, middle * share, question.timing, simulate) for share in CURVE) if middle else ()
    )
    # what comes during a cold start must still find room
    grows = 2 ** (question.cold_start_s / question.doubling_s)
    scale_up = middle / grows
    near = min(curve, key=lambda one: abs(one.per_s - scale_up)) if curve else None
    return FleetPlan(
        question=question,
        per_replica_per_s=middle,
        slowest_per_s=low,
        fastest_per_s=high,
        tokens_per_s=middle * statistics.mean(one.output for one in first),
        replicas=replicas_for(question.peak_per_s, question.safety, middle),
        fewest=replicas_for(question.peak_per_s, question.safety, high),
        most=replicas_for(question.peak_per_s, question.safety, low),
        curve=curve,
        scale_up_per_s=scale_up,
        # half: one replica fewer must not ask for one more
        scale_down_per_s=scale_up / 2,
        in_flight_at_scale_up=near.in_flight if near else 0.0,
    )


def replicas_for(peak: float, safety: float, per_replica: float) -> int | None:
    """ceil(peak * safety / per replica), in one unit: requests or tokens a second. None: a replica carries nothing."""
    return None if per_replica <= 0 else max(1, math.ceil(peak * safety / per_replica - 1e-9))


def concurrency(per_s: float, ttft_s: float, tpot_s: float, output_tokens: float) -> float:
    """Requests in flight: Little's law, rate * (TTFT + tokens * TPOT)."""
    return per_s * (ttft_s + output_tokens * tpot_s)


def sustainable(
    question: FleetQuestion, draw: Sequence[Arrival], timing: StepTiming, simulate: Simulate, *, near: float = 0.0
) -> float:
    """The highest rate at which enough requests keep the goal, by halving between one that does and one that doesn't.
    `near`: where it is expected. 0: none was found down to one request an hour."""

    def keeps(per_s: float) -> bool:
        return level(question, draw, per_s, timing, simulate).kept >= question.slo.share

    step = NEAR if near else 2.0
    start = near or 1 / _busy_s(draw, timing)
    if keeps(start):
        low, high = start, start * step
        while keeps(high) and high < question.peak_per_s * 64:
            low, high = high, high * step
    else:
        if not keeps(SLOWEST_PER_S):
            return 0.0
        low, high = start / step, start
        while not keeps(low) and low > SLOWEST_PER_S:
            low, high = low / step, low
    for _ in range(SEARCH_STEPS - 3 if near else SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _busy_s(draw: Sequence[Arrival], timing: StepTiming) -> float:
    """One average request alone: where the search begins."""
    entry = statistics.mean(one.input for one in draw)
    leave = statistics.mean(one.output for one in draw)
    alone = Work(decodes=1, held=round(entry + leave / 2))
    return timing.step_s(Work(pieces=1, prefill=round(entry))) + leave * timing.step_s(alone)


def level(
    question: FleetQuestion, draw: Sequence[Arrival], per_s: float, timing: StepTiming, simulate: Simulate
) -> Level:
    """One simulated rate, its middle part."""
    part = draw[: requests_for(question, draw, per_s)]
    served = simulate(at_rate(part, per_s), timing, question.place)
    first, last = (int(len(served) * share) for share in COUNTED)
    counted = served[first : max(last, first + 1)]
    kept = sum(question.slo.is_kept(one) for one in counted) / len(counted)
    ttft = sorted(one.ttft_s if one.ttft_s is not None else math.inf for one in counted)
    tpot = sorted(one.tpot_s for one in counted if one.tpot_s is not None) or [0.0]
    return Level(
        per_s=per_s,
        kept=kept,
        goodput_per_s=per_s * kept,
        output_tokens_per_s=_per_s(served, counted[0].at_s, counted[-1].at_s),
        ttft_p50_s=nearest(ttft, 0.5),
        ttft_p99_s=nearest(ttft, 0.99),
        tpot_p50_s=nearest(tpot, 0.5),
        # Little's law
        in_flight=per_s * statistics.mean(one.ended_s - one.at_s for one in counted),
    )


def _per_s(served: Sequence[Served], start_s: float, stop_s: float) -> float:
    """Output tokens a second between two instants; a request's tokens are spread evenly over its decoding."""
    found = 0.0
    for one in served:
        if one.ttft_s is not None:
            first = one.at_s + one.ttft_s
            inside = min(one.ended_s, stop_s) - max(first, start_s)
            if one.tokens == 1:
                found += start_s <= first < stop_s
            elif inside > 0:
                found += one.tokens * inside / (one.ended_s - first)
    return found / max(1e-9, stop_s - start_s)


def requests_for(question: FleetQuestion, draw: Sequence[Arrival], per_s: float) -> int:
    """How many a run needs: rate * time of one request at the goal * `SPANS`. A trace is taken whole."""
    if len(draw) < MAX_REQUESTS:
        return len(draw)
    tokens = statistics.mean(one.output for one in draw)
    busy = concurrency(per_s, question.slo.ttft_s, question.slo.tpot_s, tokens)
    return min(MAX_REQUESTS, max(question.requests, math.ceil(busy * SPANS)))


def nearest(values: Sequence[float], share: float) -> float:
    """Nearest rank of sorted values."""
    return values[min(len(values) - 1, max(0, math.ceil(share * len(values)) - 1))]
