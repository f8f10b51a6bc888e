"""Does it fit, and how many at once: `hitsend plan memory`.

Enters: a checkpoint, an engine, the parallelism, a GPU or the bytes that are free. Leaves: a `MemoryPlan` with every
number and the arithmetic behind it. Always true: sizes are bytes on one rank unless their name says `whole`; weights
and cache are exact, overhead is an estimate and says so; what isn't known is None and never a guess; the tightest
pipeline stage decides. Next: `explain.py`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan import compressed
from hitsend.plan.blocks import BLOCK_TOKENS, LATENT_BLOCK_TOKENS, BlockPlan, BlockRequest, LayerKind, plan_blocks
from hitsend.plan.cells import CellPool, Costs, llama_pool, sglang_pool, shared_pool
from hitsend.plan.checkpoint import Checkpoint, Layer
from hitsend.plan.facts import Gpu
from hitsend.plan.formats import WeightFormat, weight_format, weights_name
from hitsend.plan.hardware import is_blackwell, is_large
from hitsend.plan.overhead import (
    Overhead,
    Step,
    default_batch_tokens,
    default_sequences,
    estimate_overhead,
    graph_bytes,
)
from hitsend.plan.sizes import Ranks, indexer_bytes, is_llama, kv_bytes_per_token, stages, state_bytes, weights_bytes
from hitsend.plan.versions import default_share, group_slack, has_new_log, has_window_groups, steps_in_flight

MAX_TOKENS, MAX_DRAFTS = 10**9, 64
ENGINES = ("vllm", "sglang", "llama.cpp", "hitsend")
DEFAULT_UTILIZATION = {"sglang": 0.88, "llama.cpp": 1.0, "hitsend": 1.0}
"""SGLang's static fraction depends on the GPU and is near this; the others take all. vLLM's: `versions.py`."""


class MemoryQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. None: the default of the engine, or unknown."""

    checkpoint: Checkpoint
    engine: str = "vllm"
    engine_version: str | None = None
    gpu: Gpu | None = None
    ranks: Ranks = Ranks()
    weights: str | None = None
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool = False
    drafts: int = 0
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    available_kv_bytes: int | None = None
    weights_bytes: int | None = None
    """Measured, per rank: goes before what is computed."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage, one rank of it."""

    num_layers: int
    weights_bytes: Fraction | None
    kv_bytes_per_token: Fraction
    """What one more token costs."""
    window_bytes: Fraction
    """What layers with a window keep of one long sequence."""
    state_bytes: int
    overhead: Overhead | None
    available_bytes: int | None
    blocks: BlockPlan | None = None
    cells: CellPool | None = None

    @property
    def max_concurrency(self) -> Fraction | None:
        """Sequences of the length asked for."""
        if self.blocks is not None:
            return self.blocks.max_concurrency
        return None if self.cells is None else self.cells.sequences


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, with what was assumed. `stage`: the tightest one."""

    question: MemoryQuestion
    kv_dtype: str
    weights: str
    max_model_len: int
    batch_tokens: int
    stage: StagePlan
    num_stages: int
    whole_weights_bytes: Fraction | None
    whole_kv_bytes_per_token: Fraction
    whole_state_bytes: int
    pool_tokens: int | None

    @property
    def fits(self) -> bool | None:
        """Whether one sequence of the length asked for can be served. None: nobody said what there is."""
        concurrency, blocks = self.stage.max_concurrency, self.stage.blocks
        if concurrency is None or blocks is None:
            return None if concurrency is None else concurrency >= 1
        return concurrency >= 1 and blocks.needed_bytes <= (self.stage.available_bytes or 0)


def plan_memory(question: MemoryQuestion) -> MemoryPlan:
    """Raises ConfigError that names the flag or the key."""
    _check(question)
    model, ranks = question.checkpoint, question.ranks
    kv_dtype = effective_kv_dtype(question)
    name = weights_name(question.weights, model.weights, has_experts=model.experts_per_token > 0)
    form = weight_format("bf16" if name == "gguf" else name)
    length = question.max_model_len or model.context
    if length is None:
        raise ConfigError(f"--max-model-len: {model.name} doesn't say its context, so it must be given")
    batch = question.max_num_batched_tokens or default_batch_tokens(
        question.engine, question.engine_version, question.gpu, length, model.media_tokens
    )
    asked = msgspec.structs.replace(question, max_model_len=length, max_num_batched_tokens=batch, kv_dtype=kv_dtype)
    found = [_stage(asked, form, layers) for layers in stages(len(model.layers), ranks.pp)]
    tightest = min(found, key=lambda stage: math.inf if stage.max_concurrency is None else stage.max_concurrency)
    if tightest.max_concurrency is None:
        tightest = max(found, key=lambda stage: stage.kv_bytes_per_token)
    everything = range(len(model.layers))
    single = msgspec.structs.replace(asked, ranks=Ranks())
    return MemoryPlan(
        question=question,
        kv_dtype=kv_dtype,
        weights=name,
        max_model_len=length,
        batch_tokens=batch,
        stage=tightest,
        num_stages=ranks.pp,
        whole_weights_bytes=_weights(single, form, everything),
        whole_kv_bytes_per_token=_kv_per_token(single, everything),
        whole_state_bytes=_state(single, everything),
        pool_tokens=_pool_tokens(tightest, question),
    )


def effective_kv_dtype(question: MemoryQuestion) -> str:
    """A sparse-attention model's fp8 cache is DeepSeek's packed row, except where Blackwell stores plain fp8.

    Source: vLLM 0.18 on H200 and B200, SGLang PR#11309 (kv_logs).
    """
    sparse = any(layer.kv is not None and layer.kv.indexer_dim for layer in question.checkpoint.layers)
    if _is_compressed(question.checkpoint) and question.kv_dtype.casefold() in {"auto", "fp8", "fp8_e4m3"}:
        return "fp8_ds_mla"
    packs = question.engine == "sglang" or (
        question.engine == "vllm" and not (question.gpu is not None and is_blackwell(question.gpu))
    )
    return "fp8_ds_mla" if sparse and packs and question.kv_dtype.casefold() == "fp8" else question.kv_dtype


def _is_compressed(model: Checkpoint) -> bool:
    return any(layer.kv is not None and layer.kv.beside_window for layer in model.layers)


def _check_compressed(question: MemoryQuestion) -> None:
    """What is known of compressed tokens is vLLM's packed cache. Raises ConfigError for anything else."""
    model = question.checkpoint
    if question.engine != "vllm":
        raise ConfigError(
            f"--engine {question.engine}: how it keeps the compressed tokens of {model.name} isn't known, of vllm it is"
        )
    if question.kv_dtype.casefold() not in {"auto", "fp8", "fp8_e4m3", "fp8_ds_mla"}:
        raise ConfigError(f"--kv-dtype {question.kv_dtype}: {model.name} keeps packed rows, needed is fp8 or auto")
    if question.ranks.dcp > 1:
        raise ConfigError(f"--dcp is {question.ranks.dcp}: vLLM doesn't divide a cache with windows, limit 1")


