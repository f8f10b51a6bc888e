"""Traces for an OpenTelemetry collector: one per request, whose spans nest as the pipeline does. An extra (`otel`).

Enters: a request's arrival with the `traceparent` that its client sent, and the flight when it is closed. Leaves: the
`traceparent` for whoever is asked next, and spans over OTLP. Always true: no text of a prompt or an answer is in a
span; nothing here waits or fails a request: spans are sent from a thread of the library's own, and dropped when the
collector is away; without `tracing.otlp_url` this module isn't imported. Next: `../flights.py`.

    POST /v1/chat/completions                 server span; gen_ai.* attributes, error.type
    ├─ prepare  (render, tokenize)
    ├─ generate (wait, prefill, decode, upstream, client_wait)
    └─ settle

Attributes follow OpenTelemetry's semantic conventions for generative AI (`gen_ai.*`), headers W3C Trace Context.
"""

import logging
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hitsend.core import events as ev
from hitsend.core.record import Flight
from hitsend.core.segments import Interval
from hitsend.settings import TracingSettings

STAGES = {
    "prepare": ("render", "tokenize"),
    "generate": ("wait", "prefill", "decode", "upstream", "client_wait"),
    "settle": ("settle",),
}
"""The spans below a request's, and the kinds of interval below each."""

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}

logging.getLogger("opentelemetry").setLevel(logging.ERROR)


class Traces:
    """Where `Flights` tells of requests. `begin` and `end` once each, in that order."""

    def __init__(self, settings: TracingSettings, url: str) -> None:
        share = ParentBased(TraceIdRatioBased(settings.sample_share))
        resource = Resource.create({"service.name": settings.service_name, "service.version": version("hitsend")})
        self._provider = TracerProvider(sampler=share, resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=settings.timeout_s)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=settings.max_spans))
        self._tracer = self._provider.get_tracer("hitsend")
        self._headers = TraceContextTextMapPropagator()
        self._open: dict[str, Span] = {}

    def begin(self, flight: Flight, traceparent: str | None) -> str:
        """A span for it, below the client's where that sent a good one; returns what to hand on."""
        above = self._headers.extract({} if traceparent is None else {"traceparent": traceparent})
        span = self._tracer.start_span("request", above, SpanKind.SERVER, start_time=_ns(flight, flight.received_at))
        self._open[flight.request_id] = span  # type: ignore[assignment]  # the SDK's tracer makes the SDK's spans
        carrier: dict[str, str] = {}
        self._headers.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def end(self, flight: Flight) -> None:
        """All its spans. Unknown flights are ignored."""
        span = self._open.pop(flight.request_id, None)
        if span is None:
            return
        if span.is_recording():
            _describe(span, flight)
            self._below(span, flight)
        closed_at = flight.closed_at if flight.closed_at is not None else flight.received_at
        span.end(_ns(flight, closed_at))

    def stop(self) -> None:
        """Send what is left, and end the library's thread. Waits: call it from a thread."""
        self._provider.shutdown()

    def _below(self, root: Span, flight: Flight) -> None:
        intervals = tuple(_merged(flight.intervals()))
        for stage, kinds in STAGES.items():
            inside = [one for one in intervals if one.name in kinds]
            if not inside:
                continue
            start, end = min(one.start for one in inside), max(one.end for one in inside)
            span = self._tracer.start_span(stage, set_span_in_context(root), start_time=_ns(flight, start))
            for one in inside if len(kinds) > 1 else ():
                part = self._tracer.start_span(one.name, set_span_in_context(span), start_time=_ns(flight, one.start))
                part.end(_ns(flight, one.end))
            span.end(_ns(flight, end))


def _merged(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Own and shared steps are one prefill, or one decode; neighbours of one kind are one span."""
    last: Interval | None = None
    for one in sorted(intervals, key=lambda each: each.start):
        name = one.name.removesuffix("_own").removesuffix("_shared")
        if last is not None and last.name == name:
            last = Interval(last.start, max(last.end, one.end), name)
            continue
        if last is not None:
            yield last
        last = Interval(one.start, one.end, name)
    if last is not None:
        yield last


def _describe(span: Span, flight: Flight) -> None:
    received = next((event for event in flight.events() if isinstance(event, ev.Received)), None)
    path = received.path if received is not None else ""
    operation = _OPERATIONS.get(path, "chat")
    span.update_name(f"{operation} {flight.model or 'unknown'}")
    span.set_attributes({name: value for name, value in _attributes(flight, operation, path) if value is not None})
    if flight.error is not None:
        span.set_attribute("error.type", flight.error.code)
        span.set_status(Status(StatusCode.ERROR, flight.error.code))


def _attributes(flight: Flight, operation: str, path: str) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "hitsend"
    yield "gen_ai.request.model", flight.model
    yield "gen_ai.response.model", flight.model
    yield "gen_ai.response.id", flight.request_id
    yield "gen_ai.usage.input_tokens", flight.usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", flight.usage.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", flight.usage.cached_tokens
    yield "gen_ai.usage.reasoning.output_tokens", flight.usage.reasoning_tokens
    yield "gen_ai.response.finish_reasons", (flight.finish_reason,) if flight.finish_reason else None
    fitted = next((event for event in flight.events() if isinstance(event, ev.Fitted)), None)
    if fitted is not None:
        for name in ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"):
            yield f"gen_ai.request.{name}", getattr(fitted.sampling, name)
        yield "gen_ai.request.max_tokens", fitted.max_tokens
    yield "url.path", path or None
    yield "http.request.method", "POST"
    yield "hitsend.request_id", flight.request_id
    yield "hitsend.engine", flight.engine
    yield "hitsend.cost_microusd", flight.cost_microusd
    yield "hitsend.principal", flight.principal.name
    if flight.first_token_at is not None:
        yield "gen_ai.server.time_to_first_token", flight.first_token_at - flight.received_at


def _ns(flight: Flight, at: float) -> int:
    """The clock's seconds as nanoseconds since 1970."""
    return round((flight.received_wall + at - flight.received_at) * 1_000_000_000)
