"""A memory plan in words: every formula with its numbers, what would fit, and what breaks first.

Enters: a `MemoryPlan`. Leaves: lines of text, and the JSON document of `hitsend plan memory`. Always true: the numbers
in a line are the ones that were used; an estimate is called one; what nobody has re-read is said. Next: `logs.py`.
"""

from collections import Counter
from fractions import Fraction
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.blocks import BlockPlan
from hitsend.plan.checkpoint import KvLayer, Layer, StateLayer
from hitsend.plan.formats import has_cache, kv_bytes, weight_format
from hitsend.plan.memory import MemoryPlan, MemoryQuestion, plan_memory, utilization_of
from hitsend.plan.sizes import Ranks, kv_bytes_per_token, latent_row_bytes, state_bytes

GIB = 2**30
_TP_TRIES = (1, 2, 4, 8, 16)
_WEIGHT_TRIES = ("bf16", "fp8", "int4")


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What would fit. None: nothing does, or nobody said what there is."""

    breaks_first: str
    longest_len: int | None = None
    smallest_tp: int | None = None
    lighter_weights: str | None = None


def explain(plan: MemoryPlan) -> list[str]:
    """The arithmetic, one line each."""
    lines = [_weights_line(plan), *_kv_lines(plan), *_state_lines(plan)]
    question, stage = plan.question, plan.stage
    context = question.checkpoint.context
    if context is not None and plan.max_model_len > context:
        lines.append(f"length: {plan.max_model_len:,} tokens are more than the model's own context of {context:,}")
    lines += _notes(plan)
    if question.ranks.dp > 1 or question.ranks.ep:
        lines.append(_groups_line(plan))
    if plan.num_stages > 1:
        lines.append(f"pipeline: the tightest of {plan.num_stages} stages holds {stage.num_layers} layers")
    if stage.available_bytes is not None:
        lines.append(_free_line(plan))
    if stage.blocks is not None:
        lines += _block_lines(stage.blocks, max(0, stage.available_bytes or 0))
    if stage.cells is not None:
        lines.append(_cell_line(plan))
    lines += [f"not re-read: {what}" for what in question.checkpoint.uncertain]
    model = question.checkpoint
    lines.append(f"source of the shapes: {model.source}" + (f", as of {model.as_of}" if model.as_of else ""))
    return lines


def _notes(plan: MemoryPlan) -> list[str]:
    """What was asked for and can't be had just so. It is planned all the same."""
    question = plan.question
    model, found = question.checkpoint, []
    if not has_cache(question.engine, plan.kv_dtype):
        found.append(
            f"--kv-dtype: {question.engine} has no cache in {plan.kv_dtype}; the sizes are those it would have"
        )
    if question.drafts and not model.mtp_layers:
        found.append(f"--mtp: {model.name} has no layers that draft; a model that drafts beside it isn't counted")
    return found


def _weights_line(plan: MemoryPlan) -> str:
    model, whole = plan.question.checkpoint, plan.whole_weights_bytes
    params = model.params
    if whole is None or plan.stage.weights_bytes is None or params is None:
        return "weights: unknown, the widths of this model weren't captured"
    rank = f"{_gib(plan.stage.weights_bytes)} per GPU, {_gib(whole)} in all"
    if model.file_bytes is not None and plan.question.weights is None:
        return f"weights: {rank}: {len(model.tensors):,} tensors of the file, {model.file_bytes:,} B exactly"
    form = weight_format(plan.weights)
    each = f"{float(form.bytes_per_param):.4g} B each" + (", an average over whole files" if form.is_average else "")
    rest = "" if form.is_everything else "; embedding, head, norms and routers 2 B"
    return (
        f"weights: {rank}: {params.total:,} parameters ({params.active:,} active) in {plan.weights}, {each}{rest}: "
        f"embedding {params.embedding:,}, attention {params.attention:,}, recurrent {params.recurrent:,}, "
        f"MLP {params.mlp + params.shared_experts:,}, experts {params.routed_experts:,}, head {params.head:,}"
        + (f", towers and tables that are only looked up {params.other:,}" if params.other else "")
    )


def _groups_line(plan: MemoryPlan) -> str:
    """How groups of ranks divide the model, and what they hold together."""
    ranks, params = plan.question.ranks, plan.question.checkpoint.params
    count = ranks.tp * ranks.dp
    told = f"data parallel: {ranks.dp} groups of {ranks.tp} GPUs, each with its own sequences and cache"
    if params is not None and params.routed_experts:
        how = "whole experts" if ranks.ep else "by width"
        told += f"; experts are divided over all {count} ({how}), the rest is in every group"
    concurrency = plan.stage.max_concurrency
    return told if concurrency is None else f"{told}; together {float(concurrency * ranks.dp):,.2f} sequences at once"


