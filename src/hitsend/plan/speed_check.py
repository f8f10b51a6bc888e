"""Plans beside measured speeds: `hitsend plan check-speed FILE`.

Enters: measured rows. Leaves: one `Judged` per row, and scores of the half that nothing was fitted to. Always true: a
row's hash says which half it is in, so the judged half is the same everywhere; TTFT and TPOT are scored apart, and TTFT
only where nobody queued: neither by the plan nor, over 10 s, by the measurement; a calibration uses one row of the same
system and is judged on the others. Next: `speed_fit.py`.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.calibrate import moved
from hitsend.plan.constants import Published, SpeedFacts, beside_published, plain_spreads
from hitsend.plan.facts import Facts
from hitsend.plan.fit import predicted
from hitsend.plan.hardware import find_gpu
from hitsend.plan.measured import Measured
from hitsend.plan.models import find_checkpoint
from hitsend.plan.published import Kin, Wait
from hitsend.plan.roofline import floor_s, shape_of
from hitsend.plan.speed import SpeedQuestion, group_of, kin_of, planned_terms
from hitsend.plan.transfer import NEARBY, TPOT_FADE, expected

QUEUED_MS = 10_000
"""A measured TTFT above this is a wait for cache, whatever the plan says (throughput_rules)."""
Waits = Mapping[str, Sequence[Wait]]
"""By group."""
_SAME_SHAPES = {"zhipuai/GLM-5": "zai-org/GLM-5.2"}
"""Where a row's model is another release of a known one."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement with its terms."""

    measured: Measured
    kin: Kin
    group: str
    moe: str
    floor_ms: float
    tpot_terms: dict[str, float]
    ttft_terms: dict[str, float]
    queues: bool

    @property
    def has_ttft(self) -> bool:
        """Whether its TTFT is one without queueing."""
        ttft = self.measured.ttft_ms
        return ttft is not None and ttft <= QUEUED_MS and not self.queues


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Errors are planned / measured - 1; None: not judged."""

    id: str
    group: str
    system: str
    is_held_out: bool
    queues: bool
    beats_floor: bool
    tpot_ms: float
    planned_tpot_ms: float
    tpot_error: float
    noise: float
    tpot_terms: dict[str, float]
    ttft_ms: float | None = None
    planned_ttft_ms: float | None = None
    ttft_error: float | None = None
    ttft_terms: dict[str, float] = {}
    load: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Concurrency, prompt, answer."""
    kin: Kin | None = None


class SpeedScore(msgspec.Struct, frozen=True, kw_only=True):
    """Of some rows' absolute errors."""

    what: str
    limit: float
    rows: int
    median: float
    p90: float
    bias: float

    @property
    def ok(self) -> bool:
        """The median is within the limit."""
        return self.median <= self.limit


def rows_of(measured: Sequence[Measured], facts: Facts) -> tuple[list[Row], list[str]]:
    """Rows with their terms, and what couldn't be planned."""
    rows, refused = [], []
    for one in measured:
        try:
            rows.append(_row(one, facts))
        except ConfigError as why:
            refused.append(f"{one.id}: {why}")
    return rows, refused


def _row(one: Measured, facts: Facts) -> Row:
    model = find_checkpoint(_SAME_SHAPES.get(one.model, one.model), facts)
    gpu = find_gpu(one.gpu, facts)
    shape = shape_of(model, one.weights)
    question = SpeedQuestion(
        checkpoint=model,
        gpu=gpu,
        # TensorRT-LLM's pool is counted as bytes; for a fit, so is everybody's
        engine="trtllm",
        layout=one.layout,
        weights=one.weights,
        batch=one.concurrency,
        input=one.input,
        output=one.output,
    )
    tpot, ttft, queues = planned_terms(question, shape)
    return Row(
        measured=one,
        kin=kin_of(question, shape),
        group=group_of(one.engine, shape),
        moe=group_of("any", shape),
        floor_ms=floor_s(shape, one.layout, gpu) * 1e3,
        tpot_terms=tpot,
        ttft_terms=ttft,
        queues=queues,
    )


def judge(rows: Sequence[Row], facts: SpeedFacts) -> list[Judged]:
    """Every row with the constants of its group."""
    return [_judged(row, facts) for row in rows]


