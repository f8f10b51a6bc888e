"""From which confidence on a cheap model's answers may be sent. Pure.

Enters: answers with their confidence, each known to be good or not. Leaves: the threshold that accepts most of them
while no more than a given share of what it accepts is wrong. Always true: what is accepted at the threshold is exactly
what `CascadeSettings.min_logprob` would accept; no threshold is given where none keeps to the share. Next: `router.py`.
"""

from collections.abc import Sequence

import msgspec


class Labelled(msgspec.Struct, frozen=True):
    """`confidence`: mean log-probability per token."""

    confidence: float
    is_good: bool


LEAST = -100.0
"""What `cascade.min_logprob` may be at least; above 0 a mean comes by rounding only."""


class Calibration(msgspec.Struct, frozen=True):
    """Counts of the sample. `min_logprob` None: nothing may be accepted. Shares: `accepted` of all, `wrong` of the
    accepted, `missed` of the good ones that are escalated all the same.
    """

    min_logprob: float | None
    num_samples: int
    num_good: int
    num_accepted: int
    num_wrong: int
    accepted_share: float
    wrong_share: float
    missed_share: float


def calibrate(samples: Sequence[Labelled], max_wrong: float) -> Calibration:
    """The lowest threshold that keeps to `max_wrong`."""
    best: tuple[float | None, int, int] = (None, 0, 0)
    accepted = wrong = 0
    ordered = sorted(samples, key=lambda one: -one.confidence)
    for index, one in enumerate(ordered):
        accepted, wrong = accepted + 1, wrong + (not one.is_good)
        is_whole = index + 1 == len(ordered) or ordered[index + 1].confidence < one.confidence
        if is_whole and wrong <= max_wrong * accepted:  # equal confidences are accepted together
            best = (one.confidence, accepted, wrong)
    threshold, accepted, wrong = best
    good = sum(one.is_good for one in samples)
    return Calibration(
        min_logprob=None if threshold is None else min(max(threshold, LEAST), 0.0),
        num_samples=len(samples),
        num_good=good,
        num_accepted=accepted,
        num_wrong=wrong,
        accepted_share=accepted / len(samples) if samples else 0.0,
        wrong_share=wrong / accepted if accepted else 0.0,
        missed_share=(good - (accepted - wrong)) / good if good else 0.0,
    )
