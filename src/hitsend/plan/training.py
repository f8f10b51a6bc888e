"""What training takes: `hitsend plan train`.

Enters: parameters and shape, a method, an optimizer, the way work is divided, tokens. Leaves: a `TrainPlan`: bytes on
one GPU by part, communication, operations, hours. Always true: GB here is 1e9 bytes, as the papers write it; states
(weights, gradients, optimizer) are exact, activations are a formula for a plain transformer layer and say so; what is
frozen has no gradient and no moment. Next: `training_text.py`.
"""

import math
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Checkpoint

METHODS = ("full", "lora", "qlora")
CHECKPOINTING = ("none", "selective", "full")
LEAST_MFU = 0.0001
CHINCHILLA_RATIO = 20
"""Tokens per parameter at which a training budget is best spent (Hoffmann et al., arXiv 2203.15556)."""
NF4_BYTES = Fraction(1, 2)
DOUBLE_QUANT_BITS = Fraction(8, 64) + Fraction(32, 64 * 256)
SINGLE_QUANT_BITS = Fraction(32, 64)
"""QLoRA's constants a parameter, with and without double quantisation (Dettmers et al., arXiv 2305.14314, section
3)."""


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per trained parameter."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def states(self) -> int:
        """What ZeRO stage 1 divides."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """Everything."""
        return self.weights + self.gradients + self.states


OPTIMIZERS = {
    # 2 + 2 + (4 + 4 + 4): ZeRO, arXiv 1910.02054, section 3.1
    "adamw": Optimizer(weights=2, gradients=2, master=4, moments=8),
    "adamw-fp32": Optimizer(weights=4, gradients=4, master=0, moments=8),
    "adamw-bf16": Optimizer(weights=2, gradients=2, master=0, moments=4),
    # two moments of a byte: Dettmers et al., arXiv 2110.02861
    "adamw-8bit": Optimizer(weights=2, gradients=2, master=4, moments=2),
    # 16-bit weights and gradients, moments in fp32, no master copy (QLoRA's 780 GB for 65B)
    "adam-no-master": Optimizer(weights=2, gradients=2, master=0, moments=8),
    "sgd": Optimizer(weights=2, gradients=2, master=4, moments=0),
    "sgd-momentum": Optimizer(weights=2, gradients=2, master=4, moments=4),
    # one moment (Chen et al., arXiv 2302.06675)
    "lion": Optimizer(weights=2, gradients=2, master=4, moments=4),
}


class TrainShape(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer as far as training needs it. Matrices that LoRA adapts: (inputs, outputs) by name, of one layer."""

    params: int
    active_params: int
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    adapted: tuple[tuple[int, int], ...] = ()


class TrainQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `batch`: sequences on one GPU in one pass."""

    shape: TrainShape
    method: str = "full"
    optimizer: str = "adamw"
    zero: int = 0
    gpus: int = 1
    seq: int = 2048
    batch: int = 1
    checkpointing: str = "none"
    flash: bool = True
    """Attention scores are never kept (FlashAttention): the quadratic part falls away."""
    rank: int = 16
    tokens: int | None = None
    algorithm: str = "sft"

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        for name, value, known in (
            ("--method", self.method, METHODS),
            ("--optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("--checkpointing", self.checkpointing, CHECKPOINTING),
            ("--algorithm", self.algorithm, tuple(ALGORITHMS)),
        ):
            if value not in known:
                raise ConfigError(f"{name} {value}: known are {', '.join(known)}")
        if not 0 <= self.zero <= 3:
            raise ConfigError(f"--zero is {self.zero}, needed is 0 to 3")
        for name, count in (
            ("--gpus", self.gpus),
            ("--seq", self.seq),
            ("--batch", self.batch),
            ("--rank", self.rank),
            ("--params", self.shape.params),
        ):
            if count < 1:
                raise ConfigError(f"{name} is {count}, needed is 1 or more")
        if self.method != "full" and not self.shape.adapted:
            raise ConfigError(f"--method {self.method} adapts matrices: give --model, or --layers and --hidden")


class Copies(msgspec.Struct, frozen=True):
    """Models that an algorithm holds: trained ones and frozen ones, each as large as the policy."""

    trained: int
    frozen: int
    names: str


ALGORITHMS = {
    "sft": Copies(1, 0, "policy"),
    "dpo": Copies(1, 1, "policy, frozen reference"),
    "ppo": Copies(2, 2, "policy, critic, frozen reference, frozen reward model"),
    "grpo": Copies(1, 1, "policy, frozen reference; the group's mean replaces a critic"),
}
"""DPO: arXiv 2305.18290. PPO: InstructGPT, arXiv 2203.02155. GRPO: arXiv 2402.03300, section 4.1. A reward model that
is a rule costs nothing; where it is a model, GRPO has one more frozen copy."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one GPU."""

    weights: Fraction
    adapters: Fraction
    gradients: Fraction
    master: Fraction
    moments: Fraction
    frozen_copies: Fraction
    activations: Fraction

    @property
    def states(self) -> Fraction:
        """Without activations: what the literature's examples add up."""
        return self.total - self.activations

    @property
    def total(self) -> Fraction:
        """All parts."""
        return sum(
            (
                self.weights,
                self.adapters,
                self.gradients,
                self.master,
                self.moments,
                self.frozen_copies,
                self.activations,
            ),
            Fraction(0),
        )


class TrainPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `communicated_bytes`: sent by one GPU in one step. `flops` None: nobody said how many tokens."""

    question: TrainQuestion
    trained_params: int
    memory: Memory
    communicated_bytes: Fraction
    flops: float | None
    recompute_factor: Fraction


def plan_train(question: TrainQuestion) -> TrainPlan:
    """Raises ConfigError that names the flag."""
    question.check()
    shape = question.shape
    trained = shape.params if question.method == "full" else adapter_params(shape, question.rank)
    tokens = question.tokens
    return TrainPlan(
        question=question,
        trained_params=trained,
        memory=memory_of(question, trained),
        communicated_bytes=communication_bytes(trained, shape.params, question),
        flops=None if tokens is None else training_flops(shape.active_params, tokens, question.method),
        recompute_factor=Fraction(4, 3) if question.checkpointing == "full" else Fraction(1),
    )


def shape_of_params(params: int, *, layers: int = 0, hidden: int = 0, heads: int = 0) -> TrainShape:
    """Of a number alone. LoRA adapts four square attention matrices a layer, where layers and width are given."""
    adapted = ((hidden, hidden),) * 4 if hidden and layers else ()
    return TrainShape(params=params, active_params=params, layers=layers, hidden=hidden, heads=heads, adapted=adapted)


def shape_of_model(model: Checkpoint) -> TrainShape:
    """LoRA adapts query, key, value and output of each attention layer. Raises ConfigError without shapes."""
    params = model.params
    if params is None or model.hidden is None:
        raise ConfigError(f"{model.name}: its widths aren't known, so its training can't be planned")
    kv = next((layer.kv for layer in model.layers if layer.kv is not None), None)
    adapted: tuple[tuple[int, int], ...] = ()
    if kv is not None and kv.latent_dim is None:
        queries, keys = kv.heads * kv.key_dim, kv.kv_heads * kv.key_dim
        values, outputs = kv.kv_heads * kv.value_dim, kv.heads * kv.value_dim
        adapted = ((model.hidden, queries), (model.hidden, keys), (model.hidden, values), (outputs, model.hidden))
    return TrainShape(
        params=params.total,
        active_params=params.active,
        layers=len(model.layers),
        hidden=model.hidden,
        heads=0 if kv is None else kv.heads,
        adapted=adapted,
    )


def adapter_params(shape: TrainShape, rank: int) -> int:
    """LoRA: two thin matrices beside each adapted one, r * (inputs + outputs) (arXiv 2106.09685, section 4.1)."""
    return shape.layers * rank * sum(entry + leave for entry, leave in shape.adapted)


def state_bytes_per_gpu(params: int, optimizer: Optimizer, zero: int, gpus: int) -> Fraction:
    """ZeRO (arXiv 1910.02054, figure 1): stage 1 divides the optimizer's states, 2 the gradients too, 3 the weights
    too."""
    weights = Fraction(optimizer.weights, gpus if zero >= 3 else 1)
    gradients = Fraction(optimizer.gradients, gpus if zero >= 2 else 1)
    return params * (weights + gradients + Fraction(optimizer.states, gpus if zero >= 1 else 1))


def base_bytes(params: int, method: str) -> Fraction:
    """Frozen weights: 16 bit, or NF4 with doubly quantised constants."""
    return params * (NF4_BYTES + DOUBLE_QUANT_BITS / 8) if method == "qlora" else Fraction(2 * params)


def memory_of(question: TrainQuestion, trained: int) -> Memory:
    """Bytes on one GPU by part. Frozen copies stay 16 bit, divided at stage 3; those of adapter methods are the base
    itself with the adapters off, and cost nothing."""
    optimizer, gpus, zero = OPTIMIZERS[question.optimizer], question.gpus, question.zero
    copies = ALGORITHMS[question.algorithm]
    params, is_full = question.shape.params, question.method == "full"
    by_weights, by_gradients, by_states = (Fraction(1, gpus if zero >= stage else 1) for stage in (3, 2, 1))
    # a critic of an adapter method is another set of adapters on the same base
    own = trained * copies.trained
    shared = 0 if is_full else 1
    frozen = copies.frozen if is_full else max(0, copies.frozen - shared)
    return Memory(
        weights=own * optimizer.weights * by_weights if is_full else base_bytes(params, question.method) * by_weights,
        adapters=Fraction(0) if is_full else own * optimizer.weights * by_weights,
        gradients=own * optimizer.gradients * by_gradients,
        master=own * optimizer.master * by_states,
        moments=own * optimizer.moments * by_states,
        frozen_copies=frozen * base_bytes(params, question.method if not is_full else "lora") * by_weights,
        activations=activation_bytes(question),
    )


def activation_bytes(question: TrainQuestion) -> Fraction:
    """Per layer s*b*h*(34 + 5*a*s/h); selective recomputation (and FlashAttention) 34*s*b*h; full 2*s*b*h, and one
    layer whole while it is recomputed (Korthikanti et al., arXiv 2205.05198, table 2). 16 bit, without vocabulary."""
    shape = question.shape
    if not shape.layers or not shape.hidden:
        return Fraction(0)
    sbh = question.seq * question.batch * shape.hidden
    quadratic = Fraction(5 * shape.heads * question.seq, shape.hidden)
    if question.flash or question.checkpointing != "none":
        quadratic = Fraction(0)
    if question.checkpointing == "full":
        return Fraction(2 * sbh * shape.layers)
    return sbh * shape.layers * (34 + quadratic)


def communication_bytes(trained: int, params: int, question: TrainQuestion) -> Fraction:
    """Sent by one GPU in one step, 16 bit: stages 0 to 2 reduce and gather 2 * P * (n - 1) / n, stage 3 gathers the
    weights twice: 3 * P (arXiv 1910.02054, section 7). Adapters send their own gradients; stage 3 gathers the frozen
    base too."""
    ring = Fraction(question.gpus - 1, question.gpus)
    if question.zero < 3:
        return 2 * 2 * trained * ring
    base = Fraction(0) if question.method == "full" else 2 * base_bytes(params, question.method) * ring
    return 3 * 2 * trained * ring + base


def training_flops(params: int, tokens: int, method: str = "full") -> float:
    """6 N D: 2 forward, 4 backward (Kaplan et al., arXiv 2001.08361, section 2.1). With a frozen base 4 N D: no
    gradients of its weights. N: parameters one token uses."""
    return float((6 if method == "full" else 4) * params * tokens)


def check_mfu(mfu: float) -> None:
    """Raises ConfigError, also where nothing is asked that depends on it."""
    if not LEAST_MFU <= mfu <= 1:
        raise ConfigError(f"--mfu is {mfu}, needed is {LEAST_MFU} to 1")


def training_hours(flops: float, *, gpus: int, peak_flops: float, mfu: float) -> float:
    """flops / (gpus * peak * MFU) (model FLOPs utilisation: PaLM, arXiv 2204.02311, appendix B). Recomputed operations
    don't count as useful, so they are in the MFU."""
    check_mfu(mfu)
    return flops / (gpus * peak_flops * mfu) / 3600


