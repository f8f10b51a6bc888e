"""How fast: `hitsend plan speed`.

Enters: a checkpoint, a GPU, a layout, an engine and a load. Leaves: a `SpeedPlan`: time to the first token, time per
token, throughput, each with the interval that measured systems had around it. Always true: the constants come from
`data/speed.json`, fitted on one half of published measurements; no plan is below the floor; where the cache is too
small for the load it says that requests queue, and gives no time to a first token; speculation and prefix hits change
the load and not the constants. Next: `calibrate.py`.
"""

import math

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Checkpoint
from hitsend.plan.constants import Constants, SpeedFacts, Spread, beside_published, plain_spreads, speed_facts
from hitsend.plan.facts import Gpu
from hitsend.plan.memory import MAX_DRAFTS, MAX_TOKENS, MemoryQuestion, plan_memory
from hitsend.plan.overhead import Step, default_batch_tokens, estimate_overhead
from hitsend.plan.published import Beside, Kin, Wait
from hitsend.plan.roofline import (
    Layout,
    Phase,
    Shape,
    floor_s,
    phases,
    sequence_kv_bytes,
    sequence_state_bytes,
    shape_of,
)
from hitsend.plan.sizes import Ranks
from hitsend.plan.terms import Load, System, first_token_terms, step_terms
from hitsend.plan.transfer import SAME, Factors, farness
from hitsend.plan.versions import default_share

ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp", "hitsend")


def group_of(engine: str, shape: Shape) -> str:
    """Which constants: by engine, and whether there are experts."""
    return f"{engine}/{'moe' if shape.moe_layers else 'dense'}"


class SpeedQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `batch` sequences at once over all replicas; `accept`: chance that a drafted token is right."""

    checkpoint: Checkpoint
    gpu: Gpu
    engine: str = "vllm"
    layout: Layout = Layout()
    replicas: int = 1
    weights: str | None = None
    kv_dtype: str = "auto"
    batch: int = 1
    input: int = 1024
    output: int = 256
    prefix_hit: float = 0.0
    drafts: int = 0
    accept: float = 0.7
    draft_cost: float | None = None
    """One draft's time / a pass of the target. None: one layer's share of it (multi-token prediction)."""
    gpu_memory_utilization: float | None = None

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine {self.engine}: known are {', '.join(ENGINES)}")
        counts = {
            "--batch": self.batch,
            "--input": self.input,
            "--output": self.output,
            "--dp": self.replicas,
            "--tp": self.layout.tp,
            "--pp": self.layout.pp,
        }
        for name, value in counts.items():
            if not 1 <= value <= MAX_TOKENS:
                raise ConfigError(f"{name} is {value}, needed is 1 to {MAX_TOKENS:,}")
        if self.output < 2:
            raise ConfigError("--output is 1, needed is 2 or more: one token has no time between tokens")
        for name, share in (("--prefix-hit", self.prefix_hit), ("--accept", self.accept)):
            if not 0 <= share < 1:
                raise ConfigError(f"{name} is {share}, needed is 0 to below 1")
        if not 0 <= self.drafts <= MAX_DRAFTS:
            raise ConfigError(f"--drafts is {self.drafts}, needed is 0 to {MAX_DRAFTS}")
        if not 0 <= (self.draft_cost or 0.0) <= 1:
            raise ConfigError(f"--draft-cost is {self.draft_cost}, needed is 0 to 1")
        if self.layout.pp > len(self.checkpoint.layers):
            raise ConfigError(f"--pp is {self.layout.pp}, the model has {len(self.checkpoint.layers)} layers")


class Interval(msgspec.Struct, frozen=True):
    """The middle and, four times in five, the bounds. Milliseconds, or tokens a second."""

    value: float
    low: float
    high: float


class SpeedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `ttft_ms` None: requests queue for cache. `running`: sequences at once that fit or are asked for."""

    question: SpeedQuestion
    shape: Shape
    constants: Constants
    group: str
    is_fitted: bool
    floor_ms: float
    capacity: float
    running: float
    ttft_ms: Interval | None
    tpot_ms: Interval
    output_tokens_per_s: Interval
    expected_per_pass: float
    terms: dict[str, float]
    """Milliseconds of a step, by term."""
    ttft_terms: dict[str, float]
    prefill: Phase
    decode: Phase
    published: tuple[Beside, Beside] = (Beside(), Beside())
    """What measured systems say of TPOT's and TTFT's terms; it is in them."""
    factors: Factors = Factors()
    """What a calibration said."""
    kin: Kin | None = None
    waits: tuple[Wait, ...] = ()
    """What moved terms leave of published first tokens."""

    @property
    def queues(self) -> bool:
        """More sequences are asked for than the cache holds."""
        return self.ttft_ms is None

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.question.layout.tp * self.question.layout.pp * self.question.replicas


