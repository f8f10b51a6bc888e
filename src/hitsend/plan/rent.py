"""Managed tokens or machines of one's own: `hitsend plan rent-or-buy`.

Enters: what the traffic costs at a managed price, what a dedicated replica costs a month and how fast it is. Leaves:
the traffic at which they meet, what each costs now, and how far the answer depends on what nobody knows. Always true:
managed cost grows with traffic, dedicated cost in steps of a replica; people, spare replicas and idle time are on the
dedicated side; where a plausible change turns the answer round, nobody wins and it says so. Next: `fleet.py`.
"""

import math

import msgspec

from hitsend.core.errors import ConfigError

SECONDS_PER_DAY = 86_400
CLEAR = 1.25
"""Below this factor between the two, neither wins clearly: a judgement, about the spread of one rental's price."""
MAX_REPLICAS = 100_000
LEAST, MOST = 1e-6, 10**12
"""Of any number that is asked with."""


class RentQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `managed_usd`: of the traffic as it is, in `days` days. Dedicated costs are of as many days."""

    managed_usd: float
    requests: int
    output_tokens: float
    """Of the whole traffic."""
    dedicated_usd: float
    """Of one replica."""
    ops_usd: float = 0.0
    redundancy: int = 0
    """Replicas beyond those that the peak needs."""
    days: float = 30.0
    tokens_per_s: float | None = None
    """Output of one replica within its latency goal. None: one replica is taken to carry everything."""
    utilization: float = 0.7
    """Of its rate, what a replica is loaded with at peak."""
    peak_factor: float = 3.0
    """Peak / mean traffic."""

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        for name, value in (
            ("--dedicated-cost", self.dedicated_usd),
            ("--requests", self.requests),
            ("the managed cost (--price, --input, --output)", self.managed_usd),
            ("--days", self.days),
            ("--tokens-per-s", self.tokens_per_s),
        ):
            if value is not None and not LEAST <= value <= MOST:
                raise ConfigError(f"{name} is {value}, needed is above 0 ({LEAST:g}) and at most {MOST:,}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"--utilization is {self.utilization}, needed is above 0 and at most 1")
        if not 1 <= self.peak_factor <= MOST:
            raise ConfigError(f"--peak-factor is {self.peak_factor}, needed is 1 to {MOST:,}")
        for name, value in (("--ops-cost", self.ops_usd), ("--redundancy", self.redundancy)):
            if not 0 <= value <= MOST:
                raise ConfigError(f"{name} is {value}, needed is 0 to {MOST:,}")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one number, and managed / dedicated cost then."""

    what: str
    value: str
    ratio: float


class RentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Crossovers are factors of the traffic as it is. `crossover` None: never; `settled`: from here on for
    good, past the steps at which another replica is needed."""

    question: RentQuestion
    dedicated_usd: float
    replicas: int
    mean_utilization: float | None
    crossover: float | None
    settled: float | None
    crossover_utilization: float | None
    cases: tuple[Case, ...]

    @property
    def ratio(self) -> float:
        """Managed / dedicated, with the traffic as it is."""
        return self.question.managed_usd / self.dedicated_usd

    @property
    def is_clear(self) -> bool:
        """By more than a little, and in every case that was tried."""
        sides = {self.ratio > 1, *(case.ratio > 1 for case in self.cases)}
        return len(sides) == 1 and max(self.ratio, 1 / self.ratio) >= CLEAR


def plan_rent(question: RentQuestion) -> RentPlan:
    """Raises ConfigError that names the flag."""
    question.check()
    replicas = replicas_needed(question, 1.0)
    first, settled = crossovers(question)
    return RentPlan(
        question=question,
        dedicated_usd=dedicated_usd(question, 1.0),
        replicas=replicas,
        mean_utilization=_utilization(question, 1.0),
        crossover=first,
        settled=settled,
        crossover_utilization=None if first is None else _utilization(question, first),
        cases=sensitivity(question),
    )


def mean_tokens_per_s(question: RentQuestion, factor: float) -> float:
    """Output, over all hours."""
    return question.output_tokens * factor / (question.days * SECONDS_PER_DAY)


def replica_limit(question: RentQuestion) -> float:
    """The factor of traffic that one replica carries at peak."""
    if question.tokens_per_s is None or not question.output_tokens:
        return math.inf
    return question.tokens_per_s * question.utilization / (mean_tokens_per_s(question, 1.0) * question.peak_factor)


def replicas_needed(question: RentQuestion, factor: float) -> int:
    """ceil(peak tokens/s / (tokens/s * utilisation)), at least one, and the spare ones."""
    limit = replica_limit(question)
    # a hair of slack, so that a whole number of replicas isn't one more by rounding
    return max(1, math.ceil(factor / limit - 1e-9)) + question.redundancy


def dedicated_usd(question: RentQuestion, factor: float) -> float:
    """Replicas and the people who run them."""
    return replicas_needed(question, factor) * question.dedicated_usd + question.ops_usd


def crossovers(question: RentQuestion) -> tuple[float | None, float | None]:
    """The first factor at which dedicated isn't dearer, and the one after which it never is again.

    With n replicas for traffic both meet at ((n + spare) * C + ops) / managed; that holds where n replicas carry so
    much.
    """
    limit = replica_limit(question)
    first = settled = None
    if limit == math.inf:
        meet = dedicated_usd(question, 0.0) / question.managed_usd
        return meet, meet
    # past this many, each further replica either pays for itself or never does
    per_replica = question.managed_usd * limit
    if per_replica <= question.dedicated_usd:
        most = 1
    else:
        fixed = question.redundancy * question.dedicated_usd + question.ops_usd + question.dedicated_usd
        most = min(MAX_REPLICAS, math.ceil(fixed / (per_replica - question.dedicated_usd)) + 1)
    for count in range(1, most + 1):
        cost = (count + question.redundancy) * question.dedicated_usd + question.ops_usd
        meet = cost / question.managed_usd
        if meet <= count * limit:
            start = max(meet, (count - 1) * limit)
            first = start if first is None else first
            # whoever meets behind the step's beginning was dearer just before
            if settled is None or meet > (count - 1) * limit:
                settled = start
    return first, settled if per_replica > question.dedicated_usd else None


def _utilization(question: RentQuestion, factor: float) -> float | None:
    if question.tokens_per_s is None:
        return None
    return mean_tokens_per_s(question, factor) / (replicas_needed(question, factor) * question.tokens_per_s)


def sensitivity(question: RentQuestion) -> tuple[Case, ...]:
    """Each unknown number lower and higher, the others as they are."""
    replace = msgspec.structs.replace
    changed: list[tuple[str, str, RentQuestion]] = []
    for times in (0.7, 1.3):
        label = f"x {times:g}"
        changed += [
            ("managed price", label, replace(question, managed_usd=question.managed_usd * times)),
            ("dedicated cost", label, replace(question, dedicated_usd=question.dedicated_usd * times)),
        ]
        if question.tokens_per_s is not None:
            faster = replace(question, tokens_per_s=question.tokens_per_s * times)
            changed.append(("tokens per second", label, faster))
    if question.ops_usd:
        changed += [("people", f"x {x:g}", replace(question, ops_usd=question.ops_usd * x)) for x in (0.5, 2.0)]
    if question.tokens_per_s is not None:
        changed += [("utilisation at peak", f"{x:.0%}", replace(question, utilization=x)) for x in (0.4, 0.9)]
    spare = 1 - min(1, question.redundancy)
    changed.append(("spare replicas", str(spare), replace(question, redundancy=spare)))
    traffic = [_case(question, "traffic", f"x {x:g}", factor=x) for x in (0.5, 2.0)]
    return (*traffic, *(_case(other, what, value) for what, value, other in changed))


def _case(question: RentQuestion, what: str, value: str, *, factor: float = 1.0) -> Case:
    return Case(what=what, value=value, ratio=question.managed_usd * factor / dedicated_usd(question, factor))


def usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """A rental's price as one of output tokens, busy all the time: rate / 3,600 / tokens/s * 1e6."""
    return usd_per_hour / 3600 / tokens_per_s * 1e6


def usd_per_million_output(
    usd_per_hour: float, input_per_s: float, output_per_s: float, *, ratio: float = 4.0
) -> float:
    """A rental's price shared between input and output, where an output token counts as `ratio` input tokens: rate /
    3,600 / (input/s / ratio + output/s) (Google's GKE inference recommender, its Cost type)."""
    return usd_per_hour / 3600 / (input_per_s / ratio + output_per_s) * 1e6


def break_even_per_hour(usd_per_hour: float, usd_per_request: float) -> float:
    """Requests an hour at which a rental costs what a managed price does."""
    return usd_per_hour / usd_per_request


def usd_per_request(
    usd_per_hour: float, requests_per_hour: float, *, escalated: float = 0.0, managed: float = 0.0
) -> float:
    """Of one's own machine, where a share of the requests goes to a managed model all the same."""
    return usd_per_hour / requests_per_hour + escalated * managed
