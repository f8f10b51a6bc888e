"""Constants moved towards what one's own system did: `--calibrate FILE`.

Enters: a `hitsend load --json` document, or the JSON of vLLM's benchmark. Leaves: factors for the terms of a plan.
Always true: a step's term moves by its share of the squared time, so what dominates the measured load explains it and
the rest stays as it was; no term falls below a fifth; what is left holds near the measured load only, and so does the
whole error of a first token (`transfer.py`); measured points where requests queued don't count. Next: `compare.py`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hitsend.core.errors import ConfigError
from hitsend.plan.speed import SpeedPlan, SpeedQuestion, plan_speed
from hitsend.plan.transfer import Factors, Near

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


_Above = Annotated[float, Meta(gt=0)]


class _Spread(msgspec.Struct, frozen=True):
    p50: _Above


class _Level(msgspec.Struct, frozen=True):
    tpot_ms: _Spread | None = None
    ttft_ms: _Spread | None = None
    in_flight_mean: Annotated[float, Meta(ge=0)] | None = None
    concurrency: _Above | None = None
    input_tokens_mean: Annotated[float, Meta(ge=0)] | None = None
    output_tokens_mean: Annotated[float, Meta(ge=0)] | None = None
    cached_tokens_mean: Annotated[float, Meta(ge=0)] | None = None
    is_growing: bool = False


class _Target(msgspec.Struct, frozen=True):
    levels: tuple[_Level, ...] = ()


class _LoadTest(msgspec.Struct, frozen=True):
    targets: tuple[_Target, ...] = ()


class _Bench(msgspec.Struct, frozen=True):
    """vLLM's own names (`vllm bench serve --save-result`, its `benchmarks/serve.py`); SGLang's are the same."""

    mean_tpot_ms: _Above
    mean_ttft_ms: _Above
    completed: _Above
    total_input_tokens: _Above
    total_output_tokens: _Above
    duration: _Above | None = None
    max_concurrency: _Above | None = None
    request_rate: float | str | None = None


_NEEDED = ("completed", "total_input_tokens", "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms")
_BENCHMARK = {*_NEEDED, "request_throughput", "total_token_throughput", "num_prompts"}

T = TypeVar("T")


def read_points(path: Path) -> list[Point]:
    """Raises ConfigError where it is neither document, lacks a key, or nothing in it was measured."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    documents = _documents(content, path)
    found = [point for told in documents for point in _points(told, path)]
    if not found:
        raise ConfigError(f"--calibrate {path}: there is nothing in it")
    return found


def _documents(content: bytes, path: Path) -> list[Any]:
    """One document, or one per line: what a benchmark appends (`--append-result`)."""
    try:
        return [msgspec.json.decode(content)]
    except msgspec.DecodeError as error:
        wrong = ConfigError(f"{path} is not JSON: {error}")
    try:
        return [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
    except msgspec.DecodeError:
        raise wrong from None


def _points(told: Any, path: Path) -> list[Point]:
    if isinstance(told, dict) and told.get("kind") == "hitsend.load":
        # the first target's
        levels = next((target.levels for target in _typed(told, _LoadTest, path).targets), ())
        found = [point for level in levels if (point := _of_level(level)) is not None]
        if not found:
            raise ConfigError(f"--calibrate {path}: {_lacking(levels)}")
        return found
    if isinstance(told, dict) and _BENCHMARK & told.keys():
        missing = [key for key in _NEEDED if told.get(key) is None]
        if missing:
            hint = "; --percentile-metrics must name ttft and tpot" if missing[0].endswith("_ms") else ""
            raise ConfigError(f"--calibrate {path}: the key {missing[0]!r} is missing, a benchmark's JSON has it{hint}")
        return [_of_bench(_typed(told, _Bench, path), path)]
    raise ConfigError(f"--calibrate {path}: needed is a `hitsend load --json` document or a vLLM benchmark's JSON")


def _lacking(levels: Sequence[_Level]) -> str:
    if not any(level.tpot_ms for level in levels):
        return "no level in it has a time per token (tpot_ms)"
    for key in ("input_tokens_mean", "output_tokens_mean"):
        if not any(getattr(level, key) is not None for level in levels):
            return f"no level in it has {key}"
    return "no level in it has in_flight_mean or concurrency beside tpot_ms, input_tokens_mean and output_tokens_mean"


def _typed(told: Any, kind: type[T], path: Path) -> T:
    """Raises ConfigError with the field, what is needed and what is there."""
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.(\w+)`", str(error))
        value = f", it is {str(told.get(field[1]))[:40]}" if field else ""
        raise ConfigError(f"--calibrate {path}: {error}{value}") from None


def _of_level(level: _Level) -> Point | None:
    running = level.in_flight_mean or level.concurrency
    if level.tpot_ms is None or not running or level.input_tokens_mean is None or level.output_tokens_mean is None:
        return None
    return Point(
        concurrency=max(1.0, running),
        input=max(1.0, level.input_tokens_mean),
        output=max(1.0, level.output_tokens_mean),
        cached=level.cached_tokens_mean or 0.0,
        # an open loop that piles up measures its queue
        ttft_ms=None if level.ttft_ms is None or level.is_growing else level.ttft_ms.p50,
        tpot_ms=level.tpot_ms.p50,
    )


def _of_bench(told: _Bench, path: Path) -> Point:
    output = told.total_output_tokens / told.completed
    if told.max_concurrency is None and told.duration is None:
        raise ConfigError(f"--calibrate {path}: max_concurrency and duration are missing, one of them is needed")
    if output <= 1:
        told_of = f"total_output_tokens is {told.total_output_tokens:.0f} of {told.completed:.0f} requests"
        raise ConfigError(f"--calibrate {path}: {told_of}: one token has no time between tokens")
    # without a limit: Little's law over what was measured
    busy_s = told.completed * (told.mean_ttft_ms + told.mean_tpot_ms * max(0.0, output - 1)) / 1e3
    return Point(
        concurrency=max(1.0, told.max_concurrency or busy_s / (told.duration or 1.0)),
        input=max(1.0, told.total_input_tokens / told.completed),
        output=max(1.0, output),
        cached=0.0,
        # all prompts at once: what a first token waited for was the queue
        ttft_ms=None if told.max_concurrency is None and told.request_rate == "inf" else told.mean_ttft_ms,
        tpot_ms=told.mean_tpot_ms,
    )


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
    plans = [(_plan_of(question, point), point) for point in points]
    for _ in range(SWEEPS if len(plans) > 1 else 1):
        for plan, point in plans:
            tpot = moved(plan.terms, tpot, point.tpot_ms * plan.expected_per_pass, noise=plan.constants.tpot_noise)
    found = Factors(tpot=tpot, kin=plans[0][0].kin, waits=plans[0][0].waits) if plans else Factors()
    return msgspec.structs.replace(found, near=tuple(_left(plan, point, found) for plan, point in plans))


def _left(plan: SpeedPlan, point: Point, factors: Factors) -> Near:
    """What the moved terms leave unexplained of one load's steps, and the plan of its first tokens."""
    again = plan_speed(plan.question, factors)
    ttft = None if point.ttft_ms is None or plan.ttft_ms is None else point.ttft_ms / plan.ttft_ms.value
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