def expected_tokens(accept: float, drafts: int) -> float:
    """Of one pass that checks so many drafts, each right with the same chance: (1 - a^(g+1)) / (1 - a) (Leviathan et
    al., arXiv 2211.17192, equation 1)."""
    return float(drafts + 1) if accept == 1 else (1 - accept ** (drafts + 1)) / (1 - accept)


def speculation_factor(accept: float, drafts: int, draft_cost: float) -> float:
    """Where passes cost the same with drafts: (1 - a^(g+1)) / ((1 - a)(g c + 1)) (arXiv 2211.17192, theorem 3.8)."""
    return expected_tokens(accept, drafts) / (drafts * draft_cost + 1)


def capacity_of(question: SpeedQuestion, shape: Shape) -> float:
    """Sequences of whole length that the cache of one replica holds: what `plan memory` says, or for TensorRT-LLM the
    same arithmetic without blocks."""
    layout, length = question.layout, question.input + question.output
    groups = layout.tp if layout.attention_dp else 1
    if question.engine != "trtllm":
        plan = plan_memory(
            MemoryQuestion(
                checkpoint=question.checkpoint,
                engine=question.engine,
                gpu=question.gpu,
                ranks=Ranks(layout.attention_ranks, layout.pp, dp=groups, ep=layout.ep),
                weights=question.weights,
                kv_dtype=question.kv_dtype,
                max_model_len=length,
                gpu_memory_utilization=question.gpu_memory_utilization,
            )
        )
        return float(plan.stage.max_concurrency or 0) * groups
    return free_bytes(question, shape) / sequence_bytes(question, length) * groups


def free_bytes(question: SpeedQuestion, shape: Shape) -> float:
    """What weights and overhead leave of one GPU."""
    layout = question.layout
    use = question.gpu_memory_utilization or default_share(None)
    tokens = default_batch_tokens("vllm", None, question.gpu, question.input + question.output)
    overhead = estimate_overhead(question.checkpoint, Step("vllm", tokens, sequences=256, tp=layout.tp))
    weights = shape.shared_bytes / layout.attention_ranks + shape.routed_bytes / layout.tp
    return max(0.0, use * question.gpu.memory_bytes - weights / layout.pp - (overhead.total if overhead else 0))


def sequence_bytes(question: SpeedQuestion, tokens: int) -> float:
    """What one sequence of so many tokens keeps on one GPU."""
    model, layout = question.checkpoint, question.layout
    keeps = sequence_kv_bytes(model, layout, question.kv_dtype, tokens) + sequence_state_bytes(model, layout)
    return max(1.0, keeps / layout.pp)


def load_of(question: SpeedQuestion, running: float) -> Load:
    """The load of one replica."""
    return Load(
        running=running,
        input=question.input,
        output=question.output,
        cached=question.prefix_hit * question.input,
        tokens_per_pass=question.drafts + 1,
        expected_per_pass=expected_tokens(question.accept, question.drafts),
    )


def constants_of(engine: str, shape: Shape, facts: SpeedFacts) -> tuple[str, Constants]:
    """The engine's own, or those of all engines together."""
    group = group_of(engine, shape)
    if group not in facts.groups:
        group = group_of("any", shape)
    return group, facts.groups[group]


def plan_speed(question: SpeedQuestion, factors: Factors | None = None) -> SpeedPlan:
    """Raises ConfigError that names the flag."""
    question.check()
    facts = speed_facts()
    model, gpu, layout = question.checkpoint, question.gpu, question.layout
    shape = shape_of(model, question.weights)
    group, constants = constants_of(question.engine, shape, facts)
    wanted, capacity = question.batch / question.replicas, _room(question, shape)
    running = min(wanted, capacity)
    load = load_of(question, running)
    moved = factors or Factors()
    system = System(model=model, shape=shape, gpu=gpu, layout=layout, kv_dtype=question.kv_dtype)
    is_fitted = group.split("/", 1)[0] == question.engine and any(name in gpu.name for name in facts.gpus)
    published = facts.published.get(group) if is_fitted else None
    said = beside_published(kin_of(question, shape), published)
    weighted = _times(step_terms(system, load), constants.tpot, said[0].factors, moved.tpot)
    waited = _times(first_token_terms(system, load), constants.ttft, said[1].factors)
    floor = floor_s(shape, layout, gpu) * 1e3
    share = (1 / len(model.layers)) if question.draft_cost is None else question.draft_cost
    asked = (float(question.batch), float(question.input), float(question.output))
    rest = moved.rest(asked)
    step = max(floor, sum(weighted.values()) * rest[0]) * (1 + question.drafts * share)
    plain = plain_spreads(constants, published, said, is_fitted=is_fitted)
    tpot_spread, ttft_spread = _spreads(constants, said, plain, moved, asked)
    per_token = _bounds(step / load.expected_per_pass, tpot_spread, floor / load.expected_per_pass)
    first = _bounds(sum(waited.values()) * rest[1], ttft_spread, 0.0)
    prefill, decode = _phases(question, shape, running, load.fresh)
    return SpeedPlan(
        question=question,
        shape=shape,
        constants=constants,
        group=group,
        is_fitted=is_fitted,
        floor_ms=floor,
        capacity=capacity,
        running=running,
        ttft_ms=None if wanted > capacity else first,
        tpot_ms=per_token,
        output_tokens_per_s=_throughput(question, running, per_token, first),
        expected_per_pass=load.expected_per_pass,
        terms=weighted,
        ttft_terms=waited,
        prefill=prefill,
        decode=decode,
        published=said,
        factors=moved,
        kin=kin_of(question, shape),
        waits=() if published is None else published.waits,
    )