class Chinchilla(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of L(N, D) = E + A / N^alpha + B / D^beta (arXiv 2203.15556, section 3.3, approach 3)."""

    floor: float = 1.69
    a: float = 406.4
    b: float = 410.7
    alpha: float = 0.34
    beta: float = 0.28

    def loss(self, params: float, tokens: float) -> float:
        """Nats a token."""
        return self.floor + self.a / math.pow(params, self.alpha) + self.b / math.pow(tokens, self.beta)

    def tokens_for(self, params: float, loss: float) -> float | None:
        """Tokens at which so many parameters reach a loss. None: never."""
        left = loss - self.floor - self.a / math.pow(params, self.alpha)
        return None if left <= 0 else math.exp(math.log(self.b / left) / self.beta)


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """A model of one quality: smaller and trained for longer, or larger. FLOPs of training and of serving."""

    params: float
    tokens: float
    training_flops: float
    serving_flops: float

    @property
    def total_flops(self) -> float:
        """Both."""
        return self.training_flops + self.serving_flops


def lifetimes(params: int, tokens: int, served_tokens: float, shares: tuple[float, ...]) -> list[Lifetime]:
    """Models of the same predicted loss, at these shares of the parameters: 6 N D + 2 N served (Sardana et al.,
    arXiv 2401.00448). The law's constants are disputed (arXiv 2404.10102): read the order, not the digits."""
    law = Chinchilla()
    goal = law.loss(params, tokens)
    found = []
    for share in shares:
        size = params * share
        needed = law.tokens_for(size, goal)
        if needed is not None:
            found.append(
                Lifetime(
                    params=size, tokens=needed, training_flops=6 * size * needed, serving_flops=2 * size * served_tokens
                )
            )
    return found


class OffloadEstimate(msgspec.Struct, frozen=True):
    """What DeepSpeed's ZeRO-2 estimator says, in bytes."""

    gpu: Fraction
    cpu: Fraction


def zero2_offload(params: int, gpus: int, *, offload: bool, buffer: Fraction = Fraction(3, 2)) -> OffloadEstimate:
    """DeepSpeed's own formula (`estimate_zero2_model_states_mem_needs`): offloaded 2 P on the GPU and P * max(4 n,
    16) * 1.5 on the host, else 4 P + 16 P / n and P * 4 * n * 1.5."""
    if offload:
        return OffloadEstimate(Fraction(2 * params), params * max(4 * gpus, 16) * buffer)
    return OffloadEstimate(4 * params + Fraction(16 * params, gpus), params * 4 * gpus * buffer)
