"""A cascade over the real small model: what it isn't sure of goes on, and every cost is in the ledger once."""

import re

import pytest

from bench.cascade import CAPITALS, sample, stub
from tests.served import serving, until

pytestmark = pytest.mark.model

TABLE = """
[engine]
alias = "small"
num_slots = 2
context = 512
[[prices]]
model = "small"
input = 0.02
output = 0.04
[[engines]]
name = "stub"
base_url = "%s/v1"
models = { strong = "strong" }
prices = { input = 1.0, output = 2.0 }
[[routes]]
model = "auto"
engines = ["small", "strong"]
strategy = "cascade"
cascade = { min_logprob = -9.0, regex = '[^0-9]*' }
"""


def test_what_the_small_model_is_not_sure_of_is_the_strong_ones(tmp_path):
    questions = [sample()[0], sample()[len(CAPITALS)]]  # a city, and a sum, whose answer has digits
    with stub({one.text: one.answer for one in questions}) as strong:
        config = tmp_path / "hitsend.toml"
        config.write_text(TABLE % strong)
        with serving("--config", str(config), data=tmp_path) as server:
            for number, question in enumerate(questions):
                messages = [{"role": "user", "content": question.text}]
                body = {"model": "auto", "messages": messages, "max_tokens": 24, "temperature": 0}
                status, answer, _ = server.post("/v1/chat/completions", body)
                assert (status, answer["model"]) == (200, "auto")
                request_id = answer["hitsend"]["request_id"]
                record = until(lambda one=request_id: server.record(one), lambda record: record["ledger"] is not None)
                (verdict,) = [event for event in record["events"] if event["type"] == "judged"]
                assert record["ledger"]["model"] == ("small" if verdict["accepted"] else "strong")
                assert verdict["mean_logprob"] < 0
                assert verdict["accepted"] is (number == 0)
                if not verdict["accepted"]:
                    assert re.search(question.expect, answer["choices"][0]["message"]["content"])
            server.wait_idle()
            assert server.get("/admin/reconcile")["drifted"] == []
