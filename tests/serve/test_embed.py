"""One embedding request over a real ledger and a scripted model: what is held, what is billed, what is refused."""

import asyncio

import pytest

from hitsend.core.embedding import EmbeddingRequest
from hitsend.core.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, ModelNotFound
from hitsend.core.lifecycle import State
from hitsend.core.record import Flight
from hitsend.serve.database.connection import database_url
from hitsend.serve.embed import EmbeddingStages, embed
from hitsend.serve.engine.embedding_messages import EmbedderFacts, Vectors
from hitsend.serve.usage.pricing import PriceBook
from hitsend.settings import PriceSettings
from tests.usage.storage import storage

FACTS = EmbedderFacts("bert", "l", 50, dimensions=4, max_tokens=6, max_batch_tokens=8, max_batch_inputs=2)


class ScriptedEmbedder:
    """One token per letter; the batch number `fails_at` does what it is told."""

    model, name, facts = "e", "embedding", FACTS

    def __init__(self, fails_at: int | None = None, how: object = None) -> None:
        self.fails_at, self.how = fails_at, how
        self.batches: list[int] = []

    async def tokenize(self, texts):
        return tuple((1,) * len(text) for text in texts)

    async def embed(self, inputs, dimensions):
        if len(self.batches) == self.fails_at:
            if isinstance(self.how, Exception):
                raise self.how
            await self.how.wait()
        self.batches.append(sum(map(len, inputs)))
        return Vectors(bytes([len(self.batches)]) * 4 * dimensions * len(inputs), 1.0, 2.0)


@pytest.fixture
async def stored(tmp_path):
    async with storage(database_url(None, tmp_path)) as opened:
        yield opened


def flying(stored) -> Flight:
    return Flight("r", stored.clock)


def stages(stored, embedder) -> EmbeddingStages:
    prices = PriceBook([PriceSettings(model="e", input=2.0, output=9.0, id="p")])
    return EmbeddingStages(stored.clock, embedder, prices, stored.ledger)


async def test_one_row_and_vectors_in_order(stored):
    embedder, flight = ScriptedEmbedder(), flying(stored)
    done = await embed(
        EmbeddingRequest("r", "e", ("aaaa", (7, 8), "bbb"), dimensions=2), flight, stages(stored, embedder)
    )
    assert [len(vector) for vector in done.vectors] == [8, 8, 8]
    assert [vector[0] for vector in done.vectors] == [1, 1, 2]
    assert embedder.batches == [6, 3]
    (row,) = await stored.rows()
    assert (row["prompt_tokens"], row["completion_tokens"], row["cost_microusd"]) == (9, 0, 18)
    assert (row["reason"], row["engine"]) == ("stop", "embedding")
    assert await stored.holds() == []
    assert flight.state is State.FINISHED
    assert (done.usage.prompt_tokens, done.cost_microusd) == (9, 18)


@pytest.mark.parametrize("fails_at", [0, 1])
async def test_what_was_computed_before_a_failure_is_billed(stored, fails_at):
    embedder, flight = ScriptedEmbedder(fails_at, EngineFailed("gone")), flying(stored)
    with pytest.raises(EngineFailed):
        await embed(EmbeddingRequest("r", "e", ("aaaa", "bb", "ccc")), flight, stages(stored, embedder))
    (row,) = await stored.rows()
    assert row["prompt_tokens"] == (0, 6)[fails_at]
    assert row["reason"] == "engine_failed"
    assert await stored.holds() == []


async def test_a_cancelled_request_pays_for_its_finished_batches(stored):
    embedder, flight = ScriptedEmbedder(1, asyncio.Event()), flying(stored)
    running = asyncio.create_task(
        embed(EmbeddingRequest("r", "e", ("aaaa", "bb", "ccc")), flight, stages(stored, embedder))
    )
    while not embedder.batches:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (row,) = await stored.rows()
    assert (row["prompt_tokens"], row["reason"]) == (6, "client_gone")
    assert flight.state is State.CANCELLED


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (EmbeddingRequest("r", "e", ("a", "b" * 7)), ContextLengthExceeded, "input[1]"),
        (EmbeddingRequest("r", "e", ((1, 50),)), InvalidRequest, "input"),
        (EmbeddingRequest("r", "e", ("a",), dimensions=5), InvalidRequest, "dimensions"),
        (EmbeddingRequest("r", "x", ("a",)), ModelNotFound, "model"),
    ],
)
async def test_refusals_hold_nothing(stored, request_, error, param):
    with pytest.raises(error) as refused:
        await embed(request_, flying(stored), stages(stored, ScriptedEmbedder()))
    assert refused.value.param == param
    assert await stored.rows() == []
    assert await stored.holds() == []
