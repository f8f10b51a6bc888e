"""Constants moved towards what one's own system did: `--calibrate FILE`.

Enters: a `hitsend load --json` document, or the JSON of vLLM's benchmark. Leaves: factors for the terms of a plan.
Always true: a term moves by its share of the squared time, so what dominates the measured load explains it and the
rest stays as it was; no term falls below a fifth; what is left holds near the measured load only; measured points
where requests queued don't count. Next: `compare.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.speed import Factors, Near, SpeedPlan, SpeedQuestion, plan_speed

LEAST_FACTOR = 0.2
SWEEPS = 3


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measured load, in milliseconds."""

    concurrency: float
    input: float
    output: float
    cached: float
    ttft_ms: float | None
    tpot_ms: float


def read_points(path: Path) -> list[Point]:
    """Raises ConfigError where it is neither document, or nothing in it was measured."""
    try:
        told = msgspec.json.decode(path.read_bytes())
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if isinstance(told, dict) and told.get("kind") == "hitsend.load":
        found = [point for level in _levels(told) if (point := _of_level(level)) is not None]
    elif isinstance(told, dict) and "mean_tpot_ms" in told:
        found = [_of_bench(told, path)]
    else:
        raise ConfigError(f"--calibrate {path}: needed is a `hitsend load --json` document or a vLLM benchmark's JSON")
    if not found:
        raise ConfigError(f"--calibrate {path}: no level in it has a time per token")
    return found


def _levels(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The first target's."""
    targets = told.get("targets") or [{}]
    return targets[0].get("levels") or []


def _of_level(level: Mapping[str, Any]) -> Point | None:
    tpot, ttft = level.get("tpot_ms"), level.get("ttft_ms")
    running = level.get("in_flight_mean") or level.get("concurrency")
    sizes = level.get("input_tokens_mean"), level.get("output_tokens_mean")
    if not tpot or not running or None in sizes:
        return None
    return Point(
        concurrency=max(1.0, float(running)),
        input=max(1.0, float(sizes[0] or 1)),
        output=max(1.0, float(sizes[1] or 1)),
        cached=float(level.get("cached_tokens_mean") or 0),
        # an open loop that piles up measures its queue
        ttft_ms=None if ttft is None or level.get("is_growing") else float(ttft["p50"]),
        tpot_ms=float(tpot["p50"]),
    )


def _of_bench(told: Mapping[str, Any], path: Path) -> Point:
    try:
        completed = float(told["completed"])
        output = float(told["total_output_tokens"]) / completed
        tpot, ttft = float(told["mean_tpot_ms"]), float(told["mean_ttft_ms"])
        running = told.get("max_concurrency")
        # without a limit: Little's law over what was measured
        busy_s = completed * (ttft + tpot * (output - 1)) / 1e3
        return Point(
            concurrency=max(1.0, float(running or busy_s / float(told["duration"]))),
            input=float(told["total_input_tokens"]) / completed,
            output=output,
            cached=0.0,
            ttft_ms=ttft,
            tpot_ms=tpot,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as missing:
        raise ConfigError(f"--calibrate {path}: the benchmark's JSON lacks or breaks {missing}") from None


def moved(
    terms: Mapping[str, float], factors: Mapping[str, float], measured: float, *, noise: float
) -> dict[str, float]:
    """One measurement: factor_i += error * x_i / (sum x_j^2 + noise * (sum x)^2), x being milliseconds of a term.

    The update of a linear Gaussian model whose constants are each as unsure, in proportion, as the others.
    """
    now = {name: value * factors.get(name, 1.0) for name, value in terms.items()}
    total = sum(now.values())
    scale = sum(value * value for value in now.values()) + noise * total * total
    error = measured - total
    return dict(factors) | {
        name: factors.get(name, 1.0) * max(LEAST_FACTOR, 1 + error * value / scale) for name, value in now.items()
    }


def factors_of(question: SpeedQuestion, points: Sequence[Point]) -> Factors:
    """The system of the question under each measured load. Raises ConfigError as a plan does."""
    tpot: dict[str, float] = {}
    ttft: dict[str, float] = {}
    plans = [(_plan_of(question, point), point) for point in points]
    for _ in range(SWEEPS if len(plans) > 1 else 1):
        for plan, point in plans:
            tpot = moved(plan.terms, tpot, point.tpot_ms * plan.expected_per_pass, noise=plan.constants.tpot_noise)
            if point.ttft_ms is not None and not plan.queues:
                ttft = moved(plan.ttft_terms, ttft, point.ttft_ms, noise=plan.constants.ttft_noise)
    found = Factors(tpot=tpot, ttft=ttft)
    return msgspec.structs.replace(found, near=tuple(_left(plan, point, found) for plan, point in plans))


def _left(plan: SpeedPlan, point: Point, factors: Factors) -> Near:
    """What the moved terms leave unexplained of one load."""
    again = plan_speed(plan.question, factors)
    ttft = None if point.ttft_ms is None or again.ttft_ms is None else point.ttft_ms / again.ttft_ms.value
    return Near(
        batch=plan.question.batch,
        input=plan.question.input,
        output=plan.question.output,
        tpot=point.tpot_ms / again.tpot_ms.value,
        ttft=ttft,
    )


def _plan_of(question: SpeedQuestion, point: Point) -> SpeedPlan:
    asked = msgspec.structs.replace(
        question,
        batch=max(1, round(point.concurrency)),
        input=max(1, round(point.input)),
        output=max(1, round(point.output)),
        prefix_hit=min(0.99, point.cached / point.input),
    )
    return plan_speed(asked)
