"""The official Python client's `responses` against a real server: whole, streamed, stored, gone on with, counted."""

import contextlib
import sqlite3
from collections.abc import Iterator

import openai
import pytest

from tests.served import Served

pytestmark = pytest.mark.model


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The client, without its own retries."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="not-needed", max_retries=0) as made:
        yield made


QUESTION = "What is the capital of France?"
BRIEF = "You answer in one short sentence."


def test_whole_and_streamed(client: openai.OpenAI, served: Served) -> None:
    common = {"model": served.model, "instructions": BRIEF, "input": QUESTION, "temperature": 0}
    whole = client.responses.create(**common, max_output_tokens=40)
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    with client.responses.stream(**common, max_output_tokens=40) as stream:
        events = list(stream)
        final = stream.get_final_response()
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == final.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage == whole.usage
    cut = client.responses.create(**common, max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_is_stored_and_forgotten(client: openai.OpenAI, served: Served) -> None:
    first = client.responses.create(model=served.model, input="My name is Ada.", max_output_tokens=8)
    second = client.responses.create(
        model=served.model, input="What is my name?", previous_response_id=first.id, max_output_tokens=8
    )
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    counted = client.responses.input_tokens.count(
        model=served.model, input="What is my name?", previous_response_id=first.id
    )
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=served.model, input="x", previous_response_id=first.id)
    unstored = client.responses.create(model=served.model, input="hi", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_one_request_is_one_row_of_the_ledger(client: openai.OpenAI, served: Served) -> None:
    answer = client.responses.create(model=served.model, input="hi", max_output_tokens=4)
    assert answer.usage is not None
    request_id = answer.id.removeprefix("resp_")
    with contextlib.closing(sqlite3.connect(served.data / "hitsend.sqlite3")) as database:
        query = "SELECT prompt_tokens, completion_tokens FROM ledger WHERE request_id = ?"
        rows = database.execute(query, (request_id,)).fetchall()
    assert rows == [(answer.usage.input_tokens, answer.usage.output_tokens)]


def test_logprobs_and_errors(client: openai.OpenAI, served: Served) -> None:
    answer = client.responses.create(
        model=served.model, input="hi", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = answer.output[0].content[0]
    assert len(part.logprobs) == 3
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=served.model, input="hi", tools=[{"type": "web_search"}])
    assert refused.value.param == "tools[0].type"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model=served.model, input="hi", background=True)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nope", input="hi")
