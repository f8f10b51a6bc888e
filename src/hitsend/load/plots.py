"""Values to be drawn: as small plots of text, and as numbers for the page.

Enters: numbers, samples. Leaves: bins, series, lines of block characters. Always true: no plot claims a value that
wasn't measured: an empty one is an empty text; a histogram's last bin holds everything from there on. Next: `page.py`.
"""

from collections.abc import Sequence

import msgspec

from hitsend.load.report import percentile
from hitsend.load.sample import Sample

BLOCKS = " ▁▂▃▄▅▆▇█"


class Bins(msgspec.Struct, frozen=True):
    """How many values lie in each of equally wide bins from `low` to `high`; the last one also holds what is above."""

    counts: tuple[int, ...]
    low: float
    high: float


def bins(values: Sequence[float], number: int) -> Bins | None:
    """From the least value to the 99th percentile, so that one outlier doesn't flatten the rest."""
    if not values:
        return None
    ordered = sorted(values)
    low, high = ordered[0], percentile(ordered, 0.99)
    width = (high - low) / number or 1.0
    counts = [0] * number
    for value in ordered:
        counts[min(number - 1, int((value - low) / width))] += 1
    return Bins(tuple(counts), low, high)


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from 0 to the greatest; anything above 0 is seen."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[max(1, round(value / top * steps))] if value > 0 else " " for value in values)


def tokens_over_time(samples: Sequence[Sample], wall_s: float, number: int) -> list[float]:
    """Output tokens per second in equal parts of the stage; an answer's tokens are spread over its pieces."""
    if wall_s <= 0:
        return []
    width = wall_s / number
    found = [0.0] * number
    for sample in samples:
        if sample.arrivals_s:
            weight = sample.output_tokens / len(sample.arrivals_s) / width
            for at in sample.arrivals_s:
                found[min(number - 1, max(0, int(at / width)))] += weight
    return found
