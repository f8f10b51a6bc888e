"""Whole tests against a scripted server: what it was asked, how ends are told apart, what is believed."""

import asyncio
import resource
import socket

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.load.client import Client
from hitsend.load.document import document
from hitsend.load.lengths import fixed, read_length
from hitsend.load.probe import LANES
from hitsend.load.report import Slo
from hitsend.load.result import Plan
from hitsend.load.run import run
from hitsend.load.saturation import Ramp
from hitsend.load.target import Target
from hitsend.load.workload import Ask, Recorded, Shape
from tests.load.scripted import (
    TEMPLATE,
    Quiet,
    break_off,
    fail_midway,
    garbage,
    no_stream,
    refuse,
    say_nothing,
    scripted,
)

SMALL = Shape(fixed(40), fixed(6))


def plan(server, **fields):
    defaults = {"targets": (Target("a", server.url),), "shape": SMALL, "concurrency": (2,), "requests": 8, "warmup": 0}
    return Plan(**defaults | fields)


async def measured(server, **fields):
    done = await run(plan(server, **fields), Quiet())
    return done.targets[0].measured[0]


@pytest.fixture
async def server():
    async with scripted() as server:
        yield server


async def test_prompts_have_the_length_that_was_asked_and_are_never_the_same(server):
    found = await measured(server, shape=Shape(read_length("--input", "uniform:20,60"), fixed(6)))
    asked = server.prompts()[-8:]
    assert len({text.split()[0] for text in asked}) > 2
    assert len(set(asked)) == 8
    assert {one.asked_input == one.claimed_input for one in found.samples} == {True}
    assert min(one.asked_input for one in found.samples) >= 20
    assert [one.outcome for one in found.samples] == ["ok"] * 8
    assert found.level.usage.prompts_checked == 8
    assert (found.level.usage.method, found.level.usage.is_believable) == ("tokenize", True)
    assert found.level.output_tokens_mean == 6
    assert [len(one.arrivals_s) for one in found.samples] == [6] * 8
    assert all(chat["max_tokens"] == 6 and chat["stream"] and chat["ignore_eos"] for chat in server.chats[-8:])


async def test_a_shared_system_prompt_is_shared_and_the_rest_is_not(server):
    await measured(server, shape=Shape(fixed(20), fixed(4), system=50))
    chats = server.chats[-8:]
    systems = {chat["messages"][0]["content"] for chat in chats}
    assert len(systems) == 1
    assert len(systems.pop().split()) == 50
    assert len({chat["messages"][1]["content"] for chat in chats}) == 8
    assert {len(chat["messages"][1]["content"].split()) for chat in chats} == {20 - TEMPLATE}


async def test_a_chat_sends_what_was_really_answered(server):
    await measured(server, shape=Shape(fixed(20), fixed(3), turns=3), concurrency=(1,), requests=3)
    first, second, third = (chat["messages"] for chat in server.chats[-3:])
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third[2]["content"] == "w0 w1 w2"
    assert second == third[:4]
    assert first == second[:2]


async def test_the_same_seed_asks_the_same(server):
    for seed in (1, 1, 2):
        await measured(server, seed=seed, concurrency=(1,), shape=Shape(read_length("-", "uniform:9,60"), fixed(2)))
    prompts = server.prompts()
    size = len(prompts) // 3
    assert prompts[size - 8 : size] == prompts[2 * size - 8 : 2 * size] != prompts[-8:]


async def test_every_way_to_fail_has_its_own_name(server):
    probes = 1
    scripts = (refuse, break_off, fail_midway, say_nothing, no_stream, garbage)
    server.scripts = {probes + number: script for number, script in enumerate(scripts)}
    found = await measured(server, concurrency=(1,), slo=Slo(ttft_ms=60_000))
    kinds = {"http_429": 1, "broken": 1, "error_frame": 1, "empty": 1, "bad_stream": 2}
    assert found.level.errors == kinds
    assert found.level.requests.ok == 2
    assert found.level.goodput_share == 0.25
    assert "rate_limit_exceeded" in found.samples[0].detail


