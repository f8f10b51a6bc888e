"""Rules about the engine: memory, queue, steps, cores.

Enters: `Figures`, perhaps a `Baseline`. Leaves: a `Finding`, or None where the rule doesn't hold or the server doesn't
tell what it asks. Always true: pure; a rule never takes an unknown figure for 0. Next: `rules.py`.
"""

from hitsend.inspect.baseline import Baseline
from hitsend.inspect.findings import Finding, Threshold, at_least, at_most, seen, slow_tpot, slow_ttft, sure
from hitsend.inspect.readings import Figures, over

FAILED_SHARE = Threshold(0.05)
PREEMPTED_SHARE = Threshold(0.1)
KV_SHARE, KV_SHARE_ALONE = Threshold(0.6), Threshold(0.9)
"""Held cells, where free slots show that it isn't the slots; and where nothing is known of slots."""
WAITING = Threshold(1.0)
SLOTS_SHARE = Threshold(0.9)
STALL = Threshold(5.0)
STALL_SHARE = Threshold(0.2)
LONG = Threshold(128.0)
"""Prompt tokens in a step: short prompts stall answers too, but not for long, and no smaller piece would help."""
THREADS_WAITING = Threshold(0.4)
BUSY = Threshold(0.7)
SATURATED = Threshold(0.9)
WIDE = Threshold(8.0)
MOST = Threshold(0.8)


def preemption(now: Figures, _: Baseline | None) -> Finding | None:
    """Sequences lose their cells and are computed twice."""
    share = over(now.preemptions, (now.requests or 0.0) + (now.running or 0.0))
    if not now.preemptions or share is None or share < PREEMPTED_SHARE.value:
        return None
    return Finding(
        name="preemption",
        text="Running requests lose their KV cells to others and have to be computed again.",
        confidence=sure(share, PREEMPTED_SHARE.value),
        evidence=(
            at_least("preemptions per request", share, "", PREEMPTED_SHARE),
            *seen(
                ("preemptions", now.preemptions, ""),
                ("KV held", now.kv_share, "share"),
                ("waiting", now.waiting, "requests"),
            ),
        ),
        change="Give the KV cache more memory (engine.kv_budget_bytes; vLLM: gpu_memory_utilization), or admit fewer "
        "at once (engine.num_slots, a larger engine.reserve_tokens; vLLM: max_num_seqs).",
        effect=f"{now.preemptions:.0f} prompts in this window would not have been computed a second time.",
        measure="Preemptions per minute after the change: 0 while KV held stays below 90 %.",
    )


def kv_memory_bound(now: Figures, _: Baseline | None) -> Finding | None:
    """Requests wait for cells while there are slots."""
    slots = over(now.running, now.slots)
    limit = KV_SHARE if slots is not None else KV_SHARE_ALONE
    if (now.waiting or 0.0) < WAITING.value or now.kv_share is None or now.kv_share < limit.value:
        return None
    if slots is not None and slots >= SLOTS_SHARE.value:
        return None
    return Finding(
        name="kv_memory_bound",
        text="The batch is as large as the KV memory allows: requests wait for cells, not for compute.",
        confidence=sure(now.kv_share, 0.6, is_direct=slots is not None),
        evidence=(
            at_least("waiting", now.waiting or 0.0, "requests", WAITING),
            at_least("KV held", now.kv_share, "share", limit),
            *((at_most("slots in use", slots, "share", SLOTS_SHARE),) if slots is not None else ()),
            *seen(("width of a step", now.width, "sequences"), ("mean wait", now.queue_s, "s")),
        ),
        change="Give the KV cache more memory (engine.kv_budget_bytes), or need less per token: a quantised KV cache, "
        "shorter prompts, smaller max_tokens.",
        effect=f"Those that wait would run too, with {1 + (now.waiting or 0.0) / max(1.0, now.running or 1.0):.1f} "
        "times the cells.",
        measure="`hitsend plan memory` for the model, then the same load with twice the budget.",
    )


