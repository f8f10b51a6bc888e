"""Series that every request counts in: plain numbers, made into Prometheus's text when somebody scrapes.

Enters: numbers with label values. Leaves: metric families. Always true: names, samples and exemplars are those that
prometheus_client's own metrics would have; what it does per number (a lock, a walk over all buckets, a check of the
exemplar's characters) happens once per scrape instead. For one thread. Next: `metrics.py`.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class Totals(Collector):
    """A counter's series, by their label values."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._found: dict[tuple[str, ...], float] = {}

    def add(self, number: float, *labels: str) -> None:
        """Count on. A series is shown from its first number on, 0 included."""
        self._found[labels] = self._found.get(labels, 0.0) + number

    def total(self, **labels: str) -> float:
        """Its sum over every label that isn't asked for."""
        asked = [(self._labels.index(name), value) for name, value in labels.items()]
        return sum(number for key, number in self._found.items() if all(key[at] == value for at, value in asked))

    def collect(self) -> Iterable[CounterMetricFamily]:
        """prometheus_client: what stands to be shown."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, number in sorted(self._found.items()):
            family.add_metric(labels, number)
        yield family


class Times:
    """One histogram's numbers."""

    __slots__ = ("_bounds", "_counts", "_shown", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._shown: list[tuple[str, float, float] | None] = [None] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, shown: str | None = None) -> None:
        """Count one. `shown`: the id of the request that its bucket shows from now on."""
        bucket = bisect_left(self._bounds, seconds)
        self._counts[bucket] += 1
        self._sum += seconds
        if shown is not None:
            self._shown[bucket] = (shown, seconds, time.time())

    def add_to(self, family: HistogramMetricFamily, label: str) -> None:
        """As samples: buckets count what is in those below them, too."""
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        number = 0
        for bound, count, shown in zip((*self._bounds, float("inf")), self._counts, self._shown, strict=True):
            number += count
            name = str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # it has no types
            if shown is None:
                buckets.append((name, number))
            else:
                buckets.append((name, number, Exemplar({"request_id": shown[0]}, shown[1], shown[2])))
        family.add_metric([label], buckets, self._sum)


class Histograms(Collector):
    """One histogram per value of a label."""

    def __init__(self, name: str, text: str, label: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._label, self._bounds = name, text, label, bounds
        self._found: dict[str, Times] = {}

    def of(self, value: str) -> Times:
        """That value's, shown from now on."""
        found = self._found.get(value)
        if found is None:
            found = self._found[value] = Times(self._bounds)
        return found

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """prometheus_client: what stands to be shown."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, times in sorted(self._found.items()):
            times.add_to(family, value)
        yield family
