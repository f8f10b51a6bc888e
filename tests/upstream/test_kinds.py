"""What goes out to each kind of upstream: names, what is left out or refused, salts, and the count of a prompt."""

import json

import msgspec
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from hitsend.core.request import Delta, Message, OutputFormat, Principal, Request, SamplingAsked, Tool
from hitsend.serve.chat.handover import Counted, Handover, check, count, fit, handed_over
from hitsend.serve.engine.openai_body import asked, encode_body
from hitsend.serve.engine.profiles import PROFILES
from hitsend.serve.engine.terms import changes, drops, terms_of
from hitsend.serve.upstreams import build_upstreams
from hitsend.settings import EngineSettings, ServerSettings, Settings
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings
from tests.upstream.asking import ask, engine_of, job_of, request_of
from tests.upstream.conftest import gateway

MODELS = {"near": "far"}


def body(settings, salt=b"house", **fields):
    return json.loads(encode_body(request_of(**fields), 9, terms_of(settings, salt)))


def openai(server="generic", **fields):
    return UpstreamSettings(name="there", base_url="http://127.0.0.1:1/v1", models=MODELS, server=server, **fields)


def vllm(url="http://127.0.0.1:1", **fields):
    return VllmSettings(**({"name": "v", "base_url": url, "models": MODELS, "metrics_poll_s": 0.0} | fields))


def test_vllm_gets_its_extensions_under_its_names():
    sent = body(
        vllm(sends_priority=True),
        sampling=SamplingAsked(top_k=5, min_p=0.1, repetition_penalty=1.1),
        template_kwargs={"enable_thinking": False},
        thinking_token_budget=0,
        stop_token_ids=(1,),
        min_tokens=2,
        ignore_eos=True,
        output_format=OutputFormat("lark", "start: /a/"),
        tier=2,
    )
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"], sent["priority"]) == (5, 0.1, 1.1, 2)
    assert (sent["thinking_token_budget"], sent["stop_token_ids"], sent["min_tokens"]) == (0, [1], 2)
    assert sent["structured_outputs"] == {"grammar": "start: /a/"}
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body(vllm(), output_format=OutputFormat("regex", "a+"))["structured_outputs"] == {"regex": "a+"}
    assert "priority" not in body(vllm(), tier=2), "older ones refuse it under their default policy"


def test_each_tenant_has_a_salt_that_no_other_can_have_or_guess():
    mine, other = Principal(org="a", key_id="k1"), Principal(org="a", key_id="k2")
    salts = [body(vllm(), salt, principal=who)["cache_salt"] for salt in (b"x", b"y") for who in (mine, other)]
    assert len(set(salts)) == 4
    assert salts[0] == body(vllm(), b"x", principal=mine, messages=(Message("user", "else"),))["cache_salt"]
    # names that run into each other stay apart
    first, second = Principal(org="ab", app="c"), Principal(org="a", app="bc")
    assert body(vllm(), principal=first)["cache_salt"] != body(vllm(), principal=second)["cache_salt"]
    assert "cache_salt" not in body(vllm(salts_cache=False))
    assert "cache_salt" not in body(openai("hitsend"))


@pytest.mark.parametrize(
    "server", ["generic", "openai", "openrouter", "ollama", "llama_server", "sglang", "tgi", "hitsend"]
)
def test_nothing_goes_out_that_a_server_does_not_take(server):
    settings = openai(server, unsupported="ignore")
    everything = {
        "sampling": SamplingAsked(
            temperature=0.5, top_k=5, min_p=0.1, repetition_penalty=1.1, typical_p=0.5, dry_multiplier=1.0, seed=3
        ),
        "thinking_token_budget": 7,
        "template_kwargs": {"enable_thinking": False},
        "output_format": OutputFormat("regex", "a+"),
        "logprobs": True,
        "tools": (Tool("f"),),
        "logit_bias": ((1, 1.0),),
        "ignore_eos": True,
    }
    terms = terms_of(settings)
    plain = body(settings)
    sent = body(settings, **everything)
    paths = {
        path: value
        for name, value in sent.items()
        for path in ([f"{name}.{one}" for one in value] if name in ("structured_outputs", "reasoning") else [name])
    }
    assert paths.keys() - plain.keys() == {
        terms.names[name] for name in asked(request_of(**everything)) if name in terms.names
    }
    assert set(asked(request_of(**everything))) - terms.takes <= set(drops(terms)), "and the command says so"


def test_names_differ_as_the_profiles_say():
    asked_for = SamplingAsked(repetition_penalty=1.5)
    assert body(openai("llama_server"), sampling=asked_for)["repeat_penalty"] == 1.5
    assert body(openai("openrouter"), thinking_token_budget=9)["reasoning"] == {"max_tokens": 9}
    assert body(openai("sglang"), output_format=OutputFormat("regex", "a"))["regex"] == "a"
    assert body(openai("openai"))["max_completion_tokens"] == 9
    assert body(openai(renames={"top_k": "options.k"}), sampling=SamplingAsked(top_k=1))["options"] == {"k": 1}
    assert "repetition_penalty → repeat_penalty" in changes(terms_of(openai("llama_server")))


