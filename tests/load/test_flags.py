"""What is typed becomes a plan, or one line that names the flag, the value and what would do."""

import pytest

from hitsend.cli.load_flags import Given, make_plan
from hitsend.core.errors import ConfigError
from hitsend.load.workload import CHAT, CUSTOMER_SERVICE

NOTHING = dict.fromkeys(Given.__struct_fields__) | {
    "url": "http://127.0.0.1:8000",
    "is_key_typed": False,
    "warmup": 2,
    "endpoint": "chat",
    "abort": 0.0,
    "seed": 0,
    "temperature": 0.0,
    "think": 0.0,
    "timeout": 120.0,
    "fresh_connections": False,
}


def plan(**flags):
    return make_plan(Given(**NOTHING | flags))


def test_without_any_flag_it_is_the_customer_service_workload_bounded_and_scaled():
    made = plan()
    assert made.shape == CUSTOMER_SERVICE
    assert (made.is_scaled, made.duration_s, made.requests, made.concurrency) == (True, 30.0, None, (1, 8))
    assert (made.targets[0].name, made.rounds) == ("server", 1)


def test_every_plan_has_an_end():
    for flags in ({}, {"rate": "5"}, {"ramp": "1:8"}, {"concurrency": "4"}, {"workload": "chat"}):
        made = plan(**flags)
        assert made.duration_s or made.requests
        assert made.timeout_s


def test_lengths_of_ones_own_share_nothing_unless_asked():
    made = plan(input="uniform:10,20", output="5", requests=9)
    assert (made.shape.system, made.shape.input.said(), made.is_scaled, made.duration_s) == (
        0,
        "uniform:10,20",
        False,
        None,
    )
    assert plan(input="10", system=30).shape.system == 30
    assert plan(workload="chat", turns=3).shape.turns == 3
    assert plan(workload="chat").shape == CHAT


def test_slos_are_milliseconds_or_say_so():
    slo = plan(slo_ttft="2s", slo_tpot="100", slo_e2e="1.5s").slo
    assert (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms) == (2000, 100, 1500)


def test_several_targets_have_names_models_and_rounds(monkeypatch):
    monkeypatch.setenv("PEER_KEY", "sk-peer")
    targets = ["a=http://h:1", "b=http://h:2/v1,model=org/m:7b,key-env=PEER_KEY"]
    made = plan(target=targets, model="m", key="sk-env")
    assert [(one.name, one.model, one.key) for one in made.targets] == [("a", "m", None), ("b", "org/m:7b", "sk-peer")]
    assert made.rounds == 3
    typed = plan(target=targets[:1], key="sk-typed", is_key_typed=True)
    assert typed.targets[0].key == "sk-typed"


def test_a_timed_trace_is_replayed(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_tokens": 5, "output_tokens": 2, "at_s": 0}\n')
    assert plan(trace=file).replay_speed == 1.0
    assert plan(trace=file, replay=4.0).replay_speed == 4.0
    assert plan(trace=file, concurrency="2").replay_speed is None
    for speed in (0.0, -1.0, 1e9):
        with pytest.raises(ConfigError, match="above 0 and at most 1e\\+06"):
            plan(trace=file, replay=speed)


def test_a_replay_ends(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f'{{"input_tokens": 5, "output_tokens": 2, "at_s": {at}}}\n' for at in (0, 1e6)))
    with pytest.raises(ConfigError, match="the trace would take 1e\\+06 s, at most 86400"):
        plan(trace=file)
    assert plan(trace=file, replay=100.0).replay_speed == 100.0
    assert plan(trace=file, duration=60.0).duration_s == 60.0
    assert plan(trace=file, requests=1).requests == 1


def test_a_trace_says_itself_how_long_things_are(tmp_path):
    lengths, bodies = tmp_path / "lengths.jsonl", tmp_path / "bodies.jsonl"
    lengths.write_text('{"input_tokens": 5, "output_tokens": 2}\n')
    bodies.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert (plan(trace=lengths).shape.system, plan(trace=lengths).is_scaled) == (0, False)
    assert plan(trace=lengths, system=30).shape.system == 30
    for flag in ({"input": "9"}, {"output": "9"}, {"turns": 2}, {"workload": "chat"}):
        with pytest.raises(ConfigError, match="with --trace the trace says it"):
            plan(trace=lengths, **flag)
    with pytest.raises(ConfigError, match="--system=9: the trace has bodies only"):
        plan(trace=bodies, system=9)
    with pytest.raises(ConfigError, match="line 1: it has no prompt"):
        plan(trace=bodies, endpoint="completions")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"concurrency": "0"}, "--concurrency=0: each must be above 0 and at most 4096"),
        ({"concurrency": "1,x"}, "--concurrency=1,x"),
        ({"concurrency": "1.5"}, "whole number"),
        ({"concurrency": "4097"}, "at most 4096"),
        ({"concurrency": "8,8"}, "each level once"),
        ({"concurrency": ",".join(map(str, range(1, 70)))}, "69 levels, at most 64"),
        ({"rate": "nan"}, "--rate=nan"),
        ({"rate": "-1"}, "--rate=-1"),
        ({"rate": "1", "concurrency": "1"}, "--concurrency, --rate: only one of them"),
        ({"arrivals": "bursts"}, "--arrivals=bursts: it is of --rate and --ramp only"),
        ({"arrivals": "never", "rate": "1"}, "one of poisson, constant, bursts"),
        ({"rate": "1", "burst_size": 4}, "--burst-size=4: it is of --arrivals bursts only"),
        ({"rate": "0.001", "requests": 1000}, "1000 requests would take 1e+06 s, at most 86400"),
        ({"ramp": "5"}, "START:STOP"),
        ({"ramp": "5:1"}, "starts above its stop"),
        ({"ramp": "1:5", "requests": 5}, "bounded by --duration"),
        ({"replay": 1.0}, "--replay: it needs --trace"),
        ({"arrivals": "often"}, "--arrivals=often: it must be one of poisson, constant, bursts"),
        ({"endpoint": "responses"}, "--endpoint=responses"),
        ({"endpoint": "completions", "turns": 2}, "--turns=2"),
        ({"workload": "huge"}, "--workload=huge: it must be one of customer-service, chat"),
        ({"input": "many"}, "--input=many"),
        ({"slo_ttft": "-1"}, "--slo-ttft=-1"),
        ({"slo_e2e": "soon"}, "--slo-e2e=soon"),
        ({"extra": "{"}, "--extra={: no JSON"),
        ({"extra": "[]"}, "a JSON object"),
        ({"extra": '{"stream": false}'}, "stream must stay true"),
        ({"url": "127.0.0.1:8000"}, "--url=127.0.0.1:8000"),
        ({"target": ["http://h"]}, "--target=http://h"),
        ({"target": ["a=http://h", "a=http://i"]}, "a name of its own"),
        ({"target": ["a=http://h,key-env=NO_SUCH_VARIABLE"]}, "the environment has no NO_SUCH_VARIABLE"),
        ({"target": [f"t{number}=http://h" for number in range(17)]}, "17 targets, at most 16"),
        ({"timeout": float("nan")}, "--timeout=nan"),
        ({"abort": float("nan")}, "--abort=nan"),
    ],
)
def test_what_cannot_be_is_one_line(flags, said):
    with pytest.raises(ConfigError) as refused:
        plan(**flags)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="--trace=.*No such file"):
        plan(trace=tmp_path / "none")
