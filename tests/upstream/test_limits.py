"""Limits and rights in front of an upstream: bounded by what is reserved for the prompt, told as everywhere."""

import asyncio

from hitsend.core.clock import SystemClock
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.terms import LimitsChange, TermsChange
from hitsend.serve.database.connection import Database, database_url
from tests.mock_upstream import USAGE
from tests.upstream.conftest import gateway


async def grant(data_dir, terms=None, **limits):
    """To everybody."""
    database = await Database.open(database_url(None, data_dir))
    terms = terms or TermsChange(limits=LimitsChange(**limits))
    await PrincipalStore(database, SystemClock()).change("global", (), terms)
    await database.close()


async def buckets(gate, **fields):
    status, body, _ = await gate.answer(path="/v1/estimate", **fields)
    assert status == 200
    return body, {one["name"]: (one["value"], one["limit"]) for one in body["buckets"]}


async def test_what_was_reserved_beyond_the_upstreams_bill_goes_back(tmp_path, mock):
    await grant(tmp_path, input_tokens_per_minute=1000, output_tokens_per_minute=100, requests_per_minute=10)
    async with gateway(tmp_path, mock) as gate:
        before, found = await buckets(gate)
        reserved = before["prompt_tokens"]
        assert before["max_output_tokens"] == 100, "what the levels leave, not the upstream's 4096"
        assert found["output_tokens_per_minute"] == (100, 100)
        assert found["input_tokens_per_minute"] == (reserved, 1000)
        status, _, answer = await gate.answer()
        assert (status, mock.calls[0].body["max_tokens"]) == (200, 100)
        assert answer.headers["x-ratelimit-limit-requests"] == "10"
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert answer.headers["x-ratelimit-remaining-output-tokens"] == "0"
        _, found = await buckets(gate, max_tokens=1)
        assert found["output_tokens_per_minute"][0] <= USAGE["completion_tokens"] + 1
        assert found["input_tokens_per_minute"][0] <= USAGE["prompt_tokens"] + reserved
        assert (await gate.idle())["quota_holds_open"] == 0


async def test_what_can_never_pass_names_its_field_and_asks_nobody(tmp_path, mock):
    await grant(tmp_path, output_tokens_per_minute=100, usd_per_day="0.00015")
    async with gateway(tmp_path, mock) as gate:
        status, body, _ = await gate.answer(max_tokens=101)
        assert (status, body["error"]["param"]) == (400, "max_tokens")
        status, body, _ = await gate.answer(messages=[{"role": "user", "content": "x" * 1000}])
        assert (status, body["error"]["param"]) == (400, "messages")
        assert "usd_per_day" in body["error"]["message"]
        estimate, _ = await buckets(gate, max_tokens=101)
        assert estimate["admission"]["refusal"]["code"] == "invalid_request"
        assert mock.calls == []


async def test_parallel_requests_are_refused_and_then_free_again(tmp_path, mock):
    await grant(tmp_path, parallel_requests=1)
    go, script = asyncio.Event(), mock.script

    async def late(call):
        await go.wait()
        await script(call)

    mock.script = late
    async with gateway(tmp_path, mock) as gate:
        first = asyncio.create_task(gate.answer())
        while not mock.calls:
            await asyncio.sleep(0.01)
        status, body, answer = await gate.answer()
        assert (status, body["error"]["code"], len(mock.calls)) == (429, "rate_limit_exceeded", 1)
        assert int(answer.headers["retry-after"]) >= 1
        go.set()
        assert (await first)[0] == 200
        assert (await gate.answer())[0] == 200


async def test_a_model_that_is_not_the_callers_is_refused(tmp_path, mock):
    await grant(tmp_path, TermsChange(models=("other",)))
    async with gateway(tmp_path, mock, models={"near": "far", "other": "far"}) as gate:
        status, body, _ = await gate.answer()
        assert (status, body["error"]["param"], mock.calls) == (403, "model", [])
        assert (await gate.answer(model="other"))[0] == 200


async def test_prompt_logprobs_are_refused_also_where_others_are_left_out(tmp_path, mock):
    async with gateway(tmp_path, mock, unsupported="ignore") as gate:
        status, body, _ = await gate.answer(prompt_logprobs=1)
        assert (status, body["error"]["param"], mock.calls) == (400, "prompt_logprobs", [])
