"""Which errors are a line's answer, and after which it is tried again.

Enters: how a line ended, how often it did so. Leaves: a pause, or none. Always true: what the line itself is to blame
for is never tried again; what lasts is waited for as long as the batch's window is open, what is broken a bounded
number of times. Next: `runner.py`.
"""

from hitsend.core.errors import (
    EngineFailed,
    EngineUnavailable,
    InsufficientQuota,
    LimitError,
    ServeError,
    ShuttingDown,
    StorageFailed,
)

MAX_FAILS = 10
"""Of an engine or a database that is away."""
LONGEST_S = 30.0
LONGEST_FULL_S = 5.0
"""Of what is full, the most that its own word about when to come back is taken for."""
USED_S = 0.25


def pause_s(error: ServeError | None, num_fails: int, left_s: float) -> float | None:
    """Seconds until it is tried again; None: that is its answer. `left_s`: of the batch's window."""
    backoff = min(2.0**num_fails, LONGEST_S)
    if error is not None and error.param == "x-request-id":
        return USED_S  # another process used its id in the same moment
    if isinstance(error, InsufficientQuota):
        again = error.retry_after_s
        return LONGEST_S if again is not None and again < left_s else None
    if isinstance(error, LimitError):
        return min(max(error.retry_after_s or backoff, 0.05), LONGEST_FULL_S)
    if isinstance(error, ShuttingDown):
        return backoff  # the next start goes on with it
    if isinstance(error, EngineFailed):
        return backoff if num_fails == 0 else None  # perhaps another request broke it; twice, it was this one
    if isinstance(error, EngineUnavailable | StorageFailed) and num_fails < MAX_FAILS:
        return backoff
    return None
