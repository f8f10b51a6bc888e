"""Figures of one level: percentiles, throughput, goodput, errors, and whether the server's usage can be believed.

Enters: samples. Leaves: a `Level`. Always true: percentiles are nearest-rank of what was measured, never interpolated;
latencies are of answers that came whole; an error is never good, one that we cut off counts neither way; a figure that
nothing was measured for is None. Next: `saturation.py`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from hitsend.load.sample import Sample
from hitsend.load.strain import Strain

TOLERATED = 0.02
"""Part by which own and claimed tokens may differ in sum: a text doesn't always tokenise back into what was sampled."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of sorted values: the smallest one that at least `share` of them don't exceed."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


class Spread(msgspec.Struct, frozen=True):
    """A quantity over all requests (or gaps) of a level."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """None where there is nothing."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    p50, p90, p99 = (percentile(found, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(found), math.fsum(found) / len(found), p50, p90, p99, found[-1])


class Slo(msgspec.Struct, frozen=True):
    """What a good answer keeps, in ms; None: anything."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def is_given(self) -> bool:
        """Whether anything is asked."""
        return (self.ttft_ms, self.tpot_ms, self.e2e_ms) != (None, None, None)

    def is_kept(self, sample: Sample) -> bool:
        """Only by a whole answer. A TPOT that doesn't exist (one token) breaks nothing."""
        pairs = ((sample.ttft_ms, self.ttft_ms), (sample.tpot_ms, self.tpot_ms), (sample.e2e_ms, self.e2e_ms))
        kept = all(value is None or limit is None or value <= limit for value, limit in pairs)
        return sample.outcome == "ok" and kept


class Counts(msgspec.Struct, frozen=True):
    """`sent` = ok + errors + aborted + interrupted."""

    sent: int
    ok: int
    errors: int
    aborted: int
    interrupted: int


class UsageCheck(msgspec.Struct, frozen=True):
    """The server's usage beside our own count.

    `method`: tokenize (its own tokenizer over the text that came) or chunks (an answer can't have fewer tokens than
    pieces). `differ`: answers whose counts differ; `over_limit`: that claim more than was allowed; `without`: that came
    without usage. `is_believable` is None where nothing could be checked.
    """

    method: Literal["tokenize", "chunks"]
    checked: int
    differ: int
    own_tokens: int
    claimed_tokens: int
    over_limit: int
    without: int
    prompts_checked: int
    prompts_differ: int
    is_believable: bool | None