def _check(question: MemoryQuestion) -> None:
    if question.engine not in ENGINES:
        raise ConfigError(f"--engine {question.engine}: known are {', '.join(ENGINES)}")
    question.ranks.check()
    if _is_compressed(question.checkpoint):
        _check_compressed(question)
    use = question.gpu_memory_utilization
    if use is not None and not 0 < use <= 1:
        raise ConfigError(f"--gpu-memory-utilization is {use}, needed is above 0 and at most 1")
    for name, value, most in (
        ("--max-model-len", question.max_model_len, MAX_TOKENS),
        ("--max-num-batched-tokens", question.max_num_batched_tokens, MAX_TOKENS),
        ("--max-num-seqs", question.max_num_seqs, MAX_TOKENS),
        ("--available-kv-gib", question.available_kv_bytes, 2**60),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}, needed is 1 to {most:,}")
    if not 0 <= question.drafts <= MAX_DRAFTS:
        raise ConfigError(f"--mtp is {question.drafts}, needed is 0 to {MAX_DRAFTS}")
    is_latent = any(layer.kv is not None and layer.kv.latent_dim for layer in question.checkpoint.layers)
    if question.ranks.dcp > 1 and not is_latent:
        raise ConfigError(f"--dcp is {question.ranks.dcp}: {question.checkpoint.name} has no latent cache to divide")
    params = question.checkpoint.params
    if question.ranks.ep and (params is None or not params.routed_experts):
        raise ConfigError(f"--ep: {question.checkpoint.name} has no experts that could be divided")
    counts = {layer.kv.heads for layer in question.checkpoint.layers if layer.kv is not None}
    heads = next((count for count in sorted(counts) if count % question.ranks.tp), None)
    if heads is not None and not is_llama(question.engine):
        raise ConfigError(f"--tp is {question.ranks.tp}, which doesn't divide the model's {heads} attention heads")


