"""`hitsend plan speed`, `plan compare` and `plan check-speed`.

Enters: a model, GPUs, a load, perhaps a measurement of one's own. Leaves: times with their intervals and arithmetic, a
ranking, or a table of measured and planned speeds. Always true: `--json` prints one document. Next: `plan_train.py`.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import options
from hitsend.cli.plan_answer import Answer, give
from hitsend.cli.plan_memory import FactsFile
from hitsend.core.errors import ConfigError
from hitsend.plan.calibrate import factors_of, read_points
from hitsend.plan.compare import Choice, Goal, compare
from hitsend.plan.constants import speed_facts
from hitsend.plan.facts import load_facts
from hitsend.plan.hardware import find_gpu
from hitsend.plan.measured import read_measured
from hitsend.plan.models import find_checkpoint
from hitsend.plan.roofline import Layout
from hitsend.plan.speed import SpeedQuestion, plan_speed
from hitsend.plan.speed_check import coverage, judge, rows_of, score
from hitsend.plan.speed_fit import fit
from hitsend.plan.speed_text import speed_document

Model = Annotated[str, typer.Option("--model", metavar="M", help="A name, config.json, safetensors folder or GGUF.")]
Batch = Annotated[int, typer.Option("--batch", help="Sequences at once, over all copies.")]
Input = Annotated[int, typer.Option("--input", help="Prompt tokens.")]
Output = Annotated[int, typer.Option("--output", help="Answer tokens.")]
Engine = Annotated[str, typer.Option("--engine", help="vllm, sglang, trtllm, llama.cpp or hitsend.")]
Hit = Annotated[float, typer.Option("--prefix-hit", help="Part of the prompt found in a prefix cache, 0 to 1.")]
Drafts = Annotated[int, typer.Option("--drafts", "--mtp", metavar="N", help="Tokens drafted per pass.")]
Accept = Annotated[float, typer.Option("--accept", help="Chance that a drafted token is right.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="bf16, fp8, nvfp4 …")]


def as_ms(flag: str, text: str) -> float:
    """`500`, `500ms`, `2s`: milliseconds. Raises ConfigError."""
    low = text.strip().casefold()
    factor = 1.0 if low.endswith("ms") or not low.endswith("s") else 1000.0
    try:
        value = float(low.removesuffix("ms").removesuffix("s")) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag} {text}: needed are milliseconds above 0, such as 500, 500ms or 2s")
    return value


def speed(
    model: Model,
    gpu: Annotated[str, typer.Option("--gpu", metavar="G", help="H100, H200, 4090 …")],
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option("--dp", help="Copies of the model.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Divide experts by expert, not by width.")] = False,
    attention_dp: Annotated[bool, typer.Option("--attention-dp", help="Each GPU has its own sequences.")] = False,
    weights: Annotated[str | None, typer.Option("--weights", help="bf16, fp8, int4, nvfp4, gguf:Q4_K_M …")] = None,
    kv_dtype: KvDtype = "auto",
    engine: Engine = "vllm",
    batch: Batch = 1,
    input_tokens: Input = 1024,
    output_tokens: Output = 256,
    prefix_hit: Hit = 0.0,
    drafts: Drafts = 0,
    accept: Accept = 0.7,
    draft_cost: Annotated[float | None, typer.Option("--draft-cost", help="A draft's time / a pass's.")] = None,
    utilization: Annotated[float | None, typer.Option("--gpu-memory-utilization", metavar="U")] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="hitsend load --json, or a vLLM benchmark.")
    ] = None,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """Time to the first token, time per token, throughput, what bounds them, and how sure that is."""
    known = load_facts(facts)
    question = SpeedQuestion(
        checkpoint=find_checkpoint(model, known),
        gpu=find_gpu(gpu, known),
        engine=engine,
        layout=Layout(tp=tp, pp=pp, ep=ep, attention_dp=attention_dp),
        replicas=dp,
        weights=weights,
        kv_dtype=kv_dtype,
        batch=batch,
        input=input_tokens,
        output=output_tokens,
        prefix_hit=prefix_hit,
        drafts=drafts,
        accept=accept,
        draft_cost=draft_cost,
        gpu_memory_utilization=utilization,
    )
    plain = plan_speed(question)
    if calibrate is None:
        found = speed_document(plain)
    else:
        found = speed_document(plan_speed(question, factors_of(question, read_points(calibrate))), before=plain)
    return give(found, speed_text(found), as_json=as_json)


def speed_text(found: dict[str, Any]) -> list[str]:
    """The same document for a reader."""
    ttft = "queues" if found["ttft_ms"] is None else _interval(found["ttft_ms"], "ms")
    rate = _interval(found["output_tokens_per_s"], "tokens/s")
    return [
        (
            f"{found['model']} ({found['weights']}) on {found['gpus']} x {found['gpu']}, {found['engine']}, "
            f"{found['batch']} at "
            f"once, {found['input']:,} in, {found['output']:,} out:"
        ),
        f"  TTFT {ttft}, TPOT {_interval(found['tpot_ms'], 'ms')}, output {rate}",
        *(f"  {line}" for line in found["explain"]),
    ]


def _interval(found: dict[str, float], unit: str) -> str:
    return f"{found['value']:,.1f} {unit} [{found['low']:,.1f}, {found['high']:,.1f}]"


def compare_command(
    model: Model,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", metavar="G", help="Repeatable; default: common ones.")
    ] = None,
    max_gpus: Annotated[int, typer.Option("--max-gpus", help="Of one kind.")] = 8,
    weights: Annotated[list[str] | None, typer.Option("--weights", help="Repeatable; default bf16, fp8, int4.")] = None,
    kv_dtype: KvDtype = "auto",
    engine: Engine = "vllm",
    batch: Batch = 16,
    input_tokens: Input = 1024,
    output_tokens: Output = 256,
    prefix_hit: Hit = 0.0,
    drafts: Drafts = 0,
    accept: Accept = 0.7,
    slo_ttft: Annotated[str | None, typer.Option("--slo-ttft", metavar="MS", help="At most (500, 500ms, 2s).")] = None,
    slo_tpot: Annotated[str | None, typer.Option("--slo-tpot", metavar="MS", help="At most.")] = None,
    show: Annotated[int, typer.Option("--show", min=1, help="Rows of text.")] = 12,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """Rank GPUs, layouts and weights for one load and latency goal, with the reason for each."""
    known = load_facts(facts)
    cards = [find_gpu(name, known) for name in gpu or ("L40S", "A100", "H100", "H200", "B200")]
    question = SpeedQuestion(
        checkpoint=find_checkpoint(model, known),
        gpu=cards[0],
        engine=engine,
        kv_dtype=kv_dtype,
        batch=batch,
        input=input_tokens,
        output=output_tokens,
        prefix_hit=prefix_hit,
        drafts=drafts,
        accept=accept,
    )
    question.check()
    given = (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot))
    goal = Goal(*(None if text is None else as_ms(flag, text) for flag, text in given))
    found = compare(
        question, cards, facts=known, goal=goal, max_gpus=max_gpus, weights=weights or ("bf16", "fp8", "int4")
    )
    good = sum(choice.is_good for choice in found)
    lines = [f"{question.checkpoint.name}: {good} of {len(found)} ways keep the goal; best first"]
    lines += [f"{rank:3} {choice_line(choice)}" for rank, choice in enumerate(found[:show], 1)]
    return give({"choices": [choice_row(one) for one in found]}, lines, as_json=as_json)


def choice_row(choice: Choice) -> dict[str, Any]:
    """One choice as JSON."""
    plan = choice.plan
    return {
        "gpu": choice.gpu,
        "gpus": choice.gpus,
        **msgspec.to_builtins(choice.layout),
        "dp": choice.replicas,
        "weights": choice.weights,
        "keeps_slo": choice.is_good,
        "why_not": choice.why_not or None,
        "ttft_ms": None if plan is None or plan.ttft_ms is None else plan.ttft_ms.value,
        "tpot_ms": None if plan is None else plan.tpot_ms.value,
        "output_tokens_per_s": None if plan is None else plan.output_tokens_per_s.value,
        "output_tokens_per_s_per_gpu": choice.tokens_per_s_per_gpu,
        "usd_per_hour": None if choice.usd_per_hour is None else float(choice.usd_per_hour),
        "usd_per_million_output": choice.usd_per_million_output,
        "reason": choice.reason,
    }


def choice_line(choice: Choice) -> str:
    """One choice as text."""
    head = f"{choice.gpus} x {choice.gpu} {choice.weights}"
    if choice.plan is None:
        return f"{head}: {choice.why_not}"
    plan = choice.plan
    ttft = "queues" if plan.ttft_ms is None else f"TTFT {plan.ttft_ms.value:,.0f} ms"
    rate = f"{choice.tokens_per_s_per_gpu:,.0f} tokens/s a GPU"
    cost = choice.usd_per_million_output
    money = "" if cost is None else f", {cost:,.3f} USD/M output"
    missed = f"  MISSES: {choice.why_not}" if choice.why_not else ""
    return f"{head}: {ttft}, TPOT {plan.tpot_ms.value:,.1f} ms, {rate}{money}; {choice.reason}{missed}"


def check_speed(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Measured rows, as tests/plan/data has them.")],
    every: Annotated[bool, typer.Option("--all", help="Print each row.")] = False,
    refit: Annotated[bool, typer.Option("--fit", help="Fit constants to one half first, judge on the other.")] = False,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> None:
    """Plan what was measured, and compare TTFT and TPOT apart, on rows that nothing was fitted to."""
    rows, refused = rows_of(read_measured(file), load_facts(facts))
    constants = fit(rows, source=str(file), as_of="now") if refit else speed_facts()
    judged = judge(rows, constants)
    if not judged or (refit and not constants.groups):
        raise ConfigError(f"{file}: too few rows that can be planned")
    found = score(judged, constants.published)
    beaten = sum(row.beats_floor for row in judged)
    inside = coverage(rows, judged, constants)
    if as_json:
        document = {"scores": [msgspec.to_builtins(one) | {"ok": one.ok} for one in found], "beats_floor": beaten}
        document |= {"rows": judged if every else len(judged), "refused": refused, "coverage": inside}
        print(msgspec.json.encode(document).decode())
        return
    for row in judged if every else []:
        ttft = (
            "queues"
            if row.ttft_error is None
            else f"TTFT {row.ttft_ms:,.0f} | {row.planned_ttft_ms:,.0f} {row.ttft_error:+.0%}"
        )
        half = "judged" if row.is_held_out else "fitted"
        print(f"{half} {row.id}: TPOT {row.tpot_ms:.2f} | {row.planned_tpot_ms:.2f} {row.tpot_error:+.0%}, {ttft}")
    print(f"{len(judged)} rows, {len(refused)} refused; {beaten} measured TPOTs beat the floor")
    for one in found:
        mark = "ok" if one.ok else "MISS"
        errors = f"median error {one.median:.1%} (limit {one.limit:.0%}), p90 {one.p90:.1%}, bias {one.bias:+.1%}"
        print(f"{mark:4} {one.what}: {one.rows} rows, {errors}")
    print(f"intervals made for 80% of TPOTs hold {inside:.0%} of them")
