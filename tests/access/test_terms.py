from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from hitsend.core.errors import InvalidRequest
from hitsend.core.limits import Limits
from hitsend.serve.access import terms
from hitsend.serve.access.terms import LimitsChange, Terms, TermsChange, changed, instant, microusd, seconds

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", 0), ("1", 1_000_000), ("0.000001", 1), ("54.60", 54_600_000), (1.5, 1_500_000), (0.1, 100_000),
        (3, 3_000_000), ("1e3", 1_000_000_000), ("1000000000", 10**15), (0.000001, 1), ("+2", 2_000_000),
        (131.4, 131_400_000),
    ],
)  # fmt: skip
def test_money_is_exact(written, expected):
    assert microusd("usd_per_day", written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "", " 1", "1,5", "-1", "-0.000001", "0.0000001", "1000000000.000001", "nan", "inf", "Infinity",
        "1e400", "1e-400", "0x10", "1_000", "٣", "1" * 500, "1.0000000000000000000000000001",
        float("nan"), float("inf"), 1e-7, "$5", "5 USD",
    ],
)  # fmt: skip
def test_money_that_is_none_is_refused_by_name_and_value(written):
    with pytest.raises(InvalidRequest, match=r"^usd_per_day must be an amount of USD") as refused:
        microusd("usd_per_day", written)
    assert refused.value.param == "usd_per_day"


@given(st.integers(0, 10**15))
def test_money_goes_out_as_it_came_in(amount):
    assert microusd("x", terms.usd_text(amount)) == amount


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("90s", 90), ("15m", 900), ("24h", 86_400), ("30d", 2_592_000), ("0", 0)]
)
def test_lengths_of_time(text, expected):
    assert seconds("overlap", text) == expected


@pytest.mark.parametrize("text", ["", "h", "-1h", "1.5h", "1 h", "1w", "1h30m", "٣d", "9" * 10])
def test_lengths_of_time_that_are_none_are_refused(text):
    with pytest.raises(InvalidRequest, match="overlap must be a length of time"):
        seconds("overlap", text)


def test_instants_are_dates_times_lengths_and_seconds():
    day = datetime(2030, 1, 31, tzinfo=UTC).timestamp()
    assert instant("expires_at", "30d", NOW) == NOW + 2_592_000
    assert instant("expires_at", "2030-01-31", NOW) == day
    assert instant("expires_at", "2030-01-31T12:00:00Z", NOW) == day + 43_200
    assert instant("expires_at", "2030-01-31T12:00:00+02:00", NOW) == day + 36_000
    assert instant("expires_at", NOW + 1, NOW) == NOW + 1


@pytest.mark.parametrize(
    "written", ["", "soon", "2020-01-01", "0d", NOW, 0, -1, float("nan"), float("inf"), 1e300, "x" * 999]
)
def test_instants_that_are_none_or_over_are_refused(written):
    with pytest.raises(InvalidRequest, match="expires_at must"):
        instant("expires_at", written, NOW)


def test_a_change_touches_what_it_names_and_nothing_else():
    before = Terms(Limits(requests_per_minute=5, usd_per_day_microusd=7), ("a",), 2, 1)
    assert changed(before, TermsChange()) == before
    after = changed(before, TermsChange(limits=LimitsChange(requests_per_minute=None, usd_per_month="1.5"), tier=None))
    assert after == Terms(Limits(usd_per_day_microusd=7, usd_per_month_microusd=1_500_000), ("a",), None, 1)
    assert changed(before, TermsChange(limits=None, models=None, tier=0, max_tier=None)) == Terms(tier=0)


def test_what_is_shown_can_be_sent_back():
    limits = Limits(1, 2, 3, 4, 5, 6, 7_000_000)
    shown = terms.shown_limits(limits)
    assert set(shown) == set(LimitsChange.__struct_fields__)
    back = msgspec.convert(shown, LimitsChange)
    assert changed(Terms(), TermsChange(limits=back)).limits == limits


@pytest.mark.parametrize("names", [("",), (" a",), ("a\n",), ("x" * 257,), tuple(map(str, range(257)))])
def test_names_of_models_are_printable_and_few(names):
    with pytest.raises(InvalidRequest, match="models"):
        changed(Terms(), TermsChange(models=names))
    assert terms.checked_models(("a", "b", "a")) == ("a", "b")
    assert terms.checked_models(UNSET) is UNSET