def _judged(row: Row, facts: SpeedFacts) -> Judged:
    constants = facts.groups.get(row.group) or facts.groups[row.moe]
    one = row.measured
    said = beside_published(row.kin, facts.published.get(row.group))
    tpot_terms = _weighted(row.tpot_terms, constants.tpot, said[0].factors)
    ttft_terms = _weighted(row.ttft_terms, constants.ttft, said[1].factors)
    tpot = max(row.floor_ms, sum(tpot_terms.values()))
    ttft = sum(ttft_terms.values()) if row.has_ttft else None
    return Judged(
        id=one.id,
        group=row.group,
        system=repr(one.system),
        is_held_out=not one.is_for_fitting,
        queues=row.queues or (one.ttft_ms or 0) > QUEUED_MS,
        beats_floor=one.tpot_ms < row.floor_ms,
        tpot_ms=one.tpot_ms,
        planned_tpot_ms=tpot,
        tpot_error=tpot / one.tpot_ms - 1,
        noise=constants.tpot_noise,
        tpot_terms=tpot_terms,
        ttft_ms=one.ttft_ms,
        planned_ttft_ms=ttft,
        ttft_error=None if ttft is None or not one.ttft_ms else ttft / one.ttft_ms - 1,
        ttft_terms=ttft_terms,
        load=(one.concurrency, one.input, one.output),
        kin=row.kin,
    )


def _weighted(
    terms: Mapping[str, float], constants: Mapping[str, float], factors: Mapping[str, float]
) -> dict[str, float]:
    return {
        name: value * constants[name] * factors.get(name, 1.0)
        for name, value in terms.items()
        if value and constants.get(name)
    }


class View(msgspec.Struct, frozen=True):
    """One quantity of a judged row."""

    terms: dict[str, float]
    measured: float
    error: float
    load: tuple[float, float, float]
    group: str = ""
    kin: Kin | None = None
    noise: float | None = None
    """None: its terms aren't moved, its errors are carried over as `transfer.py` does."""

    def octaves(self, other: "View") -> float:
        """How far another load is."""
        return sum(abs(math.log2(mine / its)) for mine, its in zip(self.load, other.load, strict=True))


def tpot_of(row: Judged) -> View | None:
    """None where it queued."""
    if row.queues:
        return None
    return View(row.tpot_terms, row.tpot_ms, row.tpot_error, row.load, row.group, row.kin, row.noise)


def ttft_of(row: Judged) -> View | None:
    """None where it queued."""
    if row.ttft_error is None or row.ttft_ms is None:
        return None
    return View(row.ttft_terms, row.ttft_ms, row.ttft_error, row.load, row.group, row.kin)


def score(rows: Sequence[Judged], published: Mapping[str, Published]) -> list[SpeedScore]:
    """Of the rows that nothing was fitted to: as planned, and calibrated by one row of the same system."""
    waits = {group: told.waits for group, told in published.items()}
    held = [row for row in rows if row.is_held_out]
    found = []
    quantities: list[tuple[str, Callable[[Judged], View | None], float]] = [
        ("TPOT", tpot_of, 0.15),
        ("TTFT", ttft_of, 0.25),
    ]
    for what, view_of, limit in quantities:
        plain = [view.error for row in held if (view := view_of(row)) is not None]
        calibrated = calibrated_errors(held, view_of, waits)
        nearby = nearby_errors(held, view_of, waits)
        found += [
            _score(what, plain, limit),
            _score(f"{what}, calibrated by one point", calibrated, 0.08),
            _score(f"{what}, calibrated by one within two octaves of its load", nearby, 0.08),
        ]
    found.append(_score("TTFT, calibrated by the other loads of its system", swept_errors(held, ttft_of, waits), 0.08))
    return [one for one in found if one.rows]


def calibrated_errors(rows: Sequence[Judged], view_of: Callable[[Judged], View | None], waits: Waits) -> list[float]:
    """Each system's first row by id calibrates; its other rows are judged with that."""
    systems = _by_system(sorted(rows, key=lambda one: one.id), view_of)
    errors = []
    for first, *others in systems.values():
        errors += [_transferred(first, view, waits) / view.measured - 1 for view in others]
    return errors


