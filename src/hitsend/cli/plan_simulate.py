"""`hitsend plan simulate`: what hitsend's scheduler makes of a trace, as `hitsend load --trace` would measure it.

Enters: a trace, step times or a load test that they are fitted to, slots and cells. Leaves: throughput, TTFT and TPOT.
Always true: the same trace goes into `hitsend load --trace FILE --replay 1`, so that both can be held against each
other. Next: `plan_steps.py`.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import CallFailed, options
from hitsend.plan.calibrate import read_points
from hitsend.plan.fleet import Place, Served, nearest
from hitsend.plan.steps import Calibration, Room, read_calibration
from hitsend.plan.timing import StepTiming, Uneven, fit_timing, read_timing
from hitsend.plan.traffic import Arrival, read_trace

SLOTS, CACHE_BYTES = 8, 512 << 20
DRAWS = 7
"""An odd number: each figure is the median of theirs."""


def simulate_trace(
    trace: Annotated[Path, typer.Option("--trace", metavar="FILE", help="JSON Lines, with at_s.")],
    timing: Annotated[
        str | None,
        typer.Option(
            "--timing", metavar="FILE|MS,MS,MS", help="What plan steps wrote; or a step, a prompt's token, an answer's."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="hitsend load --json with --concurrency 1,4.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, max=4096, help="Closed loop: so many at once; at_s is nothing."),
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, max=4096, help="Sequences at once.")] = None,
    cells: Annotated[int | None, typer.Option("--cells", min=1, help="Tokens of cache; default: enough.")] = None,
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=1, help="Of one step.")] = 512,
    as_json: options.Json = False,
) -> None:
    """Run the scheduler on a recorded trace at its own pace, without a model."""
    # the planner's other commands start without the loop and numpy
    from hitsend.plan.simulate import simulate  # noqa: PLC0415

    found = _calibration(timing, calibrate, step_tokens)
    arrivals = read_trace(trace, is_timed=concurrency is None)
    place = _place(found.room, arrivals, (slots, cells, step_tokens))
    served = [
        simulate(
            arrivals,
            timing,
            place,
            concurrency=concurrency,
            answers=found.answers,
            edge=found.edge,
            usual=found.timing,
        )
        for timing in draws_of(found)
    ]
    _show(trace_document(served) | {"timing": msgspec.to_builtins(found.timing)}, found, as_json=as_json)


def _calibration(timing: str | None, calibrate: Path | None, step_tokens: int) -> Calibration:
    if (timing is None) == (calibrate is None):
        raise CallFailed("--timing or --calibrate: one of them")
    if calibrate is not None:
        return Calibration(timing=fit_timing(read_points(calibrate), step_tokens))
    text = timing or ""
    return read_calibration(Path(text)) if "," not in text else Calibration(timing=read_timing(text))


def draws_of(found: Calibration) -> list[StepTiming]:
    """Steps as uneven as they were seen, several times: where a hair decides which step a prompt comes into, one run
    tells one of two stories."""
    if not found.spread:
        return [found.timing]
    return [Uneven(found.timing, found.spread, seed) for seed in range(DRAWS)]


def _place(room: Room | None, arrivals: list[Arrival], asked: tuple[int | None, int | None, int]) -> Place:
    """The room that was asked for, then the one that was seen, then enough."""
    slots, cells, step_tokens = asked
    longest = max(one.input + one.output for one in arrivals)
    many = slots or (room.slots if room else SLOTS)
    each = room.cells_per_slot if room else longest
    whole = cells or (room.cells if room and slots is None else many * each)
    if longest > min(each, whole):
        raise CallFailed(
            f"--trace: the longest request has {longest:,} tokens, a sequence can have {min(each, whole):,}"
        )
    has_cache = room is not None or any(one.shared or one.repeated for one in arrivals)
    return Place(
        slots=many,
        cells_per_slot=each,
        cells=min(whole, many * each),
        step_tokens=step_tokens,
        prefix_cache_bytes=CACHE_BYTES if has_cache else 0,
        drafts=room is not None and room.drafts,
    )


def _show(found: dict[str, Any], calibration: Calibration, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{found['requests']} requests, {found['refused']} refused, in {found['wall_s']:,.2f} s")
    print(f"  output {found['output_tokens_per_s']:,.1f} tokens/s, {found['requests_per_s']:,.3f} requests/s")
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        told = ", ".join(f"{key} {value:,.1f}" for key, value in (found[name] or {}).items())
        print(f"  {name.replace('_', ' ')}: {told or 'none'}")
    if found["cached_tokens_mean"]:
        print(f"  from the prefix cache: {found['cached_tokens_mean']:,.1f} tokens of a prompt")
    times = calibration.timing
    parts = f"{times.step_ms:.3f} ms + {times.prefill_ms:.3f} a prompt's token + {times.decode_ms:.3f} an answer's"
    fitted = f", fitted to {calibration.steps:,} steps, {calibration.error:.1%} off" if calibration.steps else ""
    print(f"  step times: {parts}{fitted}")
    if "between_draws" in found:
        low, high = found["between_draws"]["ttft_p50_ms"]
        said = f"{DRAWS} draws of steps that vary by {calibration.spread:.1%}"
        print(f"  medians of {said}; ttft p50 {low:,.1f} to {high:,.1f}")


def trace_document(draws: Sequence[list[Served]]) -> dict[str, Any]:
    """The keys are those of a load test's level; each figure is its median over the draws. `between_draws`: the lowest
    and the highest of some."""
    found = [_one_document(served) for served in draws]
    document: dict[str, Any] = _medians(found)
    if len(found) > 1:
        ranges = {"output_tokens_per_s": [one["output_tokens_per_s"] for one in found]}
        for share in ("p50", "p99"):
            ranges[f"ttft_{share}_ms"] = [one["ttft_ms"][share] for one in found if one["ttft_ms"]] or [0.0]
        document["between_draws"] = {name: [min(values), max(values)] for name, values in ranges.items()}
    return document


def _medians(found: Sequence[Any]) -> Any:
    """Key by key; None where the first draw has none."""
    first = found[0]
    if isinstance(first, dict):
        return {key: _medians([one[key] for one in found if one is not None]) for key in first}
    return None if first is None else statistics.median_low([one for one in found if one is not None])


def _one_document(served: list[Served]) -> dict[str, Any]:
    whole = [one for one in served if one.ttft_s is not None]
    wall = max(one.ended_s for one in served)
    return {
        "requests": len(served),
        "refused": len(served) - len(whole),
        "wall_s": wall,
        "requests_per_s": len(whole) / wall,
        "output_tokens_per_s": sum(one.tokens for one in whole) / wall,
        "cached_tokens_mean": statistics.mean(one.cached for one in whole) if whole else 0.0,
        "ttft_ms": _spread([one.ttft_s for one in whole]),
        "tpot_ms": _spread([one.tpot_s for one in whole]),
        "e2e_ms": _spread([one.ended_s - one.at_s for one in whole]),
    }


def _spread(values: list[float | None]) -> dict[str, float] | None:
    known = sorted(value * 1e3 for value in values if value is not None)
    if not known:
        return None
    shares = {f"p{share}": nearest(known, share / 100) for share in (50, 90, 99)}
    return {"mean": statistics.mean(known)} | shares
