"""A whole load test: probes, warm-up, then every level of every round, the targets taking turns.

Enters: a `Plan`. Leaves: a `Run`: per target its facts and, per level, figures and samples. Always true: targets are
measured one at a time, in alternating order; nothing measured is lost when it is interrupted; what warms up is counted
nowhere; counting the answers' tokens again happens between levels, not during them. Next: `document.py`.
"""

import asyncio
import contextlib
import os
import platform
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import datetime, timezone
from typing import Any, Protocol

import msgspec

from hitsend.load.arrivals import MOST_REQUESTS, arrivals
from hitsend.load.client import Client, Unreachable
from hitsend.load.drive import KEPT_TEXTS, Stage
from hitsend.load.probe import count, first_model, probe
from hitsend.load.report import Facts as StageFacts
from hitsend.load.report import Level, summarise
from hitsend.load.result import Measured, Plan, Run, TargetRun
from hitsend.load.sample import Sample
from hitsend.load.saturation import Ramp, is_sustained
from hitsend.load.strain import Strain, watched
from hitsend.load.workload import Shape, Workload, fitted

STEADY = 4.0
"""A stage of a ramp lasts so many times the median answer: in less, whether requests pile up can't be told."""


class Watcher(Protocol):
    """Who shows how far it is."""

    def stage(self, title: str, stage: Stage, *, requests: int | None, duration_s: float | None) -> None:
        """A stage begins; its counters may be looked at while it runs."""
        ...

    def seen(self) -> None:
        """An answer has ended."""
        ...


