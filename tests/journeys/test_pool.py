"""Several embedded models behind one real server: loaded on demand, evicted, killed, cancelled; and adapters."""

import contextlib
import http.client
import json
import os
import signal
from pathlib import Path

import pytest

from tests.engine.conftest import bundled
from tests.engine.lora import write_lora
from tests.served import serving, until

pytestmark = pytest.mark.model

SMALL = "num_slots = 2\ncontext = 256\nkv_budget_bytes = 0\n"
MODEL = f"[engine]\n{SMALL}aging_s = 1000.0\n"


def pooled(name, **fields):
    more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
    return (
        f'[[engines]]\nkind = "embedded"\nname = "{name}"\nmodel = "smollm2-135m"\naliases = ["{name}-model"]\n{more}'
    )


def written(folder, *parts):
    file = folder / "hitsend.toml"
    file.write_text("\n".join(parts))
    return str(file)


def models(served):
    return served.state()["pool"]["models"]


def states(served):
    return {name: shown["state"] for name, shown in models(served).items()}


class Stream:
    """One streamed answer, read line by line."""

    def __init__(self, served, model, *, max_tokens=200):
        self.connection = http.client.HTTPConnection(*served.url.removeprefix("http://").split(":"), timeout=60)
        body = {"model": model, "messages": [{"role": "user", "content": "Count to a hundred."}], "stream": True}
        body |= {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        self.request_id = self.answer.getheader("x-request-id")

    def until(self, word):
        """Read to the first line with it; the line, or an empty one at the end."""
        for line in self.answer:
            if word in line:
                return line
        return b""

    def leave(self):
        self.answer.close()
        self.connection.close()


@contextlib.contextmanager
def streaming(served, model, **fields):
    stream = Stream(served, model, **fields)
    try:
        yield stream
    finally:
        stream.leave()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_models_take_turns_under_one_budget(tmp_path):
    """Room for the default model and one more: a takes about 230 MB, b 265."""
    config = written(
        tmp_path,
        MODEL + "memory_budget_bytes = 520_000_000",
        "[stream]\nping_s = 0.1",
        pooled("a"),
        pooled("b", idle_unload_s=1.0, num_slots=1, context=2048),
        '[[prices]]\nmodel = "b-model"\ninput = 1000000\noutput = 0',
    )
    with serving("--config", config) as served:
        listed = {one["id"]: one for one in served.get("/v1/models")["data"]}
        assert set(listed) == {"smollm2-135m", "a-model", "b-model"}
        assert listed["a-model"]["hitsend"]["state"] == "unloaded"
        used, alike = served.state()["pool"]["memory_used_bytes"], listed["a-model"]["hitsend"]["memory_bytes"]
        assert abs(used / alike - 1) < 0.05, "the default model alone; each is rehearsed in a process of its own"
        first = served.chat("Hi", model="a-model", max_tokens=3)
        assert (states(served), first["hitsend"]["cost_microusd"]) == ({"a": "loaded", "b": "unloaded"}, 0)
        record = served.record(first["hitsend"]["request_id"])
        assert (record["engine"], record["model"]) == ("a", "a-model")
        assert "model_loaded" in [event["type"] for event in record["events"]]
        pid = models(served)["a"]["pid"]
        second = served.chat("Hi", model="b-model", max_tokens=3)
        assert second["hitsend"]["cost_microusd"] == second["usage"]["prompt_tokens"] * 1_000_000 > 0
        assert states(served) == {"a": "unloaded", "b": "loaded"}
        assert not is_running(pid)
        assert until(lambda: states(served)["b"], lambda state: state == "unloaded") == "unloaded", "it was idle"
        _wait_for_the_busy(served)
        metrics = served.text("/metrics")
        assert 'hitsend_model_loads_total{engine="b"} ' in metrics
        assert 'hitsend_tokens_billed_total{kind="completion",model="b-model"} ' in metrics
        idle = served.wait_idle()
        assert (idle["waiting"], idle["cells_used"], idle["holds_open"]) == (0, 0, 0)


def _wait_for_the_busy(served):
    """While b answers, those who want a wait for it and hear pings; one leaves, one stays and is served."""
    with streaming(served, "b-model", max_tokens=1900) as busy:
        assert until(lambda: models(served)["b"]["running"], lambda count: count == 1, 60) == 1
        loads = models(served)["a"]["loads_total"]
        with streaming(served, "a-model") as leaving:
            assert leaving.until(b": ping")
            assert leaving.until(b": ping"), "not only the first byte: alive while it waits"
            assert models(served)["a"]["waiting"] == 1
        assert until(lambda: models(served)["a"]["waiting"], lambda count: count == 0) == 0
        record = until(lambda: served.record(leaving.request_id), lambda found: found["ledger"] is not None)
        assert (record["state"], record["usage"]["total_tokens"]) == ("cancelled", 0)
        assert models(served)["a"]["loads_total"] == loads, "nobody waits for it any more"
        with streaming(served, "a-model", max_tokens=3) as staying:
            assert staying.until(b": ping")
            assert models(served)["b"]["state"] == "loaded", "never while it answers"
            busy.leave()
            assert staying.until(b"[DONE]")
    assert models(served)["a"]["loads_total"] == loads + 1


def _has_its_own_layout(served):
    """What was predicted of the converted file is what its process loads, and the record says so from the start."""
    before = models(served)["small"]
    answer = served.chat("Say hi.", model="small-model", max_tokens=2)
    record = served.record(answer["hitsend"]["request_id"])
    routed = next(event for event in record["events"] if event["type"] == "routed")
    assert (before["layout"], routed["layout"], models(served)["small"]["layout"]) == ("q8_0",) * 3
    assert models(served)["a"]["layout"] == "as-shipped"
    status = Path(f"/proc/{models(served)['small']['pid']}/status").read_text()
    resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident < before["memory_bytes"] * 1.05
    # q8_0 is 1.5 times the bundled file, which alone is more than two slots' cells
    assert before["memory_bytes"] > models(served)["a"]["memory_bytes"] + 30_000_000


def test_one_models_death_touches_nobody_else_and_adapters_keep_their_names(tmp_path):
    red = write_lora(tmp_path / "red.gguf", bundled())
    config = written(
        tmp_path,
        MODEL,
        pooled("a", is_loaded_at_start=True),
        pooled("small", layout="q8_0", num_slots=1),
        f'[[adapters]]\nname = "red"\npath = "{red}"',
        f'[[adapters]]\nname = "red-a"\nmodel = "a-model"\npath = "{red}"',
        '[[prices]]\nmodel = "red"\ninput = 0\noutput = 1000000',
    )
    with serving("--config", config) as served:
        assert states(served) == {"a": "loaded", "small": "unloaded"}
        _has_its_own_layout(served)
        with streaming(served, "a-model") as dying, streaming(served, "smollm2-135m", max_tokens=100) as living:
            assert until(lambda: served.state()["running"], lambda count: count == 2, 60) == 2
            os.kill(models(served)["a"]["pid"], signal.SIGKILL)
            assert b"engine_failed" in dying.until(b'"error"')
            assert living.until(b"[DONE]")
        restarted = until(lambda: models(served)["a"], lambda shown: shown["is_ready"] and shown["restarts"] == 1)
        assert (restarted["state"], restarted["restarts"]) == ("loaded", 1)
        assert served.get("/readyz")["status"] == "ready"
        says = {
            name: served.chat("Say hi.", model=name, max_tokens=4, temperature=0)
            for name in ("smollm2-135m", "a-model", "red", "red-a")
        }
        texts = {name: answer["choices"][0]["message"]["content"] for name, answer in says.items()}
        assert texts["smollm2-135m"] == texts["a-model"] != texts["red"] == texts["red-a"]
        assert says["red"]["hitsend"]["cost_microusd"] == 4_000_000
        assert served.record(says["red-a"]["hitsend"]["request_id"])["engine"] == "a"
        listed = {one["id"]: one.get("hitsend", {}) for one in served.get("/v1/models")["data"]}
        assert listed["red"]["adapter_of"] == "smollm2-135m"
        assert listed["red-a"]["adapter_of"] == "a-model"
        idle = served.wait_idle()
        assert (idle["cells_used"], idle["holds_open"]) == (0, 0)
