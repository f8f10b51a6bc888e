"""What a rule says when it holds: the evidence, how sure it is, and the one change to try first.

Enters: nothing. Leaves: structs, and the thresholds that more than one rule looks at. Always true: every number that a
finding rests on is in it, beside the threshold that it passed and where that came from. Next: `rules.py`.
"""

from typing import Literal

import msgspec

from hitsend.inspect.baseline import Baseline

Confidence = Literal["high", "medium", "low"]
DEFAULT = "default"

TTFT_S, TPOT_S = 2.0, 0.1
"""The server's own objectives, unless they are set (`settings.SloSettings`): what a reader accepts."""
SLACK = 1.5
"""How far above its load test a latency may lie before it counts as slow."""


class Threshold(msgspec.Struct, frozen=True):
    """`source`: `default`, or the load test that it was derived from."""

    value: float
    source: str = DEFAULT


class Evidence(msgspec.Struct, frozen=True):
    """One number. `relation` is how it stands to the threshold; without one, it is there to be read."""

    name: str
    value: float
    unit: str
    relation: Literal[">=", "<=", ""] = ""
    threshold: float | None = None
    source: str | None = None


class Finding(msgspec.Struct, frozen=True):
    """One bottleneck. `change` is what to try first, `effect` what to expect of it, `measure` what would prove it."""

    name: str
    text: str
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    change: str
    effect: str
    measure: str


def at_least(name: str, value: float, unit: str, threshold: Threshold) -> Evidence:
    """A number that reached its threshold."""
    return Evidence(name, round(value, 4), unit, ">=", threshold.value, threshold.source)


def at_most(name: str, value: float, unit: str, threshold: Threshold) -> Evidence:
    """A number that didn't exceed its threshold."""
    return Evidence(name, round(value, 4), unit, "<=", threshold.value, threshold.source)


def seen(*numbers: tuple[str, float | None, str]) -> tuple[Evidence, ...]:
    """Numbers to read beside the others; those that aren't known are left out."""
    return tuple(Evidence(name, round(value, 4), unit) for name, value, unit in numbers if value is not None)


def slow_ttft(baseline: Baseline | None) -> Threshold:
    """Seconds to the first token from which on it is slow."""
    if baseline is not None and baseline.slo_ttft_s is not None:
        return Threshold(baseline.slo_ttft_s, f"objective of {baseline.source}")
    if baseline is not None and baseline.ttft_s is not None:
        return Threshold(round(SLACK * baseline.ttft_s, 4), f"{SLACK:g} times the median of {baseline.source}")
    return Threshold(TTFT_S)


def slow_tpot(baseline: Baseline | None) -> Threshold:
    """Seconds per output token from which on it is slow."""
    if baseline is not None and baseline.slo_tpot_s is not None:
        return Threshold(baseline.slo_tpot_s, f"objective of {baseline.source}")
    if baseline is not None and baseline.tpot_s is not None:
        return Threshold(round(SLACK * baseline.tpot_s, 4), f"{SLACK:g} times the median of {baseline.source}")
    return Threshold(TPOT_S)


def sure(value: float, threshold: float, *, is_direct: bool = True) -> Confidence:
    """High where a direct measurement lies well beyond its threshold; low where an indirect one barely does."""
    is_clear = value >= SLACK * threshold
    if is_direct:
        return "high" if is_clear else "medium"
    return "medium" if is_clear else "low"
