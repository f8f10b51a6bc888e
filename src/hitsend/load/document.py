"""The result as one JSON document, with the warnings that belong to it.

Enters: a `Run`. Leaves: plain values; docs/load.md describes every key. Always true: keys are only added, never renamed
or given another meaning, under one `version`; no API key and no text of a prompt or an answer is in it; everything that
makes a figure less than it looks is a line of `warnings`. Next: `rows.py`.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

import hitsend
from hitsend.load.compare import medians, middle, ratios
from hitsend.load.report import Level
from hitsend.load.result import Run, TargetRun
from hitsend.load.saturation import find
from hitsend.load.workload import Recorded

VERSION = 1
FEW = 100


def document(run: Run, *, note: str | None = None) -> dict[str, Any]:
    """The whole result. `note` says what only a person knows, such as the server's hardware."""
    pairs = [(one.target.name, [measured.level for measured in one.measured]) for one in run.targets]
    return {
        "kind": "hitsend.load",
        "version": VERSION,
        "hitsend": hitsend.__version__,
        "date": run.date,
        "machine": run.machine,
        "note": note,
        "is_interrupted": run.is_interrupted,
        "settings": _settings(run),
        "workload": _workload(run),
        "slo": msgspec.to_builtins(run.plan.slo),
        "targets": [_target(one) for one in run.targets],
        "ratios": msgspec.to_builtins(ratios(pairs)),
        "warnings": list(warnings(run)),
    }


def _settings(run: Run) -> dict[str, Any]:
    plan = run.plan
    names: tuple[str, ...] = ("timeout_s", "think_s", "abort", "seed", "keeps_connections")
    names += (
        "concurrency",
        "rates",
        "ramp",
        "replay_speed",
        "burst_size",
        "requests",
        "duration_s",
        "warmup",
        "rounds",
    )
    found = {name: msgspec.to_builtins(getattr(plan, name)) for name in names}
    return found | {"arrivals": plan.arrivals if not plan.concurrency else None}


def _workload(run: Run) -> dict[str, Any]:
    shape = run.shape
    return {
        "system_tokens": shape.system,
        "input": shape.input.said(),
        "output": shape.output.said(),
        "turns": shape.turns,
        "scale": run.scale,
        "trace_lines": len(run.plan.trace) or None,
    }


def _target(one: TargetRun) -> dict[str, Any]:
    levels = [measured.level for measured in one.measured]
    facts, dialect = one.facts, one.facts.dialect
    return {
        "name": one.target.name,
        "url": one.target.url,
        "model": facts.model,
        "context": facts.context,
        "endpoint": one.target.endpoint,
        "prompt_lengths": "exact" if facts.vocabulary.is_exact else "estimated",
        "has_tokenize": facts.tokenize is not None,
        "ignores_end": dialect.ignores_end,
        "gives_usage": dialect.gives_usage,
        "levels": msgspec.to_builtins(levels),
        "medians": medians(levels),
        "saturation": msgspec.to_builtins(find(middle(levels))),
    }


def warnings(run: Run) -> Iterator[str]:
    """What a reader must know before believing the figures."""
    if run.is_interrupted:
        yield "interrupted: the last level is incomplete"
    if run.scale < 1:
        yield f"the workload was scaled by {run.scale:.2f} to fit the model's context"
    if run.plan.trace and _num_replayed(run) > len(run.plan.trace):
        yield (
            f"the trace has {len(run.plan.trace)} lines and was gone through more than once, warm-up, levels and "
            "rounds together: recorded prompts repeat, and a prefix cache may have had them"
        )
    for one in run.targets:
        for text in _of_target(run, one):
            yield f"{one.target.name}: {text}"
        for measured in one.measured:
            for text in _of_level(measured.level, gives_usage=one.facts.dialect.gives_usage):
                yield f"{one.target.name}, {title(measured.level)}: {text}"
        for text in _of_levels([measured.level for measured in one.measured]):
            yield f"{one.target.name}, {text}"


def _num_replayed(run: Run) -> int:
    """How often a target was sent a recorded body; texts that are made up are new each time."""
    if all(one.body is None for one in run.plan.trace):
        return 0
    levels = (sum(one.level.requests.sent for one in line.measured) for line in run.targets)
    return run.plan.warmup + max(levels, default=0)


def _of_target(run: Run, one: TargetRun) -> Iterator[str]:
    if not one.facts.vocabulary.is_exact and any(line.body is None for line in run.plan.trace or (Recorded(),)):
        yield (
            "prompt lengths are an estimate: there is no /tokenize, it doesn't agree with the usage, or another "
            "target's was asked, since all get the same prompts"
        )
    if not one.facts.dialect.ignores_end:
        yield "ignore_eos isn't taken: answers may end before the length that was asked for"
    if not one.facts.dialect.gives_usage:
        yield "there is no usage in streams: an answer's pieces are counted as its tokens"


def _of_levels(levels: list[Level]) -> Iterator[str]:
    """What concerns many levels alike is said once."""
    strained = [level for level in levels if level.client.is_limit and level.requests.sent]
    if strained:
        lag, cpu = (max(getattr(one.client, name) for one in strained) for name in ("lag_p99_ms", "cpu_percent"))
        yield (
            f"{_titles(strained)}: the client was the bottleneck, or its machine was busy (event loop up to "
            f"{lag:.0f} ms late at p99, up to {cpu:.0f} % of a core): the server may do better than these figures"
        )
    few = [level for level in levels if 0 < level.requests.ok < FEW]
    if few:
        yield f"{_titles(few)}: p99 of fewer than {FEW} answers is their slowest one or two"


def _titles(levels: list[Level]) -> str:
    shown = [title(level) for level in levels]
    return "; ".join(shown if len(shown) <= 4 else [*shown[:3], f"{len(shown) - 3} more"])


def _of_level(level: Level, *, gives_usage: bool) -> Iterator[str]:
    if not level.requests.sent and not level.is_interrupted:
        yield "no request was due in the time it lasted"
    if gives_usage and level.usage.without:
        yield (
            f"{level.usage.without} of {level.requests.ok} answers came without usage, or with one that can't be: "
            "their pieces are counted as tokens"
        )
    if level.is_growing:
        yield "requests piled up: more came than were served, so latencies depend on how long it ran"
    if level.usage.is_believable is False:
        yield (
            f"the server's usage can't be believed: {level.usage.claimed_tokens} output tokens claimed, "
            f"{level.usage.own_tokens} counted, {level.usage.over_limit} answers over their limit"
        )
    if level.usage.prompts_differ:
        differ, checked = level.usage.prompts_differ, level.usage.prompts_checked
        yield f"{differ} of {checked} prompts had another number of tokens by the server's usage than by its tokenizer"
    if level.requests.errors:
        kinds = ", ".join(f"{kind} {number}" for kind, number in level.errors.items())
        yield f"{level.requests.errors} of {level.requests.sent} requests failed: {kinds}"


def title(level: Level) -> str:
    """What a level was, in words."""
    if level.concurrency is not None:
        load = f"{level.concurrency} at once"
    else:
        load = "replay" if level.rate_per_s is None else f"{level.rate_per_s:.3g}/s {level.arrivals}"
    return f"{load}, round {level.round + 1}" if level.round else load