def swept_errors(rows: Sequence[Judged], view_of: Callable[[Judged], View | None], waits: Waits) -> list[float]:
    """Each row's time to a first token calibrated by all other loads of its system: what a load test of several levels
    gives."""
    systems = _by_system(rows, view_of)
    errors = []
    for views in systems.values():
        known = [(view.load, math.log(view.measured / sum(view.terms.values()))) for view in views]
        for index, view in enumerate(views):
            others = known[:index] + known[index + 1 :]
            if others:
                told = expected(others, view.load, view.kin, waits.get(view.group, ()))
                planned = sum(view.terms.values()) * math.exp(told)
                errors.append(planned / view.measured - 1)
    return errors


def nearby_errors(rows: Sequence[Judged], view_of: Callable[[Judged], View | None], waits: Waits) -> list[float]:
    """Each row calibrated by the nearest load of its system, where there is one within `NEARBY`: what `--calibrate`
    gives whoever measures near what is asked, the rest that terms don't explain included."""
    systems = _by_system(sorted(rows, key=lambda one: one.id), view_of)
    errors = []
    for views in systems.values():
        for view in views:
            others = [other for other in views if other is not view and view.octaves(other) <= NEARBY]
            if others:
                errors.append(_transferred(min(others, key=view.octaves), view, waits) / view.measured - 1)
    return errors


def _by_system(rows: Iterable[Judged], view_of: Callable[[Judged], View | None]) -> dict[str, list[View]]:
    """What can be judged of each system, in the order of the rows."""
    systems: defaultdict[str, list[View]] = defaultdict(list)
    for row in rows:
        view = view_of(row)
        if view is not None:
            systems[row.system].append(view)
    return systems


def _transferred(near: View, view: View, waits: Waits) -> float:
    """As `Factors` does: moved terms, times what is left of the near load's rest; without a noise, the rest alone."""
    if near.noise is None:
        known = [(near.load, math.log(near.measured / sum(near.terms.values())))]
        told = expected(known, view.load, view.kin, waits.get(view.group, ()))
        return sum(view.terms.values()) * math.exp(told)
    factors = moved(near.terms, {}, near.measured, noise=near.noise)
    rest = near.measured / predicted(near.terms, factors)
    kept: float = rest ** (TPOT_FADE ** view.octaves(near))
    return predicted(view.terms, factors_with_rest(view.terms, factors)) * kept


def near_errors(rows: Sequence[Judged], view_of: Callable[[Judged], View | None]) -> list[float]:
    """Each row calibrated by the load of its system that is nearest in time per token: what a load test near the asked
    load gives."""
    systems = _by_system(rows, view_of)
    errors = []
    for views in systems.values():
        for view in views if len(views) > 1 else ():
            planned = sum(view.terms.values())
            others = [other for other in views if other is not view]
            near = min(others, key=lambda other: abs(math.log(sum(other.terms.values()) / planned)))
            errors.append(_transferred(near, view, {}) / view.measured - 1)
    return errors


def factors_with_rest(terms: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """1 for terms that the calibration didn't see."""
    return {name: factors.get(name, 1.0) for name in terms}


def _score(what: str, errors: Sequence[float], limit: float) -> SpeedScore:
    sizes = sorted(abs(error) for error in errors) or [0.0]
    return SpeedScore(
        what=what,
        limit=limit,
        rows=len(errors),
        median=statistics.median(sizes),
        p90=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=statistics.median(errors) if errors else 0.0,
    )


def coverage(rows: Sequence[Row], judged: Sequence[Judged], facts: SpeedFacts) -> float:
    """Of held-out TPOTs, those inside the interval of their plan, which is made to hold four in five."""
    inside = total = 0
    for row, one in zip(rows, judged, strict=True):
        if one.is_held_out and not one.queues:
            constants, known = facts.groups.get(row.group) or facts.groups[row.moe], facts.published.get(row.group)
            spread, _ = plain_spreads(constants, known, beside_published(row.kin, known), is_fitted=True)
            total += 1
            inside += spread.low <= one.tpot_ms / one.planned_tpot_ms <= spread.high
    return inside / total if total else 0.0
