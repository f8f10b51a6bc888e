"""`hitsend routes` over a real server and a real database, and what it stands on."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from hitsend.cli import CallFailed, routes
from hitsend.core.errors import ConfigError
from hitsend.core.request import Usage
from hitsend.serve.engine.calibrate import Labelled, calibrate
from hitsend.serve.usage.pricing import PriceBook, cost_microusd
from hitsend.serve.usage.traffic import Sent
from hitsend.serve.what_if import what_if
from hitsend.settings_source import load

TABLE = """
engine.model = "none"
[[engines]]
name = "one"
base_url = "http://127.0.0.1:9/v1"
models = { a = "x", b = "y" }
prices = { input = 1.0, output = 2.0 }
[[prices]]
model = "b"
input = 10.0
output = 20.0
[[routes]]
model = "auto"
engines = ["a", "b"]
strategy = "%s"
%s
"""


def table(tmp_path, strategy, more=""):
    file = tmp_path / "table.toml"
    file.write_text(TABLE % (strategy, more))
    return file


def sent(number, **fields):
    given = {"request_id": f"r{number}", "model": "b", "engine": "one", "prompt_tokens": 100, "completion_tokens": 11}
    given |= {"cost_microusd": 1220, "created_at": 3600.0 * number, "ttft_ms": 50.0, "wall_ms": 150.0}
    return Sent(**given | fields)


def run(*words):
    result = CliRunner().invoke(routes.app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_another_table_costs_what_its_engines_cost(tmp_path):
    past = [sent(number) for number in range(4)] + [sent(9, model="a", cost_microusd=122, ttft_ms=20.0, wall_ms=30.0)]
    found = what_if(past, load(table(tmp_path, "cheapest")).settings, "auto")
    assert (found.num_requests, found.num_routed) == (5, 5)
    assert (found.before.cost_microusd, found.after.cost_microusd) == (4 * 1220 + 122, 5 * 122)
    assert (found.before.wall_ms, found.after.wall_ms) == (150.0, 30.0)
    assert (found.after.by_model, found.after.num_timed) == ({"a": 5}, 5)


def test_what_went_to_no_route_stays_where_it_was(tmp_path):
    past = [sent(1), sent(2, route="auto")]
    found = what_if(past, load(table(tmp_path, "cheapest")).settings)
    assert (found.num_routed, found.after.by_model) == (1, {"b": 1, "a": 1})
    assert found.after.cost_microusd == 1220 + 122


def test_the_hour_counts_at_which_it_was_sent(tmp_path):
    past = [sent(number) for number in range(24)]
    found = what_if(past, load(table(tmp_path, "time_of_day", 'hours = { a = "22:00-06:00" }')).settings, "auto")
    assert found.after.by_model == {"a": 8, "b": 16}
    assert found.after.num_timed == 16  # of a nothing was ever timed


def test_an_engine_whose_price_is_a_built_in_one(tmp_path):
    more = """
