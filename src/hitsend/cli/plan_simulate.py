"""`hitsend plan simulate`: what hitsend's scheduler makes of a trace, as `hitsend load --trace` would measure it.

Enters: a trace, step times or a load test that they are fitted to, slots and cells. Leaves: throughput, TTFT and TPOT.
Always true: the same trace goes into `hitsend load --trace FILE --replay 1`, so that both can be held against each
other. Next: `plan_fleet.py`.
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import CallFailed, options
from hitsend.plan.calibrate import read_points
from hitsend.plan.fleet import Place, Served, nearest
from hitsend.plan.timing import fit_timing, read_timing
from hitsend.plan.traffic import read_trace


def simulate_trace(
    trace: Annotated[Path, typer.Option("--trace", metavar="FILE", help="JSON Lines, with at_s.")],
    timing: Annotated[
        str | None, typer.Option("--timing", metavar="MS,MS,MS", help="A step, a prompt's token, an answer's token.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="hitsend load --json with --concurrency 1,4.")
    ] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Sequences at once.")] = 8,
    cells: Annotated[int | None, typer.Option("--cells", min=1, help="Tokens of cache; default: enough.")] = None,
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=1, help="Of one step.")] = 512,
    as_json: options.Json = False,
) -> None:
    """Run the scheduler on a recorded trace at its own pace, without a model."""
    # the planner's other commands start without the loop and numpy
    from hitsend.plan.simulate import simulate  # noqa: PLC0415

    if (timing is None) == (calibrate is None):
        raise CallFailed("--timing or --calibrate: one of them")
    times = read_timing(timing) if timing else fit_timing(read_points(calibrate or Path()), step_tokens)
    arrivals = read_trace(trace)
    longest = max(one.input + one.output for one in arrivals)
    room = min(cells or slots * longest, slots * longest)
    place = Place(slots=slots, cells_per_slot=longest, cells=room, step_tokens=step_tokens)
    found = trace_document(simulate(arrivals, times, place)) | {"timing": msgspec.to_builtins(times)}
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{found['requests']} requests, {found['refused']} refused, in {found['wall_s']:,.2f} s")
    print(f"  output {found['output_tokens_per_s']:,.1f} tokens/s, {found['requests_per_s']:,.3f} requests/s")
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        told = ", ".join(f"{key} {value:,.1f}" for key, value in (found[name] or {}).items())
        print(f"  {name.replace('_', ' ')}: {told or 'none'}")
    parts = f"{times.step_ms:.3f} ms + {times.prefill_ms:.3f} a prompt's token + {times.decode_ms:.3f} an answer's"
    print(f"  step times: {parts}")


def trace_document(served: list[Served]) -> dict[str, Any]:
    """The keys are those of a load test's level."""
    whole = [one for one in served if one.ttft_s is not None]
    wall = max(one.ended_s for one in served)
    return {
        "requests": len(served),
        "refused": len(served) - len(whole),
        "wall_s": wall,
        "requests_per_s": len(whole) / wall,
        "output_tokens_per_s": sum(one.tokens for one in whole) / wall,
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