def test_every_profile_says_where_it_is_known_from():
    assert all(profile.source for profile in PROFILES.values())


def handover(settings, **fields):
    ignores = settings.unsupported == "ignore"
    fields = {"context": 100, "max_tokens": 50} | fields
    return Handover(engine="there", takes=terms_of(settings).takes, ignores=ignores, **fields)


def checked(settings, **fields):
    request = request_of(**fields)
    terms = handover(settings)
    return handed_over(request, terms, check(request, terms, set(asked(request))))


@pytest.mark.parametrize(
    ("lacks", "fields", "param"),
    [
        ("grammar", {"output_format": OutputFormat("json_schema", {})}, "response_format"),
        ("logprobs", {"logprobs": True, "top_logprobs": 2}, "logprobs"),
        ("seed", {"sampling": SamplingAsked(seed=1)}, "seed"),
        ("tools", {"tools": (Tool("f"),)}, "tools"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_or_left_out_with_a_warning(lacks, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        checked(openai(lacks=(lacks,)), **fields)
    assert caught.value.param == param
    settings = openai(lacks=(lacks,), unsupported="ignore")
    request = checked(settings, **fields)
    assert any(warning.startswith(f"{param}: left out") for warning in request.warnings)
    assert param not in body(settings, **fields)
    assert checked(openai(), **fields).warnings == ()


def test_choices_and_prompt_logprobs_are_never_left_out():
    settings = openai("ollama", unsupported="ignore")
    for fields, param in (({"n": 2}, "n"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
        with pytest.raises(InvalidRequest) as caught:
            checked(settings, **fields)
        assert caught.value.param == param


def test_a_counted_prompt_is_held_against_the_context():
    terms, request = handover(vllm()), request_of()
    assert fit(request, terms, None, None, 60).max_tokens == 39, "what is left, where nothing was asked for"
    with pytest.raises(ContextLengthExceeded, match="60 tokens"):
        fit(request_of(max_tokens=40), terms, None, None, 60)
    with pytest.raises(ContextLengthExceeded) as caught:
        fit(request, terms, None, None, 100)
    assert caught.value.param == "messages"
    assert Counted(3, 3, is_exact=True).is_exact


async def test_vllm_counts_the_prompt_by_its_own_template(mock):
    replies = [("200 OK", {"count": 42, "max_model_len": 100, "tokens": []}), ("200 OK", {}), ("404 No", {})]

    async def script(call):
        assert call.head.startswith("POST /tokenize ")
        await call.answer(*replies[len(mock.calls) - 1])

    mock.script = script
    async with engine_of(vllm(mock.url)) as engine:
        request = request_of(template_kwargs={"enable_thinking": False}, tools=(Tool("f"),))
        assert await engine.count_prompt(request) == 42
        sent = mock.calls[0].body
        assert (sent["model"], sent["chat_template_kwargs"]) == ("far", {"enable_thinking": False})
        assert sent["tools"][0]["function"]["name"] == "f"
        assert [await engine.count_prompt(request) for _ in range(3)] == [None, None, None]
        assert len(mock.calls) == 3, "where there is no such route, it isn't asked for again"


async def test_usage_in_every_chunk_counts_what_a_client_that_left_had_seen(mock):
    async def script(call):
        assert call.head.startswith("POST /v1/chat/completions ")
        await call.start()
        usage = {"prompt_tokens": 11, "completion_tokens": 8}
        await call.event({"choices": [{"index": 0, "delta": {"content": "eight tokens"}}], "usage": usage})

    mock.script = script
    async with engine_of(vllm(mock.url)) as engine:
        answer = await ask(engine)
        assert answer.error.code == "engine_failed"
        assert answer.reasons == []
        usage = answer.produced.usage
        assert (usage.prompt_tokens, usage.completion_tokens, answer.produced.is_estimate) == (11, 8, True)


async def test_a_vllm_without_priorities_blames_the_settings_and_no_client(mock):
    """As its older versions answer; a newer one takes the field whatever its policy is (`test_real.py`)."""

    async def script(call):
        text = "Got priority 2 but Priority scheduling is not enabled."
        error = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
        await call.answer("400 Bad Request", error)

    mock.script = script
    async with engine_of(vllm(mock.url, sends_priority=True)) as engine:
        answer = await ask(engine)
        assert (answer.error.code, answer.error.param) == ("engine_unavailable", None)
        assert "sends_priority = false" in answer.error.message
        assert len(mock.calls) == 1


async def test_a_prompt_that_vllm_finds_too_long_is_called_so(mock):
    async def script(call):
        text = "This model's maximum context length is 10 tokens. However, you requested 12 SECRET"
        error = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
        await call.answer("400 Bad Request", error)

    mock.script = script
    async with engine_of(vllm(mock.url)) as engine:
        error = (await ask(engine)).error
    assert error.code == "context_length_exceeded"
    assert "SECRET" not in error.message


@pytest.mark.slow  # a server of its own
async def test_what_is_left_out_stands_in_answer_and_record(tmp_path, mock):
    async with gateway(tmp_path, mock, unsupported="ignore", lacks=("seed",)) as gate:
        status, body, _ = await gate.answer(top_k=5, seed=3, temperature=0.5)
        assert status == 200
        warnings = [one for one in body["hitsend"]["warnings"] if "left out" in one]
        assert [one.partition(":")[0] for one in warnings] == ["seed", "top_k"]
        record = await gate.record(body["hitsend"]["request_id"])
        fitted = next(event for event in record["events"] if event["type"] == "fitted")
        assert fitted["warnings"] == warnings
        assert {"top_k", "seed"}.isdisjoint(mock.calls[0].body)
        assert mock.calls[0].body["temperature"] == 0.5


def test_requests_are_what_they_were():
    assert isinstance(checked(openai()), Request)


async def test_prompts_without_messages_go_to_kinds_that_have_completions(mock):
    async def script(call):
        assert call.head.startswith("POST /v1/completions ")
        await call.start()
        columns = {"tokens": ["a", "é"], "token_logprobs": [-0.5, None], "top_logprobs": [{"a": -0.5, "b": -2.0}, None]}
        for index in range(4):
            await call.event({"choices": [{"index": index, "text": "aé", "logprobs": columns, "finish_reason": None}]})
            await call.event({"choices": [{"index": index, "text": "", "logprobs": None, "finish_reason": "length"}]})
        await call.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}})
        await call.event("[DONE]")

    mock.script = script
    request = request_of(messages=(), prompts=("one", "two"), n=2, logprobs=True, top_logprobs=2)
    async with engine_of(vllm(mock.url)) as engine:
        job = msgspec.structs.replace(job_of(request), n=4)
        generation = engine.generate(job)
        deltas = [event async for event in generation if isinstance(event, Delta)]
        await generation.aclose()
    assert (mock.calls[0].body["prompt"], mock.calls[0].body["n"], mock.calls[0].body["logprobs"]) == (
        ["one", "two"],
        2,
        2,
    )
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2, 3]
    first, second = deltas[0].logprobs
    assert (first.token, first.logprob, [top.token for top in first.top]) == ("a", -0.5, ["a", "b"])
    assert (second.token, second.bytes) == ("é", (0xC3, 0xA9))
    assert generation.produced.usage.completion_tokens == 8


def test_prompts_are_bounded_by_their_bytes_or_ids():
    counted = count(request_of(messages=(), prompts=("é", "ab")), None)
    assert counted.reserved == 2 + 2 + 2
    assert count(request_of(messages=(), prompts=((1, 2, 3),)), None).estimated == 3
    terms = handover(openai())
    with pytest.raises(InvalidRequest, match="messages only"):
        check(request_of(messages=(), prompts=("a",)), terms, set())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("passes", ("top-k",)),
        ("passes", ("prompt_logprobs",)),
        ("passes", ("stream_options",)),
        ("lacks", ("logprob",)),
        ("renames", {"grammar": "x"}),
    ],
)
def test_a_field_that_nobody_could_send_stops_the_start(setting, value):
    with pytest.raises(ConfigError, match=rf"engines\[s\]\.{setting}: '{next(iter(value))}' is no field"):
        terms_of(UpstreamSettings(name="s", **{setting: value}))


