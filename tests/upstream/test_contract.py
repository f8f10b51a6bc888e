"""The same request to every kind of engine gives the same shapes: one suite, whatever stands behind a name."""

import aiohttp
import pytest

from hitsend import settings
from hitsend.serve.app import running
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings, WorkersAISettings
from tests.mock_upstream import mock_upstream
from tests.upstream.conftest import PRICES, Gateway
from tests.upstream.contract import keeps_the_contract, told

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
LOGPROBS = {"content": [{"token": "Hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}
MODELS = ("openai", "vllm", "cf", "cf-native")


def thought(call):
    """What the kinds call it: vLLM has dropped the older name."""
    return "reasoning" if call.headers()["host"] and call.head.startswith("POST /v1/") else "reasoning_content"


async def upstream(call):
    """A thought, then a call where there are tools, else text; the bill in the last chunk."""
    await call.start()
    for index in range(len(call.body.get("prompt", ()))):
        await call.event({"choices": [{"index": index, "text": "Hi", "finish_reason": "stop"}]})
    if "prompt" in call.body:
        await call.event({"choices": [], "usage": USAGE})
        await call.event("[DONE]")
        return
    await call.event({"choices": [{"index": 0, "delta": {"role": "assistant", thought(call): "hm"}}]})
    if call.body.get("tools"):
        function = {"name": "look", "arguments": '{"at": "it"}'}
        delta = {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}
        await call.event({"choices": [{"index": 0, "delta": delta}]})
    else:
        fields = {"logprobs": LOGPROBS} if call.body.get("logprobs") else {}
        await call.event({"choices": [{"index": 0, "delta": {"content": "Hi"}, **fields}]})
    reason = "stop" if "/run/" in call.head or not call.body.get("tools") else "tool_calls"
    await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": USAGE})
    await call.event("[DONE]")


def engines(mock):
    root = mock.url.removesuffix("/v1")
    cloudflare = {"base_url": f"{root}/accounts/a/ai", "prices": PRICES, "plan": "paid"}
    qwen = "@cf/qwen/qwen3.8-27b"
    return (
        UpstreamSettings(name="openai", base_url=f"{root}/far/v1", models={"openai": "far"}, prices=PRICES),
        VllmSettings(
            name="vllm",
            base_url=root,
            models={"vllm": "far"},
            prices=PRICES,
            counts_prompts="bytes",
            metrics_poll_s=0.0,  # each call is one that was asked for
        ),
        WorkersAISettings(name="cf", models={"cf": qwen}, **cloudflare),
        WorkersAISettings(name="cf-native", models={"cf-native": qwen}, route="native", **cloudflare),
    )


async def completes(gate):
    """Prompts without messages, where the kind has a route for them."""
    for model, expected in (("vllm", 200), ("openai", 400), ("cf", 400)):
        body = {"model": model, "prompt": ["a", "b"], "max_tokens": 5}
        async with gate.session.post(f"{gate.url}/v1/completions", json=body) as answer:
            found = await answer.json()
            assert answer.status == expected, model
        if expected == 200:
            assert [(one["index"], one["text"]) for one in found["choices"]] == [(0, "Hi"), (1, "Hi")]
            assert found["usage"]["completion_tokens"] == 4
        else:
            assert found["error"]["param"] == "prompt"


@pytest.mark.slow  # a server of its own
async def test_every_kind_of_upstream_gives_the_same(tmp_path):
    async with mock_upstream() as mock:
        mock.script = upstream
        tree = settings.Settings(
            server=settings.ServerSettings(data_dir=str(tmp_path)),
            engine=settings.EngineSettings(model="none"),
            engines=engines(mock),
        )
        async with running(tree) as server, aiohttp.ClientSession() as session:
            gate = Gateway(server.base_url, session, mock)
            for model in MODELS:
                await keeps_the_contract(gate, model)
            answers = [(await told(gate, model))[1] for model in MODELS]
            for body in answers:
                message = body["choices"][0]["message"]
                assert (message["reasoning_content"], message["reasoning"]) == ("hm", "hm")
                assert message["content"] == "Hi"
                assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
                assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
            for model in MODELS:
                _, body, _ = await told(gate, model, tools=[TOOL])
                choice = body["choices"][0]
                call = choice["message"]["tool_calls"][0]
                assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "look"), model
                assert call["function"]["arguments"] == '{"at": "it"}'
                assert (await told(gate, model, response_format=SCHEMA))[0] == 200
                assert mock.calls[-1].body["response_format"]["json_schema"]["strict"] is True
                assert mock.calls[-1].body["max_tokens"] == 32
            await completes(gate)
            state = await gate.idle()
            assert {name: one["kind"] for name, one in state["upstreams"].items()} == {
                "openai": "openai",
                "vllm": "vllm",
                "cf": "workers_ai",
                "cf-native": "workers_ai",
            }


VECTORS = {"data": [{"index": 1, "embedding": [0.0, 1.0]}, {"index": 0, "embedding": "AACAPwAAAAA="}]}


@pytest.mark.slow  # a server of its own
async def test_embeddings_come_from_upstreams_too(tmp_path):
    async with mock_upstream() as mock:
        answers = [
            *[VECTORS | {"usage": {"prompt_tokens": 7}}] * 3,
            VECTORS,
            {"data": []},
            b"{",
            {"data": VECTORS["data"][:1]},
            {"error": {"message": "maximum context length is 5 tokens", "code": 400}},
        ]

        async def script(call):
            assert call.head.startswith("POST /v1/embeddings ")
            await call.answer("200 OK", answers[len(mock.calls) - 1])

        mock.script = script
        one = VllmSettings(
            name="v", base_url=mock.url, embedding_models={"small": "BAAI/bge"}, prices=PRICES, metrics_poll_s=0.0
        )
        tree = settings.Settings(
            server=settings.ServerSettings(data_dir=str(tmp_path)),
            engine=settings.EngineSettings(model="none"),
            engines=(one,),
        )
        async with running(tree) as server, aiohttp.ClientSession() as session:
            gate = Gateway(server.base_url, session, mock)

            async def embed(**fields):
                body = {"model": "small", "input": ["a", "bc"]} | fields
                async with session.post(f"{server.base_url}/v1/embeddings", json=body) as answer:
                    return answer.status, await answer.json()

            status, body = await embed(dimensions=2)
            assert status == 200
            assert [one["embedding"] for one in body["data"]] == [[1.0, 0.0], [0.0, 1.0]]
            assert (body["usage"]["prompt_tokens"], body["hitsend"]["cost_microusd"]) == (7, 7)
            assert mock.calls[0].body == {
                "model": "BAAI/bge",
                "input": ["a", "bc"],
                "encoding_format": "float",
            }
            status, body = await embed(dimensions=1)
            assert [one["embedding"] for one in body["data"]] == [[1.0], [0.0]], "cut here"
            status, body = await embed(dimensions=3)
            assert (status, body["error"]["param"]) == (400, "dimensions")
            status, body = await embed()
            record = await gate.record(body["hitsend"]["request_id"])
            assert (status, record["ledger"]["is_estimate"], record["ledger"]["prompt_tokens"]) == (200, True, 1)
            for _ in answers[4:-1]:
                status, body = await embed()
                assert (status, body["error"]["code"]) == (500, "engine_failed")
            status, body = await embed()
            assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "input")
            assert [one["id"] for one in (await gate.get("/v1/models"))["data"]] == ["small"]
            assert (await gate.answer(model="small"))[0] == 404, "it doesn't chat"
            state = await gate.idle()
            assert state["holds_open"] == 0


@pytest.mark.slow  # a server of its own
async def test_no_field_and_no_header_of_a_client_moves_the_address_or_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT_TEST_KEY", "sk-canary")
    async with mock_upstream() as mock, mock_upstream() as evil:
        mock.script = evil.script = upstream
        one = UpstreamSettings(
            name="there",
            base_url=mock.url,
            models={"near": "far"},
            prices=PRICES,
            api_key_env="FAULT_TEST_KEY",
            unsupported="ignore",
        )
        tree = settings.Settings(
            server=settings.ServerSettings(data_dir=str(tmp_path)),
            engine=settings.EngineSettings(model="none"),
            engines=(one,),
        )
        async with running(tree) as server, aiohttp.ClientSession() as session:
            gate = Gateway(server.base_url, session, mock)
            tries = [
                {"model": f"{evil.url}/far"},
                {"base_url": evil.url},
                {"api_base": evil.url},
                {"metadata": {"base_url": evil.url}},
                {"user": evil.url},
                {"chat_template_kwargs": {"base_url": evil.url}},
                {"model": "near\r\nhost: evil"},
            ]
            headers = {"x-forwarded-host": evil.url, "x-upstream": evil.url, "forwarded": f"host={evil.url}"}
            for fields in tries:
                await gate.answer(headers=headers, **fields)

            async def redirects(call):
                await call.start("307 Temporary Redirect", location=f"{evil.url}/chat/completions", content_length="0")

            mock.script = redirects
            status, body, _ = await gate.answer()
            assert (status, body["error"]["code"]) == (502, "engine_unavailable")
            host = mock.url.removeprefix("http://").removesuffix("/v1")
            assert evil.calls == []
            assert evil.num_connections == 0
            assert {call.headers()["host"] for call in mock.calls} == {host}
            assert {call.head.split(" ")[1] for call in mock.calls} == {"/v1/chat/completions"}
            assert {call.headers()["authorization"] for call in mock.calls} == {"Bearer sk-canary"}