async def test_what_we_cut_is_apart_and_its_connection_is_closed(server):
    found = await measured(server, abort=1.0, shape=Shape(fixed(20), fixed(50)), requests=6)
    assert found.level.requests.aborted == 6
    assert found.level.requests.errors == 0
    assert found.level.ttft_ms is None
    assert found.level.aborted_tokens == sum(len(one.arrivals_s) for one in found.samples) < 6 * 50
    for call in server.mock.calls:
        async with asyncio.timeout(20):
            await call.has_left.wait()
    assert server.mock.num_open == 0


async def test_usage_that_claims_too_much_is_not_believed(server):
    server.claims_more = 1
    done = await run(plan(server), Quiet())
    found = done.targets[0].measured[0].level.usage
    assert (found.is_believable, found.differ, found.over_limit) == (False, 8, 8)
    assert any("can't be believed" in text for text in document(done)["warnings"])


async def test_a_limit_of_all_choices_or_over_our_own_is_no_lie(server):
    async def twice(call):
        call.body["max_tokens"] = call.body["max_tokens"] * call.body["n"]
        await server._good(call)

    server.scripts = dict.fromkeys(range(20), twice)
    (target,) = plan(server).targets
    asked = msgspec.structs.replace(target, extra={"n": 2, "max_tokens": 7})
    found = (await run(plan(server, targets=(asked,)), Quiet())).targets[0].measured[0]
    assert found.samples[0].claimed_output == 14
    assert (found.level.usage.is_believable, found.level.usage.over_limit) == (True, 0)


@pytest.mark.parametrize("kind", ["Text/Event-Stream", "", "text/plain; charset=utf-8"])
async def test_what_a_stream_is_called_matters_less_than_what_it_is(server, kind):
    async def renamed(call):
        start = call.start
        call.start = lambda status="200 OK": start(status, kind)
        await server._good(call)

    server.scripts = dict.fromkeys(range(20), renamed)
    assert (await measured(server)).level.errors == {}


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (("max_tokens", "stream_options"), "ignore_eos isn't taken"),
        (("max_completion_tokens", "stream_options"), "ignore_eos isn't taken"),
        (("max_tokens",), "no usage in streams"),
    ],
)
async def test_a_server_that_understands_less_is_asked_for_less(server, known, said):
    server.is_known = known
    server.gives_usage = "stream_options" in known
    done = await run(plan(server, requests=3), Quiet())
    level = done.targets[0].measured[0].level
    assert (level.requests.ok, level.output_tokens_mean) == (3, 6)
    assert any(said in text for text in document(done)["warnings"])


async def test_without_a_tokenizer_lengths_are_calibrated_and_said_to_be(server):
    server.has_tokenize = False
    done = await run(plan(server), Quiet())
    samples = done.targets[0].measured[0].samples
    assert {one.claimed_input for one in samples} == {40}  # a line through two probes is exact where a word is a token
    assert document(done)["targets"][0]["prompt_lengths"] == "estimated"
    assert done.targets[0].measured[0].level.usage.method == "chunks"


async def test_a_text_completion(server):
    found = await measured(server, targets=(Target("a", server.url + "/v1", endpoint="completions"),))
    assert found.level.requests.ok == 8
    assert {len(chat["prompt"].split()) for chat in server.chats[-8:]} == {40 - TEMPLATE}


async def test_a_trace_is_replayed_with_its_own_bodies_and_lengths(server):
    body = {"messages": [{"role": "user", "content": "as it was"}], "max_tokens": 2, "temperature": 0.7}
    trace = (Recorded(body=body, at_s=0.0), Recorded(30, 5, 0.01), Recorded(body=body, at_s=0.02))
    found = await measured(server, trace=trace, concurrency=(), requests=None, replay_speed=2.0)
    assert sorted(one.intended_s for one in found.samples) == [0.0, 0.005, 0.01]
    assert sorted(one.output_tokens for one in found.samples) == [2, 2, 5]
    assert [chat["temperature"] for chat in server.chats if "as it was" in str(chat)] == [0.7, 0.7]
    assert (found.level.arrivals, found.level.concurrency, found.level.rate_per_s) == ("trace", None, None)


