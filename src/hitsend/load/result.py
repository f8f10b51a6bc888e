"""What is to be measured, and what was.

Enters: what the flags say; what the probes found; samples. Leaves: plain data. Always true: a key is in `Target` only,
and `document.py` doesn't print that. Next: `run.py`.
"""

from typing import Any

import msgspec

from hitsend.load.arrivals import Kind
from hitsend.load.report import Level, Slo
from hitsend.load.sample import Sample
from hitsend.load.target import Dialect, Target
from hitsend.load.words import Vocabulary
from hitsend.load.workload import Recorded, Shape


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done. Exactly one of `concurrency`, `rates`, `ramp` and `replay_speed` says how. `is_scaled`: the
    shape is made to fit the smallest context among the targets."""

    targets: tuple[Target, ...]
    shape: Shape
    is_scaled: bool = False
    trace: tuple[Recorded, ...] = ()
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    ramp: tuple[float, float] | None = None
    replay_speed: float | None = None
    arrivals: Kind = "poisson"
    burst_size: int = 8
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 2
    rounds: int = 1
    timeout_s: float = 120.0
    think_s: float = 0.0
    abort: float = 0.0
    seed: int = 0
    slo: Slo = Slo()
    keeps_connections: bool = True


class Facts(msgspec.Struct, frozen=True):
    """`tokenize`: the form of its `/tokenize` (content as llama-server, prompt as vLLM), None without."""

    model: str
    context: int | None
    dialect: Dialect
    vocabulary: Vocabulary
    tokenize: str | None
    has_system: bool


class Measured(msgspec.Struct, frozen=True):
    """One level of one round, and its samples (without their texts)."""

    level: Level
    samples: list[Sample]


class TargetRun(msgspec.Struct):
    """One target's part."""

    target: Target
    facts: Facts
    measured: list[Measured] = []


class Run(msgspec.Struct):
    """Everything that was measured. `scale`: the factor by which the shape was made to fit."""

    plan: Plan
    shape: Shape
    scale: float
    date: str
    machine: dict[str, Any]
    targets: list[TargetRun] = []
    is_interrupted: bool = False
