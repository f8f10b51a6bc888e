"""When a prompt is counted: before it is sent, where something depends on it; else later, if nobody else tells."""

import asyncio

import pytest

from hitsend.serve.engine import upstream_generation
from hitsend.settings_upstreams import UpstreamSettings
from tests.upstream.conftest import PRICES, gateway
from tests.upstream.test_limits import grant
from tests.upstream.test_own_count import vllm

COUNT = 42


class Counter:
    """An upstream that says how long a prompt is only when it may; `usages` are those of its chunks, in order."""

    def __init__(self, mock, usages=(None, None), finishes=True):
        self.may_count, self.has_asked = asyncio.Event(), asyncio.Event()
        self.paths = []
        self.mock, self.usages, self.finishes = mock, usages, finishes
        mock.script = self.script

    async def script(self, call):
        path = call.head.split()[1]
        self.paths.append(path)
        if path != "/v1/chat/completions":
            self.has_asked.set()
            await self.may_count.wait()
            await call.answer("200 OK", {"count": COUNT, "input_tokens": COUNT})
            return
        await call.start()
        for text, usage in zip(("Hel", "lo"), self.usages, strict=True):
            more = {} if usage is None else {"usage": usage}
            await call.event({"choices": [{"index": 0, "delta": {"content": text}}]} | more)
        if self.finishes:
            await call.finish()
        else:
            await asyncio.sleep(60)


def llama_server(mock):
    """A kind that counts, and tells in the end only how long the prompt was."""
    return UpstreamSettings("there", mock.url, {"near": "far"}, server="llama_server", prices=PRICES, metrics_poll_s=0)


async def ended(gate, answer):
    record = await gate.record(answer.headers["x-request-id"])
    return record, {event["type"]: event for event in record["events"]}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_no_limit_watches_does_not_wait_for_its_count(tmp_path, mock, stream):
    upstream = Counter(mock)
    async with gateway(tmp_path, mock, vllm(mock)) as gate:
        asking = asyncio.ensure_future(gate.answer(stream=stream))
        await asyncio.wait_for(upstream.has_asked.wait(), 10)
        for _ in range(500):
            if len(upstream.paths) == 2:
                break
            await asyncio.sleep(0.01)
        assert sorted(upstream.paths) == ["/tokenize", "/v1/chat/completions"], "sent, though nobody has counted yet"
        assert not asking.done(), "the upstream doesn't tell the prompt's tokens, so its first word waits for the count"
        upstream.may_count.set()
        status, _, answer = await asking
        record, said = await ended(gate, answer)
        assert (status, said["prompt_counted"]["prompt_tokens"]) == (200, COUNT)
        assert said["reserved"]["input_tokens"] > COUNT, "a bound from the bytes was held"
        row = record["ledger"]
        assert (row["prompt_tokens"], row["is_estimate"]) == (COUNT, True)
        assert (await gate.idle())["holds_open"] == 0


async def test_where_the_upstream_says_it_itself_nothing_waits_for_the_count(tmp_path, mock):
    usage = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}
    upstream = Counter(mock, usages=(usage, usage))
    async with gateway(tmp_path, mock, vllm(mock)) as gate:
        status, _, answer = await asyncio.wait_for(gate.answer(stream=True), 10)
        record, said = await ended(gate, answer)
        assert (status, record["ledger"]["prompt_tokens"]) == (200, 11)
        assert "prompt_counted" not in said
        assert upstream.paths == ["/v1/chat/completions"], "vLLM's first chunk says it, so nobody asked"


async def test_a_count_that_the_upstreams_own_overtakes_is_left(tmp_path, mock):
    usage = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}
    upstream = Counter(mock, usages=(usage, usage))

    async def script(call):
        if call.head.split()[1] == "/v1/chat/completions":
            await asyncio.wait_for(upstream.has_asked.wait(), 10)
        await upstream.script(call)

    mock.script = script
    async with gateway(tmp_path, mock, llama_server(mock)) as gate:
        status, _, answer = await asyncio.wait_for(gate.answer(stream=True), 10)
        record, said = await ended(gate, answer)
        assert (status, record["ledger"]["prompt_tokens"]) == (200, 11)
        assert "prompt_counted" not in said
        for _ in range(500):  # the question that nobody needs answered any more is left
            if mock.num_open == 0:
                break
            await asyncio.sleep(0.01)
        assert mock.num_open == 0