def _kv_lines(plan: MemoryPlan) -> list[str]:
    question = plan.question
    counts: Counter[KvLayer] = Counter()
    shared = 0
    for layer in question.checkpoint.layers:
        if layer.kv is not None and not layer.shares_kv:
            counts[layer.kv] += 1
        shared += layer.shares_kv
    lines = [_kv_line(plan, kv, count) for kv, count in counts.items()]
    if shared:
        lines.append(f"KV per token: {shared} layers share an earlier layer's and keep nothing")
    total = f"KV per token: {_number(plan.stage.kv_bytes_per_token)} B per GPU"
    window = plan.stage.window_bytes
    held = f"; layers with a window keep {_number(window)} B of a long sequence and grow no further" if window else ""
    return [*lines, f"{total}, {_number(plan.whole_kv_bytes_per_token)} B in all{held}"]


def _kv_line(plan: MemoryPlan, kv: KvLayer, count: int) -> str:
    ranks, name = plan.question.ranks, plan.kv_dtype
    element = _number(kv_bytes(name))
    unpacked = plan.question.checkpoint.is_uncompressed_mla
    each = kv_bytes_per_token(Layer(kv=kv), name, ranks, is_uncompressed=unpacked)
    if kv.latent_dim is not None and not unpacked:
        packed = name.casefold() == "fp8_ds_mla"
        row = f"{_number(latent_row_bytes(kv, name))} B (packed)"
        row = row if packed else f"({kv.latent_dim} + {kv.rope_dim}) x {element} B"
        indexer = f" + {kv.indexer_dim} + 4 B indexer" if kv.indexer_dim else ""
        if kv.compress_ratio > 1:
            row, indexer = f"({row}{indexer}) / {kv.compress_ratio} tokens", ""
        elif kv.indexer_pool > 1:
            indexer = f" + ({kv.indexer_dim} + 4 B indexer) / {kv.indexer_pool} tokens"
        if kv.window_tokens is not None:
            row = f"{row}, window {kv.window_tokens:,}"
        split = f" / {ranks.dcp} (decode context parallel)" if ranks.dcp > 1 else ", on every rank"
        return f"KV per token: {count} latent layers x ({row}{indexer}){split} = {_number(each * count)} B ({name})"
    heads = f"{kv.kv_heads} KV heads"
    if unpacked:
        heads = f"{kv.heads} heads (a GGUF without the latent tensors)"
    if ranks.tp > 1:
        copied = kv.kv_heads < ranks.tp and not unpacked
        heads = f"1 KV head (of {kv.kv_heads}, copied over {ranks.tp} ranks)" if copied else f"{heads} / {ranks.tp}"
    kind = "full" if kv.window_tokens is None else f"window {kv.window_tokens:,}"
    if kv.chunk_tokens is not None:
        kind = f"chunk {kv.chunk_tokens:,}"
    dims = f"({kv.key_dim} + {kv.value_dim})"
    return f"KV per token: {count} {kind} layers x {heads} x {dims} x {element} B ({name}) = {_number(each * count)} B"


def _state_lines(plan: MemoryPlan) -> list[str]:
    question = plan.question
    counts: Counter[StateLayer] = Counter(
        layer.state for layer in question.checkpoint.layers if layer.state is not None
    )
    lines = []
    for state, count in counts.items():
        size = state_bytes(state, question.engine, question.ranks, drafts=question.drafts)
        columns = state.kernel - 1 + (question.drafts if question.engine == "vllm" else 0)
        channels = state.conv_channels
        copies = f" x (1 + {question.drafts} drafts)" if question.drafts else ""
        lines.append(
            f"state per sequence: {count} {state.kind} layers x ({columns} x {channels:,} channels: {size.conv:,} B + "
            f"{state.value_heads} x {state.key_dim} x {state.value_dim}: {size.matrix:,} B per GPU){copies} = "
            f"{size.total * count * (1 + question.drafts):,} B, however long the sequence is"
        )
    return lines


