"""What measurements gave: constants of terms, what published systems say of others, and the intervals around plans.

Enters: `data/speed.json` and `data/speed_published.json`. Leaves: `SpeedFacts`. Always true: both come from the half of
published measurements that is for fitting; an interval is as narrow as what is known of the asked system. Next:
`speed.py`.
"""

from functools import cache
from pathlib import Path

import msgspec

from hitsend.plan.published import Beside, Kin, Likeness, Moved, Wait, beside

TPOT_LIKENESS = Likeness(
    model=2.4, gpu=1.3, weights=1.5, tp=0.65, ep=1.7, attention_dp=1.2, terms=1.6, whole=0.098, nugget=0.1
)
TTFT_LIKENESS = Likeness(
    model=5.3, gpu=5.3, weights=1.7, tp=0.34, ep=1.9, attention_dp=0.54, terms=1.5, whole=0.038, nugget=0.27
)
UNFITTED_SPREAD = 2.0
"""How much wider the interval is on a GPU or an engine that no measurement was of: a judgement."""


class Spread(msgspec.Struct, frozen=True):
    """Measured / planned: the tenth and the ninetieth of a hundred."""

    low: float
    high: float

    def wider(self, factor: float) -> "Spread":
        """Both ends so much further from 1, the lower one never below a tenth."""
        return Spread(max(0.1, 1 - (1 - self.low) * factor), 1 + (self.high - 1) * factor)

    def towards(self, other: "Spread", share: float) -> "Spread":
        """So much of the way to another."""
        return Spread(self.low + share * (other.low - self.low), self.high + share * (other.high - self.high))

    @property
    def width(self) -> float:
        """High - low, as a share of the plan."""
        return self.high - self.low


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's measurements gave, without experts or with. `calibrated_*`: where one point of the same system
    is known."""

    rows: int
    tpot: dict[str, float]
    ttft: dict[str, float]
    tpot_spread: Spread
    ttft_spread: Spread
    calibrated_tpot_spread: Spread
    calibrated_ttft_spread: Spread
    tpot_noise: float = 0.05
    """Variance of one load's error beside that of the constants: how little a calibration believes it."""


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a group's measured systems say of others. The spreads: where all but one's own measurement are known."""

    tpot: tuple[Moved, ...]
    ttft: tuple[Moved, ...]
    tpot_spread: Spread
    ttft_spread: Spread
    waits: tuple[Wait, ...] = ()


class SpeedFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`data/speed.json`, and `data/speed_published.json` by group."""

    source: str
    as_of: str
    gpus: tuple[str, ...]
    groups: dict[str, Constants]
    note: str = ""
    published: dict[str, Published] = {}


@cache
def speed_facts() -> SpeedFacts:
    """What the package brings."""
    data = Path(__file__).with_name("data")
    found = msgspec.json.decode((data / "speed.json").read_bytes(), type=SpeedFacts)
    published = msgspec.json.decode((data / "speed_published.json").read_bytes(), type=dict[str, Published])
    return msgspec.structs.replace(found, published=published)


def beside_published(kin: Kin, published: Published | None) -> tuple[Beside, Beside]:
    """Of TPOT's terms and of TTFT's."""
    if published is None:
        return Beside(), Beside()
    return beside(kin, published.tpot, TPOT_LIKENESS), beside(kin, published.ttft, TTFT_LIKENESS)


def plain_spreads(
    constants: Constants, published: Published | None, said: tuple[Beside, Beside], *, is_fitted: bool
) -> tuple[Spread, Spread]:
    """Of TPOT and TTFT without a calibration: the more like a measured system is, the nearer to what is known of it."""
    if published is None:
        widen = 1.0 if is_fitted else UNFITTED_SPREAD
        return constants.tpot_spread.wider(widen), constants.ttft_spread.wider(widen)
    return (
        constants.tpot_spread.towards(published.tpot_spread, said[0].likeness),
        constants.ttft_spread.towards(published.ttft_spread, said[1].likeness),
    )
