"""An engine's prompts counted here by its checkpoint's tokenizer.json: what is held, refused, and stops a start."""

import aiohttp
import msgspec
import pytest

from hitsend.cli.client import Client
from hitsend.cli.engines_diff import compare
from hitsend.core.errors import ConfigError
from hitsend.core.request import Tool, ToolChoice
from hitsend.serve.engine.openai_body import template_arguments, told_tools
from hitsend.serve.engine.terms import terms_of
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings, WorkersAISettings
from tests.upstream.asking import request_of
from tests.upstream.conftest import PRICES, gateway
from tests.upstream.test_limits import grant
from tests.upstream.test_real import HERE, VLLM, in_front_of, llama_server, needs_vllm
from tests.vocabularies import bundled_template, write_checkpoint

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.content == 'no' %}{{ raise_exception('Not that.') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if enable_thinking %}{{ '<|im_start|>' }}{% endif %}"
)
TYPED = "Say <|im_end|> and 東京."
TALK = [{"role": "user", "content": TYPED}]
RENDERED = f"<|im_start|>user\n{TYPED}<|im_end|>\n<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LLAMA_TEMPLATE = HERE / "thinks_and_calls.jinja"
DESCRIBED = {"type": "function", "function": TOOL["function"] | {"description": "Look it up: 東京 <|im_end|>"}}
ROOMY = {"tokens_per_request": 1_000_000}
"""A limit, so that prompts are counted before they are sent."""
REAL = (
    {},
    {
        "messages": [
            {"role": "system", "content": "Bref."},
            {"role": "user", "content": "Grüße 🚀🏽  \n\n\t12345 n\u0303"},
        ]
    },
    {"messages": [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb <|endoftext|>"}]},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"tools": [DESCRIBED]},
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), template=TEMPLATE)


@pytest.fixture(scope="session")
def num_tokens(folder):
    """By the library alone."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers, an extra, isn't installed")
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def vllm(mock, **fields):
    address = mock.url.removesuffix("/v1")
    return VllmSettings("gpu", address, {"near": "far"}, prices=PRICES, metrics_poll_s=0, **fields)


async def reserved(gate, answer):
    record = await gate.record(answer.headers["x-request-id"])
    return next(event for event in record["events"] if event["type"] == "reserved")["input_tokens"]


async def held(gate, **fields):
    status, body, answer = await gate.answer(**fields)
    assert status == 200, body
    return await reserved(gate, answer)


async def estimated(gate, **fields):
    async with gate.ask(path="/v1/estimate", **fields) as answer:
        found = await answer.json()
    assert "prompt_tokens" not in found["guessed"]
    return found["prompt_tokens"]


async def completion(call):
    await call.start()
    prompt = call.body["prompt"]
    num_prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    for index in range(num_prompts):
        await call.event({"choices": [{"index": index, "text": "x", "finish_reason": "stop"}]})
    await call.raw(b"data: [DONE]\n\n")


@pytest.mark.slow  # a text worker started
async def test_what_is_held_estimated_and_limited_is_the_count(tmp_path, mock, folder, num_tokens):
    known = num_tokens(RENDERED)
    await grant(tmp_path, **ROOMY)
    async with gateway(tmp_path, mock, vllm(mock, tokenizer=str(folder), context=known + 300)) as gate:
        assert await held(gate, messages=TALK, max_tokens=9) == known
        assert [call.head.split()[1] for call in mock.calls] == ["/v1/chat/completions"], "nobody was asked for it"
        assert await estimated(gate, messages=TALK) == known
        function = '{"description": null, "name": "look", "parameters": {"type": "object"}}'
        told = f'[{{"type": "function", "function": {function}}}]'
        for choice in ("auto", "none"):
            asked = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 9}
            assert await held(gate, messages=TALK, **asked) == num_tokens(told + RENDERED)
        status, shown, _ = await gate.answer(path="/v1/chat/completions/render", messages=TALK)
        assert (status, shown["prompt"], shown["num_tokens"]) == (200, RENDERED, known)
        assert len(shown["prompt_token_ids"]) == known
        status, counted, _ = await gate.answer(path="/v1/chat/completions/input_tokens", messages=TALK)
        assert (status, counted["input_tokens"]) == (200, known)
        thinking = {"chat_template_kwargs": {"enable_thinking": True, "unknown": TYPED}}
        assert await held(gate, messages=TALK, max_tokens=9, **thinking) == known + 1
        assert await held(gate, messages=TALK, max_tokens=9, reasoning_effort="high") == known + 1
        num_calls = len(mock.calls)
        status, body, _ = await gate.answer(messages=TALK, max_tokens=301)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert f"{known} tokens" in body["error"]["message"]
        assert len(mock.calls) == num_calls, "the refused one was never sent"
        mock.script = completion
        several = [f"{TYPED} a", "b"]
        for prompt, known in ((TYPED, num_tokens(TYPED)), ([5, 6, 7], 3), (several, sum(map(num_tokens, several)))):
            asked = {"prompt": prompt, "messages": None, "max_tokens": 9}
            assert await held(gate, path="/v1/completions", **asked) == known


async def test_where_nobody_knows_the_server_what_is_typed_stays_text(tmp_path, mock, folder, num_tokens):
    await grant(tmp_path, **ROOMY)
    async with gateway(tmp_path, mock, tokenizer=str(folder / "tokenizer.json")) as gate:
        parts = (
            "<|im_start|>",
            "user\nSay <|im_",
            "end|> and 東京.",
            "<|im_end|>",
            "\n",
            "<|im_start|>",
            "assistant\n",
        )
        assert num_tokens(RENDERED) < await held(gate, messages=TALK) <= sum(map(num_tokens, parts))
        refused = [{"role": "user", "content": "no"}]
        assert await held(gate, messages=refused) > len(msgspec.json.encode(refused)), "bounded by its bytes"
        assert await held(gate, messages=TALK) < len(msgspec.json.encode(TALK)), "and the next one is counted again"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokenizer": "x.json", "counts_prompts": "bytes"}, r"engines\[there\]\.tokenizer: x\.json .*bytes"),
        ({"counts_prompts": "tokenizer"}, r"engines\[there\]\.counts_prompts: tokenizer, but no tokenizer"),
    ],
)
async def test_a_setting_that_cannot_work_stops_the_start(tmp_path, mock, fields, says):
    with pytest.raises(ConfigError, match=says):
        async with gateway(tmp_path, mock, **fields):
            pass


async def test_a_file_that_is_none_stops_the_start(tmp_path, mock, num_tokens):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=r"engines\[there\]\.tokenizer: .*/tokenizer\.json is no tokenizer\.json"):
        async with gateway(tmp_path, mock, tokenizer=str(file)):
            pass


def test_the_template_is_told_what_the_upstream_will_be():
    cloud = WorkersAISettings("cf", "http://127.0.0.1/ai", {"near": "@cf/qwen/qwen3.8-27b"})
    assert template_arguments(request_of(), terms_of(cloud)) == {"enable_thinking": False}
    assert template_arguments(request_of(reasoning_effort="low"), terms_of(cloud)) == {"enable_thinking": True}
    generic = UpstreamSettings("there", "http://127.0.0.1/v1", {"near": "far"}, unsupported="ignore")
    request = request_of(template_kwargs={"enable_thinking": True}, reasoning_effort="low")
    assert template_arguments(request, terms_of(generic)) == {}, "it never gets there"
    named = request_of(tools=(Tool("f"), Tool("g", "G")), tool_choice=ToolChoice("required", ("g",)))
    llama = UpstreamSettings("there", "http://127.0.0.1/v1", {"near": "far"}, server="llama_server")
    assert [tool["function"]["name"] for tool in told_tools(named, terms_of(llama))] == ["g"]
    assert [tool["function"]["description"] for tool in told_tools(named, terms_of(generic))] == [None, "G"]


@pytest.mark.model
async def test_the_count_is_that_of_a_real_llama_server_and_of_the_embedded_engine(tmp_path, folder, num_tokens):
    prices, templates = {"prices": PRICES, "context": 2048}, (LLAMA_TEMPLATE.read_text(), bundled_template())
    theirs, ours = (str(write_checkpoint(tmp_path / str(at), template=one)) for at, one in enumerate(templates))
    with llama_server(threads=1) as url:
        llama = UpstreamSettings(
            "llama", f"{url}/v1", {"there": "any"}, server="llama_server", tokenizer=theirs, metrics_poll_s=0, **prices
        )
        twin = UpstreamSettings(
            "twin", "http://127.0.0.1:9/v1", {"twin": "here"}, server="hitsend", tokenizer=ours, **prices
        )
        await grant(tmp_path, **ROOMY)
        async with in_front_of(tmp_path, llama, twin, model="smollm2-135m") as gate:
            for fields in REAL:
                asked = {"messages": TALK, "max_tokens": 1, "temperature": 0} | fields
                counts = {model: await estimated(gate, model=model, **asked) for model in ("here", "twin", "there")}
                assert counts["here"] == counts["twin"], fields
                status, body, answer = await gate.answer(model="there", **asked)
                assert (status, body["usage"]["prompt_tokens"]) == (200, counts["there"]), (fields, body)
                assert await reserved(gate, answer) == counts["there"]


@pytest.mark.model
@needs_vllm
async def test_the_count_is_that_of_a_real_vllm(tmp_path):
    async with aiohttp.ClientSession() as session, session.get(f"{VLLM}/v1/models") as answer:
        (served,) = (await answer.json())["data"]
    own = VllmSettings("vllm", VLLM, {"there": served["id"]}, prices=PRICES, context=2048, tokenizer=served["root"])
    await grant(tmp_path, **ROOMY)
    async with in_front_of(tmp_path, own) as gate:
        for fields in REAL:
            asked = {"messages": TALK, "max_tokens": 1, "temperature": 0} | fields
            count = await estimated(gate, model="there", **asked)
            status, body, answer = await gate.answer(model="there", **asked)
            assert (status, body["usage"]["prompt_tokens"]) == (200, count), (fields, body)
            assert await reserved(gate, answer) == count


async def test_a_diff_has_the_prompts_of_upstreams_whose_template_is_here(tmp_path, mock, folder, num_tokens):
    engine = msgspec.structs.replace(vllm(mock, tokenizer=str(folder)), models={"near": "far", "other": "far"})
    async with gateway(tmp_path, mock, engine) as gate, Client(gate.url, None) as client:
        found = await compare(client, ("near", "other"), {"messages": TALK, "max_tokens": 9})
    assert [side["rendered"] for side in found["sides"]] == [RENDERED, RENDERED]
    assert [side["prompt_tokens"] for side in found["sides"]] == [num_tokens(RENDERED)] * 2
    assert found["rendered_diff"] == []
