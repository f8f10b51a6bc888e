"""One set of figures for four kinds of servers: hitsend, vLLM, SGLang, llama-server.

Enters: a window of scrapes. Leaves: `Figures`. Always true: pure; what a server doesn't tell is None, never 0 and never
guessed from another figure without saying so here; nothing but names of metrics tells servers apart. Next: `rules.py`.

Names: vLLM's of V1 (and the older `gpu_cache_usage_perc`, `time_per_output_token_seconds`), SGLang's of its scheduler
and tokenizer collectors, llama-server's of `tools/server/README.md`. docs/diagnose.md has the table.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from hitsend.core.segments import SEGMENTS
from hitsend.inspect.scrapes import Scrape, Window

Server = Literal["hitsend", "vllm", "sglang", "llama-server"]

DECODE_WEIGHT = 2.0
"""What a decoded token costs in prefilled ones, where no step had only one kind (`explain.USUAL_WEIGHT`)."""

_FAILURES = ("engine_failed", "engine_unavailable", "engine_timeout", "storage_failed")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A window in one language. Rates are totals over `window_s`; times are means in seconds, shares are of 1.

    Requests: `requests` ended, of which `failed` by the server's fault, `overloaded` found no room, `too_long` had no
    place in the context, `limited` were refused by a caller's limits; `good_share` met the server's objectives.
    Load: choices that were `running`, `waiting`, `paused`, over the window; `slots` there are, `kv_share` is held.
    Work: `busy` is the part of the window in which the model computed; `prefill_share` of that time went to prompts
    (vLLM, llama-server: of requests' own time); `width` choices took part in a step; `decode_steps` of all steps had
    answers only, and took `decode_step_s`; those with prompts too took `mixed_step_s`, `mixed_share` of the time;
    `piece` prompt tokens were in a step that had any.
    Where ended requests' time went: `client_share`, `upstream_share`, `edge_share`. CPU in cores: `edge_cpu` used and
    `edge_wait` wanted by `edges` processes; of the engine's `threads`, `threads_waiting` had no core while it computed.
    """

    server: Server
    window_s: float
    requests: float | None = None
    failed: float | None = None
    overloaded: float | None = None
    too_long: float | None = None
    limited: float | None = None
    good_share: float | None = None
    is_up: bool | None = None
    restarts: float | None = None
    running: float | None = None
    waiting: float | None = None
    paused: float | None = None
    slots: float | None = None
    kv_share: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    has_prefix_cache: bool | None = None
    output_tokens: float | None = None
    busy: float | None = None
    prefill_share: float | None = None
    width: float | None = None
    decode_steps: float | None = None
    decode_step_s: float | None = None
    mixed_step_s: float | None = None
    mixed_share: float | None = None
    piece: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    queue_s: float | None = None
    e2e_s: float | None = None
    client_share: float | None = None
    upstream_share: float | None = None
    edge_share: float | None = None
    upstream_running: float | None = None
    upstream_slots: float | None = None
    edges: float | None = None
    edge_cpu: float | None = None
    edge_wait: float | None = None
    threads: float | None = None
    threads_waiting: float | None = None

    @property
    def output_per_s(self) -> float | None:
        """Output tokens per second."""
        return None if self.output_tokens is None else self.output_tokens / self.window_s

    @property
    def cached_share(self) -> float | None:
        """Of the prompts' tokens."""
        return over(self.cached_tokens, self.prompt_tokens)


def over(part: float | None, whole: float | None) -> float | None:
    """A share; None where either isn't known, or there is nothing to have a share of."""
    return None if part is None or not whole else part / whole


def server_of(scrape: Scrape) -> Server | None:
    """Who wrote it."""
    for prefix, server in _SERVERS.items():
        if any(name.startswith(prefix) for name in scrape.names):
            return server
    return None


def figures_of(window: Window) -> Figures | None:
    """The window's figures; None when no server is known that writes such metrics."""
    server = server_of(window.last)
    return None if server is None else _READERS[server](window)


def _hitsend(window: Window) -> Figures:
    seconds = {name: window.grew("hitsend_segment_seconds_total", segment=name) or 0.0 for name in SEGMENTS}
    spent = sum(seconds.values())
    error = _errors(window)
    local = _Local(window)
    return Figures(
        server="hitsend",
        window_s=window.seconds,
        requests=window.grew("hitsend_request_seconds_count") or 0.0,
        failed=sum(error(code) for code in _FAILURES),
        overloaded=error("server_overloaded"),
        too_long=error("context_length_exceeded"),
        limited=window.grew("hitsend_limit_refusals_total") or 0.0,
        good_share=over(
            window.grew("hitsend_requests_judged_total", outcome="good") or 0.0,
            window.grew("hitsend_requests_judged_total"),
        ),
        prompt_tokens=window.grew("hitsend_tokens_billed_total", kind="prompt") or 0.0,
        cached_tokens=window.grew("hitsend_tokens_cached_total") or 0.0,
        output_tokens=window.grew("hitsend_tokens_output_total") or 0.0,
        **_times(window, "hitsend_"),
        queue_s=window.average("hitsend_queue_seconds"),
        e2e_s=window.average("hitsend_request_seconds"),
        client_share=over(seconds["client_wait"], spent),
        upstream_share=over(seconds["upstream"], spent),
        edge_share=over(sum(seconds[name] for name in ("edge", "render", "tokenize", "settle")), spent),
        **_upstreams(window, local),
        **_embedded(window, local),
        **_processes(window),
    )


