"""The embeddings route over a scripted model: what is read, what is refused, what goes out."""

import base64

import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.embedding import EmbeddingRequest
from hitsend.core.errors import ModelNotFound
from hitsend.core.record import Flight
from hitsend.serve.api.services import ServedModel
from hitsend.serve.embed import EmbeddingStages, batches, embed
from hitsend.settings import AccessSettings
from tests.edge import Edge


def embedding_edge(**settings) -> Edge:
    return Edge(**settings, embedding_model=ServedModel(id="e", created=1, context=8))


async def ask(edge: Edge, **fields):
    return await edge.ask("/v1/embeddings", {"model": "e", "input": "hi"} | fields)


@pytest.mark.parametrize(
    ("given", "read"),
    [("ab", ("ab",)), ([1, 2], ((1, 2),)), (["a", "b"], ("a", "b")), ([[1], [2, 3]], ((1,), (2, 3)))],
)
async def test_each_shape_of_input_is_read_and_answered_in_order(given, read):
    edge = embedding_edge()
    answer = (await ask(edge, input=given, dimensions=2, user="u")).json()
    assert edge.embedded[0].inputs == read
    assert edge.embedded[0].dimensions == 2
    assert answer["object"] == "list"
    assert answer["model"] == "e"
    assert [one["index"] for one in answer["data"]] == list(range(len(read)))
    assert answer["data"][0] == {"index": 0, "embedding": [0.0, -2.5], "object": "embedding"}
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert answer["hitsend"]["cost_microusd"] == 3


async def test_base64_is_little_endian_float32():
    answer = (await ask(embedding_edge(), encoding_format="base64")).json()
    assert base64.b64decode(answer["data"][0]["embedding"]) == b"\0\0\0\0\0\0\x20\xc0"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [[1], "a"]}, "input[1]"),
        ({"input": ["a", "b", "c"]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_refusals_name_the_field(fields, param):
    edge = embedding_edge(access=AccessSettings(max_inputs=2))
    answer = await ask(edge, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert edge.embedded == []
    assert edge.flights.num_open == 0


async def test_a_body_without_model_gets_the_one_there_is_and_a_warning():
    edge = embedding_edge()
    answer = await edge.ask("/v1/embeddings", {"input": "x"})
    assert edge.embedded[0].model == "e"
    assert answer.json()["hitsend"]["warnings"] == ["model: not given, e was used"]


async def test_the_embedding_model_is_listed():
    edge = embedding_edge()
    assert [model["id"] for model in (await edge.ask("/v1/models")).json()["data"]] == ["m", "e"]
    assert (await edge.ask("/v1/models/e")).json()["id"] == "e"
    assert (await edge.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})).status == 200


async def test_without_a_model_the_error_says_what_to_set():
    stages = EmbeddingStages(SystemClock(), None, None, None, None)
    flight = Flight("r", SystemClock())
    with pytest.raises(ModelNotFound, match="engine.embedding_model") as refused:
        await embed(EmbeddingRequest("r", "x", ("a",)), flight, stages)
    assert refused.value.param == "model"


def test_batches_keep_order_and_both_limits():
    inputs = [(1,) * size for size in (3, 3, 5, 1, 1, 1, 8)]
    found = batches(inputs, 8, 2)
    assert [ids for batch in found for ids in batch] == inputs
    assert all(len(batch) <= 2 and sum(map(len, batch)) <= 8 for batch in found)
    assert len(found) == 4
