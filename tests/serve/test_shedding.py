"""An engine without room refuses before anything is prepared for it."""

from types import SimpleNamespace

import pytest

from hitsend.core.errors import ServerOverloaded
from hitsend.core.record import Flight
from hitsend.core.request import Message, Principal, Request
from hitsend.serve.pipeline import run
from hitsend.testing import FakeClock
from tests.serve.test_estimate import FACTS


class Full:
    name, facts = "embedded", FACTS
    takes = gives = "tokens"
    is_local = True

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], int]] = []

    def shed(self, tenant, choices) -> None:
        self.asked.append((tenant, choices))
        raise ServerOverloaded("The queue is full.", retry_after_s=1.0)


async def test_a_full_queue_refuses_before_the_prompt_is_prepared():
    engine = Full()
    stages = SimpleNamespace(engines={"m": engine})  # no text process: touching it would be another error
    caller = Principal(key_id="k", org="acme")
    request = Request("r", "m", (Message("user", "x"),), n=3, principal=caller)
    flight = Flight("r", FakeClock())
    with pytest.raises(ServerOverloaded):
        async for _ in run(request, flight, stages):
            pass
    assert engine.asked == [(("acme", "", "", "k"), 3)]
    assert [type(event).__name__ for event in flight.events()] == ["Routed"]