def _free_line(plan: MemoryPlan) -> str:
    question, stage = plan.question, plan.stage
    if question.available_kv_bytes is not None or question.gpu is None or stage.overhead is None:
        return f"free for the cache: {_gib(stage.available_bytes or 0)} per GPU, as given"
    use = utilization_of(question)
    over = stage.overhead
    return (
        f"free for the cache: {use:g} x {_gib(question.gpu.memory_bytes)} ({question.gpu.name}) - "
        f"{_gib(stage.weights_bytes or 0)} weights - {_gib(over.total)} overhead = {_gib(stage.available_bytes or 0)}; "
        f"overhead is an estimate: context {_gib(over.context)}, links {_gib(over.links)}, activations of "
        f"{plan.batch_tokens:,} tokens {_gib(over.activations)}, graphs {_gib(over.graphs)}"
    )


def _block_lines(blocks: BlockPlan, available: int) -> list[str]:
    groups = ", ".join(
        f"{count} x {name}"
        + (f" (blocks of {blocks.block_tokens[name]:,} tokens)" if blocks.block_tokens[name] else "")
        for name, count in blocks.groups.items()
    )
    padding = f", {blocks.padding_layers} padding layers are paid for" if blocks.padding_layers else ""
    parts = " + ".join(f"{count:,} {name}" for name, count in blocks.blocks_per_request.items())
    page = _number(blocks.page_bytes)
    beside = f"({page} B + {_number(blocks.beside_bytes)} B of indexers)" if blocks.beside_bytes else f"{page} B"
    what = f"{parts} = {blocks.request_blocks:,} blocks"
    if blocks.whole_request_blocks is not None:
        what = f"{parts} blocks, in bytes {blocks.request_blocks:,} of the first group's"
    concurrency = f"{blocks.num_blocks:,} / {blocks.request_blocks:,} = {float(blocks.max_concurrency):.2f}"
    one = f"one request of {blocks.max_model_len:,} tokens: {what}"
    before = "" if blocks.whole_request_blocks is not None else f", {blocks.log_tokens_until_0_20:,} before"
    checked = f"; at its start vLLM wants {_gib(blocks.needed_bytes)} for it" if blocks.checked_bytes else ""
    return [
        f"groups of {blocks.group_layers} layers: {groups}; page {page} B{padding}",
        f"blocks: floor({available:,} B / ({blocks.group_layers} x {beside})) = {blocks.num_blocks:,}",
        f"{one}; concurrency {concurrency}{checked}",
        f"vLLM's log says {blocks.log_tokens_since:,} tokens since 0.20.1{before}",
    ]


def _cell_line(plan: MemoryPlan) -> str:
    cells = plan.stage.cells
    if cells is None:
        return ""
    slots = "" if cells.state_slots is None else f", {cells.state_slots:,} state slots"
    how = {
        "sglang": "tokens = bytes / KV per token, recurrent states get 9/19 of the bytes first",
        "llama.cpp": "one rectangle of cells, rounded to 256, one state per sequence and draft",
        "hitsend": "cells shared by all sequences, rounded to 256, one state per slot",
    }[plan.question.engine]
    many = f"{float(cells.sequences):.2f} sequences of {plan.max_model_len:,}"
    return f"pool: {cells.tokens:,} tokens{slots}; {many} ({how})"


def advise(plan: MemoryPlan) -> Advice:
    """What would fit, by trying; each try is a whole plan."""
    if plan.fits is None:
        return Advice(breaks_first="unknown: say --gpu or --available-kv-gib")
    question = plan.question
    longest = _longest(question, plan.max_model_len)
    if plan.fits:
        concurrency = int(plan.stage.max_concurrency or 0)
        what = "state" if _state_share(plan) > 0.5 else "keys and values"
        return Advice(
            breaks_first=f"sequence {concurrency + 1} of {plan.max_model_len:,} tokens: the pool ({what}) is full",
            longest_len=longest,
        )
    first = _what_breaks(plan)
    can_change = question.gpu is not None and question.available_kv_bytes is None
    return Advice(
        breaks_first=first,
        longest_len=longest,
        smallest_tp=_smallest_tp(question) if can_change else None,
        lighter_weights=_lighter(question) if can_change else None,
    )


def _what_breaks(plan: MemoryPlan) -> str:
    stage, question = plan.stage, plan.question
    free = stage.available_bytes or 0
    if free <= 0 and question.gpu is not None:
        return (
            f"the weights: {_gib(stage.weights_bytes or 0)} and {_gib(stage.overhead.total if stage.overhead else 0)} "
            f"overhead on {_gib(question.gpu.memory_bytes)}, nothing is left for a cache"
        )
    return f"the cache: one sequence of {plan.max_model_len:,} tokens doesn't fit into {_gib(free)}"


