"""The same seeded request alone and in a full batch."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.served import Served

pytestmark = pytest.mark.model

ASKED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 4242, "max_tokens": 32}
QUESTION = "Write a short poem about the sea."


def test_alone_and_in_a_full_batch(served: Served) -> None:
    """One seed gives one answer; see docs/behaviour.md for what libllama's arithmetic promises."""
    alone = [served.chat(QUESTION, **ASKED)["choices"][0]["message"]["content"] for _ in range(2)]
    assert alone[0] == alone[1]
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(served.chat, f"{i} tell me more", seed=i, max_tokens=48, temperature=1) for i in range(7)]
        crowded = served.chat(QUESTION, **ASKED)
        for other in noise:
            other.result()
    events = served.record(crowded["hitsend"]["request_id"])["events"]
    widths = [event["batch_sequences"] for event in events if event["type"] == "step"]
    assert max(widths) > 1, "it was never in company"
    assert crowded["choices"][0]["message"]["content"] == alone[0]
