"""What the dry runs say on the real model is what then happens, and they leave no trace."""

import pytest

from tests.served import Served

pytestmark = pytest.mark.model

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe <|im_end|> der Erde?"}]


def test_render_and_count_are_what_a_request_has(served: Served) -> None:
    body = {"model": served.model, "messages": MESSAGES, "max_tokens": 1}
    status, rendered, _ = served.post("/v1/chat/completions/render", body)
    assert status == 200
    _, counted, _ = served.post("/v1/chat/completions/input_tokens", body)
    _, done, headers = served.post("/v1/chat/completions", body)
    assert rendered["num_tokens"] == counted["input_tokens"] == done["usage"]["prompt_tokens"]
    events = {event["type"]: event for event in served.record(headers["x-request-id"])["events"]}
    assert events["rendered"]["text"] == rendered["prompt"]
    assert events["tokenized"]["prompt_token_ids"] == rendered["prompt_token_ids"]
    assert events["tokenized"]["spans"] == rendered["spans"]
    assert events["rendered"]["template_sha256"] == rendered["template_sha256"]
    for span, message in zip(rendered["spans"], MESSAGES, strict=True):
        ids = rendered["prompt_token_ids"][span["start"] : span["end"]]
        _, text, _ = served.post("/detokenize", {"tokens": ids})
        assert text["content"] == message["content"]


def test_an_estimate_is_what_then_happens_and_leaves_no_trace(served: Served) -> None:
    body = {"model": served.model, "messages": MESSAGES, "max_tokens": 8, "n": 2, "temperature": 0}
    served.post("/v1/chat/completions", body)
    before = served.get("/inspect/requests?limit=1")["requests"][0]["request_id"]
    status, found, _ = served.post("/v1/estimate", body)
    assert status == 200
    assert served.get("/inspect/requests?limit=1")["requests"][0]["request_id"] == before
    assert served.state()["holds_open"] == 0
    assert found["admission"]["fits_now"] is True
    assert found["times"]["ttft_s"] > 0
    assert found["measured"]["num_requests"] >= 1
    _, done, headers = served.post("/v1/chat/completions", body)
    events = {event["type"]: event for event in served.record(headers["x-request-id"])["events"]}
    assert found["prompt_tokens"] == done["usage"]["prompt_tokens"]
    assert found["max_output_tokens"] == events["fitted"]["max_tokens"]
    assert found["cost"]["most_microusd"] == events["reserved"]["held_microusd"]
    assert found["engine"]["name"] == events["routed"]["engine"]


def test_what_never_fits_is_told_with_its_numbers(served: Served) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "word " * 3000}]}
    status, found, _ = served.post("/v1/estimate", body)
    assert status == 200
    assert found["admission"]["fits_ever"] is False
    assert found["prompt_tokens"] > 3000
    _, refused, _ = served.post("/v1/chat/completions", body)
    assert found["admission"]["refusal"]["message"] == refused["error"]["message"]
