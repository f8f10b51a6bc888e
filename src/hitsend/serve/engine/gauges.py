"""What an upstream's own `/metrics` says of its load.

Enters: text in Prometheus' format, and the names that its kind has used for each gauge. Leaves: a `Load`. Always true:
of several names the first that is there counts, because versions renamed them and some give both; several series of one
name (one per engine of a data-parallel server) are added, shares are taken at their highest; what can't be read is as
if it weren't there. Next: `replicas.py`.
"""

import re

import msgspec

MAX_METRICS_BYTES = 4 * 1024 * 1024
MOST = 1e15
"""A larger figure is a mistake, and several of them would add up to none."""
_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})? ([^ \n]+)", re.MULTILINE)


class Load(msgspec.Struct, frozen=True):
    """At one moment. None: it doesn't say. `kv_use`: a share of 1; `preemptions`: since its start."""

    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    preemptions: int | None = None


def read_load(text: bytes, names: dict[str, tuple[str, ...]]) -> Load:
    """The figures that stand under these names."""
    wanted = {name.encode() for several in names.values() for name in several}
    found: dict[str, list[float]] = {}
    for name, written in _SAMPLE.findall(text):
        if name in wanted:
            value = _number(written)
            if value is not None:
                found.setdefault(name.decode(), []).append(value)

    def values(gauge: str) -> list[float] | None:
        return next((found[name] for name in names.get(gauge, ()) if name in found), None)

    running, waiting, kv_use, preemptions = map(values, ("running", "waiting", "kv_use", "preemptions"))
    return Load(
        running=None if running is None else int(sum(running)),
        waiting=None if waiting is None else int(sum(waiting)),
        kv_use=None if kv_use is None else max(kv_use),
        preemptions=None if preemptions is None else int(sum(preemptions)),
    )


def _number(written: bytes) -> float | None:
    try:
        value = float(written)
    except ValueError:
        return None
    return value if 0 <= value <= MOST else None
