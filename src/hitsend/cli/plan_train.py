"""`hitsend plan train`: memory, communication, operations and time of training.

Enters: a model or a number of parameters, a method, GPUs. Leaves: a plan with its arithmetic. Always true: `--json`
prints one document. Next: `plan_rent.py`.
"""

from typing import Annotated, Any

import typer

from hitsend.cli import CallFailed, options
from hitsend.cli.plan_answer import Answer, give
from hitsend.cli.plan_memory import FactsFile
from hitsend.core.errors import ConfigError
from hitsend.plan.facts import Facts, load_facts
from hitsend.plan.hardware import find_gpu
from hitsend.plan.models import find_checkpoint
from hitsend.plan.training import TrainQuestion, TrainShape, plan_train, shape_of_model, shape_of_params
from hitsend.plan.training_text import TrainMoney, train_document

MOST_AMOUNT = 10**18
_SIZES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def amount(flag: str, text: str) -> int:
    """`7.5B`, `300M`, `1.4T` or digits. Raises ConfigError."""
    size = _SIZES.get(text[-1:].upper(), 1)
    try:
        value = round(float(text[:-1] if size > 1 else text) * size)
    except (ValueError, OverflowError):
        raise ConfigError(f"{flag} {text}: needed is a number, perhaps with K, M, B or T") from None
    if not 1 <= value <= MOST_AMOUNT:
        raise ConfigError(f"{flag} {text}: needed is above 0 and at most {MOST_AMOUNT:.0e}")
    return value


def train(
    params: Annotated[str | None, typer.Option("--params", metavar="N", help="7.5B, or use --model.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="A name, config.json or folder.")] = None,
    method: Annotated[str, typer.Option("--method", help="full, lora or qlora.")] = "full",
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="adamw, adamw-8bit, adamw-bf16, adamw-fp32, lion, sgd …")
    ] = "adamw",
    algorithm: Annotated[str, typer.Option("--algorithm", help="sft, dpo, ppo or grpo: how many copies.")] = "sft",
    zero: Annotated[int, typer.Option("--zero", help="Stage 0 to 3; 3 is what FSDP does.")] = 0,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="Data parallel.")] = 1,
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a sequence.")] = 2048,
    batch: Annotated[int, typer.Option("--batch", help="Sequences on one GPU in one pass.")] = 1,
    checkpointing: Annotated[str, typer.Option("--checkpointing", help="none, selective or full.")] = "none",
    flash: Annotated[bool, typer.Option("--flash/--no-flash", help="Attention scores are never kept.")] = True,
    rank: Annotated[int, typer.Option("--rank", help="Of LoRA.")] = 16,
    layers: Annotated[int, typer.Option("--layers", help="With --params: for activations and LoRA.")] = 0,
    hidden: Annotated[int, typer.Option("--hidden", help="With --params.")] = 0,
    heads: Annotated[int, typer.Option("--heads", help="With --params.")] = 0,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="D", help="Trained on: 1.4T.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="G", help="For time, and whether it fits.")] = None,
    mfu: Annotated[float, typer.Option("--mfu", help="Model FLOPs utilisation; Llama 3 had 0.38 to 0.43.")] = 0.4,
    usd_per_gpu_hour: Annotated[float | None, typer.Option("--usd-per-gpu-hour")] = None,
    served_tokens: Annotated[str | None, typer.Option("--served-tokens", help="In the model's life.")] = None,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """Bytes on each GPU by part, what is sent, 6ND, hours, and whether smaller-but-longer would be cheaper."""
    given = locals()
    known = load_facts(facts)
    asked = {name: given[name] for name in TrainQuestion.__struct_fields__ if name in given}
    asked["tokens"] = None if tokens is None else amount("--tokens", tokens)
    shape = _shape(known, params, model, {"layers": layers, "hidden": hidden, "heads": heads})
    plan = plan_train(TrainQuestion(shape=shape, **asked))
    money = TrainMoney(
        gpu=None if gpu is None else find_gpu(gpu, known),
        mfu=mfu,
        usd_per_gpu_hour=usd_per_gpu_hour,
        served_tokens=None if served_tokens is None else amount("--served-tokens", served_tokens),
    )
    found = train_document(plan, money)
    return give(found, train_text(found), as_json=as_json)


def _shape(known: Facts, params: str | None, model: str | None, widths: dict[str, int]) -> TrainShape:
    if (params is None) == (model is None):
        raise CallFailed("--params or --model: one of them")
    if model is not None:
        return shape_of_model(find_checkpoint(model, known))
    return shape_of_params(amount("--params", params or ""), **widths)


def train_text(found: dict[str, Any]) -> list[str]:
    """The same document for a reader."""
    head = f"{found['params']:,} parameters, {found['method']} {found['algorithm']}, ZeRO {found['zero']}"
    head += f", {found['gpus']} GPUs"
    return [f"{head}: {found['total_gb_per_gpu']:,.2f} GB on each", *(f"  {line}" for line in found["explain"])]
