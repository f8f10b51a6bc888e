"""What each engine's log prints, and what the planner says to it.

Enters: a question and a record's `reported` numbers. Leaves: `Reading`s. Always true: rounding is the log's own (two
decimals of a GiB are worth some blocks); token counts of hybrids are compared with the formula of the version that
printed them. Next: `logs.py`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.blocks import BLOCK_TOKENS, BlockPlan
from hitsend.plan.cells import padded, window_cells
from hitsend.plan.explain import advise
from hitsend.plan.facts import Gpu
from hitsend.plan.memory import MemoryQuestion, costs_of, plan_memory
from hitsend.plan.sizes import state_bytes
from hitsend.plan.versions import has_new_log, number_of

GIB, MIB = 2**30, 2**20
_MOST_BLOCKS = 400_000


class Reading(msgspec.Struct, frozen=True):
    """One number, logged and planned. `rounding`: how far the log's own rounding may be off."""

    test: str
    quantity: str
    logged: float
    planned: float
    rounding: float = 0.0
    note: str = ""


def vllm_rows(question: MemoryQuestion, reported: Mapping[str, Any], gpu: Gpu | None) -> Iterator[Reading]:
    """Blocks, tokens, concurrency."""
    printed = (reported.get("max_concurrency") or {}).get("x")
    tokens = reported.get("gpu_kv_cache_size_tokens")
    blocks = reported.get("num_gpu_blocks") or reported.get("num_gpu_blocks_after")
    available = next((reported[key] for key in _FREE if reported.get(key)), None)
    if available is not None:
        asked = msgspec.structs.replace(question, available_kv_bytes=int(available * GIB), gpu=gpu)
        yield from _pool_rows("pool", asked, printed, tokens, blocks)
        yield from _refusal_rows(asked, reported)
        if reported.get("outcome") and "too small" in str(reported["outcome"]):
            fits = plan_memory(asked).fits
            yield Reading("pool", "refused", 1.0, 0.0 if fits else 1.0, note="the engine refused to start")
    elif printed or (isinstance(tokens, int) and question.checkpoint.layers):
        yield from _solved(question, printed, tokens, blocks)
    elif reported.get("needed_gib"):
        # what one request needs doesn't depend on what was free
        alone = {"needed_gib": reported["needed_gib"]}
        yield from _refusal_rows(msgspec.structs.replace(question, available_kv_bytes=1), alone)
    if gpu is not None and question.gpu_memory_utilization and (printed or tokens or blocks or available):
        asked = msgspec.structs.replace(question, gpu=gpu)
        try:
            note = _left_over(asked, gpu, reported)
            if printed or tokens or blocks:
                for row in _pool_rows("gpu", asked, printed, tokens if not printed else None, blocks):
                    yield msgspec.structs.replace(row, note=note)
            else:
                planned = plan_memory(asked).stage.available_bytes or 0
                yield Reading("gpu", "available GiB", float(available or 0), planned / GIB, note=note)
        except ConfigError:
            return


def _refusal_rows(asked: MemoryQuestion, reported: Mapping[str, Any]) -> Iterator[Reading]:
    """An engine that didn't start says what it wanted, and what length would have fitted."""
    needed, longest = reported.get("needed_gib"), reported.get("estimated_max_len")
    plan = plan_memory(asked)
    if needed and plan.stage.blocks is not None:
        yield Reading("pool", "needed GiB", needed, float(plan.stage.blocks.needed_bytes) / GIB, 0.0051)
    if longest:
        yield Reading("pool", "longest", longest, advise(plan).longest_len or 0, BLOCK_TOKENS)


def _left_over(asked: MemoryQuestion, gpu: Gpu, reported: Mapping[str, Any]) -> str:
    """What the log left for neither weights nor cache, beside the estimate."""
    stage = plan_memory(asked).stage
    free = next((reported[key] for key in _FREE if reported.get(key)), None)
    loaded = reported.get("model_loading_gib") or reported.get("model_weights_gb")
    if free is None or loaded is None or stage.overhead is None or stage.weights_bytes is None:
        return ""
    left = (asked.gpu_memory_utilization or 0) * gpu.memory_bytes / GIB - loaded - free
    return (
        f"weights {loaded:.2f} GiB logged, {float(stage.weights_bytes) / GIB:.2f} planned; "
        f"overhead {left:.2f} left over in the log, {stage.overhead.total / GIB:.2f} estimated"
    )


_FREE = ("available_kv_cache_gib", "available_kv_cache_gib_per_rank", "kv_cache_gib")


def _pool_rows(
    test: str, asked: MemoryQuestion, printed: float | None, tokens: Any, blocks: int | None
) -> Iterator[Reading]:
    plan = plan_memory(asked).stage.blocks
    if plan is None:
        return
    if printed:
        yield Reading(test, "concurrency", printed, float(plan.max_concurrency), 0.006)
    if isinstance(tokens, int):
        yield _tokens(test, plan, asked.engine_version, tokens)
    if blocks:
        yield Reading(test, "blocks", blocks, plan.num_blocks, 1.0)


