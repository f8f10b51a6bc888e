"""One real server with the bundled model, shared by all tests that leave it as they found it."""

from collections.abc import Iterator

import hypothesis
import pytest

from tests.served import Served, serving

hypothesis.settings.register_profile("no seconds are asserted", deadline=None)
hypothesis.settings.load_profile("no seconds are asserted")


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Eight slots of 1,024 tokens, every step checked for lost cells, text captured."""
    with serving(
        *("--set", "engine.num_slots=8", "--set", "engine.context=1024", "--set", "engine.check_every_step=true"),
        *("--set", "record.text=true", "--set", "stream.ping_s=0.5", "--set", "record.ring=5000"),
        *("--set", "engine.wait_timeout_s=300"),  # a slow machine is no fault
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each journey nothing runs, waits, holds cells or an open hold, and the accounting found no fault."""
    yield
    if "served" not in request.fixturenames:
        return
    state = request.getfixturevalue("served").wait_idle()
    left = {
        name: state[name]
        for name in ("running", "waiting", "cells_used", "slots_used", "holds_open", "quota_holds_open")
    }
    assert not any(left.values()), left
    assert state["engine"]["check"] is None