def _state_share(plan: MemoryPlan) -> float:
    growing = float(plan.stage.kv_bytes_per_token) * plan.max_model_len
    return plan.stage.state_bytes / ((growing + plan.stage.state_bytes) or 1)


def _fits(question: MemoryQuestion) -> bool:
    try:
        return bool(plan_memory(question).fits)
    except ConfigError:
        return False


def _longest(question: MemoryQuestion, length: int) -> int | None:
    """By halving, between 1 and the model's own context."""
    high = max(question.checkpoint.context or 0, length)
    if _fits(msgspec.structs.replace(question, max_model_len=high)):
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits(msgspec.structs.replace(question, max_model_len=middle))
        low, high = (middle, high) if fits else (low, middle)
    return low or None


def _smallest_tp(question: MemoryQuestion) -> int | None:
    ranks = question.ranks
    return next((tp for tp in _TP_TRIES if _fits(msgspec.structs.replace(question, ranks=with_tp(ranks, tp)))), None)


def with_tp(ranks: Ranks, tp: int) -> Ranks:
    """The same groups and stages of other tensor ranks."""
    return msgspec.structs.replace(ranks, tp=tp, dcp=1)


def _lighter(question: MemoryQuestion) -> str | None:
    return next((name for name in _WEIGHT_TRIES if _fits(msgspec.structs.replace(question, weights=name))), None)


def document(plan: MemoryPlan) -> dict[str, Any]:
    """What `--json` prints. Sizes are bytes per GPU unless their name ends in `_whole`."""
    stage, question, advice = plan.stage, plan.question, advise(plan)
    params = question.checkpoint.params
    return {
        "model": question.checkpoint.name,
        "architecture": question.checkpoint.architecture,
        "engine": question.engine,
        "max_model_len": plan.max_model_len,
        "weights_bytes": _whole(stage.weights_bytes),
        "weights_bytes_whole": _whole(plan.whole_weights_bytes),
        "kv_bytes_per_token": _whole(stage.kv_bytes_per_token),
        "kv_bytes_per_token_whole": _whole(plan.whole_kv_bytes_per_token),
        "window_bytes_per_sequence": _whole(stage.window_bytes),
        "state_bytes_per_sequence": stage.state_bytes,
        "state_bytes_per_sequence_whole": plan.whole_state_bytes,
        "overhead_bytes": None if stage.overhead is None else stage.overhead.total,
        "overhead": None if stage.overhead is None else msgspec.to_builtins(stage.overhead),
        "kv_pool_bytes": None if stage.available_bytes is None else max(0, stage.available_bytes),
        "kv_pool_tokens": plan.pool_tokens,
        "max_concurrency": None if stage.max_concurrency is None else round(float(stage.max_concurrency), 4),
        "max_concurrency_whole": None
        if stage.max_concurrency is None
        else round(float(stage.max_concurrency * question.ranks.dp), 4),
        "gpus": question.ranks.tp * question.ranks.pp * question.ranks.dp,
        "fits": plan.fits,
        "blocks": None if stage.blocks is None else _blocks_document(stage.blocks),
        "breaks_first": advice.breaks_first,
        "would_fit": {
            "longest_len": advice.longest_len,
            "smallest_tp": advice.smallest_tp,
            "weights": advice.lighter_weights,
        },
        "parameters": None
        if params is None
        else msgspec.to_builtins(params)
        | {
            "total": params.total,
            "active": params.active,
        },
        "kv_dtype": plan.kv_dtype,
        "weights": plan.weights,
        "explain": explain(plan),
    }


def _blocks_document(blocks: BlockPlan) -> dict[str, Any]:
    return {
        "num_blocks": blocks.num_blocks,
        "block_tokens": blocks.block_tokens,
        "page_bytes": _whole(blocks.page_bytes),
        "group_layers": blocks.group_layers,
        "groups": blocks.groups,
        "blocks_per_request": blocks.request_blocks,
        "needed_bytes": _whole(blocks.needed_bytes),
        "state_copies": blocks.state_copies,
        "log_tokens": blocks.log_tokens_since,
        "log_tokens_until_0_20": blocks.log_tokens_until_0_20,
    }


def _whole(value: Fraction | None) -> int | float | None:
    if value is None:
        return None
    return value.numerator if value.denominator == 1 else round(float(value), 4)


def _number(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.4f}".rstrip("0")


def _gib(value: Fraction | float) -> str:
    return f"{float(value) / GIB:,.2f} GiB"