def _tokens(test: str, plan: BlockPlan, version: str | None, tokens: int) -> Reading:
    """A version that isn't known may have printed either formula; the note says which it must have been."""
    newer, older = plan.log_tokens_since, plan.log_tokens_until_0_20
    one_block = min((size for size in plan.block_tokens.values() if size), default=1)
    if number_of(version) is not None:
        return Reading(test, "tokens", tokens, newer if has_new_log(version) else older, one_block)
    best = min((newer, older), key=lambda planned: abs(planned - tokens))
    note = "" if newer == older else f"version not known; {'newer' if best == newer else 'older'} log formula"
    return Reading(test, "tokens", tokens, best, one_block, note)


def _solved(question: MemoryQuestion, printed: float | None, tokens: Any, blocks: int | None) -> Iterator[Reading]:
    """The bytes weren't printed. The number of blocks that reproduces the concurrency must reproduce the tokens too."""
    asked = msgspec.structs.replace(question, available_kv_bytes=1)
    plan = plan_memory(asked).stage.blocks
    if plan is None or not plan.request_blocks:
        return
    if blocks and printed:
        planned = msgspec.structs.replace(plan, num_blocks=blocks)
        yield Reading("solved", "concurrency", printed, float(planned.max_concurrency), 0.006, f"{blocks} blocks")
        return
    if not isinstance(tokens, int):
        return
    near = _candidates(plan, printed, tokens)
    found = [
        (abs(_told(plan, count, is_new=is_new) - tokens), count, is_new)
        for count in near
        for is_new in _formulas(question.engine_version)
    ]
    if not found:
        return
    _, count, is_new = min(found)
    one_block = min((size for size in plan.block_tokens.values() if size), default=1)
    note = f"{count} blocks of {plan.request_blocks} a request, {'newer' if is_new else 'older'} log formula"
    # a new-formula count is one of few values, so it must come out to the token; an old one is a multiple of a block
    yield Reading("solved", "tokens", tokens, _told(plan, count, is_new=is_new), 0 if is_new else one_block - 1, note)


def _candidates(plan: BlockPlan, printed: float | None, tokens: int) -> list[int]:
    if printed:
        low, high = ((printed + side * 0.0051) * plan.request_blocks for side in (-1, 1))
        return list(range(max(1, math.floor(low)), math.ceil(high) + 1))
    newer = tokens / plan.max_model_len * plan.request_blocks
    smallest = min((size for size in plan.block_tokens.values() if size), default=1)
    older = tokens // smallest * sum(plan.groups.values())
    return [count for middle in (round(newer), older) for count in range(max(1, middle - 2), middle + 8)]


def _formulas(version: str | None) -> tuple[bool, ...]:
    return (True, False) if number_of(version) is None else (has_new_log(version),)


def _told(plan: BlockPlan, count: int, *, is_new: bool) -> int:
    planned = msgspec.structs.replace(plan, num_blocks=count)
    return planned.log_tokens_since if is_new else planned.log_tokens_until_0_20


def sglang_rows(question: MemoryQuestion, reported: Mapping[str, Any], gpu: Gpu | None) -> Iterator[Reading]:
    """SGLang prints tokens and GiB (as GB) of keys and values, and the states' slots and sizes."""
    tokens = reported.get("kv_tokens")
    printed = reported.get("kv_gb_actual_incl_indexer") or reported.get("kv_gb")
    if printed is None and reported.get("k_gb"):
        printed = reported["k_gb"] + reported["v_gb"]
    planned = plan_memory(question)
    if tokens and printed:
        size = float(planned.stage.kv_bytes_per_token) * tokens / GIB
        yield Reading("bytes", "KV GiB", printed, size, 0.011)
    if tokens and gpu is not None and question.gpu_memory_utilization and question.checkpoint.hidden:
        found = plan_memory(msgspec.structs.replace(question, gpu=gpu))
        yield Reading("gpu", "tokens", tokens, found.pool_tokens or 0)
    if tokens and reported.get("available_kv_cache_gib"):
        free = int(reported["available_kv_cache_gib"] * GIB)
        pool = plan_memory(msgspec.structs.replace(question, available_kv_bytes=free)).stage.cells
        if pool is not None:
            yield Reading("pool", "tokens", tokens, pool.tokens)
            if pool.state_slots:
                yield Reading("pool", "state slots", reported.get("mamba_slots") or 0, pool.state_slots, 1.0)
    slots = reported.get("mamba_slots")
    states = [layer.state for layer in question.checkpoint.layers if layer.state is not None]
    if not slots or not states:
        return
    sizes = [state_bytes(state, "sglang", question.ranks) for state in states]
    matrix = sum(size.matrix for size in sizes) * (slots + 1) / GIB
    logged = reported.get("ssm_state_gb") or reported.get("ssm_gb")
    conv = sum(size.conv for size in sizes) * (slots + 1) / GIB
    if logged is None and reported.get("mamba_gb"):
        logged, matrix = reported["mamba_gb"], matrix + conv
    if logged is None:
        return
    # the config's float32 can be overruled on SGLang's command line, and the log shows only the size
    halved = matrix / 2 if abs(matrix / 2 - logged) < abs(matrix - logged) else matrix
    note = "" if halved == matrix else "state in 16 bit, set on the command line"
    yield Reading("bytes", "state GiB", logged, halved, 0.011, note)


