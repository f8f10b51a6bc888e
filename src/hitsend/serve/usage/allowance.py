"""Workers AI's neurons of a UTC day: what is free, what is billed, and whether another request still fits.

Enters: micro-neurons used and held today by the whole account. Leaves: what the provider bills, or a refusal. Always
true: on the paid plan the first 10,000 neurons of each UTC day are free and the rest has its rate, nothing is ever
refused here; on the free plan a hold fits only below the limit, counted with everything that is held; unused neurons
aren't carried over; all of it is integer arithmetic. Next: `rows.py`.
"""

from typing import Literal

import msgspec

from hitsend.core.errors import InsufficientQuota, PermissionDenied
from hitsend.serve.usage.pricing import PICOUSD_PER_MICRONEURON, Price, rounded

Plan = Literal["free", "paid"]
MICRONEURONS = 1_000_000
FREE_NEURONS_MICRO = 10_000 * MICRONEURONS
"""Per UTC day and account, on both plans."""
DAY_S = 86_400.0
HELD_S = 5.0
"""When to come back where only holds stand in the way: most answers are over by then."""


class DayNeurons(msgspec.Struct, frozen=True):
    """Micro-neurons of one UTC day: in rows, and in holds that are still open."""

    used_micro: int = 0
    held_micro: int = 0


def billed_neurons_micro(used_micro: int) -> int:
    """What a day's use is billed for, on the paid plan."""
    return max(0, used_micro - FREE_NEURONS_MICRO)


def billed_microusd(used_micro: int) -> int:
    """The same in micro-dollars, rounded half up once per day."""
    return rounded(billed_neurons_micro(used_micro) * PICOUSD_PER_MICRONEURON)


def fits(plan: Plan, wanted_micro: int, today: DayNeurons) -> bool:
    """Whether a hold of so many micro-neurons still fits into today."""
    return plan == "paid" or today.used_micro + today.held_micro + wanted_micro <= FREE_NEURONS_MICRO


def check_model(plan: Plan, price: Price, model: str) -> None:
    """Raises PermissionDenied for a model that the free plan doesn't serve. Ask before holding."""
    if plan == "free" and price.is_paid_only:
        raise PermissionDenied(f"{model} needs Workers AI's paid plan, this account has the free one", param="model")


def refusal(wanted_micro: int, today: DayNeurons, now: float) -> InsufficientQuota:
    """What to say when it doesn't fit, and when to come back: never, soon, or when the allowance begins again at 00:00
    UTC. `now`: seconds since the epoch."""
    wait_s: float | None = DAY_S - now % DAY_S
    until = "the day ends at 00:00 UTC"
    if wanted_micro > FREE_NEURONS_MICRO:
        wait_s, until = None, "no day has so many: ask for a shorter answer (max_tokens)"
    elif today.used_micro + wanted_micro <= FREE_NEURONS_MICRO:
        wait_s, until = HELD_S, "what requests that run hold and don't use comes back"
    return InsufficientQuota(
        f"Workers AI's free plan: this request may use {_neurons(wanted_micro)} neurons; of "
        f"{_neurons(FREE_NEURONS_MICRO)} today {_neurons(today.used_micro)} are used and "
        f"{_neurons(today.held_micro)} held; {until}",
        retry_after_s=wait_s,
    )


def _neurons(micro: int) -> str:
    whole, rest = divmod(micro, MICRONEURONS)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
