"""Two of the induced bottlenecks in every run of CI: both hold however slow the machine is."""

import asyncio

import pytest

from tests.inspect.induced import SCENARIOS, induce

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.mark.parametrize("name", ["few-slots", "tiny-context"])
def test_the_command_names_what_was_made(name):
    (scenario,) = [each for each in SCENARIOS if each.name == name]
    found = asyncio.run(induce(scenario, window_s=3))
    assert found.diagnosis["verdict"] == scenario.expected, found.diagnosis