class _Load(msgspec.Struct, frozen=True):
    """One level to be measured."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    round: int = 0

    def title(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return "replay" if self.rate_per_s is None else f"{self.rate_per_s:g}/s"


class _Line:
    """One target while it is measured."""

    def __init__(self, client: Client, run: TargetRun, workload: Workload) -> None:
        self.client, self.run, self.workload = client, run, workload


async def run(plan: Plan, watcher: Watcher) -> Run:
    """Do it. Cancelling it once ends it early with what was measured. Raises ConfigError before anything is."""
    async with AsyncExitStack() as stack:
        lines, found = await _open(plan, stack)
        try:
            for line in lines:
                await _warm_up(plan, line, watcher)
            for number in range(plan.rounds):
                await _round(plan, lines if number % 2 == 0 else lines[::-1], number, watcher)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not any(line.run.measured for line in lines):
                raise
            task.uncancel()
            found.is_interrupted = True
        return found


async def _open(plan: Plan, stack: AsyncExitStack) -> tuple[list[_Line], Run]:
    clients, contexts = [], []
    for target in plan.targets:
        client = await stack.enter_async_context(
            Client(target, timeout_s=plan.timeout_s, keeps_connections=plan.keeps_connections)
        )
        model, context = await first_model(client)
        client.target = msgspec.structs.replace(client.target, model=model)
        clients.append(client)
        contexts.append(context)
    smallest = min((context for context in contexts if context is not None), default=None)
    shape, scale = fitted(plan.shape, smallest) if plan.is_scaled else (plan.shape, 1.0)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")  # noqa: UP017  # Python 3.11's spelling, too
    found = Run(plan, shape, scale, date, machine())
    for client, context in zip(clients, contexts, strict=True):
        facts = await probe(client, context, plan.seed)
        found.targets.append(TargetRun(client.target, facts, []))
    workload = _workload(plan, shape, found.targets)
    return [_Line(client, one, workload) for client, one in zip(clients, found.targets, strict=True)], found


def _workload(plan: Plan, shape: Shape, targets: list[TargetRun]) -> Workload:
    """One for all targets, whatever each knows: the words of the first whose lengths are exact, and system messages
    where all take them. For the others these lengths are an estimate."""
    all_facts = [one.facts for one in targets]
    vocabulary = next((one.vocabulary for one in all_facts if one.vocabulary.is_exact), all_facts[0].vocabulary)
    has_system = all(one.has_system for one in all_facts)
    for one in targets:
        is_own = one.facts.vocabulary == vocabulary and one.facts.has_system == has_system
        ours = vocabulary if is_own else msgspec.structs.replace(vocabulary, is_exact=False)
        one.facts = msgspec.structs.replace(one.facts, vocabulary=ours)
    endpoint = targets[0].target.endpoint
    workload = Workload(shape, vocabulary, plan.seed, plan.abort, endpoint, has_system=has_system, trace=plan.trace)
    return workload.ready()


async def _warm_up(plan: Plan, line: _Line, watcher: Watcher) -> None:
    if plan.warmup:
        workload = msgspec.structs.replace(line.workload, abort=0.0)
        stage = Stage(line.client.send, lambda number: workload.conversation("warm-up", number), seen=watcher.seen)
        watcher.stage(f"{line.client.target.name}: warm-up", stage, requests=plan.warmup, duration_s=None)
        line.client.start_s = stage.begin()
        await stage.closed(min(2, plan.warmup), requests=plan.warmup, duration_s=None)


async def _round(plan: Plan, lines: list[_Line], number: int, watcher: Watcher) -> None:
    if plan.ramp is not None:
        await _ramps(plan, lines, number, watcher)
        return
    loads = [_Load(concurrency=level, round=number) for level in plan.concurrency]
    loads += [_Load(rate_per_s=rate, round=number) for rate in plan.rates]
    for load in loads or [_Load(round=number)]:
        for line in lines:
            await _measure(plan, line, load, watcher)


async def _ramps(plan: Plan, lines: list[_Line], number: int, watcher: Watcher) -> None:
    assert plan.ramp is not None
    ramps = [(line, Ramp(*plan.ramp)) for line in lines]
    lengths = dict.fromkeys(range(len(lines)), plan.duration_s)
    while any(ramp.next() is not None for _, ramp in ramps):
        for at, (line, ramp) in enumerate(ramps):
            rate = ramp.next()
            if rate is None:
                continue
            here = msgspec.structs.replace(plan, duration_s=lengths[at])
            level = await _measure(here, line, _Load(rate_per_s=rate, round=number), watcher)
            ramp.tell(sustained=is_sustained(level))
            if level.e2e_ms is not None and plan.duration_s is not None and is_sustained(level):
                lengths[at] = max(plan.duration_s, min(plan.timeout_s, STEADY * level.e2e_ms.p50 / 1000))


async def _measure(plan: Plan, line: _Line, load: _Load, watcher: Watcher) -> Level:
    name = f"{load.round}/{load.title()}"
    stage = Stage(line.client.send, lambda index: line.workload.conversation(name, index), seen=watcher.seen)
    title = f"{line.client.target.name}: {load.title()}" + (f", round {load.round + 1}" if plan.rounds > 1 else "")
    drive = _driver(plan, stage, load, title, watcher)
    strain, own, is_interrupted = Strain(), None, True
    try:
        async with watched() as watch:
            line.client.start_s = stage.begin()
            try:
                await drive()
                is_interrupted = False
            finally:
                strain = watch.strain()
        own = await _count_again(line, stage.samples)
    finally:  # also of what was interrupted
        level = _level(plan, line, stage, load, (strain, own, is_interrupted))
        samples = [msgspec.structs.replace(one, text="", content="") if one.text else one for one in stage.samples]
        if samples or not is_interrupted:
            line.run.measured.append(Measured(level, samples))
    return level


def _driver(plan: Plan, stage: Stage, load: _Load, title: str, watcher: Watcher) -> Callable[[], Any]:
    """What runs the stage, once its clock has begun."""
    if load.concurrency is not None:
        concurrency = load.concurrency
        watcher.stage(title, stage, requests=plan.requests, duration_s=plan.duration_s)
        return lambda: stage.closed(
            concurrency, requests=plan.requests, duration_s=plan.duration_s, think_s=plan.think_s
        )
    times = _times(plan, load)
    watcher.stage(title, stage, requests=len(times), duration_s=None)
    return lambda: stage.open(times, think_s=plan.think_s)


def _times(plan: Plan, load: _Load) -> list[float]:
    if load.rate_per_s is None:
        speed = plan.replay_speed or 1.0
        times = [(one.at_s or 0.0) / speed for one in plan.trace][: plan.requests or MOST_REQUESTS]
        return [at for at in times if plan.duration_s is None or at < plan.duration_s]
    return arrivals(
        plan.arrivals,
        load.rate_per_s,
        duration_s=plan.duration_s,
        requests=plan.requests,
        seed=plan.seed,
        part=f"{load.round}/{load.title()}",
        burst_size=plan.burst_size,
    )


async def _count_again(line: _Line, samples: list[Sample]) -> dict[int, int] | None:
    """Our own count of some answers' tokens, by the target's tokenizer; None where it has none."""
    form = line.run.facts.tokenize
    if form is None:
        return None
    own = {}
    with contextlib.suppress(Unreachable):  # those that were counted count
        for sample in [one for one in samples if one.text][:KEPT_TEXTS]:
            number = await count(line.client, form, sample.text)
            if number is not None:
                own[sample.number] = number
    return own


def _level(
    plan: Plan, line: _Line, stage: Stage, load: _Load, seen: tuple[Strain, dict[int, int] | None, bool]
) -> Level:
    strain, own, is_interrupted = seen
    # of an open loop that was to last so long, the time after its last request counts too
    lasts = plan.duration_s if load.rate_per_s is not None and plan.requests is None and not is_interrupted else None
    facts = StageFacts(
        mode="open" if load.concurrency is None else "closed",
        concurrency=load.concurrency,
        rate_per_s=load.rate_per_s,
        arrivals=None if load.concurrency is not None else "trace" if load.rate_per_s is None else plan.arrivals,
        round=load.round,
        wall_s=max(stage.wall_s, lasts or 0.0),
        sending_s=max(stage.sending_s, lasts or 0.0),
        strain=strain,
        slo=plan.slo,
        own=own,
        is_exact=line.run.facts.vocabulary.is_exact,
        is_interrupted=is_interrupted,
    )
    return summarise(stage.samples, facts)


def machine() -> dict[str, Any]:
    """The client's machine, without its name."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
