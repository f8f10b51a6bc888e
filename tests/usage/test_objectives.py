import pytest

from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.metrics import MAX_EXEMPLAR_CHARS, Metrics
from hitsend.serve.usage.objectives import outcome
from hitsend.settings import SloSettings

PROMISED = SloSettings(ttft_s=2.0, tpot_s=0.1, e2e_s=30.0)
SERVED = {"model": "m", "wall_s": 3.0, "ttft_s": 1.0, "tpot_s": 0.05, "has_row": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "good"),
        ({"ttft_s": 2.0, "tpot_s": 0.1, "wall_s": 30.0}, "good"),
        ({"ttft_s": 2.1, "tpot_s": 0.2}, "ttft"),
        ({"tpot_s": 0.11}, "tpot"),
        ({"wall_s": 30.1}, "e2e"),
        ({"ttft_s": None, "tpot_s": None}, "good"),
        ({"error_code": "engine_failed"}, "failed"),
        ({"error_code": "server_overloaded", "has_row": False}, "failed"),
        ({"error_code": "rate_limit_exceeded", "has_row": False}, None),
        ({"error_code": "invalid_request", "has_row": False}, None),
        ({"error_code": "client_gone", "cancelled_during": "running"}, None),
        ({"has_row": False, "ttft_s": None, "tpot_s": None}, None),
    ],
)
def test_only_what_was_served_or_should_have_been_is_judged(changes, expected):
    assert outcome(RequestFigures(**(SERVED | changes)), PROMISED) == expected


def test_what_isnt_promised_isnt_looked_at():
    nothing = SloSettings(ttft_s=None, tpot_s=None, e2e_s=None)
    assert outcome(RequestFigures(**(SERVED | {"ttft_s": 99.0, "tpot_s": 9.0, "wall_s": 999.0})), nothing) == "good"


@pytest.mark.parametrize(("chars", "is_shown"), [(MAX_EXEMPLAR_CHARS, True), (MAX_EXEMPLAR_CHARS + 1, False)])
def test_a_request_id_that_is_too_long_for_an_exemplar_is_left_out(chars, is_shown):
    metrics = Metrics()
    metrics.observe_request(RequestFigures(**SERVED, request_id="r" * chars))
    assert (b"rrr" in metrics.render(is_openmetrics=True)) is is_shown
