"""The Plan page's process and its route: the same answers as in a terminal, from fields that lead nowhere."""

import asyncio
import json
import shlex
from typing import get_args

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from hitsend.cli import plan
from hitsend.cli.plan_page import PLANS, Question, answered, catalogue, fields_of
from hitsend.core.errors import ServerOverloaded
from hitsend.core.request import Principal
from hitsend.plan.facts import shipped_facts
from hitsend.serve.api.plan import MAX_BYTES, Plan
from hitsend.serve.planning import ask
from tests.edge import Edge

ASKED = {
    "memory": {"model": "Qwen3.8-27B", "gpu": "H200", "kv-dtype": "fp8", "max-model-len": "32768", "mtp": "2"}
    | {"prefix-caching": "true"},
    "speed": {"model": "Llama-3.1-70B", "gpu": "H200", "tp": 2, "weights": "fp8", "prefix-hit": "0.5"},
    "compare": {"model": "Qwen3-8B", "gpu": "L40S, H100", "max-gpus": "2", "weights": ["bf16"], "slo-tpot": "15ms"},
    "cost": {"requests": "30000", "input": "1200", "output": "400", "price": "workers-ai:qwen3.8-27b,0.45/3.20"},
    "fleet": {"peak-rps": "5", "slo-ttft": "800ms", "slo-tpot": "100ms", "timing": "40,4,10", "input": "40"}
    | {"output": "4", "requests": "20"},
    "rent-or-buy": {"dedicated-cost": "5460", "price": "0.45/3.20"},
    "train": {"params": "7.5B", "gpus": "8", "zero": "2", "flash": "false"},
}


def in_a_terminal(words):
    result = CliRunner().invoke(plan.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", PLANS)
def test_the_page_says_what_the_terminal_says(name):
    found = answered(Question(name, ASKED[name]))
    command = shlex.split(found["command"])
    assert command[:3] == ["hitsend", "plan", name]
    if name == "fleet":  # simulating again would be slow
        assert "\n  ".join(found["document"]["explain"]) in found["text"]
        return
    assert in_a_terminal(command[2:]) == found["text"] + "\n"
    assert json.loads(in_a_terminal([*command[2:], "--json"])) == json.loads(msgspec.json.encode(found["document"]))


def test_a_pasted_config_is_planned_like_its_file(tmp_path):
    model = next(one for one in shipped_facts().models if one.name.endswith("Qwen3-8B"))
    found = answered(Question("memory", {"gpu": "H100", "model": "/ignored"}, dict(model.config)))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model.config))
    told = json.loads(in_a_terminal(["memory", "--gpu", "H100", "--model", str(file), "--json"]))
    same = ("weights_bytes", "kv_bytes_per_token", "kv_pool_tokens", "max_concurrency")
    assert {key: found["document"][key] for key in same} == {key: told[key] for key in same}
    assert found["command"] == "hitsend plan memory --model ./config.json --gpu H100"
    refused = answered(Question("memory", {}, {"model_type": "x"}))
    assert refused["error"].startswith("pasted config.json: ")
    assert "error" in answered(Question("cost", ASKED["cost"], {}))


BENCH = {
    "completed": 100, "total_input_tokens": 102_400, "total_output_tokens": 102_400, "mean_ttft_ms": 260.0,
    "mean_tpot_ms": 19.0, "duration": 60.0, "max_concurrency": 16,
}  # fmt: skip
TRACE = [{"at_s": at / 3, "input_tokens": 40, "output_tokens": 4} for at in range(12)]
OWN = {"gpus": [{"name": "Ours", "source": "here", "as_of": "2026-11-01", "memory_bytes": 10**11}
                | {"bandwidth_bytes_per_s": 10**12, "bf16_flops": 10**14}]}  # fmt: skip


