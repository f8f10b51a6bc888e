"""`hitsend plan`: what a person reads, what a program reads, and what isn't loaded for it.

The golden texts are read by people before they are written: HITSEND_WRITE_GOLDEN=1 writes them anew.
"""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hitsend.cli import CallFailed, plan
from hitsend.cli.plan_tokens import PIECE_CHARACTERS, pieces
from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.pricing import Price
from tests.usage.storage import storage, wanted

GOLDEN = Path(__file__).parents[1] / "plan" / "data" / "golden"
LOGS = Path(__file__).parents[1] / "plan" / "data" / "kv_logs.json"
SPEEDS = LOGS.with_name("speed_sample.csv")

SHOWN = {
    "memory_hybrid": (
        "memory --model Qwen3.8-27B --gpu H200 --max-model-len 32768 --kv-dtype fp8 --prefix-caching --mtp 2"
    ),
    "memory_too_large": "memory --model meta-llama/Llama-3.1-70B --gpu H100 --max-model-len 8192",
    "memory_ranks": "memory --model Qwen3-235B-A22B-FP8 --gpu H200 --tp 8 --max-model-len 32768",
    "memory_latent": "memory --model DeepSeek-V3.2 --tp 8 --kv-dtype fp8 --available-kv-gib 41.76 --max-model-len 8192",
    "memory_windows": "memory --model gemma-4-31B-it --available-kv-gib 69.75 --max-model-len 8192",
    "memory_llama": (
        "memory --model gpt-oss-20b --engine llama.cpp --kv-dtype q8_0 --available-kv-gib 8 --max-model-len 16384"
    ),
    "memory_sglang": "memory --model Qwen3.5-9B --engine sglang --tp 2 --available-kv-gib 9.5 --max-model-len 8192",
    "cost": "cost --requests 30000 --input 1200 --output 400 --price workers-ai:qwen3.8-27b --price 0.45/3.20",
    "cost_thinking": "cost --requests 30000 --input 1200 --output 400 --reasoning 800 --price workers-ai:qwen3.8-27b",
    "cost_batch": "cost --requests 1000 --input 2000 --output 100 --cached-share 0.5 --batch --price openai:gpt-5-mini",
    "check_logs_misses": f"check-logs {LOGS} --misses",
    "speed": "speed --model Llama-3.1-70B --gpu H200 --tp 2 --weights fp8 --batch 16 --input 1024 --output 1024",
    "speed_queues": "speed --model Llama-3.1-70B --gpu H200 --weights fp8 --batch 64 --input 8192 --output 1024",
    "speed_drafts": "speed --model Qwen3-8B --gpu 4090 --batch 4 --drafts 2 --prefix-hit 0.5",
    "check_speed": f"check-speed {SPEEDS}",
    "compare": "compare --model Qwen3-8B --gpu L40S --gpu H100 --max-gpus 2 --weights bf16 --slo-tpot 15ms",
    "train": "train --params 7.5B --gpus 8 --zero 2 --tokens 150B --gpu H100 --usd-per-gpu-hour 2.5 --served-tokens 1T",
    "train_qlora": "train --model Llama-3.1-8B --method qlora --algorithm dpo --seq 4096 --gpu 4090",
    "rent": "rent-or-buy --dedicated-cost 5460 --price 0.45/3.20",
    "rent_unclear": (
        "rent-or-buy --dedicated-cost 2000 --price 0.45/3.20 --requests 3000000 --ops-cost 1000 --redundancy 0 "
        "--tokens-per-s 1200 --peak-factor 2"
    ),
}

FLEET = (
    "fleet --peak-rps 5 --slo-ttft 800ms --slo-tpot 100ms --timing 40,4,10 --input 40 --output 12 --requests 30 "
    "--usd-per-gpu-hour 2"
)
"""No golden text: what the scheduler does is its own tests' business."""


