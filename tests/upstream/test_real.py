"""The contract against engines that are no fakes: the embedded one, llama-server, and vLLM where one is there.

vLLM: `python -m bench.peers.servers vllm 8100 --thinks` in another terminal, then
`HITSEND_TEST_VLLM=http://127.0.0.1:8100 pytest -m "" tests/upstream/test_real.py`; with `HITSEND_TEST_VLLM_COMMAND`
(its `vllm` program) and `HITSEND_TEST_VLLM_MODEL` (a folder) also what starts one. What came of it: docs/engines.md.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from bench.serving import bundled_gguf
from hitsend import settings
from hitsend.serve.app import running
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings
from tests.served import free_port
from tests.upstream.conftest import PRICES, Gateway
from tests.upstream.contract import THINK, gives_ids, keeps_all_of_it, keeps_the_contract, said
from tests.upstream.test_check import hitsend
from tests.upstream.test_limits import grant

HERE = Path(__file__).parent
VLLM, COMMAND, MODEL = map(
    os.environ.get, ("HITSEND_TEST_VLLM", "HITSEND_TEST_VLLM_COMMAND", "HITSEND_TEST_VLLM_MODEL")
)
EMBEDDED = frozenset({"count", "regex", "choice", "lark", "tools", "ids"})
LLAMA = frozenset({"count", "thinking", "tools"})
OF_VLLM = frozenset({"count", "effort", "regex", "choice", "lark", "tools", "thinking", "ids"})

needs_vllm = pytest.mark.skipif(VLLM is None, reason="HITSEND_TEST_VLLM names no vLLM server")
starts_vllm = pytest.mark.skipif(None in (COMMAND, MODEL), reason="HITSEND_TEST_VLLM_COMMAND or …_MODEL isn't set")


@contextmanager
def llama_server(gguf=None, template=HERE / "thinks_and_calls.jinja", threads=2):
    words = [sys.executable, HERE / "llama_server.py", gguf or bundled_gguf(), template, str(threads)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@asynccontextmanager
async def in_front_of(tmp_path, *engines, model="none", **more):
    tree = settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(model=model, alias="here", num_slots=2, context=1024, **more),
        record=settings.RecordSettings(text=True),
        engines=engines,
    )
    async with running(tree) as server, aiohttp.ClientSession() as session:
        yield Gateway(server.base_url, session, None)


def llama_at(url):
    return UpstreamSettings(
        name="llama", server="llama_server", base_url=f"{url}/v1", models={"there": "any"}, prices=PRICES
    )


def vllm_at(url, **fields):
    return VllmSettings(name="vllm", base_url=url, models={"far": "bench"}, prices=PRICES, **fields)


async def gauge(session, url, name):
    async with session.get(f"{url}/metrics") as answer:
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
    return float(found[1])


async def is_left_alone(gate, model, url, name):
    """A client that leaves in the middle of a stream: the engine itself says that it has stopped."""
    fields = {"model": model, "stream": True, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    async with gate.ask(**fields) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if b'"content":"' in line and b'"content":""' not in line:
                break
        answer.close()
    state = await gate.idle()
    assert (state["running"], state["holds_open"]) == (0, 0)
    for _ in range(600):
        if not await gauge(gate.session, url, name):
            break
        await asyncio.sleep(0.05)
    assert await gauge(gate.session, url, name) == 0


async def tells_its_load(gate, engine, names):
    """What admission goes by is read from the real `/metrics`."""
    for _ in range(100):
        state = await gate.get("/inspect/state")
        load = state["upstreams"][engine]["servers"][0]["load"]
        if all(load[name] is not None for name in names):
            break
        await asyncio.sleep(0.1)
    assert all(load[name] is not None for name in names), load


async def can_be_looked_at(tmp_path, gate, toml, names):
    """`engines list`, `check` and `diff`, as somebody types them."""
    config = tmp_path / "looked.toml"
    config.write_text('[engine]\nmodel = "none"\n' + toml)
    asked = ("--prompt", "Say hi.", "--max-tokens", "4", "--json", "--url", gate.url)
    checked, listed, differs = await asyncio.gather(
        hitsend("check", "--config", str(config), "--json"),
        hitsend("list", "--config", str(config), "--json"),
        hitsend("diff", *names, *asked),
    )
    assert [one[0] for one in (checked, listed, differs)] == [0, 0, 0], (checked, listed, differs)
    (row,) = json.loads(checked[1])["engines"]
    assert (row["is_well"], row["servers"][0]["gives_usage"]) == (True, True)
    assert len(json.loads(listed[1])["engines"]) == 1
    sides = json.loads(differs[1])["sides"]
    assert [side["error"] for side in sides] == [None, None]
    assert [side["prompt_tokens"] for side in sides] == [side["usage"]["prompt_tokens"] for side in sides]


async def forces_calls(gate, model):
    """`required`: a call and nothing else, of one of several functions, after thoughts too; cut, it is no text."""
    place = {"$defs": {"place": {"enum": ['東京 "a"']}}, "properties": {"at": {"$ref": "#/$defs/place"}}}
    place |= {"type": "object", "required": ["at"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": place}} for name in ("go", "stay")]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    for more in ({}, THINK | {"thinking_token_budget": 6}):
        choice, _ = await said(gate, model, **asked, **more)
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None), choice
        assert call["function"]["name"] in ("go", "stay")
        assert json.loads(call["function"]["arguments"]) == {"at": '東京 "a"'}
    choice, _ = await said(gate, model, **asked | {"max_tokens": 16})
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", ""), choice


@pytest.mark.model
async def test_the_embedded_engine_and_llama_server_keep_the_contract(tmp_path):
    with llama_server(threads=1) as url:
        async with in_front_of(tmp_path, llama_at(url), model="smollm2-135m") as gate:
            await keeps_the_contract(gate, "here")  # what else it does is tested elsewhere; all of it: below
            await gives_ids(gate, "here", EMBEDDED)
            await keeps_all_of_it(gate, "there", LLAMA)
            await tells_its_load(gate, "llama", ("running", "waiting"))
            await forces_calls(gate, "there")
            await is_left_alone(gate, "there", url, "llamacpp:requests_processing")
            toml = f'[[engines]]\nname = "l"\nserver = "llama_server"\nbase_url = "{url}/v1"\nmodels = {{ a = "b" }}\n'
            await can_be_looked_at(tmp_path, gate, toml, ("here", "there"))


@pytest.mark.slow
@needs_vllm
async def test_a_real_vllm_and_the_embedded_engine_keep_the_contract(tmp_path):
    async with in_front_of(tmp_path, vllm_at(VLLM), model="smollm2-135m") as gate:
        await keeps_all_of_it(gate, "here", EMBEDDED)
        await keeps_all_of_it(gate, "far", OF_VLLM)
        await tells_its_load(gate, "vllm", ("running", "waiting", "kv_use", "preemptions"))
        await is_left_alone(gate, "far", VLLM, "vllm:num_requests_running")
        toml = f'[[engines]]\nname = "v"\nkind = "vllm"\nbase_url = "{VLLM}"\nmodels = {{ a = "bench" }}\n'
        await can_be_looked_at(tmp_path, gate, toml, ("here", "far"))


@pytest.mark.slow
@needs_vllm
async def test_its_prefix_cache_is_each_tenants_own(tmp_path):
    """`cache_salt` reaches it: the same prompt hits for the same salt only. `cached_tokens` come back."""
    async with in_front_of(tmp_path, vllm_at(VLLM)) as gate:
        asked = {"model": "far", "messages": [{"role": "user", "content": f"{os.urandom(4).hex()} red green " * 20}]}
        found = []
        for salt in ("one", "one", "two", None, None):
            fields = asked if salt is None else asked | {"cache_salt": salt}
            _, body, _ = await gate.answer(max_tokens=1, **fields)
            found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert found == [False, True, False, False, True]


STARTS = ("env", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", str(COMMAND), "serve")
SMALL = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")


async def reached(gate, url, name, number):
    for _ in range(1200):
        if await gauge(gate.session, url, name) == number:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} was never {number}")


async def in_order_of_ending(gate, url):
    """One runs, one of the lowest tier waits, then one of the usual tier comes: in which order they end."""
    ended = []

    async def ask(name, tokens, **fields):
        status, body, _ = await gate.answer(model="far", max_tokens=tokens, ignore_eos=True, **fields)
        assert status == 200, body
        ended.append(name)

    waiting = "vllm:num_requests_waiting"
    asking = [asyncio.create_task(ask("first", 300))]
    await reached(gate, url, "vllm:num_requests_running", 1)
    asking.append(asyncio.create_task(ask("flex", 20, service_tier="flex")))
    await reached(gate, url, waiting, 1)
    asking.append(asyncio.create_task(ask("default", 20)))
    await reached(gate, url, waiting, 2)
    await asyncio.gather(*asking)
    return ended


@pytest.mark.slow
@starts_vllm
@pytest.mark.parametrize("policy", ["priority", "fcfs"])
async def test_a_tier_counts_there_where_its_policy_is_priority(tmp_path, policy):
    """Where it isn't, this version takes the field and does as if there were none."""
    url = f"http://127.0.0.1:{free_port()}"
    arguments = (*SMALL, "--max-num-seqs", "1", "--scheduling-policy", policy)
    fields = {"serve_model": MODEL, "serve_command": STARTS, "serve_arguments": arguments}
    async with in_front_of(tmp_path, vllm_at(url, sends_priority=True, **fields)) as gate:
        ended = await in_order_of_ending(gate, url)
    assert ended == (["first", "default", "flex"] if policy == "priority" else ["first", "flex", "default"])


