"""What is left of the caller's rates, as headers.

Enters: the tightest window of each rate. Leaves: headers. Always true: a rate that nobody limits has no headers;
`reset` is how long until the whole limit is there again, rounded up, never down. Next: `errors.py`.

    OpenAI's words: x-ratelimit-{limit,remaining,reset}-{requests,tokens}, reset as in "17ms", "1.5s", "6m0s". `tokens`
    is whichever of input and output has less left; both also stand alone, as -input-tokens and -output-tokens.
    Anthropic's, on its routes: anthropic-ratelimit-{requests,tokens,…}-{limit,remaining,reset}, reset as an instant.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from math import ceil

from hitsend.core.limits import RateWindow, RateWindows

Header = tuple[bytes, bytes]

_NAMES = {
    name: tuple(f"x-ratelimit-{what}-{name}".encode() for what in ("limit", "remaining", "reset"))
    for name in ("requests", "tokens", "input-tokens", "output-tokens")
}


def rate_headers(windows: RateWindows) -> list[Header]:
    """OpenAI's."""
    headers = []
    for name, window in _named(windows):
        limit, remaining, reset = _NAMES[name]
        headers += [
            (limit, b"%d" % window.limit),
            (remaining, b"%d" % window.remaining),
            (reset, duration(window.reset_s).encode()),
        ]
    return headers


def messages_rate_headers(windows: RateWindows, wall_s: float) -> list[Header]:
    """Anthropic's. `wall_s`: now, in seconds since the epoch."""
    headers = []
    for name, window in _named(windows):
        reset = datetime.fromtimestamp(ceil(wall_s + window.reset_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        headers += [
            (f"anthropic-ratelimit-{name}-limit".encode(), str(window.limit).encode()),
            (f"anthropic-ratelimit-{name}-remaining".encode(), str(window.remaining).encode()),
            (f"anthropic-ratelimit-{name}-reset".encode(), reset.encode()),
        ]
    return headers


def retry_headers(retry_after_s: float) -> list[Header]:
    """When to come back: whole seconds, and milliseconds for clients that read them; both rounded up."""
    return [
        (b"retry-after", str(max(1, ceil(round(retry_after_s, 6)))).encode()),
        (b"retry-after-ms", str(max(1, ceil(round(retry_after_s * 1000, 3)))).encode()),
    ]


def duration(seconds: float) -> str:
    """As Go writes it, to the millisecond: `0s`, `17ms`, `1.5s`, `6m0s`, `1h0m2s`."""
    ms = ceil(round(seconds * 1000, 3))
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{shown}"
    return f"{minutes}m{shown}" if minutes else shown


def _named(windows: RateWindows) -> Iterable[tuple[str, RateWindow]]:
    both = [window for window in (windows.input_tokens, windows.output_tokens) if window is not None]
    named = (
        ("requests", windows.requests),
        ("tokens", min(both, key=lambda window: window.remaining, default=None)),
        ("input-tokens", windows.input_tokens),
        ("output-tokens", windows.output_tokens),
    )
    return ((name, window) for name, window in named if window is not None)