def _stage(asked: MemoryQuestion, form: WeightFormat, layers: range) -> StagePlan:
    model = asked.checkpoint
    weights = _weights(asked, form, layers)
    step = Step(
        asked.engine,
        tokens=asked.max_num_batched_tokens or 1,
        sequences=asked.max_num_seqs or default_sequences(asked.engine, asked.engine_version, asked.gpu),
        tp=asked.ranks.tp,
        version=asked.engine_version,
        is_small=asked.gpu is not None and not is_large(asked.gpu),
    )
    overhead = estimate_overhead(model, step, graph_bytes(asked.engine, asked.engine_version, asked.gpu))
    available = asked.available_kv_bytes
    if available is None and asked.gpu is not None:
        available = _left_over(asked, weights, overhead)
    stage = StagePlan(
        num_layers=len(layers),
        weights_bytes=weights,
        kv_bytes_per_token=_kv_per_token(asked, layers),
        window_bytes=_window_bytes(asked, layers),
        state_bytes=_state(asked, layers),
        overhead=overhead,
        available_bytes=available,
    )
    if available is None:
        return stage
    if asked.engine == "vllm":
        return msgspec.structs.replace(stage, blocks=_vllm(asked, layers, max(0, available)))
    return msgspec.structs.replace(stage, cells=_cells(asked, layers, max(0, available)))


def _left_over(asked: MemoryQuestion, weights: Fraction | None, overhead: Overhead | None) -> int:
    """kv_rules 6: utilisation * what a process sees - weights - the rest."""
    if weights is None or overhead is None or asked.gpu is None:
        raise ConfigError(
            f"{asked.checkpoint.name}: its widths aren't known, so what --gpu leaves can't be said; "
            "give --available-kv-gib"
        )
    use = utilization_of(asked)
    return math.floor(Fraction(str(use)) * asked.gpu.memory_bytes - weights) - overhead.total


def utilization_of(asked: MemoryQuestion) -> float:
    """The share of the GPU that was asked for, or the engine's default."""
    if asked.gpu_memory_utilization is not None:
        return asked.gpu_memory_utilization
    return default_share(asked.engine_version) if asked.engine == "vllm" else DEFAULT_UTILIZATION[asked.engine]


def _weights(asked: MemoryQuestion, form: WeightFormat, layers: range) -> Fraction | None:
    """Measured, read from the file, or counted. A file's bytes are divided as the counted ones are."""
    model = asked.checkpoint
    if asked.weights_bytes is not None:
        return Fraction(asked.weights_bytes)
    counted = weights_bytes(model, form, layers, asked.ranks, drafts=asked.drafts)
    if model.file_bytes is None or asked.weights is not None or counted is None:
        return counted
    whole = weights_bytes(model, form, range(len(model.layers)), Ranks(), drafts=asked.drafts)
    return counted * model.file_bytes / whole if whole else counted


def _own_layers(asked: MemoryQuestion, layers: range) -> list[Layer]:
    """A stage's layers; the last stage has the speculation layer too."""
    model = asked.checkpoint
    own = [model.layers[index] for index in layers]
    if asked.drafts and layers.stop == len(model.layers):
        own += model.mtp_layers[:1]
    return own


def _layer_bytes(asked: MemoryQuestion, layer: Layer) -> Fraction:
    unpacked = asked.checkpoint.is_uncompressed_mla
    return kv_bytes_per_token(layer, asked.kv_dtype, asked.ranks, is_uncompressed=unpacked)


def _kv_per_token(asked: MemoryQuestion, layers: range) -> Fraction:
    """What one more token costs, without the speculation layer: layers that keep a window count only where all do."""
    growing, windowed = _growing_and_windowed(asked, [asked.checkpoint.layers[index] for index in layers])
    return growing or windowed


def _window_bytes(asked: MemoryQuestion, layers: range) -> Fraction:
    """What layers with a window keep of one sequence that is longer than it."""
    counts = Counter(asked.checkpoint.layers[index] for index in layers)
    return sum(
        (
            count * (_layer_bytes(asked, layer) * (layer.kv.window_tokens or 0) + compressed.window_bytes(layer.kv))
            for layer, count in counts.items()
            if layer.kv is not None and _has_windows(asked)
        ),
        Fraction(0),
    )


def _has_windows(asked: MemoryQuestion) -> bool:
    """Whether the engine frees what has left a window. hitsend divides its budget as if nothing did."""
    return asked.engine != "hitsend" and (asked.engine != "vllm" or has_window_groups(asked.engine_version))