@pytest.mark.slow
@starts_vllm
async def test_a_real_vllm_serve_is_started_and_started_again_and_stopped(tmp_path):
    one = vllm_at(
        f"http://127.0.0.1:{free_port()}",
        serve_model=MODEL,
        serve_command=STARTS,
        serve_arguments=(*SMALL, "--max-num-seqs", "2"),
        metrics_poll_s=0.0,
        breaker_failures=1000,
    )
    async with in_front_of(tmp_path, one) as gate:

        async def pid():
            status, _, _ = await gate.answer(model="far", max_tokens=1)
            return (await gate.get("/inspect/state"))["upstreams"] and status

        assert await pid() == 200
        first = children_of(os.getpid(), COMMAND)
        assert len(first) == 1
        os.kill(first[0], signal.SIGKILL)
        status = None
        for _ in range(1200):
            status = await pid()
            if status == 200 and children_of(os.getpid(), COMMAND) != first:
                break
            await asyncio.sleep(0.25)
        assert status == 200
        second = children_of(os.getpid(), COMMAND)
        assert second not in (first, [])
    assert children_of(os.getpid(), COMMAND) == []


def children_of(pid, words):
    """Processes of ours that have these words in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid and words in line:
            found.append(int(folder.name))
    return found


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.model
async def test_another_hitsend_counts_its_prompts_and_where_it_does_not_the_bound_holds(tmp_path):
    for place in ("middle", "front"):  # a limit, so that prompts are counted before they are sent
        (tmp_path / place).mkdir()
        await grant(tmp_path / place, tokens_per_request=1_000_000)
    async with in_front_of(tmp_path / "back", model="smollm2-135m") as back:
        url = f"{back.url}/v1"
        near = UpstreamSettings(name="near", server="hitsend", base_url=url, models={"near": "here"}, prices=PRICES)
        async with in_front_of(tmp_path / "middle", near) as middle:
            url = f"{middle.url}/v1"
            far = UpstreamSettings(name="far", server="hitsend", base_url=url, models={"far": "near"}, prices=PRICES)
            async with in_front_of(tmp_path / "front", far) as front:
                for gate, model, is_exact in ((middle, "near", True), (front, "far", False)):
                    for fields in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
                        status, body, answer = await gate.answer(model=model, max_tokens=2, **fields)
                        assert status == 200, body
                        record = await gate.record(answer.headers["x-request-id"])
                        held = next(one for one in record["events"] if one["type"] == "reserved")["input_tokens"]
                        told = body["usage"]["prompt_tokens"]
                        assert (held == told) if is_exact else (held > told), (model, fields)
