"""The gateways that are compared, each started with what it has of keys, limits and logs, on one core.

`hitsend` runs with a key and with limits on five levels (everybody, organisation, application, user, key: requests,
input and output tokens per minute, parallel requests, dollars per day), token counting, flight record and ledger.
LiteLLM runs with a key that is checked, requests and tokens per minute for it, and one JSON line per request; its spend
table needs a database engine that its package doesn't bring, so writes to one would come on top.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

MODEL = "bench"
KEY = "sk-bench-1234567890"
GATEWAY_CORE, OTHER_CORE = "0", "1"
ANY_CORE = f"0-{(os.cpu_count() or 1) - 1}"
START_S = 60
TASKSET = shutil.which("taskset") or "taskset"
MANY = "100000000"


class Gateway:
    """A running one: where, with which key, which process; `reader` is a key that may see the metrics."""

    def __init__(self, name: str, port: int, key: str, pid: int, reader: str = "") -> None:
        self.name, self.port, self.key, self.pid, self.reader = name, port, key, pid, reader

    def _processes(self) -> list[psutil.Process]:
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def cpu_s(self) -> float:
        """User and system time, children (those that ended too) included."""
        times = [process.cpu_times() for process in self._processes()]
        ended = times[0].children_user + times[0].children_system
        return float(sum(one.user + one.system for one in times) + ended)

    def rss_mb(self) -> float:
        """Of all its processes."""
        return float(sum(process.memory_info().rss for process in self._processes()) / 1e6)


@contextmanager
def started(words: list[str], core: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[int]:
    """A process on one core, ended with the block. `taskset` replaces itself, so its pid is the process's."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [TASKSET, "-c", core, *words], stdout=out, stderr=out, env=dict(os.environ) | (environment or {})
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def wait_for(url: str, log: Path) -> None:
    """Until it answers anything."""
    for _ in range(START_S * 20):
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310  # our own loopback server
                return
        except urllib.error.HTTPError:
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit(f"{url} did not come up:\n{log.read_text()[-3000:]}")


@contextmanager
def hitsend(
    port: int,
    upstream: int,
    folder: Path,
    source: Path | None = None,
    *,
    module: str = "hitsend",
    more: Sequence[str] = (),
) -> Iterator[Gateway]:
    """With everything on. `source`: the folder `src` of another version, in place of the installed one; `module`: what
    is run in hitsend's place."""
    environment = {} if source is None else {"PYTHONPATH": str(source)}
    key = _make_key(folder, environment)
    reader = _new_key(folder, environment, ["--name", "reader", "--role", "reader"])
    upstream_url = f"http://127.0.0.1:{upstream}/v1"
    config = folder / "hitsend.toml"
    config.write_text(
        f'[engine]\nmodel = "none"\n[[engines]]\nname = "mock"\nbase_url = "{upstream_url}"\n'
        f'max_concurrent = 4096\nmodels = {{ {MODEL} = "mock" }}\nprices = {{ input = 0.5, output = 1.5 }}\n'
    )
    words = [sys.executable, "-m", module, "serve", *more, "--config", str(config), "--port", str(port)]
    words += ["--data", str(folder / "data"), *os.environ.get("BENCH_EDGE_SET", "").split()]
    log = folder / "hitsend.log"
    with started(words, GATEWAY_CORE, log, environment) as pid:
        wait_for(f"http://127.0.0.1:{port}/healthz", log)
        yield Gateway("hitsend", port, key, pid, reader)


def _make_key(folder: Path, environment: dict[str, str]) -> str:
    """Organisation, application, user and key, and everybody together: limits on each level, none of which binds."""
    limits = ["--rpm", MANY, "--input-tpm", MANY, "--output-tpm", MANY, "--parallel", "1000000", "--usd-day", "1000000"]
    _command(folder, environment, ["limits", "set", *limits])
    _command(folder, environment, ["orgs", "create", "acme", *limits])
    _command(folder, environment, ["apps", "create", "bot", "--org", "acme", *limits])
    _command(folder, environment, ["users", "create", "ann", "--org", "acme", "--app", "bot", *limits])
    return _new_key(folder, environment, ["--name", "bench", "--org", "acme", "--app", "bot", "--user", "ann", *limits])


