"""Constants from published measurements, and what their systems say of others: `hitsend plan check-speed --fit`.

Enters: measured rows with their terms. Leaves: the content of `data/speed.json` and `data/speed_published.json`. Always
true: only the half that is for fitting is looked at; an interval is made from rows that were planned without
themselves. Next: `speed_text.py`.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from hitsend.plan.constants import (
    TPOT_LIKENESS,
    TTFT_LIKENESS,
    Constants,
    Published,
    SpeedFacts,
    Spread,
    beside_published,
)
from hitsend.plan.fit import fit_terms
from hitsend.plan.published import Seen, Wait, learn
from hitsend.plan.speed_check import QUEUED_MS, Judged, Row, judge, near_errors, tpot_of, ttft_of

NOISES = (0.02, 0.05, 0.1, 0.4, 0.8)
"""How little a calibration may believe one load; each group takes what makes its interval the narrowest."""
LEAST_ROWS = 30
"""Of a group that gets constants of its own."""


def fit(rows: Sequence[Row], *, source: str, as_of: str) -> SpeedFacts:
    """Constants from the half of the rows that is for fitting: per engine and kind of model, and for all engines."""
    half = [row for row in rows if row.measured.is_for_fitting and not row.queues]
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in half:
        groups[row.group].append(row)
        groups[row.moe].append(row)
    gpus = sorted({row.measured.gpu for row in half})
    found, published = {}, {}
    for name, members in sorted(groups.items()):
        if len(members) >= LEAST_ROWS:
            found[name], told = _constants(members)
            if not name.startswith("any/"):
                published[name] = told
    return SpeedFacts(source=source, as_of=as_of, gpus=tuple(gpus), groups=found, published=published)


def _constants(rows: Sequence[Row]) -> tuple[Constants, Published]:
    """A group's, and what its systems say of others."""
    with_ttft = [row for row in rows if row.has_ttft]
    plain = [row for row in rows if (row.measured.ttft_ms or 0) <= QUEUED_MS]
    tpot = fit_terms([row.tpot_terms for row in plain], [row.measured.tpot_ms for row in plain])
    ttft = fit_terms([row.ttft_terms for row in with_ttft], [row.measured.ttft_ms or 0.0 for row in with_ttft])
    whole = Spread(1, 1)
    rough = Constants(
        rows=len(rows),
        tpot={name: round(value, 4) for name, value in tpot.items()},
        ttft={name: round(value, 4) for name, value in ttft.items()},
        tpot_spread=whole,
        ttft_spread=whole,
        calibrated_tpot_spread=whole,
        calibrated_ttft_spread=whole,
    )
    facts = SpeedFacts(source="", as_of="", gpus=(), groups={rows[0].group: rough})
    judged = judge([msgspec.structs.replace(row, group=rows[0].group) for row in plain], facts)
    if len({row.group for row in rows}) > 1:
        # of all engines together: nobody's systems are like another engine's
        published, alone = Published(tpot=(), ttft=(), tpot_spread=whole, ttft_spread=whole), judged
    else:
        published, alone = _published(plain, judged)
    calibrated = {noise: [msgspec.structs.replace(row, noise=noise) for row in alone] for noise in NOISES}
    tpot_spread, tpot_noise = min(
        ((_spread(near_errors(found, tpot_of)), noise) for noise, found in calibrated.items()), key=_width
    )
    constants = msgspec.structs.replace(
        rough,
        tpot_spread=_spread([row.tpot_error for row in judged]),
        ttft_spread=_spread([row.ttft_error for row in judged if row.ttft_error is not None]),
        calibrated_tpot_spread=tpot_spread,
        calibrated_ttft_spread=_spread(near_errors(alone, ttft_of)),
        tpot_noise=tpot_noise,
    )
    return constants, published


def _published(rows: Sequence[Row], judged: Sequence[Judged]) -> tuple[Published, list[Judged]]:
    """What systems say of others' terms, and each row as the others alone would have planned it."""
    timed = [(row, one) for row, one in zip(rows, judged, strict=True) if one.ttft_ms and one.ttft_error is not None]
    tpot, steps = learn([Seen(row.kin, one.tpot_terms, one.tpot_ms) for row, one in zip(rows, judged, strict=True)],
                        TPOT_LIKENESS)  # fmt: skip
    ttft, waits = learn([Seen(row.kin, one.ttft_terms, one.ttft_ms or 1.0) for row, one in timed], TTFT_LIKENESS)
    found = Published(tpot=tuple(tpot), ttft=tuple(ttft), tpot_spread=Spread(1, 1), ttft_spread=Spread(1, 1))
    wait_of = {one.id: factor for (_, one), factor in zip(timed, waits, strict=True)}
    alone = [_alone(row, one, found, (step, wait_of.get(one.id, 1.0)))
             for row, one, step in zip(rows, judged, steps, strict=True)]  # fmt: skip
    spreads = (
        _spread([row.tpot_error for row in alone]),
        _spread([row.ttft_error for row in alone if row.ttft_error is not None]),
    )
    left = [_wait(row, one, found) for row, one in timed]
    return msgspec.structs.replace(found, tpot_spread=spreads[0], ttft_spread=spreads[1], waits=tuple(left)), alone


def _wait(row: Row, one: Judged, found: Published) -> Wait:
    _, said = beside_published(row.kin, found)
    planned = sum(value * said.factors.get(name, 1.0) for name, value in one.ttft_terms.items())
    return Wait(row.kin, *one.load, round(math.log((one.ttft_ms or planned) / planned), 4))


def _alone(row: Row, one: Judged, found: Published, without: tuple[float, float]) -> Judged:
    said = beside_published(row.kin, found)
    terms = [
        {name: value * beside.factors.get(name, 1.0) * factor for name, value in told.items()}
        for told, beside, factor in zip((one.tpot_terms, one.ttft_terms), said, without, strict=True)
    ]
    tpot, ttft = max(row.floor_ms, sum(terms[0].values())), sum(terms[1].values())
    return msgspec.structs.replace(
        one,
        tpot_terms=terms[0],
        ttft_terms=terms[1],
        planned_tpot_ms=tpot,
        tpot_error=tpot / one.tpot_ms - 1,
        planned_ttft_ms=ttft if one.ttft_error is not None else None,
        ttft_error=ttft / one.ttft_ms - 1 if one.ttft_error is not None and one.ttft_ms else None,
    )


def _width(found: tuple[Spread, float]) -> float:
    return found[0].width


def _spread(errors: Sequence[float]) -> Spread:
    """Measured / planned."""
    ratios = sorted(1 / (1 + error) for error in errors) or [1.0]
    low, high = (ratios[min(len(ratios) - 1, int(share * len(ratios)))] for share in (0.1, 0.9))
    return Spread(round(low, 3), round(high, 3))
