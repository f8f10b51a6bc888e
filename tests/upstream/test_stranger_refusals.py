"""How servers that call themselves compatible refuse: read for what they mean, shown without their words."""

import json

import pytest

from hitsend.serve.engine.refusals import LacksModel
from hitsend.settings_upstreams import UpstreamSettings
from tests.upstream.asking import ask, engine_of

SETTINGS = {"name": "s", "models": {"near": "far"}}

TOO_LONG = [
    "prompt is too long: 209303 tokens > 200000 maximum",
    "The input token count (1050000) exceeds the maximum number of tokens allowed (1048576).",
    "prompt token count of 132000 exceeds the limit of 128000",
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 509178 tokens.",
    "The estimated number of input and maximum output tokens (49215) exceeded this model context window limit (24000).",
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]",
    "Invalid request: Your request exceeded model token limit: 131072 (requested: 150000)",
    "invalid params, context window exceeds limit (2013)",
    "Prompt exceeds max length",
    "Input is too long for requested model.",
    "The total length of all messages is too long.",
    "the input length exceeds the context length",
    "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000",
]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (
            "This model's maximum context length is 65536 tokens. However, you requested 120846",
            "context_length_exceeded",
        ),
        ("This endpoint's maximum context length is 131072 tokens.", "context_length_exceeded"),
        ("The input (9000 tokens) is longer than the model's context length (4096 tokens).", "context_length_exceeded"),
        ("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096.", "context_length_exceeded"),
        *((words, "context_length_exceeded") for words in TOO_LONG),
        ("SECRET is not allowed here", "invalid_request"),
    ],
)
async def test_a_prompt_that_is_too_long_is_known_by_its_words(mock, words, code):
    async def script(call):
        error = {"message": words, "type": "invalid_request_error", "param": None, "code": "invalid_request_error"}
        await call.answer("400 Bad Request", {"error": error})

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        error = (await ask(engine)).error
    assert (error.code, error.param) == (code, "messages" if code == "context_length_exceeded" else None)
    assert words not in error.message


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (413, {}, "request_too_large"),
        (413, {"message": TOO_LONG[5], "code": 5021}, "context_length_exceeded"),
        (500, {"message": TOO_LONG[13]}, "context_length_exceeded"),
        (429, {"message": TOO_LONG[0]}, "rate_limit_exceeded"),
        (400, {"code": "model_max_prompt_tokens_exceeded"}, "context_length_exceeded"),
    ],
)
async def test_what_does_not_fit_is_no_failure_of_the_upstream(mock, status, error, code):
    async def script(call):
        await call.answer(f"{status} X", {"error": error})

    mock.script = script
    said = {"request_too_large": "too large for", "context_length_exceeded": "too long for"}
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url, breaker_failures=1)) as engine:
        found = (await ask(engine)).error
        assert (found.code, said.get(code, "limits its requests") in found.message) == (code, True)
        assert (engine.replicas.is_ready, len(mock.calls)) == (True, 1)


@pytest.mark.parametrize(("status", "code"), [(404, None), (400, "model_not_found"), (400, "invalid_model")])
async def test_who_lacks_a_model_may_say_so_in_a_code(mock, status, code):
    async def script(call):
        await call.answer(f"{status} X", {"error": {"code": code}})

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        assert isinstance((await ask(engine)).error, LacksModel)


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"retry_after_ms": "2500"}, 2.5),
        ({"retry_after_ms": "2500", "retry_after": "3"}, 3),
        ({"retry_after": "7 "}, 7),
    ],
)
async def test_when_to_come_back_may_be_told_finer(mock, headers, told):
    async def script(call):
        await call.answer("429 Too Many Requests", {}, **headers)

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        assert (await ask(engine)).error.retry_after_s == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("7", 7.0),
        ("1.5", 1.5),
        ("999999999", 3600.0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 3600.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1.0),
        ("-5", 1.0),
        ("nan", 1.0),
        ("1e999", 1.0),
        ("Wed, 99 Oct 99999 07:28:00 GMT", 1.0),
    ],
)
async def test_when_to_come_back_may_be_a_date(mock, given, told):
    async def script(call):
        await call.answer("429 Too Many Requests", {}, retry_after=given)

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        error = (await ask(engine)).error
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", told)


@pytest.mark.parametrize(
    ("status", "error", "has_credit"),
    [
        (429, {"code": "insufficient_quota", "type": "insufficient_quota"}, False),
        (429, {"code": None, "type": "exceeded_current_quota_error"}, False),
        (402, {}, False),
        (200, {"code": "insufficient_quota"}, False),
        (429, {"code": "rate_limit_exceeded"}, True),
    ],
)
async def test_no_credit_is_no_limit_that_waiting_helps_against(mock, status, error, has_credit):
    async def script(call):
        await call.answer(f"{status} X", {"error": error})

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url, breaker_failures=1)) as engine:
        found = (await ask(engine)).error
        assert found.code == ("rate_limit_exceeded" if has_credit else "engine_unavailable")
        assert ("no credit left" in found.message, engine.replicas.is_ready) == (not has_credit, has_credit)
        assert len(mock.calls) == 1


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"code": 429, "message": "slow down"}, "rate_limit_exceeded"),
        ({"code": "Throttling", "message": "slow down"}, "engine_unavailable"),
        ({"code": 400, "message": "prompt is too long", "data": None}, "context_length_exceeded"),
        ({"code": 200, "message": "ok", "data": {}}, "engine_failed"),
        ({"message": "hello"}, "engine_failed"),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_code_and_a_message_with_nothing_around_them_are_an_error(mock, said, code, kind):
    async def script(call):
        await call.start(kind=kind)
        if kind == "application/json":
            await call.raw(json.dumps(said).encode())
        else:
            await call.raw(b"event: error\n")
            await call.event(said)

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url, retry_share=0.0)) as engine:
        found = await ask(engine)
    assert (found.error.code, found.produced.usage.total_tokens) == (code, 0)


async def test_in_the_middle_of_an_answer_they_are_one_too(mock):
    async def script(call):
        await call.start()
        await call.say("Hel")
        await call.event({"code": 500, "message": "broke"})
        await call.finish()

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url)) as engine:
        found = await ask(engine)
    assert (found.text, found.reasons, found.error.code) == ("Hel", [], "engine_failed")
