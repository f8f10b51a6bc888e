"""`hitsend serve --engine vllm` as somebody types it, with the real vLLM: see `test_real.py` for the variables."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from tests.served import Served, descendants, free_port, those_left, until
from tests.upstream.test_real import COMMAND, MODEL, starts_vllm

pytestmark = pytest.mark.slow

SMALL = "--dtype float32 --max-model-len 512 --max-num-seqs 2 --enforce-eager"
START_S = 400


@contextlib.contextmanager
def typed(folder):
    """Yields it at once, ready or not."""
    port, vllm_port = free_port(), free_port()
    words = [sys.executable, "-m", "hitsend", "serve", "--engine", "vllm", "--model", MODEL, "--port", str(port)]
    words += ["--vllm-port", str(vllm_port), "--vllm-arguments", SMALL, "--data", str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(COMMAND).parent}:{environment['PATH']}"
    with (
        (folder / "server.log").open("ab") as log,
        subprocess.Popen(words, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            yield Served(process, f"http://127.0.0.1:{port}", folder)
        finally:
            process.terminate()


def is_ready(served):
    try:
        return bool(served.get("/v1/models")["data"])
    except OSError:
        return False


@starts_vllm
def test_it_is_started_by_flags_answers_and_leaves_nothing_behind(tmp_path):
    with typed(tmp_path) as served:
        until(lambda: is_ready(served) or served.process.poll() is not None, bool, START_S)
        assert is_ready(served), (tmp_path / "server.log").read_text()[-3000:]
        started = descendants(served.process.pid)
        assert len(started) >= 2  # its server and its engine
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            (model,) = client.models.list()
            assert model.id == Path(MODEL).name.lower()
            asked = {"model": model.id, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 5}
            whole = client.chat.completions.create(temperature=0, **asked)
            parts = list(client.chat.completions.create(temperature=0, stream=True, **asked))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == whole.choices[0].message.content
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (5, "length")
        rows = [one["row"] for one in served.get("/admin/ledger")["data"]]
        assert [(row["engine"], row["completion_tokens"], row["cost_microusd"]) for row in rows] == [("vllm", 5, 0)] * 2
        served.process.terminate()
        assert served.process.wait(60) == 0
    assert until(lambda: those_left(started), lambda left: not left) == set()


@starts_vllm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_it_still_starts_it_leaves_nothing_behind(tmp_path, number):
    with typed(tmp_path) as served:
        started = until(lambda: descendants(served.process.pid), bool, START_S)
        assert started
        time.sleep(1)  # any moment of a start will do
        started |= descendants(served.process.pid)
        served.process.send_signal(number)
        served.process.wait(60)
    assert until(lambda: those_left(started), lambda left: not left) == set()
