"""Several servers of one engine: who gets a request, who gets none, and what happens when one fails."""

import asyncio

import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import EngineUnavailable, ServerOverloaded
from hitsend.serve.engine.gauges import Load, read_load
from hitsend.serve.engine.profiles import LLAMA_SERVER, SGLANG, VLLM
from hitsend.serve.engine.replicas import AFFINITY_SLACK, Replicas
from hitsend.settings_upstreams import VllmSettings
from hitsend.testing import FakeClock
from tests.mock_upstream import good, mock_upstream
from tests.upstream.asking import ask, engine_of

HANG_S = 60
URLS = tuple(f"http://127.0.0.1:{port}" for port in (1, 2, 3))


def settings_of(urls=URLS, **fields):
    fields = {"name": "v", "base_urls": urls, "models": {"near": "far"}, "metrics_poll_s": 0.0} | fields
    return VllmSettings(**fields)


def replicas(clock=None, **fields):
    return Replicas(settings_of(**fields), URLS, VLLM, clock or FakeClock(), key=None)


NEWER = b"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="q"} 12.0
vllm:num_requests_running{engine="1",model_name="q"} 3.0
vllm:num_requests_waiting{engine="0",model_name="q"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="q"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="q"} 0.75
vllm:gpu_cache_usage_perc{engine="0",model_name="q"} 0.1
vllm:num_preemptions_total{engine="0",model_name="q"} 9.0
vllm:num_preemptions_created{engine="0",model_name="q"} 1.7e+09
"""
OLDER = b'vllm:num_requests_running{model_name="q"} 1\nvllm:gpu_cache_usage_perc{model_name="q"} 0.5\n'


@pytest.mark.parametrize(
    ("text", "profile", "load"),
    [
        (NEWER, VLLM, Load(15, 4, 0.75, 9)),
        (OLDER, VLLM, Load(1, None, 0.5, None)),
        (
            b'sglang:num_running_reqs{m="q"} 8\nsglang:num_queue_reqs{m="q"} 4\nsglang:token_usage 0.5',
            SGLANG,
            Load(8, 4, 0.5),
        ),
        (b"llamacpp:requests_processing 4\nllamacpp:requests_deferred 46\n", LLAMA_SERVER, Load(4, 46)),
        (b"vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nnonsense \xff\n", VLLM, Load()),
        (b"", VLLM, Load()),
    ],
)
def test_gauges_are_found_under_the_names_of_every_version(text, profile, load):
    assert read_load(text, profile.metrics) == load


def test_the_idlest_gets_it_and_a_conversation_stays_where_it_began():
    servers = replicas()
    servers.all[0].running, servers.all[1].running, servers.all[2].running = 3, 1, 2
    assert servers.choose() is servers.all[1]
    for one in servers.all:
        one.running = 0
    homes = {kin: servers.choose(kin) for kin in map(str, range(60))}
    assert {one.url for one in homes.values()} == set(URLS), "all of them get some"
    assert all(servers.choose(kin) is one for kin, one in homes.items())
    kin, home = next(iter(homes.items()))
    home.running = AFFINITY_SLACK
    assert servers.choose(kin) is home
    home.running += 1
    assert servers.choose(kin) is not home, "not at any price"
    # one that goes moves nobody's conversations but its own
    gone = servers.all[0]
    gone.is_draining, home.running = True, 0
    assert all(servers.choose(kin) is one for kin, one in homes.items() if one is not gone)


def test_a_full_server_gets_nothing_and_old_figures_count_no_more():
    clock = FakeClock()
    servers = replicas(clock, max_waiting=10)
    for one in servers.all:
        one.note(Load(running=50, waiting=10), clock.now())
    with pytest.raises(ServerOverloaded, match="max_waiting"):
        servers.choose()
    servers.all[1].note(Load(running=90, waiting=9), clock.now())
    assert servers.choose() is servers.all[1]
    servers.all[1].note(Load(running=90, waiting=1, kv_use=0.99), clock.now())
    with pytest.raises(ServerOverloaded):
        servers.choose()
    servers.all[1].note(Load(running=90, waiting=0, kv_use=0.99), clock.now())
    assert servers.choose() is servers.all[1], "full of work, but nobody waits"
    clock.advance(60)
    assert servers.choose().load.waiting is not None
    assert servers.load(servers.all[0]) == Load()


def test_one_that_preempts_while_requests_wait_is_left_alone():
    clock = FakeClock()
    servers = replicas(clock)
    for number, preemptions in ((0, (5, 6)), (1, (5, 5)), (2, (0, 3))):
        for count in preemptions:
            servers.all[number].note(Load(running=number, waiting=1, preemptions=count), clock.now())
    assert servers.choose() is servers.all[1]


def test_where_all_drain_or_fail_it_is_said():
    servers = replicas(draining=URLS)
    with pytest.raises(EngineUnavailable, match="draining"):
        servers.choose()
    servers = replicas(breaker_failures=1)
    for one in servers.all:
        one.leave(one.enter(), "failed")
    with pytest.raises(EngineUnavailable) as caught:
        servers.choose()
    assert caught.value.retry_after_s == 2.0
    assert not servers.is_ready


async def test_a_failed_attempt_goes_to_another_server_and_each_breaker_knows_its_own():
    async with mock_upstream() as bad, mock_upstream() as well:

        async def fails(call):
            await call.answer("500 Oops")

        bad.script = fails
        urls = (bad.url.removesuffix("/v1"), well.url.removesuffix("/v1"))
        async with engine_of(settings_of(urls, breaker_failures=2)) as engine:
            for _ in range(6):
                answer = await ask(engine)
                assert (answer.text, answer.reasons) == ("Hello!", ["stop"])
            assert [one.running for one in engine.replicas.all] == [0, 0]
            assert engine.replicas.all[1].breaker.state == "closed"
            assert len(bad.calls) <= 2, "then it is left alone"
            assert engine.state().is_ready
            shown = engine.shown()["servers"]
            assert [one["base_url"] for one in shown] == list(urls)


async def test_nothing_is_repeated_after_the_first_byte_also_where_another_server_could():
    async with mock_upstream() as first, mock_upstream() as second:

        async def cut(call):
            await call.start()
            await call.say("Hel")

        first.script = second.script = cut
        urls = (first.url, second.url)
        async with engine_of(settings_of(urls)) as engine:
            answer = await ask(engine)
            assert (answer.text, answer.error.code, answer.reasons) == ("Hel", "engine_failed", [])
            assert len(first.calls) + len(second.calls) == 1


async def test_its_metrics_are_polled_and_hold_back_what_it_could_not_take(mock):
    figures = {"waiting": 200}

    async def script(call):
        if call.head.startswith("GET /metrics "):
            await call.answer("200 OK", f"vllm:num_requests_waiting {figures['waiting']}\n".encode())
        else:
            await good(call)

    mock.script = script
    settings = settings_of((mock.url,), metrics_poll_s=0.02)
    async with asyncio.timeout(HANG_S), engine_of(settings, clock=SystemClock()) as engine:
        one = engine.replicas.all[0]
        while one.loaded_at is None:
            await asyncio.sleep(0.01)
        assert (await ask(engine)).error.code == "server_overloaded"
        figures["waiting"] = 0
        while one.load.waiting:
            await asyncio.sleep(0.01)
        assert (await ask(engine)).text == "Hello!"
    num_calls = len(mock.calls)
    await asyncio.sleep(0.1)
    assert len(mock.calls) == num_calls, "who stopped asks nothing more"


def test_a_figure_that_is_none_is_as_if_it_were_not_there():
    names = {"waiting": ("w",), "running": ("r",)}
    wild = b"\n".join(b'w{engine="%d"} %s' % pair for pair in enumerate((b"1e308", b"1e308", b"NaN", b"-1", b"+Inf")))
    assert read_load(wild + b"\nr 2\n", names) == Load(running=2)
    assert read_load(wild + b"\nw 3\n", names) == Load(waiting=3)