def kin_of(question: SpeedQuestion, shape: Shape) -> Kin:
    """The system that is asked about."""
    layout, name = question.layout, question.checkpoint.name.split(" (")[0].rsplit("/", 1)[-1]
    return Kin(name, question.gpu.name, shape.weights, layout.tp, layout.ep, layout.attention_dp)


def _room(question: SpeedQuestion, shape: Shape) -> float:
    """Raises ConfigError where not one sequence fits."""
    capacity = capacity_of(question, shape)
    if capacity < 1:
        gpus = question.layout.tp * question.layout.pp
        raise ConfigError(
            f"{shape.name} with {question.input + question.output:,} tokens a sequence doesn't fit on {gpus} x "
            f"{question.gpu.name}: see `hitsend plan memory`"
        )
    return capacity


def _times(terms: dict[str, float], constants: dict[str, float], *factors: dict[str, float]) -> dict[str, float]:
    return {
        name: value * constants[name] * math.prod(each.get(name, 1.0) for each in factors)
        for name, value in terms.items()
        if value and constants.get(name)
    }


def _phases(question: SpeedQuestion, shape: Shape, running: float, fresh: float) -> tuple[Phase, Phase]:
    return phases(
        question.checkpoint,
        shape,
        question.gpu,
        question.layout,
        kv_dtype=question.kv_dtype,
        batch=running,
        fresh=fresh,
        context=question.input + question.output / 2,
    )


def _spreads(
    constants: Constants,
    said: tuple[Beside, Beside],
    plain: tuple[Spread, Spread],
    moved: Factors,
    asked: tuple[float, float, float],
) -> tuple[Spread, Spread]:
    """Of TPOT and TTFT, after what was measured."""
    tpot = constants.calibrated_tpot_spread.wider(2 - said[0].likeness)
    ttft = constants.calibrated_ttft_spread.wider(2 - said[1].likeness)
    far, ttft_far = moved.distance(asked), moved.distance(asked, with_ttft=True)
    return _after(tpot, plain[0], far), _after(ttft, plain[1], ttft_far)


def _after(near: Spread, plain: Spread, octaves: float) -> Spread:
    """The interval with a measured load so many octaves away: half of what is left at the load itself, that of a near
    load within two octaves (twice that for a system like none that was published, whose errors are about twice as
    large), the plain one far away, and never wider than that."""
    if math.isinf(octaves):
        return plain
    narrower = near if near.width < plain.width else plain
    again = narrower.towards(Spread(1.0, 1.0), SAME * max(0.0, 1.0 - octaves))
    return again.towards(plain, farness(octaves))


def _bounds(value: float, spread: Spread, least: float) -> Interval:
    return Interval(value, max(least, value * spread.low), max(least, value * spread.high))


def _throughput(question: SpeedQuestion, running: float, tpot: Interval, ttft: Interval) -> Interval:
    """Little's law: running sequences, each taking TTFT + (output - 1) * TPOT for its output."""

    def rate(first: float, each: float) -> float:
        return question.replicas * running * question.output / (first + each * (question.output - 1)) * 1e3

    return Interval(rate(ttft.value, tpot.value), rate(ttft.high, tpot.high), rate(ttft.low, tpot.low))


def planned_terms(question: SpeedQuestion, shape: Shape) -> tuple[dict[str, float], dict[str, float], bool]:
    """For a fit: the terms of TPOT and TTFT before their constants, and whether requests queue."""
    capacity = max(1.0, capacity_of(question, shape))
    wanted = question.batch / question.replicas
    load = load_of(question, min(wanted, capacity))
    system = System(
        model=question.checkpoint,
        shape=shape,
        gpu=question.gpu,
        layout=question.layout,
        kv_dtype=question.kv_dtype,
    )
    return (
        step_terms(system, load),
        first_token_terms(system, load),
        wanted > capacity,
    )
