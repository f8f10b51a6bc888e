"""hitsend's planner beside accelerate's and DeepSpeed's estimators and aiconfigurator: the same questions, and whose
answer is nearer to what engines logged and benchmarks measured.

Usage: python -m bench.planners --logs kv_logs.json --speeds inferencex.csv --accelerate PYTHON --aiconfigurator PYTHON
PYTHON: an interpreter of an environment of its own, made for this (`accelerate deepspeed transformers torch` in one,
`aiconfigurator` in the other); a peer that isn't given is left out. Logs and measurements are the files that `hitsend
plan check-logs` and `check-speed` take. Speeds are judged on rows that hitsend's constants weren't fitted to.
"""

import argparse
import csv
import hashlib
import json
import pathlib
import statistics
import subprocess
import time
from collections import Counter
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.constants import speed_facts
from hitsend.plan.explain import GIB
from hitsend.plan.facts import Facts, load_facts
from hitsend.plan.hardware import find_gpu
from hitsend.plan.logs import question_of, read_logs
from hitsend.plan.measured import read_measured
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.speed_check import judge, rows_of
from hitsend.plan.training import TrainQuestion, plan_train, shape_of_params
from hitsend.plan.training_text import TrainMoney, train_document

Row = dict[str, Any]
TIMEOUT_S = 3600
PARTS = ("weights", "training", "cache", "speeds")
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "A100": "a100_sxm", "L40S": "l40s", "L4": "l4"}
"""What aiconfigurator calls them."""
NAMES = {
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-235B-A22B",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-ai/DeepSeek-R1",
    "RedHatAI/Qwen3.5-35B-A3B-FP8-dynamic": "Qwen/Qwen3.5-35B-A3B",
    "RedHatAI/Qwen3.5-122B-A10B-FP8-dynamic": "Qwen/Qwen3.5-122B-A10B",
    "RedHatAI/Qwen3.5-397B-A17B-FP8-dynamic": "Qwen/Qwen3.5-397B-A17B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "google/gemma-4-31B-it": "nvidia/Gemma-4-31B-IT-NVFP4",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""Names under which aiconfigurator brings the same shapes; others are asked by their own name."""
OWN_FORMAT = ("deepseek-ai/DeepSeek-R1",)
"""Of those: the checkpoint is quantised itself, and its config says so."""
BITS = {None: 16, "bf16": 16, "fp8": 8, "fp8-dynamic": 8, "int8": 8, "int4": 4, "nvfp4": 4}
ZERO = (
    # ZeRO, arXiv 1910.02054, figure 1: 7.5B parameters on 64 GPUs
    {"params": 7_500_000_000, "gpus": 64, "zero": 1, "gb": 31.4, "from": "ZeRO paper"},
    {"params": 7_500_000_000, "gpus": 64, "zero": 2, "gb": 16.6, "from": "ZeRO paper"},
    {"params": 7_500_000_000, "gpus": 64, "zero": 3, "gb": 1.9, "from": "ZeRO paper"},
)


def ask(python: str | None, peer: str, questions: list[Row]) -> tuple[str | None, list[Row]]:
    """Its version and answers, in order."""
    if python is None:
        return None, [{"refused": "not asked"}] * len(questions)
    words = [python, str(pathlib.Path(__file__).with_name("planner_peers.py")), peer]
    ran = subprocess.run(
        words, input=json.dumps(questions), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if ran.returncode:
        raise SystemExit(f"{peer} could not be asked:\n{ran.stderr[-2000:]}")
    found = json.loads(ran.stdout)
    return found["version"], found["answers"]


def off(answer: float | None, truth: float) -> float | None:
    """Answer / truth - 1."""
    return None if answer is None else answer / truth - 1


def config_of(name: str, facts: Facts) -> Row | None:
    """The config.json that hitsend's own plan is made from."""
    return next((dict(one.config) for one in facts.models if name in (one.name, *one.aliases)), None)


def loaded(logs: list[Row], facts: Facts) -> list[Row]:
    """Logs that print what the weights took on one GPU, of models whose config is known."""
    rows = []
    for log in logs:
        truth = (log.get("reported") or {}).get("model_loading_gib")
        if not truth or "inferred" in str(log.get("model")):
            continue
        try:
            question = question_of(log, facts)
            planned = plan_memory(question).stage.weights_bytes
        except ConfigError:
            continue
        config = config_of(question.checkpoint.name.partition(" (shapes of ")[2].rstrip(")"), facts)
        config = config or config_of(question.checkpoint.name, facts)
        if planned is None or config is None:
            continue
        rows.append({"id": log["id"], "truth": truth, "config": config, "planned": float(planned) / GIB} | of(question))
    return rows


def of(question: MemoryQuestion) -> Row:
    """What the peers are told of it."""
    return {"tp": question.ranks.tp * question.ranks.pp, "weights": question.weights, "kv": question.kv_dtype}


def weights(rows: list[Row], python: str | None) -> tuple[str | None, list[Row]]:
    """GiB per GPU: the log's, ours, accelerate's (its bytes by type, divided by the GPUs: it knows no ranks)."""
    version, answers = ask(python, "accelerate", [{"config": row["config"]} for row in rows])
    found = []
    for row, answer in zip(rows, answers, strict=True):
        bits = BITS.get(row["weights"])
        told = answer.get("fp32_bytes")
        theirs = None if told is None or bits is None else told * bits / 32 / row["tp"] / GIB
        found.append(
            {
                "id": row["id"],
                "truth": row["truth"],
                "hitsend": off(row["planned"], row["truth"]),
                "accelerate": off(theirs, row["truth"]),
                "refused": answer.get("refused"),
            }
        )
    return version, found


def training(python: str | None) -> tuple[str | None, list[Row]]:
    """GB per GPU of model states, beside the published table."""
    version, answers = ask(python, "deepspeed", list(ZERO))
    found = []
    for row, answer in zip(ZERO, answers, strict=True):
        question = TrainQuestion(shape=shape_of_params(row["params"]), zero=row["zero"], gpus=row["gpus"])
        ours = train_document(plan_train(question), TrainMoney())["states_gb_per_gpu"]
        told = answer.get("gb_per_gpu")
        found.append(
            {
                "id": f"{row['from']}, 7.5B on {row['gpus']}, ZeRO {row['zero']}",
                "truth": row["gb"],
                "hitsend": off(ours, row["gb"]),
                "deepspeed": off(told, row["gb"]),
                "refused": answer.get("refused"),
            }
        )
    return version, found


def pools(logs: list[Row], facts: Facts) -> list[Row]:
    """vLLM's and SGLang's logs that print the pool's tokens, of GPUs that aiconfigurator knows."""
    rows = []
    for log in logs:
        truth = (log.get("reported") or {}).get("gpu_kv_cache_size_tokens")
        system = SYSTEMS.get(str(log.get("gpu")).split()[0])
        if not isinstance(truth, int) or system is None or not log.get("gpu_memory_utilization"):
            continue
        try:
            question = question_of(log, facts)
            asked = plan_memory(with_gpu(question, str(log["gpu"]), facts))
        except ConfigError:
            continue
        blocks = asked.stage.blocks
        if blocks is None:
            continue
        candidates = (blocks.log_tokens_since, blocks.log_tokens_until_0_20)
        planned = min(candidates, key=lambda tokens, truth=truth: abs(tokens - truth))
        rows.append({"id": log["id"], "truth": truth, "planned": planned} | call_of(log, question, system))
    return rows


def with_gpu(question: MemoryQuestion, gpu: str, facts: Facts) -> MemoryQuestion:
    """The question with the GPU, as an operator would ask it."""
    return msgspec.structs.replace(question, gpu=find_gpu(gpu.split(maxsplit=1)[0], facts))


def call_of(log: Row, question: MemoryQuestion, system: str) -> Row:
    """aiconfigurator's words for it."""
    model = str(log["model"])
    shapes = NAMES.get(model, model)
    is_other = shapes != model and shapes not in OWN_FORMAT  # else its own config says what it is quantised to
    bits = BITS.get(question.weights) if is_other else None
    quant = {16: "bfloat16", 8: "fp8", 4: "int4_wo"}.get(bits or 0)
    call: Row = {
        "max_num_tokens": question.max_num_batched_tokens or 8192,
        "max_batch_size": 256,
        "memory_fraction_kind": "of_total",
        "memory_fraction_value": question.gpu_memory_utilization,
        "tp_size": question.ranks.tp,
        "pp_size": question.ranks.pp,
        "gemm_quant_mode": quant,
        "kvcache_quant_mode": "fp8" if question.kv_dtype.startswith("fp8") else "bfloat16",
    }
    checkpoint = question.checkpoint
    if checkpoint.experts_per_token:
        call |= {"moe_tp_size": question.ranks.tp, "moe_ep_size": 1, "moe_quant_mode": quant}
    return {"model": shapes, "system": system, "backend": log["engine"], "call": call}


def cache(rows: list[Row], python: str | None) -> tuple[str | None, list[Row]]:
    """Tokens in the pool from the GPU and its utilisation: the log's, ours, aiconfigurator's."""
    version, answers = ask(python, "aiconfigurator", rows)
    found = [
        {
            "id": row["id"],
            "truth": row["truth"],
            "hitsend": off(row["planned"], row["truth"]),
            "aiconfigurator": off(answer.get("tokens"), row["truth"]),
            "refused": answer.get("refused"),
        }
        for row, answer in zip(rows, answers, strict=True)
    ]
    return version, found


def loads(file: pathlib.Path, facts: Facts, sample: int) -> list[Row]:
    """Measured rows of the judged half where nobody queued, chosen by a hash, with what both are told."""
    rows, _ = rows_of(read_measured(file), facts)
    judged = [row for row in judge(rows, speed_facts()) if row.is_held_out and row.ttft_error is not None]
    judged.sort(key=lambda row: hashlib.sha256(row.id.encode()).digest())
    with file.open(newline="") as opened:
        told = {row["id"]: row for row in csv.DictReader(opened)}
    found = []
    for row in judged[:sample]:
        raw = told[row.id]
        numbers = {
            name: int(raw[name])
            for name in ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
            if raw.get(name)
        }
        call = {"isl": int(raw["isl"]), "osl": int(raw["osl"]), "batch_size": int(raw["batch_size"]), **numbers}
        call |= {name: raw[name] for name in ("gemm_quant_mode", "moe_quant_mode") if raw.get(name)}
        call |= {"backend_name": raw["backend"]}
        errors = {"hitsend_tpot": row.tpot_error, "hitsend_ttft": row.ttft_error}
        truth = {"tpot_ms": row.tpot_ms, "ttft_ms": row.ttft_ms}
        model = NAMES.get(raw["model_path"], raw["model_path"])
        found.append({"id": row.id, "model": model, "system": raw["system"], "call": call, **errors, **truth})
    return found


def speeds(rows: list[Row], python: str | None) -> tuple[str | None, list[Row]]:
    """TPOT and TTFT: measured, ours, aiconfigurator's."""
    # one system and engine after the other: it loads a database for each
    ordered = sorted(rows, key=lambda row: (row["system"], row["call"]["backend_name"], row["model"]))
    version, answers = ask(python, "aiconfigurator", ordered)
    found = []
    for row, answer in zip(ordered, answers, strict=True):
        theirs = {
            f"aiconfigurator_{name}": off(answer.get(f"{name}_ms"), row[f"{name}_ms"]) for name in ("tpot", "ttft")
        }
        ours = {name: row[name] for name in ("hitsend_tpot", "hitsend_ttft")}
        found.append({"id": row["id"], **ours, **theirs, "refused": answer.get("refused")})
    return version, found


def line(question: str, rows: list[Row], ours: str, peer: str, name: str) -> str:
    """One row of the table: medians where both answered, who is nearer, who answers how many."""
    both = [(abs(row[ours]), abs(row[peer])) for row in rows if row[ours] is not None and row[peer] is not None]
    answered = sum(row[peer] is not None for row in rows)
    if not both:
        return f"| {question} | {len(rows)} | {name} | - | - | - | {answered} |"
    mine, theirs = (statistics.median(side) for side in zip(*both, strict=True))
    nearer = sum(a < b for a, b in both)
    return f"| {question} | {len(rows)} | {name} | {mine:.1%} | {theirs:.1%} | {nearer} of {len(both)} | {answered} |"


def show(result: Row) -> None:
    """Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    print(f"{versions}; {result['date']}\n")
    print("| question | asked | beside | off by, hitsend | off by, the other | hitsend nearer | the other answered |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(line("weights per GPU, GiB", result["weights"], "hitsend", "accelerate", "accelerate"))
    print(line("model states per GPU, ZeRO 1 to 3", result["training"], "hitsend", "deepspeed", "DeepSpeed"))
    print(line("tokens in the pool, from GPU and utilisation", result["cache"], *_AIC))
    print(line("TPOT, judged half", result["speeds"], "hitsend_tpot", "aiconfigurator_tpot", "aiconfigurator"))
    print(line("TTFT, judged half", result["speeds"], "hitsend_ttft", "aiconfigurator_ttft", "aiconfigurator"))
    for part in PARTS:
        reasons = Counter(str(row["refused"])[:110] for row in result[part] if row["refused"])
        for reason, count in reasons.most_common(6):
            print(f"refused, {part}: {count} x {reason}")


_AIC = ("hitsend", "aiconfigurator", "aiconfigurator")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=pathlib.Path, required=True)
    parser.add_argument("--speeds", type=pathlib.Path, required=True)
    parser.add_argument("--accelerate", metavar="PYTHON", help="with accelerate, transformers, torch and deepspeed")
    parser.add_argument("--aiconfigurator", metavar="PYTHON")
    parser.add_argument("--sample", type=int, default=150, help="measured rows")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    facts, logs = load_facts(), read_logs(asked.logs)
    versions: dict[str, str | None] = {}
    result: Row = {"date": time.strftime("%Y-%m-%d"), "versions": versions}
    parts: list[str] = asked.parts.split(",")
    result |= {part: [] for part in PARTS}
    if "weights" in parts:
        versions["accelerate"], result["weights"] = weights(loaded(logs, facts), asked.accelerate)
    if "training" in parts:
        versions["deepspeed"], result["training"] = training(asked.accelerate)
    if "cache" in parts:
        versions["aiconfigurator"], result["cache"] = cache(pools(logs, facts), asked.aiconfigurator)
    if "speeds" in parts:
        rows = loads(asked.speeds, facts, asked.sample)
        versions["aiconfigurator"], result["speeds"] = speeds(rows, asked.aiconfigurator)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))
    show(result)


if __name__ == "__main__":
    main()
