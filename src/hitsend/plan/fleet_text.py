"""A fleet plan in words: how many, the goodput curve, thresholds, money, and how sure that is.

Enters: a `FleetPlan`. Leaves: lines and the JSON document of `hitsend plan fleet`. Always true: a number of replicas
stands with its range. Next: `../serve/loop/__init__.py`, whose scheduler was simulated.
"""

import math
from typing import Any

import msgspec

from hitsend.plan.fleet import FleetPlan, Level, requests_for

BAR = 30


def fleet_document(plan: FleetPlan) -> dict[str, Any]:
    """What `--json` prints. Milliseconds of latencies that nobody had (refused requests) are null."""
    asked = plan.question
    gpus = asked.gpus_per_replica

    def times(replicas: int | None) -> int | None:
        return None if replicas is None else replicas * gpus

    return {
        "replicas": plan.replicas,
        "replicas_range": [plan.fewest, plan.most],
        "replicas_with_spare": plan.with_spare,
        "gpus": times(plan.replicas),
        "gpus_range": [times(plan.fewest), times(plan.most)],
        "gpus_with_spare": times(plan.with_spare),
        "requests_per_s_per_replica": plan.per_replica_per_s,
        "requests_per_s_per_replica_range": [plan.slowest_per_s, plan.fastest_per_s],
        "output_tokens_per_s_per_replica": plan.tokens_per_s,
        "output_tokens_per_s_per_gpu": plan.tokens_per_s / gpus,
        "scale_up_requests_per_s": plan.scale_up_per_s,
        "scale_up_in_flight": plan.in_flight_at_scale_up,
        "scale_down_requests_per_s": plan.scale_down_per_s,
        "usd_per_day": _usd_per_day(plan),
        "usd_per_day_scaled_to_zero": _usd_scaled_to_zero(plan),
        "cold_start_s": asked.cold_start_s,
        "curve": [_row(one) for one in plan.curve],
        "sure": how_sure(plan),
        "explain": explain_fleet(plan),
    }


def _row(one: Level) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in msgspec.to_builtins(one).items()
    } | {
        "ttft_p99_s": None if math.isinf(one.ttft_p99_s) else one.ttft_p99_s,
        "ttft_p50_s": None if math.isinf(one.ttft_p50_s) else one.ttft_p50_s,
    }


def _usd_per_day(plan: FleetPlan) -> float | None:
    asked = plan.question
    if asked.usd_per_gpu_hour is None or plan.with_spare is None:
        return None
    return plan.with_spare * asked.gpus_per_replica * asked.usd_per_gpu_hour * 24


def _usd_scaled_to_zero(plan: FleetPlan) -> float | None:
    """Nothing runs in the idle hours; one start a day is paid for and serves nobody."""
    asked, whole = plan.question, _usd_per_day(plan)
    if whole is None:
        return None
    return whole * (24 - asked.idle_hours_per_day + asked.cold_start_s / 3600) / 24


def how_sure(plan: FleetPlan) -> str:
    """One sentence about the range."""
    if plan.replicas is None or plan.fewest is None:
        return "no rate keeps the goal on one replica: a single request is too slow, or the goal too near it"
    if plan.most is None:
        return f"unsure: {plan.fewest} replicas or more; at the slow end of the interval no rate keeps the goal"
    if plan.fewest == plan.most:
        return f"sure within what was modelled: {plan.replicas} at both ends of the step times and in every draw"
    factor = plan.most / plan.fewest
    word = "roughly" if factor < 1.5 else "unsure"
    return (
        f"{word}: {plan.fewest} to {plan.most} replicas; measure one replica (`hitsend load`) and --calibrate with it"
    )


def explain_fleet(plan: FleetPlan) -> list[str]:
    """The arithmetic, one line each."""
    asked = plan.question
    slo = asked.slo
    goal = f"TTFT <= {slo.ttft_s:g} s and TPOT <= {slo.tpot_s * 1e3:g} ms for {slo.share:.0%}"
    requests = requests_for(asked, asked.draws[0], plan.per_replica_per_s)
    lines = [
        (
            f"goal: {goal}; simulated: hitsend's scheduler, {requests} requests in the run at the limit, "
            f"{len(asked.draws)} draws, what fills and what empties the server not counted"
        ),
        (
            f"one replica ({asked.gpus_per_replica} GPUs, {asked.place.slots} slots, {asked.place.cells:,} tokens "
            f"of cache): "
            f"{plan.per_replica_per_s:,.3f} requests/s [{plan.slowest_per_s:,.3f}, {plan.fastest_per_s:,.3f}], "
            f"{plan.tokens_per_s:,.1f} output tokens/s"
        ),
    ]
    if plan.replicas is None:
        return [*lines, how_sure(plan)]
    spare = plan.with_spare or 0
    lines.append(
        f"replicas: ceil({asked.peak_per_s:g} x {asked.safety:g} / {plan.per_replica_per_s:,.3f}) = "
        f"{plan.replicas}; with one for "
        f"a failure {spare}, {spare * asked.gpus_per_replica} GPUs"
    )
    loads = [asked.peak_per_s / count / plan.per_replica_per_s for count in (spare, max(1, spare - 1))]
    lines.append(f"headroom: at peak each carries {loads[0]:.0%} of what it can, {loads[1]:.0%} while one is down")
    lines += ["goodput by rate on one replica:", *(_curve_line(one) for one in plan.curve)]
    lines.append(
        f"autoscaling: add one above {plan.scale_up_per_s:,.3f} requests/s a replica (about "
        f"{plan.in_flight_at_scale_up:,.1f} in "
        f"flight), so that a cold start of {asked.cold_start_s:g} s is over before traffic that doubles in "
        f"{asked.doubling_s:g} s needs it; take one away below {plan.scale_down_per_s:,.3f}"
    )
    whole, zero = _usd_per_day(plan), _usd_scaled_to_zero(plan)
    if whole is not None and zero is not None:
        lines.append(
            f"money: {whole:,.2f} USD a day; scaled to zero for {asked.idle_hours_per_day:g} h {zero:,.2f}, "
            f"where whoever comes "
            f"first waits {asked.cold_start_s:g} s"
        )
    return [*lines, how_sure(plan)]


def _curve_line(one: Level) -> str:
    late = "refused" if math.isinf(one.ttft_p99_s) else f"{one.ttft_p99_s:,.2f} s"
    bar = "#" * round(one.kept * BAR)
    return (
        f"  {one.per_s:9,.3f}/s |{bar:<{BAR}}| {one.kept:5.1%} kept, {one.goodput_per_s:,.3f}/s, TTFT p99 {late}, "
        f"TPOT p50 {one.tpot_p50_s * 1e3:,.1f} ms, {one.output_tokens_per_s:,.0f} tokens/s, "
        f"{one.in_flight:,.1f} in flight"
    )
