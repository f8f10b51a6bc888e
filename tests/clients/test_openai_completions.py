"""OpenAI's own client against the real server: the legacy completions route, one bill however many prompts."""

import re
from collections.abc import Iterator

import openai
import pytest

from tests.served import Served

pytestmark = pytest.mark.model


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_whole_streamed_and_echoed(client: openai.OpenAI, served: Served) -> None:
    prompt = "The capital of France is"
    asked = {"model": served.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.usage.completion_tokens <= 8
    assert "Paris" in whole.choices[0].text
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    echoed = client.completions.create(**asked, echo=True)
    assert echoed.choices[0].text == prompt + whole.choices[0].text
    streamed = list(client.completions.create(**asked, echo=True, stream=True))
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == echoed.choices[0].text


def test_every_choice_of_every_prompt_is_held_to_its_format(client: openai.OpenAI, served: Served) -> None:
    held = {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2}"}}
    answer = client.completions.create(
        model=served.model, prompt=["The code is ", "Once"], n=2, max_tokens=20, temperature=1, extra_body=held
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert re.fullmatch("[0-9]{3}-[a-c]{2}", choice.text)
        assert choice.finish_reason == "stop"


def test_text_and_its_ids_are_the_same_prompt(client: openai.OpenAI, served: Served) -> None:
    prompt = "Once upon a time <|im_end|>"
    status, ids, _ = served.post("/tokenize", {"content": prompt, "add_special": True})
    assert status == 200
    asked = {"model": served.model, "max_tokens": 6, "temperature": 0}
    text = client.completions.create(**asked, prompt=prompt)
    from_ids = client.completions.create(**asked, prompt=ids["tokens"])
    assert from_ids.choices[0].text == text.choices[0].text
    assert from_ids.usage.prompt_tokens == text.usage.prompt_tokens == ids["count"]
    echoed = client.completions.create(**asked, prompt=[ids["tokens"]], echo=True)
    assert echoed.choices[0].text == prompt + text.choices[0].text


def test_several_prompts_and_choices_make_one_bill(client: openai.OpenAI, served: Served) -> None:
    prompts = ["One, two, three,", "The sun rises in the", "def add(a, b):"]
    asked = {"model": served.model, "max_tokens": 5, "temperature": 0}
    alone = [client.completions.create(**asked, prompt=prompt) for prompt in prompts]
    together = client.completions.create(**asked, prompt=prompts, n=2, seed=1)
    assert [choice.index for choice in together.choices] == list(range(6))
    for index, choice in enumerate(together.choices):
        assert choice.text == alone[index // 2].choices[0].text
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert together.usage.completion_tokens == 2 * sum(one.usage.completion_tokens for one in alone)
    record = served.record(together._request_id)
    assert record["state"] == "finished"
    assert record["ledger"]["prompt_tokens"] == together.usage.prompt_tokens
    assert record["ledger"]["completion_tokens"] == together.usage.completion_tokens
    names = [event["type"] for event in record["events"]]
    for once in ("reserved", "queued", "released", "settled"):
        assert names.count(once) == 1
    stream = client.completions.create(**asked, prompt=prompts, n=2, stream=True)
    texts = [""] * 6
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in together.choices]
    served.wait_idle()
    assert served.state()["holds_open"] == 0


def test_a_seed_gives_the_same_choices_again_and_choices_differ(client: openai.OpenAI, served: Served) -> None:
    asked = {"model": served.model, "prompt": ["A poem about", "A poem about"], "n": 2, "max_tokens": 12, "seed": 7}
    first = client.completions.create(**asked, temperature=1.0)
    second = client.completions.create(**asked, temperature=1.0)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1


def test_legacy_logprobs(client: openai.OpenAI, served: Served) -> None:
    answer = client.completions.create(
        model=served.model, prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=3
    )
    found, text = answer.choices[0].logprobs, answer.choices[0].text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert len(found.tokens) == answer.usage.completion_tokens
    assert "".join(found.tokens) == text
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert text[offset:].startswith(token)
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3
    none = client.completions.create(model=served.model, prompt="x", max_tokens=2, temperature=0, logprobs=0)
    assert [len(top) for top in none.choices[0].logprobs.top_logprobs] == [1] * none.usage.completion_tokens


def test_stop_and_default_length(client: openai.OpenAI, served: Served) -> None:
    asked = {"model": served.model, "prompt": "1, 2, 3, 4, 5,", "temperature": 0}
    assert client.completions.create(**asked).usage.completion_tokens <= 16
    stopped = client.completions.create(**asked, stop=["7"], max_tokens=30)
    assert stopped.choices[0].finish_reason == "stop"
    assert "7" not in stopped.choices[0].text


def test_a_client_that_leaves_ends_all_prompts(client: openai.OpenAI, served: Served) -> None:
    stream = client.completions.create(
        model=served.model, prompt=["Tell a story.", "Tell another."], n=2, max_tokens=400, stream=True
    )
    next(iter(stream))
    request_id = stream.response.headers["x-request-id"]
    stream.close()
    served.wait_idle()
    record = served.record(request_id)
    assert record["state"] == "cancelled"
    assert record["ledger"]["completion_tokens"] > 0
    assert served.state()["cells_used"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [[1, 10**6]]}, "prompt[1]"),
        ({"prompt": ""}, "prompt"),
        ({"max_tokens": 1100}, "prompt"),
        ({"extra_body": {"messages": []}}, "messages"),
    ],
)
def test_refusals_name_the_field(client: openai.OpenAI, served: Served, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": served.model, "prompt": "x"} | fields)
    assert refused.value.param == param
