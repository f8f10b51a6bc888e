"""Whole requests on the real model over real sockets: what they answer, and what they leave in the record."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hitsend.testing import check_stream
from tests.served import Served

pytestmark = pytest.mark.model

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def stream(served: Served, body: dict[str, Any]) -> tuple[bytes, str]:
    """The raw bytes of a streamed answer, and its request id."""
    raw = json.dumps({"model": served.model, "stream": True} | body).encode()
    request = urllib.request.Request(served.url + "/v1/chat/completions", raw, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read(), answer.headers["x-request-id"]


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON frames of a stream."""
    return [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]


def test_stream_and_whole_answer_say_the_same(served: Served) -> None:
    whole = served.chat("Name three colours.", **GREEDY)
    body = {"messages": [{"role": "user", "content": "Name three colours."}], "stream_options": {"include_usage": True}}
    raw, _ = stream(served, body | GREEDY)
    check_stream(raw, include_usage=True)
    frames = chunks(raw)
    text = "".join(c["delta"].get("content") or "" for f in frames for c in f["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert text.strip()
    usage = next(f["usage"] for f in frames if f.get("usage"))
    assert usage == whole["usage"]
    assert frames[-1]["hitsend"]["cost_microusd"] == whole["hitsend"]["cost_microusd"]


def test_the_record_tells_the_whole_life(served: Served) -> None:
    answer = served.chat("Hello there!", **GREEDY)
    record = served.record(answer["hitsend"]["request_id"])
    assert record["state"] == "finished"
    assert record["finish_reason"] in ("stop", "length")
    kinds = [event["type"] for event in record["events"]]
    expected = ["received", "authenticated", "parsed", "routed", "rendered", "tokenized", "fitted", "reserved"]
    assert kinds[: len(expected)] == expected
    for kind in ("queued", "admitted", "step", "first_token", "choice_finished", "released", "settled", "delivered"):
        assert kind in kinds, kind
    at = [event["at_ms"] for event in record["events"]]
    assert at == sorted(at)
    assert sum(part["ms"] for part in record["segments"]) == pytest.approx(record["wall_ms"], rel=0.01)
    assert record["cells"]["before"] == 0
    assert record["cells"]["after"] == 0
    assert record["cells"]["held"] > 0
    assert record["ledger"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert record["sampling"]["temperature"] == 0
    assert all(limit["value"] <= limit["limit"] for limit in record["limits"])
    tokenized = next(event for event in record["events"] if event["type"] == "tokenized")
    assert tokenized["num_tokens"] == answer["usage"]["prompt_tokens"]


def test_sixty_four_mixed_requests_at_once(served: Served) -> None:
    def ask(number: int) -> tuple[int, dict[str, Any]]:
        words = "word " * (number * 7 % 90)
        body = {"model": served.model, "messages": [{"role": "user", "content": f"{number} {words}"}]}
        fields = {"max_tokens": 1 + number % 20, "seed": number, "n": 1 + (number % 16 == 0)}
        status, answer, _ = served.post("/v1/chat/completions", body | fields)
        return status, answer

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert [status for status, _ in answers] == [200] * 64
    for number, (_, answer) in enumerate(answers):
        assert 0 <= answer["usage"]["completion_tokens"] <= (1 + number % 20) * (1 + (number % 16 == 0))
        record = served.record(answer["hitsend"]["request_id"])
        assert record["ledger"]["completion_tokens"] == answer["usage"]["completion_tokens"]
        assert sum(part["ms"] for part in record["segments"]) == pytest.approx(record["wall_ms"], rel=0.01)
    widths = [
        event["batch_sequences"]
        for _, answer in answers
        for event in served.record(answer["hitsend"]["request_id"])["events"]
        if event["type"] == "step"
    ]
    assert max(widths) > 4, "requests never shared a batch"


def test_n_answers_one_prompt(served: Served) -> None:
    answer = served.chat("Tell me something.", n=3, temperature=1.0, seed=7, max_tokens=12)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for index, choice in enumerate(answer["choices"]):
        alone = served.chat("Tell me something.", temperature=1.0, seed=7 + index, max_tokens=12)
        assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
        assert choice["message"]["content"] == alone["choices"][0]["message"]["content"]
    steps = [e for e in served.record(answer["hitsend"]["request_id"])["events"] if e["type"] == "step"]
    assert sum(step["prefill_tokens"] for step in steps) == answer["usage"]["prompt_tokens"], "one prefill for all"


def test_a_stop_string_is_never_seen_and_ends_the_bill(served: Served) -> None:
    free = served.chat("Count from one to ten in words.", temperature=0, max_tokens=40)
    text = free["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:6]
    cut = text.index(stop)
    answer = served.chat("Count from one to ten in words.", temperature=0, max_tokens=40, stop=[stop])
    assert answer["choices"][0]["message"]["content"] == text[:cut]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < free["usage"]["completion_tokens"]
    record = served.record(answer["hitsend"]["request_id"])
    ended = next(event for event in record["events"] if event["type"] == "choice_finished")
    assert ended["num_tokens"] == answer["usage"]["completion_tokens"]


def test_logprobs_cover_every_token_and_join_to_the_text(served: Served) -> None:
    answer = served.chat("Say hello in French.", temperature=0, max_tokens=12, logprobs=True, top_logprobs=3)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy takes the best"


def test_a_prompt_that_never_fits_is_refused_with_the_numbers(served: Served) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "word " * 1500}]}
    status, answer, _ = served.post("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "1024" in answer["error"]["message"].replace(",", "")