async def test_the_count_leaves_the_upstream_alone_until_its_head_is_there(tmp_path, mock, monkeypatch):
    monkeypatch.setattr(upstream_generation, "UNDISTURBED_S", 60.0)
    upstream, has_come, may_begin = Counter(mock), asyncio.Event(), asyncio.Event()
    upstream.may_count.set()

    async def script(call):
        if call.head.split()[1] == "/v1/chat/completions":
            has_come.set()
            await may_begin.wait()
        await upstream.script(call)

    mock.script = script
    async with gateway(tmp_path, mock, llama_server(mock)) as gate:
        asking = asyncio.ensure_future(gate.answer(stream=True))
        await asyncio.wait_for(has_come.wait(), 10)
        await asyncio.sleep(0.1)
        assert not upstream.has_asked.is_set()
        may_begin.set()
        record, _ = await ended(gate, (await asking)[2])
        assert record["ledger"]["prompt_tokens"] == COUNT


async def test_an_upstream_whose_head_comes_late_is_asked_all_the_same(tmp_path, mock):
    upstream = Counter(mock)
    upstream.may_count.set()

    async def script(call):
        if call.head.split()[1] == "/v1/chat/completions":
            await asyncio.wait_for(upstream.has_asked.wait(), 10)
        await upstream.script(call)

    mock.script = script
    async with gateway(tmp_path, mock, llama_server(mock)) as gate:
        status, _, answer = await gate.answer(stream=True)
        record, _ = await ended(gate, answer)
        assert (status, record["ledger"]["prompt_tokens"]) == (200, COUNT)


async def test_a_client_that_leaves_before_the_first_word_is_counted_then(tmp_path, mock):
    upstream, has_come = Counter(mock), asyncio.Event()
    upstream.may_count.set()

    async def script(call):
        if call.head.split()[1] == "/v1/chat/completions":
            has_come.set()
            await asyncio.sleep(60)
        await upstream.script(call)

    mock.script = script
    async with gateway(tmp_path, mock, vllm(mock)) as gate:
        asking = asyncio.ensure_future(gate.answer(headers={"x-request-id": "left-early"}))
        await asyncio.wait_for(has_come.wait(), 10)
        await asyncio.sleep(0.1)
        assert not upstream.has_asked.is_set()
        asking.cancel()
        record = await gate.record("left-early")
        assert (record["ledger"]["prompt_tokens"], record["ledger"]["is_estimate"]) == (COUNT, True)


async def test_a_client_that_leaves_pays_for_what_was_counted(tmp_path, mock):
    upstream = Counter(mock, finishes=False)
    async with gateway(tmp_path, mock, vllm(mock)) as gate:
        upstream.may_count.set()
        async with gate.ask(stream=True) as answer:
            await answer.content.readany()
        record, _ = await ended(gate, answer)
        assert (record["ledger"]["prompt_tokens"], record["ledger"]["is_estimate"]) == (COUNT, True)


@pytest.mark.parametrize(
    ("limits", "context", "max_tokens"),
    [
        ({"tokens_per_request": 5_000}, 8_192, 9),
        ({}, 180, 100),  # the bytes of a prompt could be more than the context leaves
    ],
)
async def test_what_a_limit_or_the_context_depends_on_is_counted_first(tmp_path, mock, limits, context, max_tokens):
    upstream = Counter(mock, usages=({"prompt_tokens": COUNT, "completion_tokens": 1}, None))
    if limits:
        await grant(tmp_path, **limits)
    async with gateway(tmp_path, mock, vllm(mock, context=context)) as gate:
        asking = asyncio.ensure_future(gate.answer(max_tokens=max_tokens))
        await asyncio.wait_for(upstream.has_asked.wait(), 10)
        await asyncio.sleep(0.05)
        assert upstream.paths == ["/tokenize"]
        upstream.may_count.set()
        status, _, answer = await asking
        _, said = await ended(gate, answer)
        assert (status, said["reserved"]["input_tokens"]) == (200, COUNT)
        assert upstream.paths == ["/tokenize", "/v1/chat/completions"]


async def test_a_count_that_fails_changes_nothing(tmp_path, mock):
    async def script(call):
        if call.head.startswith("POST /tokenize "):
            await call.answer("500 No", {})
            return
        await call.start()
        await call.say("Hi")
        await call.finish()

    mock.script = script
    async with gateway(tmp_path, mock, vllm(mock)) as gate:
        status, body, answer = await gate.answer()
        record, said = await ended(gate, answer)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hi")
        assert "prompt_counted" not in said
        assert record["ledger"]["is_estimate"]


async def test_messages_begin_with_the_count(tmp_path, mock):
    upstream = Counter(mock)
    upstream.may_count.set()
    async with gateway(tmp_path, mock, vllm(mock)) as gate:
        _, text, _ = await gate.answer(path="/v1/messages", stream=True, max_tokens=9)
        assert f'"input_tokens":{COUNT}' in text.partition("content_block_start")[0]
