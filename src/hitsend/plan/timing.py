"""How long a step takes, for the simulator.

Enters: a planned system, or three measured numbers. Leaves: a `StepTiming`. Always true: pure; more tokens never take
less time; the same constants as `plan speed`, so that a full steady batch takes what it says. Next: `simulate.py`.
"""

import math
import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.calibrate import Point
from hitsend.plan.fit import fit_terms
from hitsend.plan.speed import SpeedPlan
from hitsend.plan.terms import Load, System, step_terms
from hitsend.plan.transfer import Factors

ALONE = 1.5
"""Requests in flight below which a first token waits for nobody."""


class Work(msgspec.Struct, frozen=True):
    """What one step computes.

    `decodes`: sequences that get a token; `drafted`: guesses beside them; `held`: cells that these read together;
    `passes`: calls of the model that they go in (sequences with a guess go in another one than those without).
    `pieces`: calls in which prompts are computed; `prefill`: the prompts' tokens; `attended`: cells that these read
    together, each its own position and all before. `copied`: tokens whose cache comes from elsewhere; `moved`:
    sequences that got another slot, so that the step's slots are neighbours.
    """

    decodes: int = 0
    drafted: int = 0
    held: int = 0
    passes: int = 1
    pieces: int = 0
    prefill: int = 0
    attended: int = 0
    copied: int = 0
    moved: int = 0


class StepTiming(Protocol):
    """Seconds of one step, and of bringing a cache that lies elsewhere."""

    def step_s(self, work: Work) -> float:
        """More work never takes less."""
        ...

    def copy_s(self, tokens: int) -> float:
        """So many tokens' cache."""
        ...


MOST_MS = 1e7
TILE = 2
"""Rows that libllama's kernels on a CPU take at once: the third costs what the third and fourth together do."""


class MeasuredTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step, of a prompt's token and of an answer's token: what a small engine on a CPU shows.

    Of what is found in a server's own records (`steps.py`) also, for the answers' tokens: `wide_ms` per call with more
    than one of them, `tile_ms` per `TILE` of those, `held_ms` per 1,000 cells that they read, `alone_ms` the same of
    one that is alone, which other threads compute; for prompts: `piece_ms` per call, `attended_ms` per 1,000,000 cells
    that they read. `copied_ms` per 1,000 tokens brought from elsewhere, `moved_ms` per sequence that changes its slot
    (all of a slot is copied, whatever is in it); `between_ms` from one step to the next.
    """

    step_ms: float
    prefill_ms: float
    decode_ms: float
    wide_ms: float = 0.0
    tile_ms: float = 0.0
    held_ms: float = 0.0
    alone_ms: float = 0.0
    piece_ms: float = 0.0
    attended_ms: float = 0.0
    copied_ms: float = 0.0
    moved_ms: float = 0.0
    between_ms: float = 0.0

    def step_s(self, work: Work) -> float:
        """The sum."""
        spent_ms = 0.0
        for name, value in parts_of(work).items():
            spent_ms += getattr(self, f"{name}_ms") * value
        return spent_ms / 1e3

    def copy_s(self, tokens: int) -> float:
        """In proportion."""
        return self.copied_ms * tokens / 1e6

    def stretched(self, factor: float) -> "MeasuredTiming":
        """Every part so much longer."""
        return MeasuredTiming(**{name: getattr(self, name) * factor for name in self.__struct_fields__})


class Uneven:
    """The same steps, each a little longer or shorter: relatively, by a normal distribution of standard deviation
    `spread`, at most three times that. The same seed gives the same times."""

    def __init__(self, timing: MeasuredTiming, spread: float, seed: int) -> None:
        self._timing, self._spread, self.between_ms = timing, spread, timing.between_ms
        # times to simulate with, nothing secret
        self._rng = random.Random(seed)  # noqa: S311

    def step_s(self, work: Work) -> float:
        """Another time whenever it is asked."""
        off = max(-3.0, min(3.0, self._rng.gauss(0.0, 1.0)))
        return self._timing.step_s(work) * max(0.0, 1.0 + self._spread * off)

    def copy_s(self, tokens: int) -> float:
        """As it is."""
        return self._timing.copy_s(tokens)


def parts_of(work: Work) -> dict[str, float]:
    """What a step's time is a sum of: amounts, by the names of `MeasuredTiming`. `copied` passes before the step."""
    rows = work.decodes + work.drafted
    is_wide = rows > 1
    return {
        "step": 1.0,
        "decode": float(rows),
        "wide": float(work.passes * is_wide),
        "tile": float(-(-rows // TILE) * is_wide),
        "held": work.held / 1e3 * is_wide,
        "alone": work.held / 1e3 * (not is_wide),
        "piece": float(work.pieces),
        "prefill": float(work.prefill),
        "attended": work.attended / 1e6,
        "moved": float(work.moved),
    }


class PlannedTiming:
    """A system of `plan speed`. `factor` stretches every step."""

    def __init__(self, plan: SpeedPlan, factors: Factors | None = None, *, factor: float = 1.0) -> None:
        self._plan, self._factor = plan, factor
        self._factors = (factors or Factors()).tpot
        self._steps: dict[int, float] = {}
        empty = self._terms(1, 0.0)
        self._kv_ms = (self._terms(1, 1000.0).get("kv", 0.0) - empty.get("kv", 0.0)) / 1000
        mixed = self._terms(1, 0.0, prompt=1000.0)
        names = ("mix_flops", "mix_reduce", "mix_layers", "mix_attention")
        self._prefill_ms = sum(mixed.get(name, 0.0) - empty.get(name, 0.0) for name in names) / 1000

    def step_s(self, work: Work) -> float:
        """The step's own time, its caches' bytes, and its prompts' operations."""
        rows = work.decodes + work.drafted
        base = self._steps.get(rows)
        if base is None:
            terms = self._terms(max(1, rows), 0.0)
            base = sum(value for name, value in terms.items() if not name.startswith("mix_"))
            self._steps[rows] = base
        found = base + self._kv_ms * work.held + self._prefill_ms * work.prefill
        return max(self._plan.floor_ms, found) * self._factor / 1e3

    def copy_s(self, tokens: int) -> float:  # noqa: ARG002  # the protocol's
        """Nothing: such engines' sequences share cells."""
        return 0.0

    def _terms(self, running: float, context: float, *, prompt: float = 0.0) -> dict[str, float]:
        asked = self._plan.question
        system = System(
            model=asked.checkpoint,
            shape=self._plan.shape,
            gpu=asked.gpu,
            layout=asked.layout,
            kv_dtype=asked.kv_dtype,
        )
        # an answer of one token: all of a prompt is computed in one step
        terms = step_terms(system, Load(running=running * asked.layout.pp, input=context or prompt, output=1.0))
        constants = self._plan.constants.tpot
        return {name: value * constants.get(name, 0.0) * self._factors.get(name, 1.0) for name, value in terms.items()}


def fit_timing(points: Sequence[Point], step_tokens: int) -> MeasuredTiming:
    """From a load test's levels of different concurrency. Raises ConfigError where they can't tell three numbers apart.

    TPOT = step + running * decode + running * input / output * prefill; TTFT of one at a time = input * prefill + a
    step per chunk. Least relative errors, none below 0.
    """
    rows: list[dict[str, float]] = []
    times: list[float] = []
    for point in points:
        fresh = max(1.0, point.input - point.cached)
        running = point.concurrency
        rows.append({"step": 1.0, "decode": running, "prefill": running * fresh / point.output})
        times.append(point.tpot_ms)
        if point.ttft_ms is not None and running < ALONE:
            rows.append({"step": math.ceil(fresh / step_tokens), "decode": 0.0, "prefill": fresh})
            times.append(point.ttft_ms)
    if len(rows) < 3:
        raise ConfigError("step times need a load test with one request at a time and another level, such as 1,4")
    found = fit_terms(rows, times)
    timing = MeasuredTiming(
        step_ms=found.get("step", 0.0), prefill_ms=found.get("prefill", 0.0), decode_ms=found.get("decode", 0.0)
    )
    if min(timing.step_ms + timing.prefill_ms, timing.step_ms + timing.decode_ms) <= 0:
        raise ConfigError("step times can't be told from this load test: its levels contradict each other")
    return timing


def read_timing(text: str) -> MeasuredTiming:
    """`STEP,PREFILL,DECODE` in milliseconds. Raises ConfigError."""
    try:
        step, prefill, decode = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--timing {text}: needed are three numbers of milliseconds: STEP,PREFILL,DECODE") from None
    is_usable = all(0 <= time <= MOST_MS for time in (step, prefill, decode))
    if not is_usable or step + prefill <= 0 or step + decode <= 0:
        raise ConfigError(f"--timing {text}: times must be 0 to {MOST_MS:g} ms, and a step can't take none")
    return MeasuredTiming(step_ms=step, prefill_ms=prefill, decode_ms=decode)
