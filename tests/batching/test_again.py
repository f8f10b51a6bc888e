"""What a line is tried again after, and what is its answer."""

import pytest

from hitsend.core.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InsufficientQuota,
    InvalidApiKey,
    InvalidRequest,
    RateLimitExceeded,
    ServeError,
    ServerOverloaded,
    ShuttingDown,
    StorageFailed,
)
from hitsend.serve.batching.again import LONGEST_FULL_S, LONGEST_S, MAX_FAILS, pause_s


@pytest.mark.parametrize(
    ("error", "num_fails", "is_again"),
    [
        (None, 0, False),
        (InvalidRequest("x", param="temperature"), 0, False),
        (InvalidRequest("used before", param="x-request-id"), 0, True),
        (ContextLengthExceeded("x"), 0, False),
        (InvalidApiKey("x"), 0, False),
        (ServeError("internal error"), 0, False),
        (RateLimitExceeded("x", retry_after_s=50.0), 999, True),
        (ServerOverloaded("x"), 999, True),
        (ShuttingDown("x"), 999, True),
        (EngineFailed("x"), 0, True),
        (EngineFailed("x"), 1, False),
        (EngineUnavailable("x"), MAX_FAILS - 1, True),
        (EngineUnavailable("x"), MAX_FAILS, False),
        (StorageFailed("x"), 0, True),
        (InsufficientQuota("x"), 0, False),
        (InsufficientQuota("until midnight", retry_after_s=3000.0), 0, True),
        (InsufficientQuota("until next month", retry_after_s=4000.0), 0, False),
    ],
)
def test_when_a_line_is_tried_again(error, num_fails, is_again):
    found = pause_s(error, num_fails, left_s=3600.0)
    assert (found is not None) is is_again
    assert found is None or 0 < found <= LONGEST_S
    if isinstance(error, RateLimitExceeded):
        assert found == LONGEST_FULL_S
