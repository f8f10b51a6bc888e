"""The official Python client against a real server: whole and streamed answers, logprobs, n, stop, and its errors."""

from collections.abc import Iterator

import openai
import pytest

from tests.served import Served, until

pytestmark = pytest.mark.model

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the capital of "}, {"type": "text", "text": "France?"}],
    },
]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The client, without its own retries."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="not-needed", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_whole_and_streamed(client: openai.OpenAI, served: Served) -> None:
    whole = client.chat.completions.create(
        model=served.model, messages=QUESTION, max_completion_tokens=20, temperature=0, user="u-1", metadata={"a": "b"}
    )
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole._request_id is not None
    stream = client.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_logprobs_n_and_stop(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        max_tokens=24,
        temperature=1,
        seed=11,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stop=["\n", ","],
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        assert "\n" not in (choice.message.content or "")
        assert "," not in (choice.message.content or "")


def test_the_stream_helper_adds_up(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(
        model=served.model, messages=QUESTION, max_tokens=16, temperature=0, logprobs=True
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].logprobs is not None


def test_extra_fields_pass_and_are_checked(client: openai.OpenAI, served: Served) -> None:
    extra = {"top_k": 1, "min_p": 0.05, "repetition_penalty": 1.1, "chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        max_tokens=4,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        extra_body=extra,
    )
    record = served.record(answer.model_extra["hitsend"]["request_id"] if answer.model_extra else "")
    assert record["sampling"]["top_k"] == 1
    assert record["sampling_sources"]["top_k"] == "client"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.model, messages=QUESTION, extra_body={"top_k": -7})
    assert refused.value.param == "top_k"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 1000}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
    ],
)
def test_errors_name_the_field(client: openai.OpenAI, served: Served, fields: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        # fields that the client's own types would refuse, on purpose
        client.chat.completions.create(model=served.model, messages=QUESTION, **fields)  # type: ignore[call-overload]
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)


def test_breaking_out_of_a_stream_frees_the_engine(client: openai.OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(model=served.model, messages=QUESTION, stream=True, max_tokens=800)
    next(iter(stream))
    stream.close()
    assert until(served.state, lambda state: state["running"] == 0)["running"] == 0