[[engines]]
kind = "workers_ai"
name = "cf"
account_id = "acc"
models = { near = "@cf/qwen/qwen3.8-27b" }
"""
    found = what_if([sent(1)], load(table(tmp_path, "fallback", more)).settings, "auto")
    assert found.after.cost_microusd == 122
    near = PriceBook(elsewhere={"near": ("workers_ai", "@cf/qwen/qwen3.8-27b")}).find("near", is_local=False)
    file = tmp_path / "table.toml"
    file.write_text(file.read_text().replace('engines = ["a", "b"]', 'engines = ["near", "b"]'))
    assert what_if([sent(1)], load(file).settings, "auto").after.cost_microusd == cost_microusd(near, Usage(100, 11))


def test_a_route_that_is_not_in_the_table(tmp_path):
    with pytest.raises(ConfigError, match="auto"):
        what_if([], load(table(tmp_path, "cheapest")).settings, "other")


def test_the_threshold_accepts_most_within_the_share_of_wrong_ones():
    samples = [Labelled(-number / 10, number not in (3, 8)) for number in range(1, 11)]
    found = calibrate(samples, 0.2)
    # down to -1.0: 10 accepted, 2 wrong
    assert (found.min_logprob, found.num_accepted, found.num_wrong) == (-1.0, 10, 2)
    assert calibrate(samples, 0.0).min_logprob == -0.2
    assert calibrate([Labelled(-0.1, is_good=False)], 0.5).min_logprob is None
    assert calibrate([], 0.5).min_logprob is None
    tied = [Labelled(-0.1, is_good=True), Labelled(-0.1, is_good=False)]
    assert calibrate(tied, 0.4).min_logprob is None  # both or neither


def test_calibrate_says_what_to_set(tmp_path):
    file = tmp_path / "sample.jsonl"
    file.write_text('{"confidence": -0.1, "is_good": true}\n\n{"confidence": -0.9, "is_good": false}\n')
    assert "min_logprob = -0.1" in run("calibrate", file)
    assert json.loads(run("calibrate", file, "--json"))["min_logprob"] == -0.1
    file.write_text("{}\n")
    with pytest.raises(CallFailed, match="line 1"):
        run("calibrate", file)


@pytest.mark.slow
async def test_all_three_against_a_server_and_what_it_wrote(tmp_path, routed):
    async def sure(call):
        await call.start()
        logprobs = {"content": [{"token": "4", "logprob": -0.25, "bytes": None, "top_logprobs": []}]}
        await call.say("4", logprobs=logprobs)
        await call.finish(usage={"prompt_tokens": 100, "completion_tokens": 11, "total_tokens": 111})

    async with routed(engines=("b", "a"), strategy="fallback") as gate:
        gate.b.script = sure
        for number in range(3):
            await gate.asked(f"r{number}")
        said = await asyncio.to_thread(run, "explain", "hi", "--url", gate.url)
        assert "auto → b at engine-b" in said
        assert "refused" not in said
        said = await asyncio.to_thread(run, "explain", "hi", "--url", gate.url, "--model", "b", "--thinking")
        assert "but it would be refused: chat_template_kwargs" in said
        found = json.loads(await asyncio.to_thread(run, "explain", "hi", "--url", gate.url, "--json"))
        assert (found["engine"], found["order"], found["route"]) == ("engine-b", ["b", "a"], "auto")
        file = tmp_path / "sample.jsonl"
        file.write_text('{"prompt": "2 + 2?", "expect": "^4$"}\n')
        words = ("calibrate", file, "--model", "b", "--url", gate.url, "--json")
        assert json.loads(await asyncio.to_thread(run, *words))["min_logprob"] == -0.25
    words = ("what-if", "--table", table(tmp_path, "cheapest"), "--data", tmp_path, "--json")
    with pytest.raises(CallFailed, match="--from 2027-01-16 is later than --to 2027-01-15"):
        await asyncio.to_thread(run, *words, "--from", "2027-01-16", "--to", "2027-01-15")
    found = json.loads(await asyncio.to_thread(run, *words))
    assert (found["num_requests"], found["num_routed"]) == (4, 3)  # calibrate asked b itself
    assert found["before"]["cost_microusd"] == 4 * 1220
    assert found["after"]["cost_microusd"] == 3 * 122 + 1220
    assert found["before"]["ttft_ms"] > 0


def test_a_rule_knows_what_it_knew_then(tmp_path):
    """Of a request to an upstream nothing is rendered here: only the record of its route says what was wanted."""
    facts = {"prompt_tokens": 5, "output_tokens": 512, "wants_thinking": True}
    past = [sent(1, route="auto", facts=facts), sent(2, route="auto", facts=facts | {"wants_thinking": False})]
    found = what_if(past, load(table(tmp_path, "thinking", 'thinking_engine = "b"')).settings)
    assert found.after.by_model == {"b": 1, "a": 1}
    longer = [sent(3, route="auto", facts=facts), sent(4, route="auto", facts=facts | {"prompt_tokens": 31})]
    found = what_if(longer, load(table(tmp_path, "prompt_length", "prompt_tokens = { a = 30 }")).settings)
    assert found.after.by_model == {"a": 1, "b": 1}


def test_the_same_table_costs_what_it_cost_also_where_something_was_cached(tmp_path):
    file = table(tmp_path, "fallback")
    file.write_text(file.read_text().replace("output = 2.0 }", "output = 2.0, cached_input = 0.1 }"))
    past = [sent(1, model="a", route="auto", cached_tokens=80, cost_microusd=20 + 8 + 22)]
    assert what_if(past, load(file).settings).after.cost_microusd == 50
    past = [sent(1, model="b", route="auto", cached_tokens=80)]
    assert what_if(past, load(file).settings).after.cost_microusd == 100 + 22, "what a had cached isn't known"


def test_an_engine_whose_context_is_too_short_is_passed_over_and_where_all_are_nothing_changes(tmp_path):
    file = table(tmp_path, "fallback")
    file.write_text(file.read_text().replace("models = {", "context = 110\nmodels = {"))
    found = what_if([sent(1, route="auto"), sent(2, route="auto", prompt_tokens=90)], load(file).settings)
    assert (found.num_routed, found.after.by_model) == (1, {"b": 1, "a": 1})


def test_a_dated_price_is_that_of_the_day(tmp_path):
    """Of a built-in list; a day before all lists has today's."""
    file = tmp_path / "table.toml"
    file.write_text(TABLE.replace("prices = { input = 1.0, output = 2.0 }", "") % ("fallback", ""))
    file.write_text(file.read_text().replace('a = "x"', 'qwen = "qwen3.8-27b"').replace('["a", "b"]', '["qwen"]'))
    settings = load(file).settings
    price = PriceBook(elsewhere={"qwen": ("openai", "qwen3.8-27b")}).find("qwen", is_local=False)
    for at in (0.0, 1_796_000_000.0):
        found = what_if([sent(1, route="auto", created_at=at)], settings)
        assert found.after.cost_microusd == cost_microusd(price, Usage(100, 11))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"confidence": "x", "is_good": true}', "confidence"),
        (b'{"confidence": null, "is_good": true}', "confidence"),
        (b'{"confidence": NaN, "is_good": true}', "confidence"),
        (b'{"confidence": true, "is_good": true}', "confidence"),
        (b'{"confidence": -0.2, "is_good": "false"}', "is_good"),
        (b'{"confidence": -0.2, "is_good": 0}', "is_good"),
        (b'{"prompt": 5, "expect": "a"}', "prompt"),
        (b'{"prompt": "a", "expect": "("}', "expect"),
        (b'{"prompt": "a"}', "expected"),
        (b"[1]", "expected"),
        (b"{", "JSON"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_line_of_a_sample_that_says_nothing_is_named(tmp_path, line, says):
    (tmp_path / "sample").write_bytes(b'{"confidence": -1, "is_good": true}\n' + line + b"\n")
    with pytest.raises(CallFailed, match=says):
        run("calibrate", tmp_path / "sample")


@pytest.mark.parametrize(("confidence", "threshold"), [(-200.0, -100.0), (1e-7, 0.0), (-0.5, -0.5)])
def test_a_threshold_is_one_that_can_be_set(confidence, threshold):
    assert calibrate([Labelled(confidence, is_good=True)], 0.05).min_logprob == threshold


def test_lines_of_batches_cost_what_lines_cost(tmp_path):
    file = table(tmp_path, "fallback")
    file.write_text(file.read_text().replace("output = 2.0 }", "output = 2.0, batch_discount = 0.5 }"))
    past = [
        sent(1, model="a", route="auto", cost_microusd=61, price_id="engines.one-batch"),
        sent(2, model="a", route="auto", cost_microusd=0, price_id="batch-repeat"),
    ]
    found = what_if(past, load(file).settings)
    assert (found.before.cost_microusd, found.after.cost_microusd) == (61, 61)
