"""500 requests at once from three gateway processes that share one server of limits: never more pass than fit."""

import contextlib
import json
import math
import subprocess
import sys
import time

import pytest

from tests.architecture.tree import ROOT

SHARES = (167, 167, 166)


@contextlib.contextmanager
def gateways(url: str, limits: dict[str, int]):
    with contextlib.ExitStack() as stack:
        found = []
        for name, num in zip("abc", SHARES, strict=True):
            command = [sys.executable, "-m", "tests.access.racing_gateway", url, name, str(num), json.dumps(limits)]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True))
            stack.callback(process.kill)
            found.append(process)
        yield found


def tell(process: "subprocess.Popen[str]") -> None:
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "admits", "left"),
    [
        ({"requests_per_minute": 37}, 37, {"m2": "0"}),
        ({"parallel_requests": 12}, 12, {}),
        ({"output_tokens_per_minute": 400}, 20, {}),
        ({"usd_per_day_microusd": 149}, 29, {"sd": "145", "sm": "145"}),
    ],
)
def test_of_500_at_once_from_three_processes_never_more_pass_than_fit(server, limits, admits, left):
    with gateways(server.url, limits) as processes:
        assert [process.stdout.readline().strip() for process in processes] == ["ready"] * 3
        started = time.monotonic()
        for process in processes:
            tell(process)
        passed = [int(process.stdout.readline()) for process in processes]
        a_second = limits.get("requests_per_minute", 0) / 60 + limits.get("output_tokens_per_minute", 0) / 60 / 20
        refill = math.ceil(a_second * (time.monotonic() - started))  # comes back while they race
        assert admits <= sum(passed) <= admits + refill
        held = server.client.hgetall('{race}:level:["org","acme"]')
        assert int(held["run"]) == sum(passed)
        for process in processes:
            tell(process)
        assert [process.stdout.readline().strip() for process in processes] == ["done"] * 3
    held = server.client.hgetall('{race}:level:["org","acme"]')
    assert held | left | {"run": "0", "held": "0"} == held
