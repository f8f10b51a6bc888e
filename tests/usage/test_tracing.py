"""A collector on a real socket receives a whole trace from a real edge, whose spans nest as the pipeline does."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hitsend import settings
from hitsend.core.errors import ConfigError
from hitsend.serve.app import built, running
from tests.mock_upstream import USAGE, mock_upstream

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
PRICES = settings.UpstreamPrices(input=1.0, output=2.0)


class Collector:
    """What an OTLP collector keeps: every span that was sent to it."""

    def __init__(self):
        self.spans = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_words):
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))  # looks so often for the end

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def tree_for(tmp_path, mock, **tracing):
    upstream = settings.UpstreamSettings(name="there", models={"near": "far"}, prices=PRICES, base_url=mock.url)
    return settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(model="none"),
        engines=(upstream,),
        tracing=settings.TracingSettings(**tracing),
    )


async def ask(server, *, status=200, text="What is secret?", **headers):
    body = {"model": "near", "messages": [{"role": "user", "content": text}], "temperature": 0.5, "max_tokens": 9}
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.base_url + "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == status
        await answer.read()
        return answer.headers["x-request-id"]


async def say_hello(call):
    await call.start()
    await call.say("Hello", " there")
    await call.finish(usage=USAGE)


def shown(value):
    return getattr(value, value.WhichOneof("value"))


async def test_a_trace_nests_as_the_pipeline_does(tmp_path):
    with Collector() as collector:
        async with mock_upstream() as mock:
            mock.script = say_hello
            async with running(tree_for(tmp_path, mock, otlp_url=collector.url)) as server:
                request_id = await ask(server, traceparent=SAMPLED)
                async with aiohttp.ClientSession() as session:
                    found = await session.get(f"{server.base_url}/inspect/requests/{request_id}")
                    record = await found.json()
            handed_on = mock.calls[0].headers()["traceparent"]
    by_name = {span.name: span for span in collector.spans}
    root = by_name["chat near"]
    assert root.trace_id.hex() == TRACE == record["trace_id"]
    assert root.parent_span_id.hex() == SPAN
    assert handed_on == f"00-{TRACE}-{root.span_id.hex()}-01"
    generate = by_name["generate"]
    assert {by_name[name].parent_span_id for name in ("generate", "settle")} == {root.span_id}
    assert by_name["upstream"].parent_span_id == generate.span_id
    for span in collector.spans:
        above = next((one for one in collector.spans if one.span_id == span.parent_span_id), span)
        assert above.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= above.end_time_unix_nano
    said = {attribute.key: shown(attribute.value) for attribute in root.attributes}
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "near"
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.request.max_tokens"] == 9
    assert said["gen_ai.usage.input_tokens"] == USAGE["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == USAGE["completion_tokens"]
    assert said["hitsend.request_id"] == request_id
    assert said["hitsend.cost_microusd"] == record["cost_microusd"] > 0
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6 == pytest.approx(record["wall_ms"], abs=0.01)
    assert b"secret" not in b"".join(span.SerializeToString() for span in collector.spans)


async def test_errors_and_what_the_client_decided(tmp_path):
    with Collector() as collector:
        async with mock_upstream() as mock:
            mock.script = lambda call: call.answer("400 Bad Request", {"error": {"message": "no"}})
            async with running(tree_for(tmp_path, mock, otlp_url=collector.url, sample_share=0.0)) as server:
                await ask(server, status=400, traceparent=SAMPLED)
                await ask(server, status=400, traceparent=SAMPLED.replace("-01", "-00"))
                await ask(server, status=400)
    roots = [span for span in collector.spans if span.name == "chat near"]
    assert len(roots) == 1, "one client wanted its request traced, one didn't, one left it to a share of nothing"
    said = {attribute.key: shown(attribute.value) for attribute in roots[0].attributes}
    assert said["error.type"] == "invalid_request"


HEADERS = {
    SAMPLED: True,
    "": False,
    "00-" + "0" * 32 + f"-{SPAN}-01": False,
    f"00-{TRACE}-{'0' * 16}-01": False,
    SAMPLED.upper(): False,
    f"{SAMPLED}, {SAMPLED}": False,
    f"ff-{TRACE}-{SPAN}-01": False,
}


async def test_without_a_collector_a_good_header_is_handed_on_and_a_bad_one_is_dropped(tmp_path):
    async with mock_upstream() as mock:
        mock.script = say_hello
        async with running(tree_for(tmp_path, mock)) as server:
            for sent in HEADERS:
                await ask(server, traceparent=sent)
        got = [call.headers().get("traceparent") for call in mock.calls]
    assert got == [sent if is_good else None for sent, is_good in HEADERS.items()]


@pytest.mark.slow  # the second that the last spans have at a stop
async def test_a_collector_that_is_away_costs_nobody_anything(tmp_path):
    async with mock_upstream() as mock:
        mock.script = say_hello
        tree = tree_for(tmp_path, mock, otlp_url="http://127.0.0.1:9/v1/traces", timeout_s=1)
        async with running(tree) as server:
            await asyncio.gather(*(ask(server) for _ in range(5)))


async def test_an_address_that_is_none_stops_the_start(tmp_path):
    async with mock_upstream() as mock:
        with pytest.raises(ConfigError, match=r"tracing\.otlp_url: expected http://"):
            async with built(tree_for(tmp_path, mock, otlp_url="localhost:4318")):
                pass