def llama_rows(question: MemoryQuestion, reported: Mapping[str, Any], _gpu: Gpu | None) -> Iterator[Reading]:
    """llama.cpp prints cells and MiB."""
    # the speculation layer has a context, and a line, of its own
    plain = msgspec.structs.replace(question, drafts=0)
    costs = costs_of(plain, range(len(question.checkpoint.layers)))
    cells = reported.get("cells") or reported.get("n_ctx") or question.max_model_len or 0
    cells *= reported.get("streams") or 1
    logged = next(
        (reported[key] for key in ("kv_full_mib", "kv_mib", "kv_mb", "kv_mib_f16") if reported.get(key)), None
    )
    if logged:
        yield Reading("bytes", "KV MiB", logged, float(costs.growing) * cells / MIB, 0.006)
    for key, value in reported.items():
        if key.startswith("kv_mib_") and key[7:].isdecimal():
            yield Reading("bytes", f"KV MiB at {key[7:]}", value, float(costs.growing) * int(key[7:]) / MIB, 0.006)
    if reported.get("kv_mib_q8_0"):
        half = costs_of(msgspec.structs.replace(plain, kv_dtype="q8_0"), range(len(question.checkpoint.layers)))
        yield Reading("bytes", "KV MiB q8_0", reported["kv_mib_q8_0"], float(half.growing) * cells / MIB, 0.006)
    if reported.get("kv_swa_mib"):
        window = reported.get("swa_cells") or padded(costs.window_tokens)
        yield Reading("bytes", "window MiB", reported["kv_swa_mib"], float(costs.windowed) * window / MIB, 0.006)
        yield from _window_rule(costs.window_tokens, int(window), int(cells), int(reported.get("seqs") or 0))
    if reported.get("n_embd_k_gqa"):
        whole = (reported["n_embd_k_gqa"] + reported["n_embd_v_gqa"]) * reported["layers"] * 2
        yield Reading("bytes", "KV bytes a token", whole, float(costs.growing))
    if reported.get("kv_lora_rank"):
        latent = (reported["kv_lora_rank"] + reported["n_embd_head_qk_rope"]) * len(question.checkpoint.layers) * 2
        yield Reading("bytes", "KV bytes a token", latent, float(costs.growing))
    logged = reported.get("rs_mib") or reported.get("rs_mib_mtp")
    if logged:
        yield _state_row(costs.state, float(logged), reported, question.drafts)


def _window_rule(window: int, logged: int, cells: int, seqs: int) -> Iterator[Reading]:
    """pad256(window * sequences + ubatch): the ubatch isn't printed, so the usual ones are tried."""
    counts = [seqs] if seqs else [1, 4]
    for count in counts:
        for ubatch in (512, 2048, 1024, 256, 128):
            note = f"{count} sequences, ubatch {ubatch}"
            if window_cells(window, count, ubatch, cells) == logged:
                yield Reading("bytes", "window cells", logged, logged, note=note)
                return
            # until autumn 2025 the step was 32 without flash attention
            if -(-(window * count + ubatch) // 32) * 32 == logged:
                yield Reading("bytes", "window cells", logged, logged, note=f"{note}, rounded to 32")
                return
    if logged == cells:
        yield Reading("bytes", "window cells", logged, cells, note="--swa-full")
        return
    yield Reading("bytes", "window cells", logged, window_cells(window, counts[0], 512, cells))


def _state_row(one: int, logged: float, reported: Mapping[str, Any], drafts: int) -> Reading:
    """One copy per sequence and draft. Neither count is always printed: then the nearest whole number of copies."""
    size = one / MIB
    copies = (reported.get("seqs") or reported.get("rs_cells") or 1) * (1 + (reported.get("rs_seq") or drafts))
    note = ""
    if abs(size * copies - logged) > 0.01 and size:
        copies = max(1, round(logged / size))
        note = f"{copies} copies (sequences x (1 + drafts)), counted from the size"
    return Reading("bytes", "state MiB", logged, size * copies, 0.006, note)
