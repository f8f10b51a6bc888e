"""The series of upstreams and routes.

Enters: what a request did there, and how it is with them before each scrape. Leaves: series in the registry of
`metrics.py`. Always true: labels are names of the settings, codes of errors and places in a list; with several gateway
processes, what runs is their sum, a breaker the worst of theirs. Next: `metrics.py`.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hitsend.serve.usage.elsewhere import Course, Elsewhere, RouteNow, ServerNow, UpstreamCall, UpstreamNow

CatchUp = Callable[[Counter, tuple[str, str], int], None]


class UpstreamSeries:
    """All of them. `catch_up` raises a counter to a total that may have begun anew."""

    def __init__(self, registry: CollectorRegistry, buckets: tuple[float, ...], catch_up: CatchUp) -> None:
        self._registry = registry
        self._catch_up = catch_up
        self._calls = self._counter(
            "upstream_requests", "Requests sent to an upstream, by outcome.", "engine", "outcome"
        )
        self._retries = self._counter("upstream_retries", "Requests that were sent once more.", "engine")
        self._first_s = Histogram(
            "hitsend_upstream_first_token_seconds",
            "From sending to the upstream's first token.",
            ["engine"],
            buckets=buckets,
            registry=registry,
        )
        self._in_flight = self._gauge("upstream_in_flight", "Requests under way at an upstream.", "engine")
        self._retries_left = self._gauge("upstream_retries_left", "Second attempts that it may make at once.", "engine")
        of_server = ("engine", "server")
        self._breaker = self._gauge(
            "upstream_breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open.", *of_server
        )
        self._openings = self._counter("upstream_breaker_openings", "Times that a breaker opened.", *of_server)
        self._age_s = self._gauge("upstream_load_age_seconds", "Since a server's own figures were read.", *of_server)
        self._running = self._gauge("upstream_running", "Requests that run there, by its own figures.", *of_server)
        self._waiting = self._gauge("upstream_waiting", "Requests that wait there, by its own figures.", *of_server)
        self._kv_use = self._gauge("upstream_kv_use", "Share of its KV cache in use, by its own figures.", *of_server)
        self._preemptions = self._counter("upstream_preemptions", "Preemptions there, by its own figures.", *of_server)
        self._neurons_used = Gauge(
            "hitsend_neurons_used", "Neurons of the UTC day at Workers AI, used and held.", registry=registry
        )
        self._neurons_left = Gauge("hitsend_neurons_left", "What is left of the day's free neurons.", registry=registry)
        self._define_routes()

    def _define_routes(self) -> None:
        self._chosen = self._counter("route_chosen", "Requests by the engine that was chosen first.", "route", "engine")
        self._answered = self._counter("route_answered", "Requests by the engine that answered.", "route", "engine")
        self._given_up = self._counter(
            "route_given_up", "Engines given up for the next one, by reason.", "route", "engine", "code"
        )
        self._drafts = self._counter("route_drafts", "A cascade's drafts, by verdict.", "route", "engine", "verdict")
        self._copies = self._counter("route_shadow_copies", "Shadow copies, by outcome.", "route", "outcome")
        self._canary = self._gauge("route_canary_share", "Share that the canary gets, 0 when rolled back.", "route")
        self._rolled_back = self._gauge("route_canary_rolled_back", "1 when the canary was rolled back.", "route")

    def observe(self, calls: Iterable[UpstreamCall], course: Course | None) -> None:
        """What one request did."""
        for call in calls:
            self._calls.labels(call.engine, call.outcome).inc()
            self._retries.labels(call.engine).inc(call.will_retry)
            if call.first_token_s is not None:
                self._first_s.labels(call.engine).observe(call.first_token_s)
        if course is None:
            return
        self._chosen.labels(course.route, course.chosen).inc()
        if course.answered is not None:
            self._answered.labels(course.route, course.answered).inc()
        for engine, code in course.given_up:
            self._given_up.labels(course.route, engine, code).inc()
        for engine, is_accepted in course.drafts:
            self._drafts.labels(course.route, engine, "accepted" if is_accepted else "rejected").inc()

    def set(self, found: list[Elsewhere]) -> None:
        """How it is now, in each process."""
        by_engine = attrgetter("engine")
        upstreams = sorted((one for each in found for one in each.upstreams), key=by_engine)
        for engine, several in groupby(upstreams, by_engine):
            self._set_upstream(engine, list(several))
        routes = sorted((one for each in found for one in each.routes), key=attrgetter("route"))
        for route, alike in groupby(routes, attrgetter("route")):
            self._set_route(route, list(alike))
        days = [each.neurons_micro for each in found if each.neurons_micro is not None]
        if days:
            used, limit = max(days)
            self._neurons_used.set(used / 1e6)
            self._neurons_left.set(max(0, limit - used) / 1e6)

    def _set_upstream(self, engine: str, several: list[UpstreamNow]) -> None:
        self._in_flight.labels(engine).set(sum(one.in_flight for one in several))
        self._retries_left.labels(engine).set(sum(one.retries_left for one in several))
        for alike in zip(*(one.servers for one in several), strict=True):
            self._set_server(engine, alike)

    def _set_server(self, engine: str, alike: tuple[ServerNow, ...]) -> None:
        server = str(alike[0].number)
        self._breaker.labels(engine, server).set(max(one.breaker for one in alike))
        openings = sum(one.num_openings for one in alike)
        self._catch_up(self._openings.labels(engine, server), ("openings " + engine, server), openings)
        freshest = min(alike, key=lambda one: float("inf") if one.age_s is None else one.age_s)
        for gauge, value in (
            (self._age_s, freshest.age_s),
            (self._running, freshest.running),
            (self._waiting, freshest.waiting),
            (self._kv_use, freshest.kv_use),
        ):
            if value is not None:
                gauge.labels(engine, server).set(value)
            else:  # what isn't known is no series, and not the last that was
                gauge.remove_by_labels({"engine": engine, "server": server})
        if freshest.preemptions is not None:
            counter = self._preemptions.labels(engine, server)
            self._catch_up(counter, ("preemptions " + engine, server), freshest.preemptions)

    def _set_route(self, route: str, alike: list[RouteNow]) -> None:
        for outcome in sorted({outcome for one in alike for outcome in one.copies}):
            total = sum(one.copies.get(outcome, 0) for one in alike)
            self._catch_up(self._copies.labels(route, outcome), ("copies " + route, outcome), total)
        shares = [one.canary_share for one in alike if one.canary_share is not None]
        if shares:
            self._canary.labels(route).set(min(shares))
            self._rolled_back.labels(route).set(any(one.is_rolled_back for one in alike))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hitsend_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"hitsend_{name}", text, labels, registry=self._registry)
