"""`hitsend plan fleet`: how many GPUs for a peak and a latency goal, found by simulating the scheduler.

Enters: a peak, goals, traffic or a trace, a planned system or measured step times. Leaves: replicas with their range, a
goodput curve, thresholds, money. Always true: the simulator, and with it the loop and numpy, is loaded here and only
here. Next: `plan_cost.py`.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import CallFailed, options
from hitsend.cli.plan_answer import Answer, give
from hitsend.cli.plan_memory import FactsFile
from hitsend.cli.plan_speed import as_ms
from hitsend.plan.calibrate import factors_of, read_points
from hitsend.plan.compare import cheapest_rental
from hitsend.plan.facts import Facts, load_facts
from hitsend.plan.fleet import MAX_REQUESTS, FleetQuestion, Place, Slo, plan_fleet
from hitsend.plan.fleet_text import fleet_document
from hitsend.plan.hardware import find_gpu
from hitsend.plan.models import find_checkpoint
from hitsend.plan.roofline import Layout
from hitsend.plan.speed import SpeedQuestion, plan_speed
from hitsend.plan.steps import Calibration, read_calibration
from hitsend.plan.timing import PlannedTiming, StepTiming, read_timing
from hitsend.plan.traffic import Arrival, Traffic, make_arrivals, read_trace

MAX_SLOTS, DEFAULT_SLOTS = 256, 8
DRAWS = 3
CACHED, BLOCK = 1 << 40, 16
"""Where requests share something: prefixes are kept, and found by blocks of so many tokens, as vLLM does."""
MEASURED_SPREAD = (0.9, 1.1)
"""Around step times that somebody typed in."""


def fleet(
    peak_rps: Annotated[float, typer.Option("--peak-rps", help="Requests a second at peak.")],
    slo_ttft: Annotated[
        str, typer.Option("--slo-ttft", metavar="MS", help="Time to the first token (500, 500ms, 2s).")
    ],
    slo_tpot: Annotated[str, typer.Option("--slo-tpot", metavar="MS", help="Time per token after it.")],
    slo_share: Annotated[float, typer.Option("--slo-share", help="Of requests that must keep both.")] = 0.95,
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="With --gpu; or --timing.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="G")] = None,
    tp: Annotated[int, typer.Option("--tp", help="GPUs of one replica.")] = 1,
    weights: Annotated[str | None, typer.Option("--weights")] = None,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype")] = "auto",
    engine: Annotated[str, typer.Option("--engine", help="Whose step times.")] = "vllm",
    calibrate: Annotated[Path | None, typer.Option("--calibrate", metavar="FILE", help="As of plan speed.")] = None,
    timing: Annotated[
        str | None, typer.Option("--timing", metavar="FILE|MS,MS,MS", help="Of plan steps; or step, prompt, answer.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, max=4096, help="Sequences at once on a replica.")
    ] = None,
    cells: Annotated[int | None, typer.Option("--cells", min=1, help="Tokens of cache on a replica.")] = None,
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=1, help="Of one step.")] = 2048,
    input_tokens: Annotated[int, typer.Option("--input", help="Median prompt.")] = 1200,
    output_tokens: Annotated[int, typer.Option("--output", help="Median answer.")] = 400,
    spread: Annotated[float, typer.Option("--spread", help="Of lengths: sigma of the logarithm; 0: alike.")] = 0.5,
    shared: Annotated[int, typer.Option("--shared", help="Prompt tokens that all have and a cache keeps.")] = 0,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="JSON Lines: at_s, input_tokens, output_tokens.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", min=20, max=MAX_REQUESTS, help="At least, in a simulated run.")
    ] = 150,
    seed: Annotated[int, typer.Option("--seed")] = 1,
    safety: Annotated[float, typer.Option("--safety", help="Factor on the peak.")] = 1.2,
    cold_start: Annotated[
        float, typer.Option("--cold-start", metavar="S", help="Seconds until a new replica serves.")
    ] = 120.0,
    doubling: Annotated[
        float, typer.Option("--doubling", metavar="S", help="Seconds in which traffic can double.")
    ] = 900.0,
    idle_hours: Annotated[float, typer.Option("--idle-hours", help="A day without traffic.")] = 8.0,
    usd_per_gpu_hour: Annotated[float | None, typer.Option("--usd-per-gpu-hour", help="Default: dated prices.")] = None,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """Replicas and GPUs for a peak at a latency goal, one more for a failure, and how sure that is."""
    given = {name: value for name, value in locals().items() if name not in {"facts", "as_json"}}
    given |= {"slo_ttft": as_ms("--slo-ttft", slo_ttft), "slo_tpot": as_ms("--slo-tpot", slo_tpot)}
    found = _simulated(Given(**given), facts)
    return give(found, fleet_text(found, peak_rps), as_json=as_json)


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The flags. `slo_*` in milliseconds."""

    peak_rps: float
    slo_ttft: float
    slo_tpot: float
    slo_share: float
    model: str | None
    gpu: str | None
    tp: int
    weights: str | None
    kv_dtype: str
    engine: str
    calibrate: Path | None
    timing: str | None
    slots: int | None
    cells: int | None
    step_tokens: int
    input_tokens: int
    output_tokens: int
    spread: float
    shared: int
    trace: Path | None
    requests: int
    seed: int
    safety: float
    cold_start: float
    doubling: float
    idle_hours: float
    usd_per_gpu_hour: float | None


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: room, and step times as planned, fast and slow."""

    place: Place
    times: tuple[StepTiming, StepTiming, StepTiming]
    usd_per_gpu_hour: float | None


def _simulated(given: Given, facts: Path | None) -> dict[str, Any]:
    # the planner's other commands start without the loop and numpy
    from hitsend.plan.simulate import simulate  # noqa: PLC0415

    return fleet_document(plan_fleet(_question(given, facts), simulate))


def fleet_text(found: dict[str, Any], peak_rps: float) -> list[str]:
    """The same document for a reader."""
    many = (
        "no number of replicas" if found["replicas"] is None else f"{found['replicas']} replicas, {found['gpus']} GPUs"
    )
    head = f"{many} for {peak_rps:g} requests/s: {found['sure']}"
    return [head, *(f"  {line}" for line in found["explain"])]


def _question(given: Given, facts: Path | None) -> FleetQuestion:
    draws = _draws(given)
    system = _measured(given, draws) if given.timing is not None else _planned(given, draws, load_facts(facts))
    return FleetQuestion(
        peak_per_s=given.peak_rps,
        slo=Slo(ttft_s=given.slo_ttft / 1e3, tpot_s=given.slo_tpot / 1e3, share=given.slo_share),
        draws=draws,
        place=system.place,
        timing=system.times[0],
        fast=system.times[1],
        slow=system.times[2],
        requests=given.requests,
        gpus_per_replica=given.tp,
        safety=given.safety,
        cold_start_s=given.cold_start,
        doubling_s=given.doubling,
        usd_per_gpu_hour=system.usd_per_gpu_hour,
        idle_hours_per_day=given.idle_hours,
    )


def _draws(given: Given) -> tuple[tuple[Arrival, ...], ...]:
    """One trace, or three draws of the same traffic."""
    if given.trace is not None:
        return (tuple(read_trace(given.trace)),)
    traffic = Traffic(input=given.input_tokens, output=given.output_tokens, spread=given.spread, shared=given.shared)
    return tuple(tuple(make_arrivals(traffic, MAX_REQUESTS, given.seed + turn)) for turn in range(DRAWS))


def _longest(draws: tuple[tuple[Arrival, ...], ...]) -> int:
    return max(one.input + one.output for draw in draws for one in draw)


def _place(given: Given, draws: tuple[tuple[Arrival, ...], ...], slots: int, cells: int) -> Place:
    longest = _longest(draws)
    cells = min(cells, slots * longest)
    has_cache = any(one.shared or one.repeated for draw in draws for one in draw)
    return Place(
        prefix_cache_bytes=CACHED if has_cache else 0,
        prefix_step=BLOCK,
        slots=slots,
        cells_per_slot=longest,
        cells=cells,
        step_tokens=given.step_tokens,
        tpot_target_s=given.slo_tpot / 1e3,
        ttft_target_s=given.slo_ttft / 1e3,
    )


def _measured(given: Given, draws: tuple[tuple[Arrival, ...], ...]) -> System:
    """Step times that somebody measured."""
    if given.model is not None or given.calibrate is not None:
        raise CallFailed("--timing, or --model with --gpu: one of them")
    text = given.timing or ""
    found = read_calibration(Path(text)) if "," not in text else Calibration(timing=read_timing(text))
    middle = found.timing
    slots = given.slots or (found.room.slots if found.room else DEFAULT_SLOTS)
    return System(
        place=_place(given, draws, slots, given.cells or slots * _longest(draws)),
        times=(middle, middle.stretched(MEASURED_SPREAD[0]), middle.stretched(MEASURED_SPREAD[1])),
        usd_per_gpu_hour=given.usd_per_gpu_hour,
    )


def _planned(given: Given, draws: tuple[tuple[Arrival, ...], ...], known: Facts) -> System:
    """Step times and room as `plan speed` has them."""
    if given.model is None or given.gpu is None:
        raise CallFailed("--model and --gpu are needed, or --timing")
    entry, leave = (
        round(sum(sizes) / len(draws[0])) for sizes in zip(*((d.input, d.output) for d in draws[0]), strict=True)
    )
    question = SpeedQuestion(
        checkpoint=find_checkpoint(given.model, known),
        gpu=find_gpu(given.gpu, known),
        engine=given.engine,
        layout=Layout(tp=given.tp),
        weights=given.weights,
        kv_dtype=given.kv_dtype,
        input=entry,
        output=leave,
    )
    factors = None if given.calibrate is None else factors_of(question, read_points(given.calibrate))
    plan = plan_speed(question, factors)
    held = int(plan.capacity * (entry + leave))
    low, high = (bound / plan.tpot_ms.value for bound in (plan.tpot_ms.low, plan.tpot_ms.high))
    rent = cheapest_rental(question.gpu, known)
    price = given.usd_per_gpu_hour
    return System(
        place=_place(given, draws, given.slots or max(1, min(MAX_SLOTS, int(plan.capacity))), given.cells or held),
        times=(
            PlannedTiming(plan, factors),
            PlannedTiming(plan, factors, factor=low),
            PlannedTiming(plan, factors, factor=high),
        ),
        usd_per_gpu_hour=price if price is not None or rent is None else float(rent.usd_per_gpu_hour),
    )
