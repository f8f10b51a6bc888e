"""A training plan in words, and the JSON document of `hitsend plan train`.

Enters: a `TrainPlan`, a GPU, money. Leaves: lines and a dict. Always true: GB is 1e9 bytes, GiB 2**30, and both stand
where memory is held against a GPU. Next: `rent.py`.
"""

from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.facts import Gpu
from hitsend.plan.training import (
    ALGORITHMS,
    CHINCHILLA_RATIO,
    OPTIMIZERS,
    TrainPlan,
    check_mfu,
    lifetimes,
    training_hours,
)

GB = 10**9
MOST_USD = 10**9
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15)


class TrainMoney(msgspec.Struct, frozen=True, kw_only=True):
    """What time and money depend on. None: not said."""

    gpu: Gpu | None = None
    mfu: float = 0.4
    usd_per_gpu_hour: float | None = None
    served_tokens: float | None = None


def train_document(plan: TrainPlan, money: TrainMoney) -> dict[str, Any]:
    """What `--json` prints. Bytes are of one GPU."""
    asked, memory = plan.question, plan.memory
    parts = {name: float(getattr(memory, name)) for name in memory.__struct_fields__}
    hours = hours_of(plan, money)
    fits = None if money.gpu is None else memory.total <= money.gpu.memory_bytes
    gpu_hours = None if hours is None else hours * asked.gpus
    return {
        "params": asked.shape.params,
        "active_params": asked.shape.active_params,
        "trained_params": plan.trained_params,
        "method": asked.method,
        "optimizer": asked.optimizer,
        "algorithm": asked.algorithm,
        "zero": asked.zero,
        "gpus": asked.gpus,
        "bytes_per_gpu": parts | {"states": float(memory.states), "total": float(memory.total)},
        "states_gb_per_gpu": float(memory.states) / GB,
        "total_gb_per_gpu": float(memory.total) / GB,
        "fits": fits,
        "communicated_bytes_per_step": float(plan.communicated_bytes),
        "tokens": asked.tokens,
        "flops": plan.flops,
        "tokens_per_param": None if asked.tokens is None else asked.tokens / asked.shape.params,
        "chinchilla_tokens": CHINCHILLA_RATIO * asked.shape.params,
        "hours": hours,
        "gpu_hours": gpu_hours,
        "usd": None if gpu_hours is None or money.usd_per_gpu_hour is None else gpu_hours * money.usd_per_gpu_hour,
        "explain": explain_train(plan, money),
    }


def hours_of(plan: TrainPlan, money: TrainMoney) -> float | None:
    """None where tokens, or a GPU's rate, aren't known. Raises ConfigError."""
    check_mfu(money.mfu)
    price = money.usd_per_gpu_hour
    if price is not None and not 0 <= price <= MOST_USD:
        raise ConfigError(f"--usd-per-gpu-hour is {price}, needed is 0 to {MOST_USD:,}")
    if plan.flops is None or money.gpu is None or money.gpu.bf16_flops is None:
        return None
    return training_hours(plan.flops, gpus=plan.question.gpus, peak_flops=money.gpu.bf16_flops, mfu=money.mfu)


def explain_train(plan: TrainPlan, money: TrainMoney) -> list[str]:
    """The arithmetic, one line each."""
    asked, memory = plan.question, plan.memory
    optimizer, copies = OPTIMIZERS[asked.optimizer], ALGORITHMS[asked.algorithm]
    lines = [
        (
            f"trained: {plan.trained_params:,} of {asked.shape.params:,} parameters ({asked.method}), each "
            f"{optimizer.weights} B "
            f"weight + {optimizer.gradients} gradient + {optimizer.master} master + {optimizer.moments} moments = "
            f"{optimizer.total} B ({asked.optimizer})"
        ),
        f"copies: {copies.names}",
        "on one GPU: "
        + " + ".join(
            f"{float(getattr(memory, name)) / GB:,.2f} {name.replace('_', ' ')}"
            for name in memory.__struct_fields__
            if getattr(memory, name)
        )
        + f" = {float(memory.total) / GB:,.2f} GB ({float(memory.total) / 2**30:,.2f} GiB)",
        _zero_line(plan),
    ]
    if not memory.activations:
        lines.append("activations: not counted; give --model, or --layers, --hidden and --heads")
    if money.gpu is not None:
        verdict = "fits" if memory.total <= money.gpu.memory_bytes else "does not fit"
        lines.append(
            f"{verdict} in {money.gpu.memory_bytes / GB:,.1f} GB of a {money.gpu.name}, fragmentation left out"
        )
    if plan.flops is not None and asked.tokens is not None:
        lines += _budget_lines(plan, money)
    return lines


def _zero_line(plan: TrainPlan) -> str:
    asked = plan.question
    divided = ("nothing", "optimizer states", "optimizer states and gradients", "weights too (FSDP's full shard)")
    return (
        f"ZeRO {asked.zero} over {asked.gpus} GPUs divides {divided[asked.zero]}; one GPU sends "
        f"{float(plan.communicated_bytes) / GB:,.2f} GB a step"
    )


def _budget_lines(plan: TrainPlan, money: TrainMoney) -> list[str]:
    asked, shape = plan.question, plan.question.shape
    tokens = asked.tokens or 0
    each = 6 if asked.method == "full" else 4
    ratio = tokens / shape.params
    lines = [
        f"work: {each} x {shape.active_params:,} x {tokens:,} = {plan.flops:.3g} FLOP",
    ]
    if asked.method == "full":
        lines.append(
            f"Chinchilla: {ratio:,.1f} tokens a parameter; {CHINCHILLA_RATIO} would be "
            f"{CHINCHILLA_RATIO * shape.params:,} tokens: {_verdict(ratio)}"
        )
    hours = hours_of(plan, money)
    if hours is not None and money.gpu is not None and money.gpu.bf16_flops is not None:
        peak = money.gpu.bf16_flops / 1e12
        told = f"time: {plan.flops:.3g} / ({asked.gpus} x {peak:,.0f} TFLOP/s x {money.mfu:.0%} MFU) = {hours:,.1f} h"
        if money.usd_per_gpu_hour is not None:
            cost = hours * asked.gpus * money.usd_per_gpu_hour
            told += f"; {hours * asked.gpus:,.0f} GPU hours x {money.usd_per_gpu_hour:g} = {cost:,.0f} USD"
        lines.append(told)
    if money.served_tokens is not None:
        lines += [_lifetime_line(shape.params, tokens, money.served_tokens)]
    return lines


def _verdict(ratio: float) -> str:
    if ratio < CHINCHILLA_RATIO / 2:
        return "a smaller model on more tokens would be better for the same money"
    if ratio > CHINCHILLA_RATIO * 2:
        return "longer than training alone asks for, which pays where the model serves much"
    return "about what training alone asks for"


def _lifetime_line(params: int, tokens: int, served: float) -> str:
    rows = lifetimes(params, tokens, served, SHARES)
    best = min(rows, key=lambda row: row.total_flops)
    told = "; ".join(
        f"{row.params / 1e9:,.1f} B on {row.tokens / 1e9:,.0f} B tokens {row.total_flops:.2e}" for row in rows
    )
    return (
        f"lifetime FLOP with {served:.3g} tokens served, same predicted loss: {told}; least {best.params / 1e9:,.1f} B"
    )