def run(*words, expected=0):
    result = CliRunner().invoke(plan.app, list(words), catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result.stdout


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_person_reads(name):
    text = run(*shlex.split(SHOWN[name]))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("HITSEND_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_json_is_one_document_with_the_agreed_keys():
    found = json.loads(run(*shlex.split(SHOWN["memory_hybrid"]), "--json"))
    assert found["kv_bytes_per_token"] == 32_768
    assert found["fits"] is True
    found = json.loads(run(*shlex.split(SHOWN["cost"]), "--json"))
    assert (found["gross_usd"], found["blended_usd"], found["neurons"]) == (54.6, 21.6, 4_963_632)
    assert [one["price"] for one in found["providers"]] == ["workers-ai:@cf/qwen/qwen3.8-27b", "0.45/3.20"]
    found = json.loads(run("check-logs", str(LOGS), "--json"))
    assert {score["test"] for score in found["scores"]} == {"bytes", "pool", "solved", "gpu"}


def test_new_documents_have_the_keys_that_the_text_shows(tmp_path):
    found = json.loads(run(*shlex.split(SHOWN["speed"]), "--json"))
    assert found["tpot_ms"]["low"] < found["tpot_ms"]["value"] < found["tpot_ms"]["high"]
    assert found["phases"]["prefill"]["side"] == "compute"
    assert found["phases"]["decode"]["side"] == "memory"
    assert json.loads(run(*shlex.split(SHOWN["speed_queues"]), "--json"))["ttft_ms"] is None
    assert json.loads(run(*shlex.split(SHOWN["train"]), "--json"))["states_gb_per_gpu"] == 28.125
    assert json.loads(run(*shlex.split(SHOWN["rent"]), "--json"))["crossover_factor"] == pytest.approx(100)
    found = json.loads(run(*shlex.split(SHOWN["compare"]), "--json"))["choices"]
    assert [one["keeps_slo"] for one in found] == sorted((one["keeps_slo"] for one in found), reverse=True)


@pytest.mark.slow  # two fleets simulated
def test_a_fleet_is_told_in_words_and_as_json():
    found = json.loads(run(*shlex.split(FLEET), "--json"))
    assert "goodput by rate on one replica:" in found["explain"]
    assert any(line.startswith("autoscaling: add one above") for line in found["explain"])
    assert found["gpus_with_spare"] == found["replicas"] + 1
    assert found["replicas_range"][0] <= found["replicas"] <= found["replicas_range"][1]
    assert len(found["curve"]) > 4
    with pytest.raises(CallFailed, match="--model and --gpu"):
        run("fleet", "--peak-rps", "1", "--slo-ttft", "1s", "--slo-tpot", "1s")


def test_a_trace_is_planned_for_and_simulated(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(f'{{"at_s": {number}, "input_tokens": 20, "output_tokens": 4}}' for number in range(12)))
    text = run(*shlex.split(FLEET), "--trace", str(trace))
    assert text.startswith(("1 replicas", "2 replicas", "3 replicas", "4 replicas", "5 replicas"))
    words = ("simulate", "--trace", str(trace), "--timing", "40,4,10")
    found = json.loads(run(*words, "--json"))
    assert (found["requests"], found["refused"]) == (12, 0)
    # one at a time: 20 tokens of prompt, then three more of the answer
    assert found["ttft_ms"]["p99"] == pytest.approx(40 + 20 * 4)
    assert found["tpot_ms"]["p50"] == pytest.approx(50)
    assert "step times: 40.000 ms" in run(*words)
    with pytest.raises(CallFailed, match="--timing or --calibrate"):
        run("simulate", "--trace", str(trace))


def test_a_measurement_makes_the_interval_narrower(tmp_path):
    bench = {"max_concurrency": 16, "completed": 100, "total_input_tokens": 102_400, "total_output_tokens": 102_400}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench | {"mean_ttft_ms": 260.0, "mean_tpot_ms": 19.0, "duration": 60.0}))
    plain = json.loads(run(*shlex.split(SHOWN["speed"]), "--json"))
    found = json.loads(run(*shlex.split(SHOWN["speed"]), "--calibrate", str(file), "--json"))
    assert abs(found["tpot_ms"]["value"] - 19) < abs(plain["tpot_ms"]["value"] - 19) / 4
    told = found["calibration"]
    assert told["tpot_width_after"] < told["tpot_width_before"]
    assert any(line.startswith("calibration: TPOT") for line in found["explain"])
    assert (told["is_near"], told["octaves"]["all"], told["measure_instead"]) == (True, 0, None)
    far = shlex.split(SHOWN["speed"].replace("--input 1024", "--input 8192").replace("--batch 16", "--batch 2"))
    told = json.loads(run(*far, "--calibrate", str(file), "--json"))["calibration"]
    assert (told["is_near"], told["octaves"]) == (False, {"concurrency": 3, "input": 3, "output": 0, "all": 6})
    assert told["nearest"] == {"concurrency": 16, "input": 1024, "output": 1024}
    assert told["measure_instead"] == {"concurrency": 2, "input": 8192, "output": 1024}
    assert told["typical_ttft_error"] > found["calibration"]["typical_ttft_error"]
    text = run(*far, "--calibrate", str(file))
    assert "measured: 16 at once, 1,024 in, 1,024 out, 6.0 octaves from what is asked" in text
    assert "hitsend load --concurrency 2 --input 8192 --output 1024 --json" in text
    file.write_text("{}")
    with pytest.raises(ConfigError, match="--calibrate"):
        run(*shlex.split(SHOWN["speed"]), "--calibrate", str(file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("speed --model Qwen3-8B --gpu H100 --batch 0", "--batch is 0"),
        ("speed --model Qwen3-8B --gpu H100 --accept 1", "--accept is 1"),
        ("speed --model Qwen3-8B --gpu H100 --output 1", "--output is 1, needed is 2 or more"),
        ("memory --model Qwen3-8B --max-num-seqs 8 --max-num-batched-tokens 4", "--max-num-batched-tokens is 4, vLLM"),
        ("memory --model Qwen3-8B --gpu H100 --engine-version banana", "--engine-version is 'banana', needed is a"),
        ("rent-or-buy --dedicated-cost 5 --price 1/2 --ops-cost -5", "--ops-cost is -5.0, needed is 0 to 1,000"),
        ("speed --model Qwen3-8B --gpu H100 --engine none", "--engine none"),
        ("speed --model Llama-3.1-70B --gpu 4090", "doesn't fit on 1 x NVIDIA RTX 4090"),
        ("compare --model Qwen3-8B --slo-ttft -2", "--slo-ttft -2"),
        ("train --params many", "--params many"),
        ("train --params 7B --zero 4", "--zero is 4"),
        ("train --params 7B --method lora", "--layers and --hidden"),
        ("rent-or-buy --dedicated-cost 0 --price 1/2", "--dedicated-cost is 0"),
        ("fleet --peak-rps 1 --slo-ttft 1s --slo-tpot 1s --timing 1,2", "--timing 1,2"),
        ("fleet --peak-rps 0 --slo-ttft 1s --slo-tpot 1s --timing 1,1,1", "--peak-rps is 0"),
        ("check-speed /nowhere.csv", "can't read"),
        ("rent-or-buy --dedicated-cost inf --price 1/2", "--dedicated-cost is inf, needed is above 0"),
        ("rent-or-buy --dedicated-cost 5 --price 1/2 --requests 0", "--requests is 0, needed is above 0"),
        ("rent-or-buy --dedicated-cost 5 --price 1/2 --cached-share nan", "--cached-share is nan, needed is 0 to 1"),
        ("train --params 7B --mfu 0", "--mfu is 0.0, needed is 0.0001 to 1"),
        ("train --params 1e308", "--params 1e308: needed is above 0 and at most 1e+18"),
        ("train --params 7B --usd-per-gpu-hour nan", "--usd-per-gpu-hour is nan, needed is 0 to 1,000,000,000"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(words, said):
    with pytest.raises(ConfigError) as refused:
        run(*shlex.split(words))
    assert said in str(refused.value)


def test_a_goal_that_no_rate_keeps_names_no_number_of_replicas():
    text = run(*shlex.split(FLEET.replace("--slo-tpot 100ms", "--slo-tpot 1ms")))
    assert text.startswith("no number of replicas for 5 requests/s: no rate keeps the goal")


def test_warnings_about_the_data(tmp_path):
    text = run("data", "check", "--today", "2026-11-29")
    assert "conflict: RunPod secure: H100 SXM 80GB" in text
    found = json.loads(run("data", "check", "--today", "2026-11-29", "--json"))
    assert {"stale", "conflict", "uncertain"} == {one["kind"] for one in found["warnings"]}
    run("data", "check", "--today", "2026-11-29", "--strict", expected=1)


def test_flags_that_exclude_each_other_are_named():
    with pytest.raises(CallFailed, match="--requests, --input and --output are needed"):
        run("cost", "--price", "1/2")
    with pytest.raises(CallFailed, match="one of them"):
        run("cost", "--price", "1/2", "--from-ledger", "--requests", "1")
    with pytest.raises(ConfigError, match="--cached-share"):
        run("cost", "--price", "1/2", "--requests", "1", "--input", "1", "--output", "1", "--cached-share", "half")


def test_recorded_traffic_is_planned_by_its_own_days(tmp_path):
    async def fill():
        async with storage(database_url(None, tmp_path)) as opened:
            for number in range(4):
                hold = await opened.ledger.reserve(wanted(f"r{number}", price=Price("u", 450_000, 3_200_000)))
                usage = Usage(1000, 100, cached_tokens=200, reasoning_tokens=40)
                await opened.ledger.settle(hold, Settlement(usage, "stop"))
                opened.clock.seconds += 43_200.0

    asyncio.run(fill())
    words = ("cost", "--from-ledger", "--data", str(tmp_path), "--price", "0.45/3.20", "--json")
    found = json.loads(run(*words))
    assert (found["requests"], found["input_tokens"], found["cached_tokens"]) == (4, 4000, 800)
    assert (found["output_tokens"], found["reasoning_tokens"]) == (400, 160)
    assert found["days"] in (2, 3)
    assert found["gross_microusd"] == round(4000 * 0.45 + 400 * 3.2)
    with pytest.raises(CallFailed, match="--from 2027-01-16 is later than --to 2027-01-15"):
        run(*words, "--from", "2027-01-16", "--to", "2027-01-15")
    empty = tmp_path / "empty"
    with pytest.raises(CallFailed, match="no settled request"):
        run("cost", "--from-ledger", "--data", str(empty), "--price", "1/2")


def test_the_planner_loads_nothing_of_the_server_and_no_network():
    """Its import must stay cheap: what would make it slow, or reach out, isn't there afterwards."""
    code = (
        "import sys, pkgutil, importlib, hitsend.plan as plan\n"
        "for module in pkgutil.iter_modules(plan.__path__):\n"
        "    # they run the server's scheduler, and only `plan fleet` and `plan simulate` load them\n"
        "    if module.name not in {'simulate', 'timed_decoder'}:\n"
        "        importlib.import_module('hitsend.plan.' + module.name)\n"
        "bad = {'asyncio', 'socket', 'ssl', 'http', 'ctypes', 'sqlite3', 'sqlalchemy', 'aiohttp', 'numpy', 'typer',\n"
        "       'rich', 'starlette', 'uvicorn', 'jinja2', 'threading_', 'hitsend.serve', 'hitsend.settings'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_long_texts_are_cut_behind_line_ends_and_lose_nothing():
    text = ("x" * 99 + "\n") * 5000 + "end"
    cut = pieces(text)
    assert "".join(cut) == text
    assert all(len(piece) <= PIECE_CHARACTERS for piece in cut)
    assert all(piece.endswith("\n") for piece in cut[:-1])
    assert "".join(pieces("y" * 450_000)) == "y" * 450_000
    assert pieces("") == []


def test_a_tokenizer_file_needs_its_library_or_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(CallFailed, match="--tokenizer"):
        run("tokens", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "none.json"))
    with pytest.raises(CallFailed, match="can't read"):
        run("tokens", str(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(CallFailed, match="there is no text in it"):
        run("tokens", str(tmp_path / "empty.txt"))


@pytest.mark.model
def test_texts_are_counted_by_the_tokenizer_that_serves(tmp_path):
    (tmp_path / "en.txt").write_text("The house is in the street and it is not on the hill.\n" * 3)
    (tmp_path / "de.txt").write_text("Das Haus ist nicht auf dem Berg und die Leute sind auch nicht da.\n" * 3)
    words = ("tokens", str(tmp_path / "en.txt"), str(tmp_path / "de.txt"), "--model", "smollm2-135m")
    found = json.loads(run(*words, "--price", "0.45/3.20", "--json"))
    english, german = found["files"]
    assert (english["language"], german["language"]) == ("en", "de")
    assert german["fertility"] > english["fertility"] > 1
    assert german["input_usd"] == pytest.approx(german["tokens"] * 0.45e-6)
    assert sum(group["tokens"] for group in found["groups"]) == english["tokens"] + german["tokens"]
    assert "de prose" in run(*words)


def test_the_planner_starts_without_the_libraries_of_servers():
    """They are most of half a second; the planner alone is a tenth."""
    heavy = "{'numpy', 'aiohttp', 'llguidance', 'sqlite3', 'uvicorn'}"
    code = f"import sys, hitsend.cli.plan; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
