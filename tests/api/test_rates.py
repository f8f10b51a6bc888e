"""What callers are told of their limits, in OpenAI's and in Anthropic's words."""

import pytest

from hitsend.core.limits import RateWindow, RateWindows
from hitsend.serve.api.rates import duration, messages_rate_headers, rate_headers, retry_headers

WINDOWS = RateWindows(
    requests=RateWindow(60, 59, 1.0), input_tokens=RateWindow(900, 800, 6.5), output_tokens=RateWindow(300, 299, 0.2)
)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0s"),
        (0.0000001, "0s"),
        (0.0171, "18ms"),
        (0.999, "999ms"),
        (0.9991, "1s"),
        (1.0, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (90.951, "1m30.951s"),
        (3602.0, "1h0m2s"),
        (90_000.5, "25h0m0.5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds, shown):
    assert duration(seconds) == shown


def test_openai_s_headers():
    assert dict(rate_headers(WINDOWS)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"300",
        b"x-ratelimit-remaining-tokens": b"299",
        b"x-ratelimit-reset-tokens": b"200ms",
        b"x-ratelimit-limit-input-tokens": b"900",
        b"x-ratelimit-remaining-input-tokens": b"800",
        b"x-ratelimit-reset-input-tokens": b"6.5s",
        b"x-ratelimit-limit-output-tokens": b"300",
        b"x-ratelimit-remaining-output-tokens": b"299",
        b"x-ratelimit-reset-output-tokens": b"200ms",
    }


def test_anthropic_s_headers():
    found = dict(messages_rate_headers(RateWindows(requests=WINDOWS.requests), 1_700_000_000.2))
    assert found == {
        b"anthropic-ratelimit-requests-limit": b"60",
        b"anthropic-ratelimit-requests-remaining": b"59",
        b"anthropic-ratelimit-requests-reset": b"2023-11-14T22:13:22Z",
    }


def test_no_limit_no_header():
    assert rate_headers(RateWindows()) == messages_rate_headers(RateWindows(), 0.0) == []


@pytest.mark.parametrize(
    ("wait_s", "seconds", "ms"),
    [(12.0, b"12", b"12000"), (12.0001, b"13", b"12001"), (0.25, b"1", b"250"), (0.0, b"1", b"1")],
)
def test_waits_are_rounded_up(wait_s, seconds, ms):
    assert dict(retry_headers(wait_s)) == {b"retry-after": seconds, b"retry-after-ms": ms}