def queue_bound(now: Figures, baseline: Baseline | None) -> Finding | None:
    """All slots are full, or requests are turned away."""
    slots = over(now.running, now.slots)
    refused = over(now.overloaded, now.requests)
    is_refusing = refused is not None and refused >= FAILED_SHARE.value
    is_waiting = (now.waiting or 0.0) >= WAITING.value
    if not is_refusing and not (is_waiting and (slots is None or slots >= SLOTS_SHARE.value)):
        return None
    evidence = []
    if is_waiting and now.waiting is not None:
        evidence.append(at_least("waiting", now.waiting, "requests", WAITING))
    if is_waiting and slots is not None:
        evidence.append(at_least("slots in use", slots, "share", SLOTS_SHARE))
    if is_refusing and refused is not None:
        evidence.append(at_least("requests refused for want of room", refused, "share", FAILED_SHARE))
    in_flight = (now.running or 0.0) + (now.waiting or 0.0)
    is_beyond = baseline is not None and baseline.tested is not None and in_flight > baseline.tested
    if is_beyond and baseline is not None and baseline.tested is not None:
        evidence.append(at_least("requests at once", in_flight, "", Threshold(baseline.tested, baseline.source)))
    is_narrow = now.width is not None and now.width < WIDE.value and now.slots is not None and not is_beyond
    return Finding(
        name="queue_bound",
        text="More requests come than are admitted: they wait for a slot.",
        confidence=sure(now.waiting or 0.0, 2.0) if slots is not None or is_refusing else "medium",
        evidence=(*evidence, *seen(("mean wait", now.queue_s, "s"), ("width of a step", now.width, "sequences"))),
        change=(
            "Raise engine.num_slots: a step this narrow has room for more sequences."
            if is_narrow
            else "Add capacity (another replica), or admit less: per-key limits and a shorter engine.max_waiting."
        ),
        effect=f"Up to {now.queue_s or 0.0:.2f} s per request: what it waits on average now; wider steps take longer.",
        measure="`hitsend load --concurrency 1,2,4,8,16,32`: where more at once brings no more tokens per second.",
    )


def long_prefills(now: Figures, baseline: Baseline | None) -> Finding | None:
    """Answers stand still while somebody's prompt is computed."""
    tpot = slow_tpot(baseline)
    stall = (
        STALL
        if baseline is None or baseline.stall is None
        else Threshold(2 * baseline.stall, f"twice {baseline.source}")
    )
    if now.mixed_step_s is not None and now.decode_step_s:
        ratio, longest, is_direct = now.mixed_step_s / now.decode_step_s, now.mixed_step_s, True
        if (now.decode_steps or 0.0) < 0.5 or (now.mixed_share or 0.0) < STALL_SHARE.value:
            return None
        if (now.piece or 0.0) < LONG.value:
            return None
    elif now.decode_step_s is None and now.itl_p50_s and now.itl_p99_s is not None and now.width is not None:
        ratio, longest, is_direct = now.itl_p99_s / now.itl_p50_s, now.itl_p99_s, False
    else:
        return None
    if ratio < stall.value or longest < tpot.value:
        return None
    what = "a step with prompts beside one without" if is_direct else "p99 beside the median between tokens"
    return Finding(
        name="long_prefills",
        text="Long prompts stall the answers that are being decoded beside them.",
        confidence=sure(ratio, stall.value, is_direct=is_direct),
        evidence=(
            at_least(what, ratio, "times", stall),
            at_least("longest pause between tokens" if not is_direct else "a step with prompts", longest, "s", tpot),
            *seen(
                ("time of steps with both", now.mixed_share, "share"),
                ("prompt tokens in such a step", now.piece, ""),
                ("prompts' part of the time", now.prefill_share, "share"),
            ),
        ),
        change="Compute prompts in smaller pieces: lower engine.tpot_target_s or engine.step_tokens (vLLM: "
        "max_num_batched_tokens, SGLang: chunked-prefill-size).",
        effect=f"Half as many tokens per step make the pauses about {longest / 2:.2f} s instead of {longest:.2f} s; "
        "first tokens of long prompts come a little later.",
        measure="p99 of hitsend_inter_token_latency_seconds against its median, before and after.",
    )


def engine_starved(now: Figures, _: Baseline | None) -> Finding | None:
    """Others have the cores that it computes on."""
    waiting = now.threads_waiting
    if waiting is None or waiting < THREADS_WAITING.value or (now.busy or 0.0) < 0.3:
        return None
    return Finding(
        name="engine_starved",
        text="The engine's threads wait for cores that other processes have.",
        confidence=sure(waiting, THREADS_WAITING.value),
        evidence=(
            at_least("threads ready without a core, while it computes", waiting, "threads", THREADS_WAITING),
            *seen(("engine's threads", now.threads, ""), ("time per output token", now.tpot_s, "s")),
        ),
        change="Free the cores: move the other process, raise this one's CPU limit, or set engine.num_threads to the "
        "cores that are really its own.",
        effect="All threads wait for the slowest in every layer: one stolen core slows a step down as if several were.",
        measure='hitsend_process_cpu_wait_seconds_total{process="engine"} beside `top`: who has the cores.',
    )


