"""The official Python client's files and batches against a real server and model."""

import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.served import Served

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The client, without its own retries."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="not-needed", max_retries=0) as made:
        yield made


def chat(number: int, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Count to {number}."}], "max_tokens": 6, "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body | fields}


def begin(client: openai.OpenAI, endpoint: Any, lines: list[dict[str, Any]]) -> Batch:
    raw = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", io.BytesIO(raw)), purpose="batch")
    assert (file.bytes, file.filename, file.status) == (len(raw), "lines.jsonl", "processed")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def until(
    client: openai.OpenAI, batch: Batch, good: Callable[[Batch], bool] = lambda batch: batch.status in OVER
) -> Batch:
    deadline = time.monotonic() + 60
    while not good(batch) and time.monotonic() < deadline:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert good(batch), batch
    return batch


def content(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_answers(client: openai.OpenAI, served: Served) -> None:
    lines = [chat(number, model=served.model) for number in range(1, 5)] + [chat(9, model=served.model, temperature=9)]
    batch = until(client, begin(client, CHAT, lines))
    assert (batch.status, batch.request_counts) == (
        "completed",
        openai.types.BatchRequestCounts(total=5, completed=4, failed=1),
    )
    answers = content(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == ["line-1", "line-2", "line-3", "line-4"]
    for answer in answers:
        parsed = openai.types.chat.ChatCompletion.model_validate(answer["response"]["body"])
        assert parsed.choices[0].message.content
        assert parsed.usage is not None
    (error,) = content(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["body"]["error"]["param"]) == ("line-9", "temperature")
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    assert batch.output_file_id in [one.id for one in client.files.list(purpose="batch_output")]
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "One, two,", "max_tokens": 3}),
        ("/v1/responses", {"input": "Say hello.", "max_output_tokens": 4, "store": False}),
    ],
)
def test_lines_of_the_other_endpoints(client: openai.OpenAI, served: Served, url: str, body: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body | {"model": served.model}}
    batch = until(client, begin(client, url, [line]))
    (answer,) = content(client, batch.output_file_id)
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("a", 200)


def test_whoever_is_there_goes_first_and_the_rest_is_cancelled(client: openai.OpenAI, served: Served) -> None:
    lines = [chat(number, model=served.model, max_tokens=40, ignore_eos=True) for number in range(1, 201)]
    batch = until(client, begin(client, CHAT, lines), lambda now: now.status == "in_progress")
    answer = client.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": "Hi!"}], max_tokens=2
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    now = client.batches.retrieve(batch.id)
    assert now.request_counts is not None
    assert now.request_counts.completed < 200
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = until(client, now)
    assert (batch.status, batch.error_file_id) == ("cancelled", None)
    assert batch.request_counts is not None
    done = content(client, batch.output_file_id) if batch.output_file_id else []
    assert len(done) == batch.request_counts.completed < 200
    served.wait_idle()
