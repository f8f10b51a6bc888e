"""Everything Prometheus may ask for. This file, `series.py` and `upstream_metrics.py` alone know prometheus_client.

Enters: figures of finished requests, HTTP answers, steps and the engine's state. Leaves: the text of `/metrics`. Always
true: a registry of its own, nothing global; labels come from bounded sets (models beyond `MAX_MODELS` and routes beyond
`MAX_ROUTES` are counted as `other`); no label holds anything a client typed; counters never fall, also when a restarted
engine counts from 0 again. Histograms of times remember, per bucket, the last request that fell into it (an exemplar):
whoever scrapes OpenMetrics gets it. Each name's meaning is its help text; `docs/metrics.md` lists them.
Next: `serve/app.py`.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics

from hitsend.core.drafts import MAX_DRAFT
from hitsend.core.segments import SEGMENTS
from hitsend.serve.usage.elsewhere import Elsewhere
from hitsend.serve.usage.figures import EngineFigures, QuotaFigures, RequestFigures, StepCounts
from hitsend.serve.usage.processes import ProcessTime
from hitsend.serve.usage.series import Histograms, Times, Totals
from hitsend.serve.usage.upstream_metrics import UpstreamSeries

CONTENT_TYPE = CONTENT_TYPE_LATEST
OPENMETRICS_TYPE = openmetrics.CONTENT_TYPE_LATEST
MAX_EXEMPLAR_CHARS = 128 - len("request_id")
"""OpenMetrics allows 128 for an exemplar's names and values together."""
MAX_MODELS = 64
MAX_ROUTES = 64

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
"""Between tokens: a GPU decodes at 5 to 50 ms a token, a laptop's CPU at 10 to 300."""
WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Queue, prefill and first token: milliseconds when idle, minutes for long prompts under load."""
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0)
"""A whole request."""
HTTP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class _Bounded:
    """The first `limit` values stay themselves, later ones become `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return "other"
        self._known.add(value)
        return value


class _ModelTimes(NamedTuple):
    """The histograms of one model, looked up once."""

    request_s: Times
    queue_s: Times
    prefill_s: Times
    decode_s: Times
    ttft_s: Times
    tpot_s: Times
    itl_s: Times


class Metrics:
    """All series of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._model = _Bounded(MAX_MODELS)
        self._route = _Bounded(MAX_ROUTES)
        self._last: dict[tuple[str, str], int] = {}
        self._last_s: dict[tuple[str, int], float] = {}
        self._times: dict[str, _ModelTimes] = {}
        self._define_times()
        self._define_requests()
        self._define_engine()
        self._define_work()
        self._elsewhere = UpstreamSeries(self._registry, WAIT_S, self._catch_up)

    def observe_request(self, figures: RequestFigures) -> None:
        """Count a request that has ended. Call once per request."""
        model = self._model(figures.model)
        times = self._times.get(model) or self._times_of(model)
        shown = _shown(figures.request_id)
        times.request_s.observe(figures.wall_s, shown)
        if figures.queue_s is not None:
            times.queue_s.observe(figures.queue_s, shown)
        if figures.prefill_s is not None:
            times.prefill_s.observe(figures.prefill_s, shown)
        if figures.decode_s is not None:
            times.decode_s.observe(figures.decode_s, shown)
        if figures.ttft_s is not None:
            times.ttft_s.observe(figures.ttft_s, shown)
        if figures.tpot_s is not None:
            times.tpot_s.observe(figures.tpot_s, shown)
        for gap in figures.gaps_s:
            times.itl_s.observe(gap)
        self._count_ending(model, figures)
        self._count_bill(model, figures)

    def _count_ending(self, model: str, figures: RequestFigures) -> None:
        for reason in figures.finish_reasons:
            self._finished.add(1, model, reason)
        if figures.error_code is not None:
            self._errors.labels(figures.error_code).inc()
        if figures.outcome is not None:
            self._judged.add(1, model, figures.outcome)
        self._elsewhere.observe(figures.calls, figures.course)
        if figures.refused_by is not None:
            self._refused.labels(*figures.refused_by).inc()
        if figures.cancelled_during is not None:
            self._cancelled.labels(figures.cancelled_during).inc()

    def _count_bill(self, model: str, figures: RequestFigures) -> None:
        self._tokens.add(figures.prompt_tokens, model, "prompt")
        self._tokens.add(figures.completion_tokens, model, "completion")
        self._cost.add(figures.cost_microusd, model)
        self._settled.add(figures.has_row, model)
        for counter, number in (
            (self._cached, figures.cached_tokens),
            (self._reasoning, figures.reasoning_tokens),
            (self._discarded, figures.discarded_tokens),
        ):
            if number:
                counter.add(number, model)
        for segment, seconds in zip(SEGMENTS, figures.segments_s, strict=False):
            if seconds:
                self._segment_s.add(seconds, model, segment)

    def observe_http(self, route: str, status: int, seconds: float) -> None:
        """Count an answer. `route` is the matched route's template or `unmatched`, never a raw path."""
        route = self._route(route)
        self._http.add(1, route, str(status))
        self._http_s.of(route).observe(seconds)

    def observe_step(self, figures: StepCounts, engine: str = "embedded") -> None:
        """Count what one pass through the model computed, the tokens that came out of it, and its time."""
        self._computed.labels(engine, "prefill").inc(figures.prefill_tokens)
        self._computed.labels(engine, "decode").inc(figures.decode_tokens)
        self._output.labels(engine).inc(figures.output_tokens)
        self._steps.labels(engine).inc()
        for drafted in figures.drafts:
            for position in range(drafted.proposed):
                outcome = "accepted" if position < drafted.accepted else "rejected"
                place = str(min(position + 1, MAX_DRAFT))
                self._drafts.labels(engine, outcome, place, drafted.drafter).inc()
        self._step_s.labels(engine, "model").inc(figures.decode_s)
        self._step_s.labels(engine, "loop").inc(max(0.0, figures.step_s - figures.decode_s))
        phase = "mixed" if figures.prefill_tokens and figures.decode_tokens else "decode"
        phase = "prefill" if figures.prefill_tokens and not figures.decode_tokens else phase
        self._phase_steps.labels(engine, phase).inc()
        self._phase_s.labels(engine, phase).inc(figures.decode_s)
        self._sequences.labels(engine).inc(figures.sequences)
        for counter, number in (
            (self._running_s, figures.running),
            (self._waiting_s, figures.waiting),
            (self._cell_s, figures.cells_used),
        ):
            counter.labels(engine).inc(number * figures.decode_s)

    def observe_upstream(self, engine: str, num_tokens: int) -> None:
        """Count the tokens that a request brought back from an upstream."""
        self._output.labels(engine).inc(num_tokens)

    def set_engine(self, state: EngineFigures, engine: str = "embedded") -> None:
        """Take over an engine's figures of this moment (before each scrape)."""
        self._up.labels(engine).set(1 if state.is_ready else 0)
        self._progress_age_s.labels(engine).set(state.progress_age_s)
        self._running.labels(engine).set(state.running)
        self._waiting.labels(engine).set(state.waiting)
        self._cells_used.labels(engine).set(state.cells_used)
        self._cells_total.labels(engine).set(state.cells_total)
        self._slots_used.labels(engine).set(state.slots_used)
        self._slots_total.labels(engine).set(state.slots_total)
        self._paused.labels(engine).set(state.paused)
        self._threads.labels(engine).set(state.num_threads)
        self._catch_up(self._restarts.labels(engine), ("restarts", engine), state.restarts)
        self._catch_up(self._preemptions.labels(engine), ("preemptions", engine), state.preemptions_total)

    def set_elsewhere(self, *found: Elsewhere) -> None:
        """Take over how it is with upstreams and routes, in each process (before each scrape)."""
        self._elsewhere.set(list(found))

    def set_pooled(self, engine: str, *, is_loaded: bool, num_loads: int, num_bytes: int) -> None:
        """Take over how it is with a model that comes and goes (before each scrape)."""
        self._loaded.labels(engine).set(is_loaded)
        self._model_bytes.labels(engine).set(num_bytes if is_loaded else 0)
        self._catch_up(self._loads.labels(engine), ("loads", engine), num_loads)

    def set_storage(self, holds_open: int, backlog: int, records_dropped: int) -> None:
        """Take over the ledger's and the record store's figures (before each scrape)."""
        self._holds_open.set(holds_open)
        self._backlog.set(backlog)
        self._catch_up(self._records_dropped, ("records_dropped", ""), records_dropped)

    def set_quota(self, health: QuotaFigures) -> None:
        """Take over whether the limits' server answers, and what its outages have led to (before each scrape)."""
        self._quota_up.set(1 if health.is_up else 0)
        self._catch_up(self._quota_outages, ("quota_outages", ""), health.num_outages)
        for budget in health.budgets:
            self._budget_limit.labels(budget.window).set(budget.limit_microusd)
            self._budget_used.labels(budget.window).set(budget.used_microusd)
        for outcome, total in (("unchecked", health.num_unchecked), ("refused", health.num_refused)):
            self._catch_up(self._quota_away.labels(outcome), ("quota_away", outcome), total)

    def set_processes(self, found: Sequence[ProcessTime]) -> None:
        """Take over what the server's processes have used (before each scrape)."""
        for process, number in Tally(each.process for each in found).items():
            self._processes.labels(process).set(number)
        for each in found:
            self._catch_up_s(self._cpu_s.labels(each.process), ("cpu " + each.process, each.pid), each.cpu_s)
            if each.wait_s is not None:
                self._catch_up_s(self._cpu_wait_s.labels(each.process), ("wait " + each.process, each.pid), each.wait_s)

    def render(self, *, is_openmetrics: bool = False) -> bytes:
        """The exposition text, of `CONTENT_TYPE`; or, with exemplars, of `OPENMETRICS_TYPE`."""
        self._scraped_at.set(time.time())
        write: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest if is_openmetrics else generate_latest
        return write(self._registry)

    def counted(self) -> dict[str, int]:
        """What was counted so far over all models, by the names of the ledger's columns; and the embedded engine's
        steps."""
        return {
            "requests": int(self._settled.total()),
            "prompt_tokens": int(self._tokens.total(kind="prompt")),
            "completion_tokens": int(self._tokens.total(kind="completion")),
            "cached_tokens": int(self._cached.total()),
            "discarded_tokens": int(self._discarded.total()),
            "cost_microusd": int(self._cost.total()),
            "sampled": _total(self._output, engine="embedded"),
            "prefill": _total(self._computed, engine="embedded", phase="prefill"),
        }

    def _times_of(self, model: str) -> _ModelTimes:
        """Made when the model is first met; from then on all its series are shown."""
        histograms = (self._request_s, self._queue_s, self._prefill_s, self._decode_s)
        rest = (self._ttft_s, self._tpot_s, self._itl_s)
        times = self._times[model] = _ModelTimes(*(one.of(model) for one in (*histograms, *rest)))
        for counter in (self._cached, self._reasoning, self._discarded):
            counter.add(0, model)
        for segment in SEGMENTS:
            self._segment_s.add(0, model, segment)
        return times

    def _catch_up(self, counter: Counter, key: tuple[str, str], total: int) -> None:
        # a total below the last one comes from a process that began again at 0
        last = self._last.get(key, 0)
        self._last[key] = total
        counter.inc(total - last if total >= last else total)

    def _catch_up_s(self, counter: Counter, key: tuple[str, int], total_s: float) -> None:
        # by process id: who is started again has another one; what falls lost a thread, which had been counted
        counter.inc(max(0.0, total_s - self._last_s.get(key, 0.0)))
        self._last_s[key] = total_s

    def _define_times(self) -> None:
        self._ttft_s = self._histogram(
            "hitsend_time_to_first_token_seconds", "From arrival to the first token.", WAIT_S
        )
        self._tpot_s = self._histogram(
            "hitsend_time_per_output_token_seconds", "Mean time per token after the first, per request.", SHORT_S
        )
        self._itl_s = self._histogram(
            "hitsend_inter_token_latency_seconds", "Time between following tokens of a choice.", SHORT_S
        )
        self._queue_s = self._histogram("hitsend_queue_seconds", "Waiting for cells and a slot.", WAIT_S)
        self._prefill_s = self._histogram("hitsend_prefill_seconds", "Computing the prompt.", WAIT_S)
        self._decode_s = self._histogram("hitsend_decode_seconds", "From the first token to the last one.", WHOLE_S)
        self._request_s = self._histogram("hitsend_request_seconds", "From arrival to the last byte.", WHOLE_S)
        self._http_s = self._histogram("hitsend_http_seconds", "HTTP answers, by route.", HTTP_S, label="route")

    def _define_requests(self) -> None:
        self._finished = self._totals("hitsend_choices_finished", "Choices by finish reason.", "model", "reason")
        self._errors = self._counter("hitsend_request_errors", "Requests that ended in an error, by code.", "code")
        self._judged = self._totals(
            "hitsend_requests_judged", "Requests by objective: good, or the first that was missed.", "model", "outcome"
        )
        self._refused = self._counter("hitsend_limit_refusals", "Refusals by level and limit.", "level", "limit")
        self._cancelled = self._counter(
            "hitsend_requests_cancelled", "Requests cancelled, by the state they were in.", "during"
        )
        self._tokens = self._totals("hitsend_tokens_billed", "Tokens in ledger rows.", "model", "kind")
        self._cached = self._totals("hitsend_tokens_cached", "Prompt tokens read from the prefix cache.", "model")
        self._reasoning = self._totals("hitsend_tokens_reasoning", "Completion tokens that were thoughts.", "model")
        self._discarded = self._totals("hitsend_tokens_discarded", "Tokens computed after an end, unbilled.", "model")
        self._cost = self._totals("hitsend_cost_microusd", "Cost in ledger rows, in millionths of a USD.", "model")
        self._settled = self._totals("hitsend_requests_settled", "Requests that ended in a ledger row.", "model")
        self._http = self._totals("hitsend_http_requests", "HTTP answers.", "route", "code")
        self._holds_open = Gauge("hitsend_holds_open", "Holds without a row yet.", registry=self._registry)
        self._backlog = Gauge("hitsend_writes_waiting", "Database writes in the queue.", registry=self._registry)
        self._quota_up = Gauge("hitsend_quota_up", "1 when the limits' server answers.", registry=self._registry)
        self._budget_limit, self._budget_used = (
            Gauge(f"hitsend_budget_{what}_microusd", text, ["window"], registry=self._registry)
            for what, text in (
                ("limit", "What everybody together may spend per UTC day or month, in millionths of a USD."),
                ("used", "What is spent and held of it."),
            )
        )
        self._quota_outages = self._counter("hitsend_quota_outages", "Times that the limits' server went away.")
        self._quota_away = self._counter(
            "hitsend_quota_away_requests", "Requests while the limits' server was away, by outcome.", "outcome"
        )
        self._records_dropped = self._counter("hitsend_records_dropped", "Flight records that were not stored.")

    def _define_engine(self) -> None:
        self._up = self._gauge("hitsend_engine_up", "1 when the engine can serve.")
        self._progress_age_s = self._gauge("hitsend_engine_progress_age_seconds", "Since the engine last showed life.")
        self._running = self._gauge("hitsend_requests_running", "Choices with cells.")
        self._waiting = self._gauge("hitsend_requests_waiting", "Choices waiting for cells.")
        self._cells_used = self._gauge("hitsend_kv_cells_used", "KV cells in use (one cell is one token).")
        self._cells_total = self._gauge("hitsend_kv_cells", "KV cells there are.")
        self._slots_used = self._gauge("hitsend_slots_used", "Sequence slots in use.")
        self._slots_total = self._gauge("hitsend_slots", "Sequence slots there are.")
        self._computed = self._counter("hitsend_tokens_computed", "Tokens through the model.", "engine", "phase")
        self._output = self._counter("hitsend_tokens_output", "Tokens sampled: billed or discarded ones.", "engine")
        self._steps = self._counter("hitsend_steps", "Passes through the model.", "engine")
        drafts = "Guessed tokens, by position in their guess and by who made it."
        self._drafts = self._counter("hitsend_drafts", drafts, "engine", "outcome", "position", "drafter")
        self._step_s = self._counter(
            "hitsend_step_seconds", "Time of steps, inside the model and around it.", "engine", "part"
        )
        self._restarts = self._counter("hitsend_engine_restarts", "Times the engine was started again.", "engine")
        self._loaded = self._gauge("hitsend_model_loaded", "1 while a model that comes and goes is in memory.")
        self._model_bytes = self._gauge("hitsend_model_bytes", "Its predicted memory while it is loaded.")
        self._loads = self._counter("hitsend_model_loads", "Times that it was loaded.", "engine")
        self._preemptions = self._counter("hitsend_preemptions", "Choices that lost their cells.", "engine")

    def _define_work(self) -> None:
        """What `hitsend diagnose` reckons with."""
        self._segment_s = self._totals("hitsend_segment_seconds", "Where requests spent time.", "model", "segment")
        self._paused = self._gauge("hitsend_requests_paused", "Choices with cells whose client doesn't read.")
        self._threads = self._gauge("hitsend_engine_threads", "Threads that compute.")
        self._sequences = self._counter("hitsend_step_sequences", "Choices that took part in steps.", "engine")
        self._phase_steps = self._counter(
            "hitsend_phase_steps", "Steps with prompts only, answers only, or both (mixed).", "engine", "phase"
        )
        self._phase_s = self._counter("hitsend_phase_seconds", "Time of these inside the model.", "engine", "phase")
        self._running_s, self._waiting_s, self._cell_s = (
            self._counter(f"hitsend_{what}_seconds", f"{text}, times the time inside the model.", "engine")
            for what, text in (
                ("running", "Choices with cells"),
                ("waiting", "Choices waiting for cells"),
                ("cell", "KV cells held"),
            )
        )
        self._processes = Gauge("hitsend_processes", "Processes of this server.", ["process"], registry=self._registry)
        self._cpu_s = self._counter("hitsend_process_cpu_seconds", "Time that they were on a core.", "process")
        self._cpu_wait_s = self._counter(
            "hitsend_process_cpu_wait_seconds", "Time that their threads were ready and had no core.", "process"
        )
        self._scraped_at = Gauge(
            "hitsend_scraped_at_seconds", "The server's time of these figures.", registry=self._registry
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *, label: Literal["model", "route"] = "model"
    ) -> Histograms:
        made = Histograms(name, text, label, buckets)
        self._registry.register(made)
        return made

    def _totals(self, name: str, text: str, *labels: str) -> Totals:
        """A counter that every request counts in."""
        made = Totals(name, text, labels)
        self._registry.register(made)
        return made

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["engine"], registry=self._registry)


def _shown(request_id: str | None) -> str | None:
    """As an exemplar, if it may be one."""
    return None if request_id is None or len(request_id) > MAX_EXEMPLAR_CHARS else request_id


def _total(counter: Counter, **labels: str) -> int:
    """Its sum over every label that isn't asked for."""
    samples = (sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total"))
    return int(sum(s.value for s in samples if all(s.labels[name] == value for name, value in labels.items())))