def _growing_and_windowed(asked: MemoryQuestion, layers: Sequence[Layer]) -> tuple[Fraction, Fraction]:
    """Bytes per token of layers that keep every token, and of those that keep a window of them."""
    growing = windowed = Fraction(0)
    for layer, count in Counter(layers).items():
        cost = count * _layer_bytes(asked, layer)
        if layer.kv is not None and layer.kv.window_tokens is not None and _has_windows(asked):
            windowed += cost
        else:
            growing += cost
    return growing, windowed


def _state(asked: MemoryQuestion, layers: range) -> int:
    copies = 1 + asked.drafts
    counts = Counter(asked.checkpoint.layers[index].state for index in layers)
    return copies * sum(
        count * state_bytes(state, asked.engine, asked.ranks, drafts=asked.drafts).total
        for state, count in counts.items()
        if state is not None
    )


def layer_kinds(asked: MemoryQuestion, layers: range) -> list[LayerKind]:
    """vLLM's groups: layers that keep the same are one kind. Chunked layers count as full ones: vLLM leaves its hybrid
    allocator off for them (kv_logs, Llama-4-Maverick)."""
    counts: Counter[LayerKind] = Counter()
    windows = _has_windows(asked)
    for layer, number in Counter(_own_layers(asked, layers)).items():
        cost = _layer_bytes(asked, layer)
        if layer.kv is not None and cost:
            window = layer.kv.window_tokens if windows else None
            pooled = layer.kv.indexer_pool > 1
            beside = indexer_bytes(layer.kv) / asked.ranks.dcp if pooled else Fraction(0)
            name = "full" if window is None else "sliding"
            counts[LayerKind(name, 0, cost - beside, window, 0, beside, pooled)] += number
        if layer.state is not None:
            size = state_bytes(layer.state, asked.engine, asked.ranks, drafts=asked.drafts).total
            counts[LayerKind(layer.state.kind, 0, state_bytes=size)] += number
    names: Counter[str] = Counter()
    found = []
    for kind, count in counts.items():
        names[kind.name] += 1
        label = kind.name if names[kind.name] == 1 else f"{kind.name} {names[kind.name]}"
        found.append(msgspec.structs.replace(kind, name=label, layers=count))
    return found


def _vllm(asked: MemoryQuestion, layers: range, available: int) -> BlockPlan:
    attention = [layer.kv for layer in asked.checkpoint.layers if layer.kv is not None]
    latent = any(kv.latent_dim for kv in attention)
    pool = max((kv.indexer_pool for kv in attention), default=1)
    is_amd = asked.gpu is not None and asked.gpu.name.startswith("AMD")
    request = BlockRequest(
        available_bytes=available,
        max_model_len=asked.max_model_len or 1,
        in_flight_tokens=(asked.max_num_batched_tokens or 1) * steps_in_flight(asked.engine_version, asked.ranks.pp),
        prefix_caching=asked.prefix_caching,
        drafts=asked.drafts,
        # an indexer's kernel reads 32 of its keys at once
        base_block_tokens=pool * 32 if pool > 1 else LATENT_BLOCK_TOKENS if latent and not is_amd else BLOCK_TOKENS,
        group_slack=group_slack(asked.engine_version),
    )
    if _is_compressed(asked.checkpoint):
        own = [layer.kv for layer in _own_layers(asked, layers) if layer.kv is not None]
        return compressed.plan_compressed(own, request, asked.engine_version)
    return plan_blocks(layer_kinds(asked, layers), request)


def costs_of(asked: MemoryQuestion, layers: range) -> Costs:
    """The stage's bytes, growing and windowed apart."""
    own = _own_layers(asked, layers)
    growing, windowed = _growing_and_windowed(asked, own)
    window = max((layer.kv.window_tokens or 0 for layer in own if layer.kv is not None), default=0)
    single = msgspec.structs.replace(asked, drafts=0)
    return Costs(growing=growing, windowed=windowed, window_tokens=window, state=_state(single, layers))


def _cells(asked: MemoryQuestion, layers: range, available: int) -> CellPool:
    costs, length = costs_of(asked, layers), asked.max_model_len or 1
    if asked.engine == "sglang":
        return sglang_pool(costs, available, length)
    if asked.engine == "hitsend":
        return shared_pool(costs, available, length)
    return llama_pool(costs, available, length, ubatch=asked.max_num_batched_tokens or 512, drafts=asked.drafts)


def _pool_tokens(stage: StagePlan, question: MemoryQuestion) -> int | None:
    if stage.cells is not None:
        return stage.cells.tokens
    if stage.blocks is None:
        return None
    is_new = has_new_log(question.engine_version)
    return stage.blocks.log_tokens_since if is_new else stage.blocks.log_tokens_until_0_20
