"""When requests are to be sent, for an open loop: the times are fixed before the first byte goes out.

Enters: a rate and a kind. Leaves: seconds from the start, in order. Always true: how a server answers changes none of
them, which is what makes an open loop immune to coordinated omission; at most `MOST_REQUESTS` of them; the same seed
gives the same times. Next: `words.py`.
"""

import random
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Literal

from hitsend.load.lengths import dice

Kind = Literal["poisson", "constant", "bursts"]
KINDS: tuple[Kind, ...] = ("poisson", "constant", "bursts")
MOST_REQUESTS = 1_000_000


def arrivals(
    kind: Kind,
    rate_per_s: float,
    *,
    duration_s: float | None,
    requests: int | None,
    seed: int,
    part: str = "",
    burst_size: int = 8,
) -> list[float]:
    """Times in seconds, the first at or after 0; ends by whichever of the two bounds comes first.

    poisson: independent gaps with mean 1/rate. constant: every 1/rate. bursts: `burst_size` at one instant, such
    instants being Poisson at rate/burst_size, so that the mean rate is the same. `part`: what of the run they are for.
    """
    times: Iterator[float] = _times(kind, rate_per_s, dice(seed, "arrivals", kind, part), burst_size)
    if duration_s is not None:
        end = duration_s
        times = takewhile(lambda at: at < end, times)
    return list(islice(times, min(requests or MOST_REQUESTS, MOST_REQUESTS)))


def _times(kind: Kind, rate_per_s: float, chance: random.Random, burst_size: int) -> Iterator[float]:
    number = 0
    at = 0.0
    while True:
        if kind == "constant":
            yield number / rate_per_s
            number += 1
            continue
        size = burst_size if kind == "bursts" else 1
        at += chance.expovariate(rate_per_s / size)
        for _ in range(size):
            yield at


def ramp(start: float, stop: float, factor: float = 2.0) -> list[float]:
    """Rates from `start` to `stop`, each `factor` times the one before; the last one is `stop`."""
    rates = [start]
    while rates[-1] * factor < stop * 0.999:
        rates.append(rates[-1] * factor)
    return [*rates, stop] if stop > start else rates
