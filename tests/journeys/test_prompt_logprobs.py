"""A prompt's own log-probabilities from the real model over a real socket."""

from typing import Any

import pytest

from tests.served import Served

pytestmark = pytest.mark.model

TEXT = "The capital of France is Paris, and that of Italy is Rome."


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"model": served.model, "max_tokens": 1, "temperature": 0} | fields
    status, answer, _ = served.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def test_they_are_what_forcing_each_token_says(served: Served) -> None:
    """Another way to the same numbers: every prefix as a prompt of its own, and the next token as its answer."""
    ids = served.post("/tokenize", {"model": served.model, "prompt": TEXT})[1]["tokens"]
    told = complete(served, prompt=ids, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
    assert len(told) == len(ids)
    assert told[0] is None
    for place in range(1, len(ids)):
        wanted = str(ids[place])
        assert next(iter(told[place])) == wanted
        forced = complete(served, prompt=ids[:place], logit_bias={wanted: 100}, logprobs=3)["choices"][0]["logprobs"]
        assert told[place][wanted]["logprob"] == pytest.approx(forced["token_logprobs"][0], abs=0.3), place
        assert told[place][wanted]["decoded_token"] == forced["tokens"][0]
        best = max(told[place].values(), key=lambda each: each["logprob"])
        assert best["rank"] == 1
        assert best["logprob"] == pytest.approx(max(forced["top_logprobs"][0].values()), abs=0.3)


def test_the_answer_is_the_one_without_them(served: Served) -> None:
    asked: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 8, "n": 2}
    plain, scored = (served.chat(TEXT * 6, **asked, **more) for more in ({}, {"prompt_logprobs": 0}))
    assert [c["message"] for c in scored["choices"]] == [c["message"] for c in plain["choices"]]
    assert scored["usage"] == plain["usage"]
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    assert scored["prompt_logprobs"][0] is None
    assert all(len(each) == 1 for each in scored["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in plain


def test_an_echo_with_logprobs(served: Served) -> None:
    found = complete(served, prompt=TEXT, echo=True, logprobs=2, max_tokens=3)["choices"][0]
    logprobs = found["logprobs"]
    assert "".join(logprobs["tokens"]) == found["text"]
    assert found["text"].startswith(TEXT)
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert found["text"][offset:].startswith(token)


def test_too_many_are_a_refusal_with_both_numbers(served: Served) -> None:
    body = {"model": served.model, "prompt": [[5] * 900], "prompt_logprobs": 20, "max_tokens": 1}
    status, answer, _ = served.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    assert "18000, limit 16384 (access.max_prompt_logprobs)" in answer["error"]["message"]