class Level(msgspec.Struct, frozen=True):
    """One stage's figures. Times in ms, rates per second of `wall_s` (first request sent to last byte)."""

    mode: Literal["closed", "open"]
    concurrency: int | None
    rate_per_s: float | None
    arrivals: str | None
    round: int
    wall_s: float
    sending_s: float
    requests: Counts
    errors: dict[str, int]
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    cached_tokens_mean: float | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    aborted_tokens: int
    goodput_per_s: float | None
    goodput_share: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    ttft_sent_ms: Spread | None
    e2e_sent_ms: Spread | None
    late_ms: Spread | None
    in_flight_mean: float
    is_growing: bool
    usage: UsageCheck
    client: Strain
    is_interrupted: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a level was, beside its samples. `own`: our own count of an answer's tokens, by the sample's number."""

    mode: Literal["closed", "open"]
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str | None = None
    round: int = 0
    wall_s: float
    sending_s: float
    strain: Strain = Strain()
    slo: Slo = Slo()
    own: dict[int, int] | None = None
    is_exact: bool = False
    is_interrupted: bool = False


def summarise(samples: Sequence[Sample], facts: Facts) -> Level:
    """All figures of one stage."""
    whole = [sample for sample in samples if sample.outcome == "ok"]
    kinds = Counter(sample.outcome for sample in samples)
    wall_s = max(facts.wall_s, 1e-9)
    output = sum(sample.output_tokens for sample in whole)
    inputs = [sample.claimed_input for sample in whole if sample.claimed_input is not None]
    cached = [sample.claimed_cached for sample in whole if sample.claimed_cached is not None]
    good, share = _goodput(samples, facts.slo)
    cut = [len(sample.arrivals_s) for sample in samples if sample.outcome == "aborted"]
    return Level(
        mode=facts.mode,
        concurrency=facts.concurrency,
        rate_per_s=facts.rate_per_s,
        arrivals=facts.arrivals,
        round=facts.round,
        wall_s=facts.wall_s,
        sending_s=facts.sending_s,
        requests=Counts(len(samples), len(whole), kinds["error"], kinds["aborted"], kinds["interrupted"]),
        errors=dict(Counter(sample.error or "?" for sample in samples if sample.outcome == "error").most_common()),
        input_tokens_mean=_mean(inputs),
        output_tokens_mean=_mean([sample.output_tokens for sample in whole]),
        cached_tokens_mean=_mean(cached),
        requests_per_s=len(whole) / wall_s,
        output_tokens_per_s=output / wall_s,
        total_tokens_per_s=(output + sum(inputs)) / wall_s,
        aborted_tokens=sum(cut),
        goodput_per_s=None if good is None else good / wall_s,
        goodput_share=share,
        ttft_ms=spread(sample.ttft_ms for sample in whole),
        tpot_ms=spread(sample.tpot_ms for sample in whole),
        itl_ms=spread(gap for sample in whole for gap in sample.gaps_ms()),
        e2e_ms=spread(sample.e2e_ms for sample in whole),
        ttft_sent_ms=spread(sample.ttft_sent_ms for sample in whole),
        e2e_sent_ms=spread(sample.e2e_sent_ms for sample in whole),
        late_ms=spread((sample.sent_s - sample.intended_s) * 1000 for sample in samples),
        in_flight_mean=math.fsum(sample.done_s - sample.sent_s for sample in samples) / wall_s,
        is_growing=facts.mode == "open" and is_growing(samples, facts.sending_s),
        usage=check_usage(whole, facts.own, is_exact=facts.is_exact),
        client=facts.strain,
        is_interrupted=facts.is_interrupted,
    )


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _goodput(samples: Sequence[Sample], slo: Slo) -> tuple[int | None, float | None]:
    """Answers that kept the SLO, and their part of all that weren't cut off by us."""
    if not slo.is_given():
        return None, None
    tried = [sample for sample in samples if sample.outcome in ("ok", "error")]
    good = sum(slo.is_kept(sample) for sample in tried)
    return good, good / len(tried) if tried else None


def is_growing(samples: Sequence[Sample], sending_s: float) -> bool:
    """Whether requests pile up: in the second half of the sending time, more were started than ended, by over a tenth
    of those started and by more than chance explains (twice the root of their number)."""
    half = sending_s / 2
    started = sum(half < sample.intended_s <= sending_s for sample in samples)
    ended = sum(half < sample.done_s <= sending_s for sample in samples)
    return started - ended > max(0.1 * started, 2 * math.sqrt(started))


def check_usage(whole: Sequence[Sample], own: dict[int, int] | None, *, is_exact: bool) -> UsageCheck:
    """Compare what the server claims with what came. With `is_exact` prompts are compared too."""
    claims = [sample for sample in whole if sample.claimed_output is not None]
    counted = [(own[sample.number], sample) for sample in claims if own is not None and sample.number in own]
    method: Literal["tokenize", "chunks"] = "tokenize" if counted else "chunks"
    pairs = counted or [(len(sample.arrivals_s), sample) for sample in claims]
    mine = sum(number for number, _ in pairs)
    claimed = sum(sample.claimed_output or 0 for _, sample in pairs)
    if method == "tokenize":
        differ = sum(number != sample.claimed_output for number, sample in pairs)
        fits = abs(mine - claimed) <= TOLERATED * max(mine, claimed, 1)
    else:
        differ = sum(number > (sample.claimed_output or 0) for number, sample in pairs)
        fits = differ <= TOLERATED * len(pairs)
    over = sum(_is_over(sample) for sample in claims)
    prompts = [one for one in whole if is_exact and None not in (one.asked_input, one.claimed_input)]
    prompts_differ = sum(sample.asked_input != sample.claimed_input for sample in prompts)
    believable = None if not pairs else fits and not over
    return UsageCheck(
        method,
        len(pairs),
        differ,
        mine,
        claimed,
        over,
        len(whole) - len(claims),
        len(prompts),
        prompts_differ,
        believable,
    )


def _is_over(sample: Sample) -> bool:
    return sample.asked_output is not None and (sample.claimed_output or 0) > sample.asked_output
