"""What this deployment did in its own load test: where thresholds come from when there is one.

Enters: the document that `hitsend load --json` printed. Leaves: a `Baseline`. Always true: pure; a figure that the test
didn't measure is None, and the rules fall back to their defaults. Next: `rules.py`.
"""

from collections.abc import Iterable
from statistics import median

import msgspec

from hitsend.core.errors import ConfigError


class _Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p99: float


class _Level(msgspec.Struct, frozen=True):
    output_tokens_per_s: float
    in_flight_mean: float
    concurrency: int | None = None
    rate_per_s: float | None = None
    input_tokens_mean: float | None = None
    cached_tokens_mean: float | None = None
    ttft_ms: _Spread | None = None
    tpot_ms: _Spread | None = None
    itl_ms: _Spread | None = None


class _Saturation(msgspec.Struct, frozen=True):
    at: float | None
    is_reached: bool
    output_tokens_per_s: float | None


class _Target(msgspec.Struct, frozen=True):
    name: str
    levels: list[_Level]
    saturation: _Saturation | None = None


class _Slo(msgspec.Struct, frozen=True):
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class _Document(msgspec.Struct, frozen=True):
    kind: str
    targets: list[_Target]
    slo: _Slo = _Slo()
    date: str = ""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """One target of a load test. Seconds, tokens and shares.

    `most_per_s`: output tokens per second where it saturated (None: it wasn't brought there), at `tested` requests at
    once; `ttft_s` and `tpot_s`: medians there, `stall`: how many times its median the p99 between tokens was.
    """

    source: str
    most_per_s: float | None = None
    tested: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    stall: float | None = None
    cached_share: float | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


def baseline_of(text: bytes, name: str) -> Baseline:
    """The first target's figures. Raises ConfigError where `name` holds no load test."""
    try:
        found = msgspec.json.decode(text, type=_Document)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"flag --baseline: {name} is no result of `hitsend load --json`: {error}") from error
    if found.kind != "hitsend.load" or not found.targets or not found.targets[0].levels:
        raise ConfigError(f"flag --baseline: {name} has no level of a `hitsend load --json`")
    target = found.targets[0]
    at = _where_it_saturated(target)
    best = [level for level in target.levels if _load(level) == at]
    return Baseline(
        source=f"{name} ({found.date})" if found.date else name,
        most_per_s=_most(target, best),
        tested=max(level.in_flight_mean for level in best),
        ttft_s=_middle(level.ttft_ms.p50 / 1000.0 for level in best if level.ttft_ms),
        tpot_s=_middle(level.tpot_ms.p50 / 1000.0 for level in best if level.tpot_ms),
        stall=_middle(level.itl_ms.p99 / level.itl_ms.p50 for level in best if level.itl_ms and level.itl_ms.p50),
        cached_share=_middle(
            (level.cached_tokens_mean or 0.0) / level.input_tokens_mean for level in best if level.input_tokens_mean
        ),
        slo_ttft_s=None if found.slo.ttft_ms is None else found.slo.ttft_ms / 1000.0,
        slo_tpot_s=None if found.slo.tpot_ms is None else found.slo.tpot_ms / 1000.0,
    )


def _load(level: _Level) -> float:
    return float(level.concurrency) if level.concurrency is not None else level.rate_per_s or 0.0


def _where_it_saturated(target: _Target) -> float:
    if target.saturation is not None and target.saturation.at is not None:
        return target.saturation.at
    return _load(max(target.levels, key=lambda level: level.output_tokens_per_s))


def _most(target: _Target, best: list[_Level]) -> float | None:
    """Only where more load was seen to bring no more."""
    if target.saturation is None or not target.saturation.is_reached:
        return None
    return target.saturation.output_tokens_per_s or _middle(level.output_tokens_per_s for level in best)


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