@pytest.mark.parametrize(
    ("renames", "lacks"),
    [({"seed": "n_seed", "top_p": "n_seed"}, ()), ({"top_p": "seed"}, ()), ({"top_p": "seed"}, ("top_p",))],
)
def test_two_fields_under_one_name_stop_the_start(renames, lacks):
    told = UpstreamSettings(name="s", renames=renames, lacks=lacks)
    if lacks:  # then one is sent
        assert terms_of(told).names["seed"] == "seed"
        return
    with pytest.raises(ConfigError, match=r"engines\[s\]\.renames: .*'seed'.* would both be sent as"):
        terms_of(told)


def test_fields_that_may_be_told_apart_start():
    told = UpstreamSettings(
        name="s",
        passes=("top_k", "chat_template_kwargs", "structured_outputs"),
        lacks=("grammar", "logprobs", "tools", "stream_options", "reasoning_content", "seed"),
        renames={"seed": "random_seed"},
    )
    assert terms_of(told).names["top_k"] == "top_k"


def test_one_address_and_several_are_not_both_set(tmp_path):
    one = UpstreamSettings(name="s", base_url="http://a/v1", base_urls=("http://b/v1",), models={"near": "far"})
    tree = Settings(server=ServerSettings(data_dir=str(tmp_path)), engine=EngineSettings(model="none"), engines=(one,))
    with pytest.raises(ConfigError, match="base_url: set beside base_urls"):
        build_upstreams(tree, SystemClock(), lambda _name, _tokens: None)