def prefix_cache_missing(now: Figures, baseline: Baseline | None) -> Finding | None:
    """Prompts are computed that used to be in the cache, or could be."""
    share, prefill = now.cached_share, now.prefill_share
    if share is None or (now.prompt_tokens or 0.0) < 1000:
        return None
    if baseline is not None and (baseline.cached_share or 0.0) >= 0.1:
        limit = Threshold(round((baseline.cached_share or 0.0) / 2, 4), f"half of {baseline.source}")
        is_direct = True
    elif now.has_prefix_cache and prefill is not None and prefill >= 0.4:
        limit, is_direct = Threshold(0.05), False
    else:
        return None
    if share > limit.value:
        return None
    return Finding(
        name="prefix_cache_missing",
        text="Prompts find little of themselves in the prefix cache, and are computed from their start.",
        confidence="high" if is_direct else "low",
        evidence=(
            at_most("prompt tokens from the cache", share, "share", limit),
            *seen(("prompts' part of the time", prefill, "share"), ("prompt tokens", now.prompt_tokens, "")),
        ),
        change="Keep what changes (dates, names, ids) behind what is shared: the first different token ends the match.",
        effect="Each hit saves the time of its prompt tokens; prompts that share nothing gain nothing.",
        measure="`hitsend inspect ID --explain` of two requests that should share: where the cache missed.",
    )


def prefill_bound(now: Figures, baseline: Baseline | None) -> Finding | None:
    """Prompts take the compute."""
    prefill, ttft = now.prefill_share, slow_ttft(baseline)
    if prefill is None or prefill < 0.5:
        return None
    is_busy = now.busy is not None and now.busy >= BUSY.value
    is_slow = now.ttft_s is not None and now.ttft_s >= ttft.value
    if (
        not is_busy
        and not is_slow
        and (now.busy is not None or now.ttft_s is not None or (now.running or 0.0) < BUSY.value)
    ):
        return None
    evidence = [at_least("prompts' part of the time", prefill, "share", Threshold(0.5))]
    if is_busy and now.busy is not None:
        evidence.append(at_least("busy", now.busy, "share", BUSY))
    if is_slow and now.ttft_s is not None:
        evidence.append(at_least("mean time to first token", now.ttft_s, "s", ttft))
    computed = (now.prompt_tokens or 0.0) - (now.cached_tokens or 0.0)
    return Finding(
        name="prefill_bound",
        text="Computing prompts takes the time: compute, not memory, is the limit.",
        confidence=sure(prefill, 0.5, is_direct=is_busy),
        evidence=(*evidence, *seen(("prompt tokens computed", computed / now.window_s, "tokens/s"))),
        change="Compute fewer prompt tokens: share a prefix and cache it, shorten the prompts; then faster arithmetic.",
        effect=f"Half the prompt tokens save about {prefill / 2:.0%} of the engine's time.",
        measure="`hitsend load --input 128,512,2048 --output 1`: prompt tokens per second that this machine can do.",
    )


def decode_bound(now: Figures, baseline: Baseline | None) -> Finding | None:
    """Each step reads all weights for one token per sequence."""
    if not now.output_tokens or (now.prefill_share or 0.0) >= 0.5:
        return None
    tpot, evidence = slow_tpot(baseline), []
    rate = now.output_per_s or 0.0
    is_full = (now.busy or 0.0) >= SATURATED.value and (now.width or 0.0) >= WIDE.value
    # of long answers none may have ended yet: a step without prompts is a token of each
    token_s = now.tpot_s if now.tpot_s is not None else now.decode_step_s
    if token_s is not None and token_s >= tpot.value:
        evidence.append(at_least("mean time per output token", token_s, "s", tpot))
    if baseline is not None and baseline.most_per_s is not None and rate >= MOST.value * baseline.most_per_s:
        most = Threshold(
            round(MOST.value * baseline.most_per_s, 2), f"{MOST.value:.0%} of the most in {baseline.source}"
        )
        evidence.append(at_least("output", rate, "tokens/s", most))
    if is_full and now.busy is not None and now.width is not None:
        evidence.append(at_least("busy", now.busy, "share", SATURATED))
        evidence.append(at_least("width of a step", now.width, "sequences", WIDE))
    if not evidence:
        return None
    is_wide = (now.width or 0.0) >= WIDE.value
    return Finding(
        name="decode_bound",
        text="Decoding is the limit: every step reads the weights from memory for one token per sequence.",
        confidence="high" if len(evidence) > 1 else "medium" if now.busy is not None else "low",
        evidence=(*evidence, *seen(("tokens per second", rate, "tokens/s"), ("a step", now.decode_step_s, "s"))),
        change=(
            "Read fewer bytes per token: smaller weights (a stronger quantisation), or more memory bandwidth."
            if is_wide
            else "Get more out of each pass: speculative decoding, or smaller weights."
        ),
        effect="Time per token falls about as the bytes of the weights do: half the bytes, close to half the time.",
        measure="`hitsend load --concurrency 1,4,16 --input 32 --output 128`: tokens per second flat from where on?",
    )
