"""Whether a request was served as well as promised: goodput is the share, or the rate, of those that were.

Enters: one ended request's figures and the objectives. Leaves: `good`, the first objective that it missed (`ttft`,
`tpot`, `e2e`), `failed`, or None where nothing was promised. Always true: a request that its client broke off or got
wrong, or that its own limits refused, says nothing of how it would have been served, and isn't judged; one that found
no room, or whose engine failed, was not served well. Next: `metrics.py`.

Goodput as in DistServe (Zhong et al., OSDI 2024): completed requests that met every objective of their latency.
"""

from hitsend.core.errors import ServerOverloaded, StorageFailed
from hitsend.serve.usage.figures import RequestFigures
from hitsend.settings import SloSettings

_OURS = frozenset({ServerOverloaded.code, StorageFailed.code, "engine_failed", "engine_unavailable", "engine_timeout"})
"""Errors that are the server's, not the caller's."""


def outcome(figures: RequestFigures, objectives: SloSettings) -> str | None:
    """See above. Times are in seconds; an objective that is None isn't looked at, nor one without a time to compare."""
    if figures.error_code is not None or figures.cancelled_during is not None:
        return "failed" if figures.error_code in _OURS else None
    for name, spent, allowed in (
        ("ttft", figures.ttft_s, objectives.ttft_s),
        ("tpot", figures.tpot_s, objectives.tpot_s),
        ("e2e", figures.wall_s, objectives.e2e_s),
    ):
        if spent is not None and allowed is not None and spent > allowed:
            return name
    return "good" if figures.has_row else None