@pytest.mark.parametrize("measured", [BENCH, [BENCH, BENCH | {"max_concurrency": 64}]])
def test_a_pasted_measurement_calibrates_like_its_file(tmp_path, measured):
    found = answered(Question("speed", ASKED["speed"], calibrate=measured))
    file = tmp_path / "calibrate.json"
    lines = measured if isinstance(measured, list) else [measured]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    command = shlex.split(found["command"])
    assert command[3:5] == ["--calibrate", "./calibrate.json"]
    told = json.loads(in_a_terminal([*command[2:4], str(file), *command[5:], "--json"]))
    assert told == json.loads(msgspec.json.encode(found["document"]))
    assert told["calibration"]["tpot_width_after"] < told["calibration"]["tpot_width_before"]


def test_a_pasted_trace_and_facts_are_taken_like_their_files():
    found = answered(Question("fleet", ASKED["fleet"], trace=TRACE))
    assert "--trace ./trace.jsonl" in found["command"]
    assert "12 requests in the run at the limit, 1 draws" in found["text"]
    ours = answered(Question("memory", {"model": "Qwen3-8B", "gpu": "Ours"}, facts=OWN))
    assert ours["document"]["kv_pool_bytes"] < 10**11
    config = dict(next(one for one in shipped_facts().models if one.name.endswith("Qwen3-8B")).config)
    both = answered(Question("memory", {"gpu": "Ours"}, config, facts=OWN))
    assert both["document"]["kv_pool_bytes"] == ours["document"]["kv_pool_bytes"]
    assert both["command"] == "hitsend plan memory --model ./config.json --facts ./facts.json --gpu Ours"


@pytest.mark.parametrize(
    ("question", "param", "said"),
    [
        (Question("speed", ASKED["speed"], calibrate={}), "calibrate", "--calibrate pasted calibrate: needed is"),
        (Question("speed", ASKED["speed"], calibrate=BENCH | {"completed": None}), "calibrate", "key 'completed'"),
        (Question("memory", ASKED["memory"], calibrate=BENCH), "calibrate", "has no --calibrate"),
        (Question("cost", ASKED["cost"], trace=TRACE), "trace", "has no --trace"),
        (Question("fleet", ASKED["fleet"], trace=TRACE[:1]), "trace", "two requests"),
        (Question("fleet", ASKED["fleet"], trace=[{"at_s": 1}]), "trace", "pasted trace, line 1"),
        (Question("memory", ASKED["memory"], facts={"gpus": [{}]}), "facts", "pasted facts: "),
        (Question("memory", {"gpu": "H100"}, {"model_type": "x"}, facts={"models": 3}), "facts", "a list"),
    ],
)
def test_what_is_wrong_with_what_was_pasted_is_said(question, param, said):
    found = answered(question)
    assert said in found["error"]
    assert "/proc/" not in found["error"]
    assert found["param"] == param


def test_every_flag_is_a_field_but_those_that_lead_to_files_or_the_ledger():
    flags = {
        name: {option.partition("/")[0].removeprefix("--") for one in command.params for option in one.opts[:1]}
        for name, command in typer.main.get_command(plan.app).commands.items()
    }
    for name, command in PLANS.items():
        fields = {field.name for field in fields_of(command)}
        left = flags[name] - fields
        assert left <= {"facts", "json", "calibrate", "trace", "from-ledger", "from", "to", "config", "data"}
        assert fields < flags[name]
    known = catalogue(shipped_facts())
    assert tuple(known["plans"]) == get_args(Plan)
    assert known["models"]
    assert known["gpus"]
    assert "workers-ai:@cf/qwen/qwen3.8-27b" in known["prices"]


