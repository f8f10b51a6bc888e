"""Anthropic's Python client against a real server: whole and streamed messages, counting, prefill, stops, errors."""

from collections.abc import Iterator

import anthropic
import pytest

from tests.served import Served, until

pytestmark = pytest.mark.model

SYSTEM = "You answer in one short sentence."
QUESTION: list[anthropic.types.MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
"""The newest client has no argument for it any more; the API has."""


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    """The client, without its own retries."""
    with anthropic.Anthropic(base_url=served.url, api_key="not-needed", max_retries=0) as made:
        yield made


def test_whole_and_streamed(client: anthropic.Anthropic, served: Served) -> None:
    common = {"model": served.model, "max_tokens": 20, "system": SYSTEM, "messages": QUESTION, "extra_body": GREEDY}
    whole = client.messages.create(**common, metadata={"user_id": "u-1"})
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", served.model)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.input_tokens > 0
    assert whole.usage.output_tokens > 0
    assert whole._request_id is not None
    with client.messages.stream(**common) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    spent = [(one.input_tokens, one.output_tokens, one.cache_read_input_tokens) for one in (final.usage, whole.usage)]
    assert spent[0] == spent[1]
    events = list(client.messages.create(**common, stream=True))
    assert [event.type for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens


def test_counting_is_exact_and_runs_nothing(client: anthropic.Anthropic, served: Served) -> None:
    counted = client.messages.count_tokens(model=served.model, system=SYSTEM, messages=QUESTION)
    rows = len(served.get("/inspect/requests?limit=100")["requests"])
    answer = client.messages.create(model=served.model, max_tokens=1, system=SYSTEM, messages=QUESTION)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert len(served.get("/inspect/requests?limit=100")["requests"]) == min(rows + 1, 100)


def test_prefill_and_stop_sequences(client: anthropic.Anthropic, served: Served) -> None:
    messages: list[anthropic.types.MessageParam] = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    answer = client.messages.create(
        model=served.model, max_tokens=12, messages=messages, stop_sequences=["Paris"], extra_body=GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")


def test_errors_are_the_client_s_own(client: anthropic.Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nope", max_tokens=5, messages=QUESTION)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=served.model, max_tokens=5, messages=QUESTION, extra_body={"temperature": 3})
    image = {"type": "image", "source": {"type": "url", "url": "http://x.example/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model=served.model, max_tokens=5, messages=[{"role": "user", "content": [image]}])


def test_a_closed_stream_is_a_cancelled_request(client: anthropic.Anthropic, served: Served) -> None:
    with client.messages.with_streaming_response.create(
        model=served.model, max_tokens=600, messages=[{"role": "user", "content": "Tell a long story."}], stream=True
    ) as answer:
        request_id = answer.headers["request-id"]
        next(answer.iter_lines())
    record = until(lambda: served.record(request_id), lambda found: found["state"] == "cancelled")
    assert record["state"] == "cancelled"
