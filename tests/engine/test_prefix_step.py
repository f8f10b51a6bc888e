"""With a step of 1, a prompt goes on at the very token at which it parts from an earlier one."""

import pytest

from tests.served import serving

pytestmark = pytest.mark.model


def test_a_step_of_one_uses_every_shared_token():
    with serving("--set", "engine.prefix_cache_step=1", "--set", "engine.num_slots=2") as served:
        first = served.chat("Count the days of the week, please.", max_tokens=4)
        again = served.chat("Count the days of the week, please.", max_tokens=4)
        other = served.chat("Count the days of the year, please.", max_tokens=4)
    prompt = first["usage"]["prompt_tokens"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again, other)]
    assert prompt < 64
    assert cached[0] == 0
    assert cached[1] == prompt - 1
    assert 0 < cached[2] < prompt - 1
