"""The other planners' end of `bench/planners.py`: questions as JSON on stdin, answers as JSON on stdout.

Usage: PYTHON bench/planner_peers.py accelerate|deepspeed|aiconfigurator < questions.json
Runs in an environment of its own, where the peer is installed and hitsend isn't. Every question has an answer: numbers,
or `refused` with the peer's own words. Nothing is downloaded: models come as their config.json's keys.
"""

import contextlib
import importlib.metadata
import io
import json
import sys
from typing import Any

Answer = dict[str, Any]


def accelerate(asked: dict[str, Any]) -> Answer:
    """Bytes of all weights at 32 bits, from the architecture alone: what `accelerate estimate-memory` does."""
    from accelerate import init_empty_weights  # noqa: PLC0415  # only one of the peers is installed
    from accelerate.utils import calculate_maximum_sizes  # noqa: PLC0415  # only one of the peers is installed
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # only one of the peers is installed

    known = dict(asked["config"])
    known = known.get("text_config") or known
    config = AutoConfig.for_model(known.pop("model_type"), **known)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    total, _ = calculate_maximum_sizes(model)
    return {"fp32_bytes": total, "parameters": sum(one.numel() for one in model.parameters())}


def deepspeed(asked: dict[str, Any]) -> Answer:
    """GB per GPU of weights, gradients and optimizer states, by its estimators; nothing offloaded."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2  # noqa: PLC0415  # only one of the peers is installed

    params, gpus = asked["params"], asked["gpus"]
    if asked["zero"] == 2:
        _, per_gpu = stage_1_and_2.estimate_zero2_model_states_mem_needs(params, gpus, 1, cpu_offload=False)
    elif asked["zero"] == 3:
        _, per_gpu, _ = stage3.estimate_zero3_model_states_mem_needs(
            params, 0, gpus, 1, cpu_offload=False, cpu_offload_params=False
        )
    else:
        raise ValueError(f"there is no estimator of ZeRO {asked['zero']}")
    return {"gb_per_gpu": per_gpu / 1e9}


def aiconfigurator(asked: dict[str, Any]) -> Answer:
    """TTFT and TPOT of one load, or the tokens that its memory model leaves for the cache."""
    from aiconfigurator.cli.api import cli_estimate  # noqa: PLC0415  # only one of the peers is installed
    from aiconfigurator_core.sdk.memory import estimate_kv_cache  # noqa: PLC0415  # only one of the peers is installed
    from aiconfigurator_core.sdk.perf_database import (  # noqa: PLC0415  # the same
        get_latest_database_version,
    )

    if "isl" in asked["call"]:
        found = cli_estimate(asked["model"], asked["system"], **asked["call"])
        return {"ttft_ms": found.ttft, "tpot_ms": found.tpot}
    newest = get_latest_database_version(asked["system"], asked["backend"])
    found = estimate_kv_cache(asked["model"], asked["system"], asked["backend"], newest, **asked["call"])
    parts = found["memory_breakdown"] or {}
    return {
        "tokens": found["total_kv_size_tokens"],
        "bytes_per_token": found["kv_size_per_token_bytes"],
        "parts": parts,
    }


PEERS = {"accelerate": accelerate, "deepspeed": deepspeed, "aiconfigurator": aiconfigurator}


def answered(peer: str, asked: dict[str, Any]) -> Answer:
    """One answer; whatever a peer raises or exits with is its refusal."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return PEERS[peer](asked)
    except (Exception, SystemExit) as refused:  # noqa: BLE001  # other people's errors are of every kind
        return {"refused": f"{type(refused).__name__}: {refused}"[:300]}


def main() -> None:
    """All questions, in order."""
    peer = sys.argv[1]
    answers = []
    for asked in json.load(sys.stdin):
        answers.append(answered(peer, asked))
        print(".", end="", file=sys.stderr, flush=True)
    json.dump({"version": importlib.metadata.version(peer), "answers": answers}, sys.stdout, default=float)


if __name__ == "__main__":
    main()
