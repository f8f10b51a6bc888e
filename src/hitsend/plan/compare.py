"""Which GPU, how many, divided how, with which weights: `hitsend plan compare`.

Enters: a model, a load, a latency goal, and what may be used. Leaves: `Choice`s, best first. Always true: what doesn't
fit or misses the goal is listed with the reason, never dropped; money per million output tokens ranks where every
candidate has a rental price, tokens per second and GPU otherwise; each layout says why one would take it. Next:
`training.py`.
"""

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Checkpoint
from hitsend.plan.facts import Facts, Gpu, Rental
from hitsend.plan.roofline import Layout
from hitsend.plan.speed import SpeedPlan, SpeedQuestion, plan_speed

SECONDS_PER_HOUR = 3600


class Goal(msgspec.Struct, frozen=True):
    """Milliseconds at most; None: no matter."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. `plan` None: it doesn't fit, or can't be planned, and `why_not` says it."""

    gpu: str
    gpus: int
    layout: Layout
    replicas: int
    weights: str
    reason: str
    plan: SpeedPlan | None = None
    why_not: str = ""
    usd_per_hour: Fraction | None = None

    @property
    def is_good(self) -> bool:
        """It runs and keeps the goal."""
        return self.plan is not None and not self.why_not

    @property
    def usd_per_million_output(self) -> float | None:
        """Of the whole rental, at this load all day."""
        if self.plan is None or self.usd_per_hour is None:
            return None
        return float(self.usd_per_hour) / SECONDS_PER_HOUR / self.plan.output_tokens_per_s.value * 1e6

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output."""
        return 0.0 if self.plan is None else self.plan.output_tokens_per_s.value / self.gpus


def layouts(model: Checkpoint, gpu: Gpu, gpus: int) -> list[tuple[Layout, int, str]]:
    """Ways to use so many GPUs: (layout, replicas, why).

    Tensor ranks where they divide the heads; stages where GPUs are joined by PCIe only; copies; and for latent
    attention with experts, attention per GPU with divided experts (SGLang's and DeepSeek's layout).
    """
    heads = next((layer.kv.heads for layer in model.layers if layer.kv is not None), 0)
    is_latent = any(layer.kv is not None and layer.kv.latent_dim for layer in model.layers)
    has_experts = bool(model.experts_per_token)
    slow = "pcie" in (gpu.link or "pcie").casefold()
    found = []
    for tp in (1, 2, 4, 8):
        if tp > gpus or gpus % tp or (heads and heads % tp):
            continue
        replicas = gpus // tp
        why = (
            f"TP{tp}: weights and cache are divided by {tp}, time per layer isn't" if tp > 1 else "one GPU: no traffic"
        )
        if replicas > 1:
            why += f"; {replicas} copies share nothing and answer each other's failures"
        found.append((Layout(tp=tp), replicas, why))
        if slow and tp == 1 and gpus > 1 and gpus <= len(model.layers):
            told = f"PP{gpus}: over PCIe a stage sends one activation, where TP{gpus} sends two a layer"
            found.append((Layout(pp=gpus), 1, told))
        if has_experts and tp == gpus and tp > 1:
            why = f"EP{tp}: whole experts on each GPU, so each matrix stays wide"
            found.append((Layout(tp=tp, ep=True), 1, why))
            if is_latent:
                why = f"DP attention + EP{tp}: a latent cache is whole on every TP rank; so it is held once, not {tp} x"
                found.append((Layout(tp=tp, ep=True, attention_dp=True), 1, why))
    return found


def compare(
    question: SpeedQuestion,
    gpus: Sequence[Gpu],
    *,
    facts: Facts,
    goal: Goal,
    max_gpus: int,
    weights: Sequence[str],
) -> list[Choice]:
    """`question`: the model and the load; its own GPU and layout don't matter. Raises ConfigError for flags."""
    if max_gpus < 1:
        raise ConfigError(f"--max-gpus is {max_gpus}, needed is 1 or more")
    found = []
    for gpu in gpus:
        rent = cheapest_rental(gpu, facts)
        for form in weights:
            for count in (1, 2, 4, 8, 16):
                if count > max_gpus:
                    continue
                for layout, replicas, reason in layouts(question.checkpoint, gpu, count):
                    asked = msgspec.structs.replace(question, gpu=gpu, weights=form, layout=layout, replicas=replicas)
                    found.append(_choice(asked, goal, reason, rent))
    priced = all(choice.usd_per_hour is not None for choice in found if choice.is_good)
    return sorted(found, key=lambda choice: _rank(choice, priced=priced))


def _choice(asked: SpeedQuestion, goal: Goal, reason: str, rent: Rental | None) -> Choice:
    count = asked.layout.tp * asked.layout.pp * asked.replicas
    plain = Choice(
        gpu=asked.gpu.name,
        gpus=count,
        layout=asked.layout,
        replicas=asked.replicas,
        weights=asked.weights or "bf16",
        reason=reason,
        usd_per_hour=None if rent is None else Fraction(rent.usd_per_gpu_hour) * count,
    )
    if asked.batch < asked.replicas:
        return msgspec.structs.replace(plain, why_not=f"{asked.batch} at once can't keep {asked.replicas} copies busy")
    try:
        plan = plan_speed(asked)
    except ConfigError as refused:
        return msgspec.structs.replace(plain, why_not=str(refused))
    return msgspec.structs.replace(plain, plan=plan, why_not=_missed(plan, goal))


def _missed(plan: SpeedPlan, goal: Goal) -> str:
    if plan.ttft_ms is None:
        return f"queues: {plan.capacity:,.1f} sequences fit a copy"
    if goal.ttft_ms is not None and plan.ttft_ms.value > goal.ttft_ms:
        return f"TTFT {plan.ttft_ms.value:,.0f} ms, limit {goal.ttft_ms:,.0f}"
    if goal.tpot_ms is not None and plan.tpot_ms.value > goal.tpot_ms:
        return f"TPOT {plan.tpot_ms.value:,.1f} ms, limit {goal.tpot_ms:,.1f}"
    return ""


def _rank(choice: Choice, *, priced: bool) -> tuple[bool, float, int]:
    cost = choice.usd_per_million_output
    return not choice.is_good, cost if priced and cost is not None else -choice.tokens_per_s_per_gpu, choice.gpus


def cheapest_rental(gpu: Gpu, facts: Facts) -> Rental | None:
    """The newest reading of each provider; of those the cheapest that isn't on the spot market."""
    newest: dict[str, Rental] = {}
    for rental in facts.rentals:
        same = _words(rental.gpu) & _words(gpu.name, *gpu.aliases) >= _words(rental.gpu) - _FILLER
        if same and "spot" not in rental.provider.casefold():
            kept = newest.get(rental.provider)
            newest[rental.provider] = rental if kept is None or rental.as_of > kept.as_of else kept
    return min(newest.values(), key=lambda rental: Fraction(rental.usd_per_gpu_hour), default=None)


_FILLER = {"se", "we", "server"}


def _words(*names: str) -> set[str]:
    """`H100 SXM5 80GB` and `H100 SXM 80GB` are one."""
    words = {word for name in names for word in name.casefold().replace("-", " ").split()}
    return {word.replace("sxm5", "sxm") for word in words}