def _errors(window: Window) -> Callable[[str], float]:
    return lambda code: window.grew("hitsend_request_errors_total", code=code) or 0.0


class _Local:
    """The engines on this machine, together: those that have cells."""

    def __init__(self, window: Window) -> None:
        self._window = window
        cells = window.last.found("hitsend_kv_cells")
        self.names = [sample.labels.get("engine", "") for sample in cells if sample.value > 0]

    def grew(self, counter: str, **labels: str) -> float:
        """By how much it grew over all of them."""
        return sum(self._window.grew(counter, engine=name, **labels) or 0.0 for name in self.names)

    def mean(self, gauge: str) -> float:
        """A gauge's sum."""
        return sum(self._window.mean(gauge, engine=name) or 0.0 for name in self.names)


def _embedded(window: Window, local: _Local) -> dict[str, Any]:
    """What is computed here; nothing where all models run elsewhere."""
    if not local.names:
        return {}
    model_s = local.grew("hitsend_step_seconds_total", part="model")
    slots = local.mean("hitsend_slots")

    def level(gauge: str, counter: str) -> float:
        """A few looks see less than all steps do; but where none were made, only the looks are left."""
        return max(local.mean(gauge), over(local.grew(counter), model_s) or 0.0)

    steps = _steps(local)
    # at the end of a step those that it finished run no more: who took part tells better how full the slots were
    running = max(level("hitsend_requests_running", "hitsend_running_seconds_total"), steps["width"] or 0.0)
    return {
        "is_up": all(window.last.total("hitsend_engine_up", engine=name) != 0 for name in local.names),
        "restarts": local.grew("hitsend_engine_restarts_total"),
        "running": running,
        "waiting": level("hitsend_requests_waiting", "hitsend_waiting_seconds_total"),
        "paused": local.mean("hitsend_requests_paused"),
        "slots": slots,
        "kv_share": over(level("hitsend_kv_cells_used", "hitsend_cell_seconds_total"), local.mean("hitsend_kv_cells")),
        "preemptions": local.grew("hitsend_preemptions_total"),
        "busy": min(1.0, model_s / window.seconds),
        "threads": local.mean("hitsend_engine_threads"),
        "threads_waiting": over(window.grew("hitsend_process_cpu_wait_seconds_total", process="engine"), model_s),
    } | steps


def _steps(local: _Local) -> dict[str, Any]:
    seconds, steps = (
        {each: local.grew(name, phase=each) for each in ("prefill", "decode", "mixed")}
        for name in ("hitsend_phase_seconds_total", "hitsend_phase_steps_total")
    )
    computed = {each: local.grew("hitsend_tokens_computed_total", phase=each) for each in ("prefill", "decode")}
    num_steps, model_s = sum(steps.values()), sum(seconds.values())
    decode_step_s = over(seconds["decode"], steps["decode"])
    if decode_step_s is not None:
        prompts = max(0.0, seconds["mixed"] - steps["mixed"] * decode_step_s)
    else:
        weight = computed["prefill"] + DECODE_WEIGHT * computed["decode"]
        prompts = seconds["mixed"] * (over(computed["prefill"], weight) or 0.0)
    return {
        "prefill_share": over(seconds["prefill"] + prompts, model_s),
        "width": over(local.grew("hitsend_step_sequences_total"), num_steps),
        "decode_steps": over(steps["decode"], num_steps),
        "decode_step_s": decode_step_s,
        "mixed_step_s": over(seconds["mixed"], steps["mixed"]),
        "mixed_share": over(seconds["mixed"], model_s),
        "piece": over(computed["prefill"], steps["prefill"] + steps["mixed"]),
    }


def _upstreams(window: Window, local: _Local) -> dict[str, Any]:
    """What the gauges have beside the engines here."""

    def beside(gauge: str) -> float | None:
        every = window.mean(gauge)
        return None if every is None else max(0.0, every - local.mean(gauge))

    return {"upstream_running": beside("hitsend_requests_running"), "upstream_slots": beside("hitsend_slots") or None}


def _processes(window: Window) -> dict[str, Any]:
    cpu = window.grew("hitsend_process_cpu_seconds_total", process="edge")
    wait = window.grew("hitsend_process_cpu_wait_seconds_total", process="edge")
    return {
        "edges": window.mean("hitsend_processes", process="edge"),
        "edge_cpu": over(cpu, window.seconds),
        "edge_wait": over(wait, window.seconds),
    }


