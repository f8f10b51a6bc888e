"""The bottleneck of a server in a window of time, or that there is none, or that nothing can be said.

Enters: `Figures`, perhaps a `Baseline`. Leaves: a `Diagnosis`. Always true: pure; the first finding is the verdict, the
others stand beside it; without a finding it is `healthy` only when there was enough to see and the objectives were
met. Next: `../cli/diagnose.py`.
"""

import msgspec

from hitsend.inspect.baseline import Baseline
from hitsend.inspect.findings import Evidence, Finding, seen
from hitsend.inspect.readings import Figures
from hitsend.inspect.rules import RULES

ENOUGH_TOKENS = 20.0
"""Output tokens, or three requests, from which on a window says something."""
ENOUGH_REQUESTS = 3.0
GOOD_SHARE = 0.9


class Diagnosis(msgspec.Struct, frozen=True):
    """`verdict`: the first finding's name, `healthy`, `unclear` (objectives missed, no rule says why), `idle` (nothing
    came), or `too_little` to tell. `text` says it in a sentence. `seen` are the figures that it looked at."""

    server: str
    window_s: float
    verdict: str
    text: str
    findings: tuple[Finding, ...]
    seen: tuple[Evidence, ...]


TEXTS = {
    "idle": "Idle: nothing came in this window.",
    "too_little": "Too little traffic in this window to tell; take a longer one, or send more.",
    "healthy": "Healthy: nothing holds requests up.",
    "unclear": "Objectives are missed, but no rule says why: explain single requests (`hitsend inspect ID --explain`).",
}


def diagnose(now: Figures, baseline: Baseline | None = None) -> Diagnosis:
    """All rules, in their order."""
    findings = tuple(finding for rule in RULES if (finding := rule(now, baseline)) is not None)
    if not _has_enough(now):
        # what needs no traffic to be true stays; a mean of one or two requests proves nothing
        findings = tuple(each for each in findings if each.name in {"engine_failing", "slow_clients", "upstream_bound"})
    verdict = findings[0].name if findings else _without(now)
    text = findings[0].text if findings else TEXTS[verdict]
    return Diagnosis(now.server, round(now.window_s, 3), verdict, text, findings, _shown(now))


def _has_enough(now: Figures) -> bool:
    load = (now.running or 0.0) + (now.waiting or 0.0)
    return (
        (now.requests or 0.0) >= ENOUGH_REQUESTS
        or (now.output_tokens or 0.0) >= ENOUGH_TOKENS
        or (load >= 1.0 and (now.busy is None or now.busy >= 0.3))
    )


def _without(now: Figures) -> str:
    if not _has_enough(now):
        some = (now.requests, now.output_tokens, now.running, now.waiting, now.upstream_running)
        return "too_little" if any(some) else "idle"
    return "unclear" if now.good_share is not None and now.good_share < GOOD_SHARE else "healthy"


def _shown(now: Figures) -> tuple[Evidence, ...]:
    return seen(
        ("requests ended", now.requests, ""),
        ("running", now.running, ""),
        ("waiting", now.waiting, ""),
        ("output", now.output_per_s, "tokens/s"),
        ("mean time to first token", now.ttft_s, "s"),
        ("mean time per output token", now.tpot_s, "s"),
        ("busy", now.busy, "share"),
        ("prompts' part of the time", now.prefill_share, "share"),
        ("KV held", now.kv_share, "share"),
        ("objectives met", now.good_share, "share"),
    )
