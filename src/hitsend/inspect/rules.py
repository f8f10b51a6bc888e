"""The rules of `hitsend diagnose`, from what breaks service to what merely bounds it.

Enters: nothing. Leaves: `RULES`. Always true: their order is the order of findings: what stands first explains what
follows (a queue behind paused requests is the slow clients' doing; a stolen core slows tokens, and adds no prompts).
Next: `diagnose.py`.
"""

from collections.abc import Callable

from hitsend.inspect.baseline import Baseline
from hitsend.inspect.findings import Finding
from hitsend.inspect.readings import Figures
from hitsend.inspect.rules_around import context_too_small, edge_bound, engine_failing, slow_clients, upstream_bound
from hitsend.inspect.rules_engine import (
    decode_bound,
    engine_starved,
    kv_memory_bound,
    long_prefills,
    preemption,
    prefill_bound,
    prefix_cache_missing,
    queue_bound,
)

Rule = Callable[[Figures, Baseline | None], Finding | None]

RULES: tuple[Rule, ...] = (
    engine_failing,
    context_too_small,
    slow_clients,
    upstream_bound,
    edge_bound,
    preemption,
    kv_memory_bound,
    queue_bound,
    long_prefills,
    prefix_cache_missing,
    prefill_bound,
    engine_starved,
    decode_bound,
)
"""In the order in which they are asked, and in which their findings are shown."""
