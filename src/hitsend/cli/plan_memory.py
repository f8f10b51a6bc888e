"""`hitsend plan memory` and `hitsend plan check-logs`.

Enters: a model and what it is to run on; a file of engines' logs. Leaves: what fits with its arithmetic; a table of
logged and planned numbers. Always true: `--json` prints one document. Next: `plan_cost.py`.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import options
from hitsend.cli.plan_answer import Answer, give
from hitsend.cli.plan_process import process_memory, process_text
from hitsend.core.errors import ConfigError
from hitsend.plan.explain import GIB, document
from hitsend.plan.facts import load_facts
from hitsend.plan.hardware import find_gpu
from hitsend.plan.logs import compare_logs, read_logs, scores
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.models import find_checkpoint
from hitsend.plan.sizes import Ranks
from hitsend.plan.versions import number_of

MAX_GIB = 1_000_000

FactsFile = Annotated[
    Path | None, typer.Option("--facts", metavar="FILE", help="Your own models, GPUs and prices (JSON or TOML).")
]


def memory(
    model: Annotated[
        str, typer.Option("--model", metavar="M", help="A name, config.json, safetensors folder or GGUF.")
    ],
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="G", help="H100, H200, 4090 …")] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 1,
    dcp: Annotated[int, typer.Option("--dcp", help="Decode context parallel ranks (latent attention).")] = 1,
    dp: Annotated[int, typer.Option("--dp", help="Groups of tensor ranks, each with its own sequences.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Whole experts on each rank, not a part of each expert.")] = False,
    weights: Annotated[str | None, typer.Option("--weights", help="bf16, fp8, int4, nvfp4, gguf:Q4_K_M …")] = None,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="bf16, fp8, nvfp4, q8_0, q4_0 …")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="L", help="Tokens a sequence.")
    ] = None,
    utilization: Annotated[float | None, typer.Option("--gpu-memory-utilization", metavar="U")] = None,
    engine: Annotated[str, typer.Option("--engine", help="vllm, sglang, llama.cpp or hitsend.")] = "vllm",
    engine_version: Annotated[str | None, typer.Option("--engine-version", help="Default: the newest known.")] = None,
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching/--no-prefix-caching")] = False,
    mtp: Annotated[int, typer.Option("--mtp", metavar="N", help="Tokens drafted per step.")] = 0,
    max_num_batched_tokens: Annotated[int | None, typer.Option("--max-num-batched-tokens", metavar="N")] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", metavar="N")] = None,
    available_kv_gib: Annotated[
        float | None, typer.Option("--available-kv-gib", metavar="X", help="Free for the cache, per GPU.")
    ] = None,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """Weights, cache, state and how many sequences fit; the formula with its numbers."""
    known = load_facts(facts)
    question = MemoryQuestion(
        checkpoint=find_checkpoint(model, known),
        engine=engine,
        engine_version=_version(engine, engine_version),
        gpu=None if gpu is None else find_gpu(gpu, known),
        ranks=Ranks(tp, pp, dcp, dp, ep),
        weights=weights,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        gpu_memory_utilization=utilization,
        prefix_caching=prefix_caching,
        drafts=mtp,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=_sequences(engine, max_num_seqs, max_num_batched_tokens),
        available_kv_bytes=_available_bytes(available_kv_gib),
    )
    found = document(plan_memory(question))
    if engine == "hitsend" and gpu is None:
        found["process"] = process_memory(model, max_model_len, max_num_seqs, kv_dtype, available_kv_gib)
    return give(found, memory_text(found), as_json=as_json)


def _version(engine: str, told: str | None) -> str | None:
    """What a log prints may be anything; a person who mistypes one is told so."""
    if engine == "vllm" and told is not None and number_of(told) is None:
        raise ConfigError(f"--engine-version is {told!r}, needed is a version of vLLM such as 0.20.1")
    return told


def _sequences(engine: str, sequences: int | None, tokens: int | None) -> int | None:
    """vLLM doesn't start where a step is too small for a token of each sequence."""
    if engine == "vllm" and sequences is not None and tokens is not None and tokens < sequences:
        raise ConfigError(f"--max-num-batched-tokens is {tokens}, vLLM needs --max-num-seqs, {sequences}, or more")
    return sequences


def _available_bytes(gib: float | None) -> int | None:
    """Raises ConfigError."""
    if gib is None:
        return None
    if not 0 < gib <= MAX_GIB:
        raise ConfigError(f"--available-kv-gib is {gib}, needed is above 0 and at most {MAX_GIB:,}")
    return max(1, int(gib * GIB))


def memory_text(found: dict[str, Any]) -> list[str]:
    """The same document for a reader."""
    verdict = {True: "fits", False: "does not fit", None: "nobody said on what"}[found["fits"]]
    lines = [f"{found['model']} on {found['engine']}, {found['max_model_len']:,} tokens a sequence: {verdict}"]
    if found["max_concurrency"] is not None:
        lines.append(
            f"  {found['max_concurrency']:,.2f} sequences at once, {found['kv_pool_tokens']:,} tokens in the pool"
        )
    lines += [f"  {line}" for line in found["explain"]]
    lines.append(f"  first to break: {found['breaks_first']}")
    would = found["would_fit"]
    told = {"longest_len": "longest sequence", "smallest_tp": "smallest --tp", "weights": "--weights"}
    fits = [
        f"{told[key]} {value:,}" if isinstance(value, int) else f"{told[key]} {value}"
        for key, value in would.items()
        if value
    ]
    if fits:
        lines.append(f"  would fit: {', '.join(fits)}")
    return lines + [f"  {line}" for line in process_text(found["process"])] if found.get("process") else lines


def check_logs(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Records of engines' logs, as tests/plan/data has them.")
    ],
    verbose: Annotated[bool, typer.Option("--all/--misses", help="Every row, or the misses only.")] = True,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> None:
    """Plan what engines logged, and compare: KV bytes, state, tokens, concurrency."""
    rows = compare_logs(read_logs(file), load_facts(facts))
    found = scores(rows)
    if as_json:
        print(msgspec.json.encode({"rows": rows, "scores": found}).decode())
        return
    for row in rows:
        if verbose or not row.ok:
            numbers = "-" if row.logged is None or row.planned is None else f"{row.logged:,.10g} | {row.planned:,.10g}"
            error = "" if row.error is None else f"{row.error:+.2%}"
            mark = "ok" if row.ok else "MISS"
            print(f"{mark:4} {row.test:6} {row.id}: {row.quantity} {numbers} {error} {row.why}".rstrip())
    for score in found:
        share = score.ok / score.rows
        print(f"{score.test}: {score.ok} of {score.rows} within {score.within:.0%} ({share:.1%})")
