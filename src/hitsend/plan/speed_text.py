"""A speed plan in words: the formula with its numbers, and the JSON document of `hitsend plan speed`.

Enters: a `SpeedPlan`. Leaves: lines and a dict. Always true: every number that isn't measured stands with its interval,
and a plan that lies outside of what was fitted says so. Next: `compare.py`.
"""

from typing import Any

import msgspec

from hitsend.plan.constants import speed_facts
from hitsend.plan.published import Beside
from hitsend.plan.roofline import Phase
from hitsend.plan.speed import Interval, SpeedPlan
from hitsend.plan.transfer import NEARBY, typical_errors

_PARTS = {
    "weights": "reading weights",
    "kv": "reading keys, values and states",
    "flops": "computing",
    "reduce": "moving activations between GPUs",
    "mix_reduce": "others' prompts",
    "mix_flops": "others' prompts",
    "mix_attention": "others' prompts",
    "mix_layers": "others' prompts",
    "mix_experts": "others' prompts",
}
"""What a term is called; the others are time per layer, whatever a step holds."""

SAME_LIKENESS = 0.99
"""From which on a published system is the asked one."""


def parts_of(plan: SpeedPlan) -> dict[str, float]:
    """Milliseconds of a step by cause, the largest first."""
    found: dict[str, float] = {}
    for name, value in plan.terms.items():
        part = _PARTS.get(name, "time per layer and sequence")
        found[part] = found.get(part, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def explain_speed(plan: SpeedPlan, before: SpeedPlan | None = None) -> list[str]:
    """The arithmetic, one line each. `before`: the same plan without calibration."""
    asked, shape = plan.question, plan.shape
    lines = [_phase_line(plan.prefill), _phase_line(plan.decode), _floor_line(plan)]
    parts = parts_of(plan)
    told = " + ".join(f"{value:.2f} {part}" for part, value in parts.items())
    lines.append(f"a decode step: {told} = {sum(parts.values()):.2f} ms, at {plan.running:,.1f} sequences")
    if asked.drafts:
        gain = f"{plan.expected_per_pass:.2f} tokens a pass"
        formula = f"(1 - {asked.accept:g}^{asked.drafts + 1}) / (1 - {asked.accept:g})"
        lines.append(
            f"speculation: {asked.drafts} drafts, {formula} = {gain}; a pass computes {asked.drafts + 1} tokens"
        )
    if asked.prefix_hit:
        cached = asked.prefix_hit * asked.input
        lines.append(
            f"prefix: {cached:,.0f} of {asked.input:,} prompt tokens are found, {asked.input - cached:,.0f} computed"
        )
    fits = f"{plan.capacity:,.1f} sequences of {asked.input + asked.output:,} tokens fit in the cache of one replica"
    wanted = asked.batch / asked.replicas
    if plan.queues:
        lines.append(
            f"queues: {fits}, {wanted:,.1f} are asked for; the rest waits, so no time to a first token is given"
        )
    else:
        lines.append(f"capacity: {fits}, {wanted:,.1f} are asked for")
    lines.append(f"limited by: {next(iter(parts), 'nothing')}")
    lines.append(_source_line(plan, is_calibrated=before is not None))
    lines += _published_lines(plan)
    if before is not None:
        lines += [_shrunk_line(plan, before), *_distance_lines(plan)]
    elif shape.weights.startswith("gguf") or asked.engine in {"llama.cpp", "hitsend"}:
        lines.append(f"unsure: no measurement of {asked.engine} was fitted; --calibrate FILE makes it yours")
    return lines


def _phase_line(phase: Phase) -> str:
    bound = f"{phase.side}-bound, {phase.ideal_s * 1e3:,.2f} ms at the peak"
    return (
        f"{phase.name}: {_short(phase.flops)}FLOP / {_short(phase.bytes)}B = {phase.intensity:,.1f} FLOP/B a "
        f"GPU, ridge "
        f"{_short(phase.peak_flops)}FLOP/s / {_short(phase.bandwidth_bytes_per_s)}B/s = {phase.ridge:,.1f}: {bound}"
    )


def _floor_line(plan: SpeedPlan) -> str:
    gpu = plan.question.gpu
    rate = f"{_short(gpu.bandwidth_bytes_per_s)}B/s"
    moved = plan.floor_ms / 1e3 * gpu.bandwidth_bytes_per_s
    return f"floor: {_short(moved)}B of weights a GPU / {rate} = {plan.floor_ms:.2f} ms a step; nothing is faster"


def _source_line(plan: SpeedPlan, *, is_calibrated: bool) -> str:
    facts = speed_facts()
    engine, kind = plan.group.split("/")
    of = "all engines" if engine == "any" else engine
    fitted = f"{plan.constants.rows} measured rows of {of} ({kind}, {', '.join(facts.gpus)}), {facts.as_of}"
    outside = "" if plan.is_fitted else "; this GPU or engine isn't among them, so the interval is twice as wide"
    outside = "; the interval widens with the distance of the measured load" if is_calibrated else outside
    return f"constants: fitted to {fitted}; intervals hold four in five{outside}"


def _shrunk_line(plan: SpeedPlan, before: SpeedPlan) -> str:
    told = [f"TPOT {_pair(before.tpot_ms)} to {_pair(plan.tpot_ms)}"]
    if plan.ttft_ms is not None and before.ttft_ms is not None:
        told.append(f"TTFT {_pair(before.ttft_ms)} to {_pair(plan.ttft_ms)}")
    return f"calibration: {', '.join(told)}; width {width(before.tpot_ms):.0%} to {width(plan.tpot_ms):.0%} of TPOT"


def _published_lines(plan: SpeedPlan) -> list[str]:
    tpot, ttft = plan.published
    if tpot.nearest is None:
        return []
    kin = tpot.nearest
    experts = ", experts divided" if kin.ep else ""
    moves = f"TPOT x {moved_by(plan.terms, tpot):.2f}, TTFT x {moved_by(plan.ttft_terms, ttft):.2f}"
    best = f"{kin.model} ({kin.weights}) on {kin.tp} x {kin.gpu}{experts}"
    return [
        f"published systems of {plan.question.engine} like this: {moves}; the most like ({tpot.likeness:.0%}) is {best}"
    ]


def moved_by(terms: dict[str, float], said: Beside) -> float:
    """What all factors together make of a sum that they are in."""
    before = sum(value / said.factors.get(name, 1.0) for name, value in terms.items())
    return sum(terms.values()) / before if before else 1.0


def distance_of(plan: SpeedPlan) -> dict[str, Any] | None:
    """How far the measured loads are from the asked one, what that means, and which load to measure instead; None
    without a calibration."""
    asked = plan.question
    load = (float(asked.batch), float(asked.input), float(asked.output))
    near = plan.factors.nearest(load, with_ttft=True) or plan.factors.nearest(load)
    if near is None:
        return None
    each, octaves = near.each(*load), near.octaves(*load)
    tpot, ttft = typical_errors(octaves, is_published=_is_published(plan))
    is_near = octaves <= NEARBY
    wanted = {"concurrency": asked.batch, "input": asked.input, "output": asked.output}
    return {
        "nearest": {"concurrency": near.batch, "input": near.input, "output": near.output},
        "has_ttft": near.ttft is not None,
        "octaves": dict(zip(wanted, each, strict=True)) | {"all": octaves},
        "is_near": is_near,
        "typical_tpot_error": tpot,
        "typical_ttft_error": ttft if near.ttft is not None else None,
        "measure_instead": None if is_near else wanted,
    }


def _is_published(plan: SpeedPlan) -> bool:
    """This system is among those that everything was fitted to."""
    return plan.published[0].likeness >= SAME_LIKENESS


def _distance_lines(plan: SpeedPlan) -> list[str]:
    found = distance_of(plan)
    if found is None:
        return []
    at, octaves = found["nearest"], found["octaves"]
    where = f"{at['concurrency']:,.0f} at once, {at['input']:,.0f} in, {at['output']:,.0f} out"
    parts = ", ".join(f"{name} {octaves[name]:.1f}" for name in ("concurrency", "input", "output"))
    first = found["typical_ttft_error"]
    ttft = "no time to a first token was measured" if first is None else f"TTFT {first:.1%}"
    off = f"TPOT {found['typical_tpot_error']:.1%}, {ttft}"
    kind = "published" if _is_published(plan) else "unpublished"
    lines = [
        (
            f"measured: {where}, {octaves['all']:.1f} octaves from what is asked ({parts}); plans of {kind} systems "
            f"from one load so far away were off by {off} in the median"
        )
    ]
    wanted = found["measure_instead"]
    if wanted is not None:
        near_tpot, near_ttft = typical_errors(1.0, is_published=_is_published(plan))
        lines.append(
            f"far: measure the asked load for TPOT {near_tpot:.1%}, TTFT {near_ttft:.1%}: hitsend load --concurrency "
            f"{wanted['concurrency']} --input {wanted['input']} --output {wanted['output']} --json"
        )
    return lines


def width(interval: Interval) -> float:
    """High - low, as a share of the middle."""
    return (interval.high - interval.low) / interval.value


def _pair(interval: Interval) -> str:
    return f"{interval.value:,.1f} ms [{interval.low:,.1f}, {interval.high:,.1f}]"


def _short(value: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:,.3g} {letter}"
    return f"{value:,.3g} "


def _phase_document(phase: Phase) -> dict[str, Any]:
    return {
        "flops": phase.flops,
        "bytes": phase.bytes,
        "intensity_flops_per_byte": phase.intensity,
        "ridge_flops_per_byte": phase.ridge,
        "side": phase.side,
        "ideal_ms": phase.ideal_s * 1e3,
    }


def speed_document(plan: SpeedPlan, before: SpeedPlan | None = None) -> dict[str, Any]:
    """What `--json` prints. Intervals are `{value, low, high}`."""
    asked = plan.question
    found: dict[str, Any] = {
        "model": plan.shape.name,
        "gpu": asked.gpu.name,
        "gpus": plan.gpus,
        "engine": asked.engine,
        "weights": plan.shape.weights,
        "tp": asked.layout.tp,
        "pp": asked.layout.pp,
        "dp": asked.replicas,
        "batch": asked.batch,
        "input": asked.input,
        "output": asked.output,
        "ttft_ms": None if plan.ttft_ms is None else msgspec.to_builtins(plan.ttft_ms),
        "tpot_ms": msgspec.to_builtins(plan.tpot_ms),
        "output_tokens_per_s": msgspec.to_builtins(plan.output_tokens_per_s),
        "output_tokens_per_s_per_gpu": plan.output_tokens_per_s.value / plan.gpus,
        "queues": plan.queues,
        "capacity": plan.capacity,
        "running": plan.running,
        "floor_tpot_ms": plan.floor_ms,
        "expected_tokens_per_pass": plan.expected_per_pass,
        "limited_by": next(iter(parts_of(plan)), None),
        "step_ms": parts_of(plan),
        "phases": {phase.name: _phase_document(phase) for phase in (plan.prefill, plan.decode)},
        "is_fitted": plan.is_fitted,
        "published": {
            "likeness": plan.published[0].likeness,
            "tpot_factor": moved_by(plan.terms, plan.published[0]),
            "ttft_factor": moved_by(plan.ttft_terms, plan.published[1]),
        },
        "explain": explain_speed(plan, before),
    }
    if before is not None:
        found["calibration"] = {
            "tpot_width_before": width(before.tpot_ms),
            "tpot_width_after": width(plan.tpot_ms),
            "ttft_width_before": None if before.ttft_ms is None else width(before.ttft_ms),
            "ttft_width_after": None if plan.ttft_ms is None else width(plan.ttft_ms),
            **(distance_of(plan) or {}),
        }
    return found