def _new_key(folder: Path, environment: dict[str, str], words: list[str]) -> str:
    return str(json.loads(_command(folder, environment, ["keys", "create", *words]))["key"])


def _command(folder: Path, environment: dict[str, str], words: list[str]) -> str:
    words = [sys.executable, "-m", "hitsend", *words, "--data", str(folder / "data"), "--json"]
    made = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(os.environ) | environment)
    if made.returncode:
        raise SystemExit(f"{words} failed:\n{made.stderr[-2000:]}")
    return made.stdout


@contextmanager
def forwarder(port: int, upstream: int, folder: Path, *, core: str = GATEWAY_CORE) -> Iterator[Gateway]:
    """Nothing but bytes."""
    words = [sys.executable, "-m", "bench.edge.forwarder", str(port), f"http://127.0.0.1:{upstream}"]
    log = folder / "forwarder.log"
    with started(words, core, log) as pid:
        wait_for(f"http://127.0.0.1:{port}/", log)
        yield Gateway("bare aiohttp forwarder", port, "none", pid)


_AUTH = """
import json
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key: str) -> UserAPIKeyAuth:
    if api_key != "KEY":
        raise Exception("wrong key")
    return UserAPIKeyAuth(api_key=api_key, user_id="u", team_id="t", org_id="o", tpm_limit=10**8, rpm_limit=10**8,
                          max_parallel_requests=10**6)


class Spend(CustomLogger):
    def __init__(self):
        super().__init__()
        self.file = open(FILE, "a")

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        self.file.write(json.dumps(kwargs.get("standard_logging_object"), default=str) + "\\n")
        self.file.flush()


spend = Spend()
"""


@contextmanager
def litellm(
    port: int, upstream: int, folder: Path, binary: str, *, core: str = GATEWAY_CORE, model: str = "mock"
) -> Iterator[Gateway]:
    """Its proxy, one worker. `model`: what the upstream calls it."""
    (folder / "edge_hooks.py").write_text(_AUTH.replace("KEY", KEY).replace("FILE", repr(str(folder / "spend.jsonl"))))
    (folder / "litellm.yaml").write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{model}\n"
        f"      api_base: http://127.0.0.1:{upstream}/v1\n      api_key: none\n"
        "      input_cost_per_token: 0.0000005\n      output_cost_per_token: 0.0000015\n"
        "general_settings:\n  custom_auth: edge_hooks.check\nlitellm_settings:\n  callbacks: edge_hooks.spend\n"
    )
    words = [str(Path(binary).absolute()), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1"]
    words += ["--port", str(port), "--num_workers", "1"]
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    environment |= {"PYTHONPATH": str(folder), "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(32)}"}
    log = folder / "litellm.log"
    with started(words, core, log, environment) as pid:
        wait_for(f"http://127.0.0.1:{port}/health/liveliness", log)
        yield Gateway("LiteLLM proxy", port, KEY, pid)


@contextmanager
def everything(ports: list[int], binary: str | None, data: str | None) -> Iterator[list[Gateway]]:
    """The mock upstream, and all gateways in front of it. `ports`: mock, hitsend, forwarder, LiteLLM."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-edge-", dir=data)))
        words = [sys.executable, "-m", "bench.edge.mock", str(ports[0])]
        stack.enter_context(started(words, OTHER_CORE, folder / "mock.log"))
        gateways = [
            stack.enter_context(hitsend(ports[1], ports[0], folder)),
            stack.enter_context(forwarder(ports[2], ports[0], folder)),
        ]
        if binary is not None:
            gateways.append(stack.enter_context(litellm(ports[3], ports[0], folder, binary)))
        yield gateways