async def test_targets_take_turns_and_get_the_same_requests(server):
    async with scripted() as other:
        targets = (Target("first", server.url), Target("second", other.url, model="other"))
        done = await run(plan(server, targets=targets, rounds=2, concurrency=(1, 2), requests=4), Quiet())
        assert [len(one.measured) for one in done.targets] == [4, 4]
        assert sorted(server.prompts()) == sorted(other.prompts())
        assert {chat["model"] for chat in other.chats} == {"other"}
    found = document(done)
    assert {(row["target"], row["base"], row["rounds"]) for row in found["ratios"]} == {("second", "first", 2)}
    assert [row["load"] for row in found["targets"][0]["medians"]] == [1, 2]


async def test_targets_that_know_less_get_the_same_requests_too(server):
    async with scripted() as other:
        other.has_tokenize = False
        targets = (Target("estimates", other.url), Target("counts", server.url))
        done = await run(plan(server, targets=targets, concurrency=(2,), requests=6), Quiet())
        assert sorted(server.prompts()[-6:]) == sorted(other.prompts()[-6:])
    assert [told["prompt_lengths"] for told in document(done)["targets"]] == ["estimated", "exact"]


async def test_a_server_without_usage_is_said_to_be_one(server):
    server.gives_usage = False
    done = await run(plan(server), Quiet())
    assert any("there is no usage in streams" in text for text in document(done)["warnings"])

    server.gives_usage, server.chats = True, []

    async def lose(call):
        server.gives_usage = False
        await server._good(call)
        server.gives_usage = True

    server.scripts = dict.fromkeys(range(4, 6), lose)
    done = await run(plan(server, concurrency=(1,)), Quiet())
    assert any("2 of 8 answers came without usage" in text for text in document(done)["warnings"])


async def test_a_tokenizer_that_goes_away_is_asked_no_more(server):
    server.tokenizes = 1  # gone while it is looked at
    found = await measured(server)
    assert (found.level.requests.ok, found.level.usage.method) == (8, "chunks")
    assert 0 > server.tokenizes >= -3 * LANES

    server.tokenizes = 10**9
    done = await run(plan(server, concurrency=(1,), requests=1), Quiet())
    asked = 10**9 - server.tokenizes
    server.tokenizes = asked + 2  # gone after the level, which was counted up to there
    found = await measured(server, requests=9)
    assert (found.level.usage.method, found.level.usage.checked) == ("tokenize", 3)
    assert server.tokenizes == -1
    assert done.targets[0].facts.tokenize == "content"


async def test_a_level_in_which_nothing_was_due_is_said_to_be_one(server):
    done = await run(plan(server, concurrency=(), rates=(0.001,), requests=None, duration_s=0.1), Quiet())
    assert [one.level.requests.sent for one in done.targets[0].measured] == [0]
    assert any("no request was due" in text for text in document(done)["warnings"])


async def test_bodies_that_were_sent_before_are_said_to_be(server):
    trace = tuple(Recorded(body={"messages": [{"role": "user", "content": f"body {at}"}]}) for at in range(4))
    for fields, is_warned in (({}, False), ({"warmup": 1}, True), ({"concurrency": (1, 2)}, True)):
        done = await run(plan(server, trace=trace, **{"requests": 4} | fields), Quiet())
        assert any("gone through more than once" in text for text in document(done)["warnings"]) == is_warned


