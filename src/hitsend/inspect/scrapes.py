"""What a window of a server's `/metrics` says, whatever the names: growth, means, quantiles.

Enters: parsed scrapes, first to last. Leaves: numbers, or None where the server doesn't tell. Always true: pure; a
counter that fell began again at 0 (a restart) and counts from there; series of one name are added up, whatever their
labels. Next: `readings.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

_PREFIXES = ("vllm", "sglang", "llamacpp")


class Sample(msgspec.Struct, frozen=True):
    """One line of an exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


class Scrape:
    """One exposition. `sglang_x` and `sglang:x` are one name: what stores series may have replaced the colon."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            # SGLang repeats a total by priority; the total is where the label is empty
            if not math.isnan(sample.value) and not sample.labels.get("priority"):
                self._by_name.setdefault(_one_name(sample.name), []).append(sample)

    @cached_property
    def names(self) -> frozenset[str]:
        """All that have a value."""
        return frozenset(self._by_name)

    def found(self, name: str, **labels: str) -> list[Sample]:
        """Its series that have these labels."""
        wanted = labels.items()
        return [
            sample
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(key) == value for key, value in wanted)
        ]

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None without any."""
        found = self.found(name, **labels)
        return sum(sample.value for sample in found) if found else None

    def most(self, name: str) -> float | None:
        """The largest."""
        return max((sample.value for sample in self.found(name)), default=None)


def _one_name(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix + "_"):
            return f"{prefix}:{name[len(prefix) + 1 :]}"
    return name


class Window:
    """Scrapes of one server over `seconds`: counters are compared from the first to the last, gauges averaged."""

    def __init__(self, scrapes: Sequence[Scrape], seconds: float) -> None:
        self.first, self.last = scrapes[0], scrapes[-1]
        self.seconds = seconds
        self._scrapes = scrapes

    def grew(self, *names: str, **labels: str) -> float | None:
        """By how much a counter grew: the first of these names that the server has."""
        for name in names:
            after = self.last.total(name, **labels)
            if after is not None:
                return _growth(self.first.total(name, **labels) or 0.0, after)
        return None

    def mean(self, *names: str, **labels: str) -> float | None:
        """A gauge, over all scrapes."""
        return self._over(lambda scrape, name: scrape.total(name, **labels), names)

    def mean_of_most(self, *names: str) -> float | None:
        """A gauge whose largest series counts, over all scrapes."""
        return self._over(lambda scrape, name: scrape.most(name), names)

    def _over(self, read: Callable[[Scrape, str], float | None], names: Sequence[str]) -> float | None:
        for name in names:
            values = [value for scrape in self._scrapes if (value := read(scrape, name)) is not None]
            if values:
                return sum(values) / len(values)
        return None

    def average(self, *names: str) -> float | None:
        """A histogram's mean in this window; None when nothing was observed."""
        for name in names:
            count = self.grew(f"{name}_count")
            if count:
                return (self.grew(f"{name}_sum") or 0.0) / count
        return None

    def quantile(self, share: float, *names: str) -> float | None:
        """A histogram's quantile, by straight lines within its buckets; the highest bound for what lies above."""
        for name in names:
            buckets = self._buckets(f"{name}_bucket")
            if buckets and buckets[-1][1] > 0:
                return _quantile(buckets, share)
        return None

    def _buckets(self, name: str) -> list[tuple[float, float]]:
        after = _by_bound(self.last.found(name))
        before = _by_bound(self.first.found(name))
        return [(bound, _growth(before.get(bound, 0.0), count)) for bound, count in sorted(after.items())]


def _growth(before: float, after: float) -> float:
    return after - before if after >= before else after


def _by_bound(samples: Iterable[Sample]) -> dict[float, float]:
    found: dict[float, float] = {}
    for sample in samples:
        bound = float(sample.labels.get("le", "inf").replace("+Inf", "inf"))
        found[bound] = found.get(bound, 0.0) + sample.value
    return found


def _quantile(buckets: list[tuple[float, float]], share: float) -> float:
    wanted = buckets[-1][1] * share
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low