@pytest.mark.parametrize(
    ("name", "fields", "param", "said"),
    [
        ("memory", {"model": "/etc/passwd"}, "model", "reads no files"),
        ("memory", {"model": "../config.json"}, "model", "reads no files"),
        ("memory", {"model": "a/../../b"}, "model", "reads no files"),
        ("memory", {"model": "config.json"}, "model", "no such file"),
        ("memory", {"model": "nobody's"}, "model", "no model of that name"),
        ("memory", {"model": "Qwen3-8B", "facts": "/etc/passwd"}, "facts", "no such field"),
        ("speed", {"model": "Qwen3-8B", "gpu": "H100", "calibrate": "x.json"}, "calibrate", "no such field"),
        ("cost", {"price": "0.45/3.20", "from-ledger": "true"}, None, "no such field"),
        ("cost", {"price": "0.45/3.20"}, "requests", "are needed"),
        ("cost", {}, "price", "is needed"),
        ("memory", {"model": "Qwen3-8B", "tp": "two"}, "tp", "whole"),
        ("memory", {"model": "Qwen3-8B", "tp": [1]}, "tp", "whole"),
        ("train", {"params": "7B", "mfu": "nan"}, "mfu", "number"),
        ("fleet", ASKED["fleet"] | {"requests": "4001"}, "requests", "limit 4000"),
        ("fleet", ASKED["fleet"] | {"requests": "1"}, "requests", "at least 20"),
        ("fleet", ASKED["fleet"] | {"timing": "/etc/hostname"}, "timing", "reads no files"),
        ("fleet", ASKED["fleet"] | {"timing": "timing.json"}, "timing", "reads no files"),
        ("fleet", ASKED["fleet"] | {"timing": ["/etc/hostname"]}, "timing", "reads no files"),
        ("elsewhere", {}, "plan", "none of memory"),
    ],
)
def test_what_is_wrong_is_said_by_field(name, fields, param, said):
    found = answered(Question(name, fields))
    assert said in found["error"]
    assert found["param"] == param


KEYS = {
    "ann": Principal(key_id="k-ann", name="ann"),
    "reader": Principal(key_id="k-r", name="reader", role="reader"),
    "narrow": Principal(key_id="k-n", name="narrow", endpoints=("/v1",)),
}
BEARER = (b"authorization", b"Bearer ann")


async def test_the_route_answers_whoever_has_a_key_and_refuses_by_field():
    edge = Edge(keys=KEYS)
    assert (await edge.ask("/inspect/plan")).status == 401
    told = await edge.ask("/inspect/plan", None, BEARER)
    assert set(told.json()["plans"]) == set(PLANS)
    body = {"plan": "cost", "fields": ASKED["cost"]}
    assert (await edge.ask("/inspect/plan", body)).status == 401
    assert (await edge.ask("/inspect/plan", body, (b"authorization", b"Bearer narrow"))).status == 403
    found = await edge.ask("/inspect/plan", body, (b"authorization", b"Bearer reader"))
    assert (found.status, found.json()["document"]["gross_usd"]) == (200, 54.6)
    wrong = await edge.ask("/inspect/plan", {"plan": "memory", "fields": {"model": "/etc"}}, BEARER)
    assert (wrong.status, wrong.error["param"]) == (400, "model")
    for refused, param in (({"plan": "sh"}, "plan"), ({"plan": "cost", "file": "x"}, "file"), ({}, "plan")):
        answer = await edge.ask("/inspect/plan", refused, BEARER)
        assert (answer.status, answer.error["param"]) == (400, param)
    for name, content in (("config", {}), ("calibrate", {}), ("facts", {}), ("trace", [])):
        large = {"plan": "memory", name: content or {"x": "y" * MAX_BYTES}}
        assert (await edge.ask("/inspect/plan", large, BEARER)).status == 413
    path = await edge.ask("/inspect/plan", {"plan": "speed", "calibrate": "/etc/passwd"}, BEARER)
    assert (path.status, path.error["param"]) == (400, "calibrate")


async def test_one_long_plan_at_a_time_and_none_for_somebody_who_left():
    long = json.dumps({"plan": "fleet", "fields": ASKED["fleet"] | {"requests": "4000"}}).encode()
    first = asyncio.create_task(ask(long, is_long=True))
    await asyncio.sleep(0)  # its process has a place now
    with pytest.raises(ServerOverloaded, match="limit 1"):
        await ask(long, is_long=True)
    short = json.dumps({"plan": "rent-or-buy", "fields": ASKED["rent-or-buy"]}).encode()
    assert json.loads(await ask(short))["text"].startswith("54.60 USD managed")
    assert not first.done()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert "error" not in json.loads(await ask(short, is_long=True)), "its place is free again"