async def test_a_client_without_descriptors_says_that_it_was_the_client():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with Client(Target("a", f"http://127.0.0.1:{listening.getsockname()[1]}")) as client:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                sample = await client.send(Ask({"messages": []}, None, 2), 0.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sample.error == "client_limit"


async def test_a_ramp_goes_up_until_its_stop(server):
    done = await run(plan(server, concurrency=(), requests=20, duration_s=0.2, ramp=(50.0, 200.0)), Quiet())
    rates = [one.level.rate_per_s for one in done.targets[0].measured]
    assert rates[0] == 50.0
    assert len(rates) <= len(list_of(Ramp(50.0, 200.0))) + 3


def list_of(ramp):
    rates = []
    while (rate := ramp.next()) is not None:
        rates.append(rate)
        ramp.tell(sustained=True)
    return rates


async def test_a_stalled_server_is_interrupted_and_what_was_measured_is_kept(server):
    ready = asyncio.Event()

    class Watching(Quiet):
        num_seen = 0

        def seen(self):
            self.num_seen += 1
            if self.num_seen == 4:
                server.gate.clear()
                ready.set()

    task = asyncio.create_task(run(plan(server, requests=None, duration_s=600.0), Watching()))
    async with asyncio.timeout(20):
        await ready.wait()
    await asyncio.sleep(0)
    task.cancel()
    done = await task
    counts = done.targets[0].measured[0].level.requests
    assert done.is_interrupted
    assert counts.ok >= 4
    assert counts.interrupted == 2
    assert "interrupted: the last level is incomplete" in document(done)["warnings"]


async def test_an_open_loop_goes_on_while_nothing_is_answered(server):
    """The server stands still from the first request on and goes on only when all twenty are there."""
    probes = 1

    async def release():
        async with asyncio.timeout(60):
            while len(server.chats) < probes + 20:
                await asyncio.sleep(0.01)
        server.gate.set()

    server.gate_at(probes)
    releasing = asyncio.create_task(release())
    found = await measured(server, concurrency=(), rates=(100.0,), arrivals="constant", requests=20)
    await releasing
    assert found.level.requests.ok == 20
    last_sent = max(one.sent_s for one in found.samples)
    for one in found.samples:
        assert one.arrivals_s[0] >= last_sent
        assert one.e2e_ms >= (last_sent - one.intended_s) * 1000


async def test_a_request_that_never_ends_is_a_timeout(server):
    server.gate.clear()
    async with Client(Target("a", server.url, "scripted"), timeout_s=0.1) as client:
        found = await client.send(Ask({"messages": [{"role": "user", "content": "hi"}]}, None, 2), 0.0)
    assert (found.outcome, found.error, found.detail) == ("error", "timeout", "no end within 0.1 s")


async def test_the_document_is_plain_json_and_holds_no_secret_and_no_text(server):
    targets = (Target("a", server.url, key="sk-secret"),)
    done = await run(plan(server, targets=targets, slo=Slo(500, 50, 5000)), Quiet())
    raw = msgspec.json.encode(document(done, note="two cores")).decode()
    assert "sk-secret" not in raw
    assert not any(prompt in raw for prompt in server.prompts())
    assert set(server.keys) == {"Bearer sk-secret"}
    found = msgspec.json.decode(raw)
    level = found["targets"][0]["levels"][0]
    for name in ("concurrency", "input_tokens_mean", "output_tokens_mean", "output_tokens_per_s", "requests_per_s"):
        assert level[name] > 0
    assert {"n", "mean", "p50", "p90", "p99", "max"} == set(level["ttft_ms"]) == set(level["tpot_ms"])
    assert (found["kind"], found["version"], found["note"]) == ("hitsend.load", 1, "two cores")
    assert found["targets"][0]["model"] == "scripted"


async def test_who_is_not_there_or_refuses_is_one_line(server):
    with pytest.raises(ConfigError, match="no server at http://127.0.0.1:9"):
        await run(plan(server, targets=(Target("gone", "http://127.0.0.1:9"),)), Quiet())
    with pytest.raises(ConfigError, match="--model=gpt: target a has scripted, other"):
        await run(plan(server, targets=(Target("a", server.url, model="gpt"),)), Quiet())
    server.scripts = {0: refuse}
    with pytest.raises(ConfigError, match="http_429") as refused:
        await run(plan(server), Quiet())
    assert str(refused.value).isprintable()