def _times(window: Window, prefix: str) -> dict[str, Any]:
    """What all but llama-server measure alike."""
    between = (f"{prefix}inter_token_latency_seconds", f"{prefix}time_per_output_token_seconds")
    return {
        "ttft_s": window.average(f"{prefix}time_to_first_token_seconds"),
        "tpot_s": window.average(
            f"{prefix}request_time_per_output_token_seconds",
            f"{prefix}time_per_output_token_seconds",
            f"{prefix}inter_token_latency_seconds",
        ),
        "itl_p50_s": window.quantile(0.5, *between),
        "itl_p99_s": window.quantile(0.99, *between),
    }


def _vllm(window: Window) -> Figures:
    prefill, decode = (window.grew(f"vllm:request_{phase}_time_seconds_sum") for phase in ("prefill", "decode"))
    inside = None if prefill is None or decode is None else prefill + decode
    queries = window.grew("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
    hits = window.grew("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
    return Figures(
        server="vllm",
        window_s=window.seconds,
        requests=window.grew("vllm:request_success_total"),
        failed=window.grew("vllm:request_success_total", finished_reason="error"),
        running=window.mean("vllm:num_requests_running"),
        waiting=window.mean("vllm:num_requests_waiting"),
        kv_share=window.mean_of_most("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        preemptions=window.grew("vllm:num_preemptions_total"),
        prompt_tokens=queries or window.grew("vllm:prompt_tokens_total"),
        cached_tokens=hits,
        has_prefix_cache=None if queries is None else queries > 0,
        output_tokens=window.grew("vllm:generation_tokens_total"),
        prefill_share=over(prefill, inside),
        width=window.mean("vllm:num_requests_running"),
        **_times(window, "vllm:"),
        queue_s=window.average("vllm:request_queue_time_seconds"),
        e2e_s=window.average("vllm:e2e_request_latency_seconds"),
    )


def _sglang(window: Window) -> Figures:
    extend, decode = (
        window.grew("sglang:forward_execution_seconds_total", category=category) for category in ("extend", "decode")
    )
    inside = (extend or 0.0) + (decode or 0.0)  # declared, but often without a value: then nothing is known
    held, there = window.mean("sglang:num_used_tokens"), window.mean("sglang:max_total_num_tokens")
    return Figures(
        server="sglang",
        window_s=window.seconds,
        requests=window.grew("sglang:num_requests_total"),
        running=window.mean("sglang:num_running_reqs"),
        waiting=window.mean("sglang:num_queue_reqs"),
        paused=None,
        kv_share=window.mean_of_most("sglang:token_usage")
        if "sglang:token_usage" in window.last.names
        else over(held, there),
        preemptions=window.grew("sglang:num_retracted_requests_total"),
        prompt_tokens=window.grew("sglang:prompt_tokens_total"),
        cached_tokens=window.grew("sglang:cached_tokens_total"),
        has_prefix_cache="sglang:cached_tokens_total" in window.last.names,
        output_tokens=window.grew("sglang:generation_tokens_total"),
        busy=min(1.0, inside / window.seconds) if inside else None,
        prefill_share=over(extend, inside),
        width=window.mean("sglang:num_running_reqs"),
        **_times(window, "sglang:"),
        queue_s=window.average("sglang:queue_time_seconds"),
        e2e_s=window.average("sglang:e2e_request_latency_seconds"),
    )


def _llama_server(window: Window) -> Figures:
    """It counts no requests and no latencies: what can be said comes from its sums of time."""
    prompt_s, output_s = (window.grew(f"llamacpp:{name}_seconds_total") for name in ("prompt", "tokens_predicted"))
    inside = None if prompt_s is None or output_s is None else prompt_s + output_s
    output = window.grew("llamacpp:tokens_predicted_total")
    processing = window.mean("llamacpp:requests_processing")  # a moment's; the sums of time know of all in between
    return Figures(
        server="llama-server",
        window_s=window.seconds,
        running=None if processing is None else max(processing, (inside or 0.0) / window.seconds),
        waiting=window.mean("llamacpp:requests_deferred"),
        kv_share=window.mean("llamacpp:kv_cache_usage_ratio"),
        prompt_tokens=window.grew("llamacpp:prompt_tokens_total"),
        output_tokens=output,
        prefill_share=over(prompt_s, inside),
        width=_busy_slots(window),
        tpot_s=over(output_s, output),
    )


def _busy_slots(window: Window) -> float | None:
    """Its gauge is a mean since the start: the mean of the window follows from the calls at both ends."""
    name, calls = "llamacpp:n_busy_slots_per_decode", "llamacpp:n_decode_total"
    after, num_after = window.last.total(name), window.last.total(calls)
    before, num_before = window.first.total(name) or 0.0, window.first.total(calls) or 0.0
    if after is None or num_after is None or num_after <= num_before:
        return None
    return max(0.0, (after * num_after - before * num_before) / (num_after - num_before))


_SERVERS: dict[str, Server] = {
    "hitsend_": "hitsend",
    "vllm:": "vllm",
    "sglang:": "sglang",
    "llamacpp:": "llama-server",
}
_READERS: dict[Server, Callable[[Window], Figures]] = {
    "hitsend": _hitsend,
    "vllm": _vllm,
    "sglang": _sglang,
    "llama-server": _llama_server,
}
