"""One embedding request over a real ledger and a scripted model: what is held, what is billed, what is refused."""

import asyncio

import pytest

from hitsend.core.embedding import EmbeddingRequest
from hitsend.core.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, ModelNotFound, RateLimitExceeded
from hitsend.core.events import Step
from hitsend.core.lifecycle import State
from hitsend.core.limits import Level, Limits
from hitsend.core.record import Flight
from hitsend.core.request import Principal
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.database.connection import database_url
from hitsend.serve.embed import EmbeddingStages, embed
from hitsend.serve.engine.embedding_messages import EmbedderFacts, Vectors
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.usage.report import Spending
from hitsend.settings import PriceSettings
from tests.usage.storage import storage

FACTS = EmbedderFacts("bert", "l", 50, dimensions=4, max_tokens=6, max_batch_tokens=8, max_batch_inputs=2)


class ScriptedEmbedder:
    """One token per letter; the batch number `fails_at` does what it is told."""

    model, name, facts = "e", "embedding", FACTS

    def __init__(self, fails_at: int | None = None, how: object = None) -> None:
        self.fails_at, self.how = fails_at, how
        self.batches: list[int] = []
        self.is_stopped = asyncio.Event()
        self.is_computing = True
        self.breaks = False

    async def tokenize(self, texts):
        return tuple((1,) * len(text) for text in texts)

    def submit(self, inputs, dimensions):
        return ScriptedBatch(self, inputs, dimensions)


class ScriptedBatch:
    def __init__(self, embedder, inputs, dimensions):
        self.embedder, self.inputs, self.dimensions = embedder, inputs, dimensions
        self.is_last = len(embedder.batches) == embedder.fails_at

    async def vectors(self):
        embedder = self.embedder
        if self.is_last and isinstance(embedder.how, Exception):
            raise embedder.how
        if self.is_last:
            embedder.is_stopped.set()
            await embedder.how.wait()
            if embedder.breaks:
                raise EngineFailed("gone")
        embedder.batches.append(sum(map(len, self.inputs)))
        return Vectors(bytes([len(embedder.batches)]) * 4 * self.dimensions * len(self.inputs), 1.0, 2.0)

    def withdraw(self):
        return not self.embedder.is_computing


@pytest.fixture
async def stored(tmp_path):
    async with storage(database_url(None, tmp_path)) as opened:
        yield opened


def flying(stored) -> Flight:
    return Flight("r", stored.clock)


def stages(stored, embedder) -> EmbeddingStages:
    prices = PriceBook([PriceSettings(model="e", input=2.0, output=9.0, id="p")])
    return EmbeddingStages(
        stored.clock, embedder, prices, stored.ledger, MemoryQuota(stored.clock, Spending(stored.database))
    )


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


@pytest.mark.parametrize(
    ("is_computing", "breaks", "billed", "steps"),
    [(False, False, 6, 1), (True, False, 9, 2), (True, True, 6, 1)],
    ids=["queued", "in the model's hands", "in its hands, and broke"],
)
async def test_a_cancelled_request_pays_for_what_was_computed(stored, is_computing, breaks, billed, steps):
    embedder, flight = ScriptedEmbedder(1, asyncio.Event()), flying(stored)
    embedder.is_computing, embedder.breaks = is_computing, breaks
    asked = EmbeddingRequest("r", "e", ("aaaa", "bb", "ccc", "dddddd"))
    running = asyncio.create_task(embed(asked, flight, stages(stored, embedder)))
    await embedder.is_stopped.wait()
    running.cancel()
    if is_computing:
        await asyncio.wait({running}, timeout=0.05)
        assert not running.done(), "settled before the batch was computed"
    embedder.how.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    (row,) = await stored.rows()
    assert (row["prompt_tokens"], row["reason"]) == (billed, "client_gone")
    assert flight.state is State.CANCELLED
    assert sum(isinstance(event, Step) for event in flight.events()) == steps
    assert await stored.holds() == []


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


async def test_an_id_that_the_model_does_not_have_is_shown(stored):
    request = EmbeddingRequest("r", "e", ((1,), (1, 50, 77)))
    with pytest.raises(InvalidRequest, match=r"^input\[1\]: 77 is no token id of this model \(0 to 49\)$"):
        await embed(request, flying(stored), stages(stored, ScriptedEmbedder()))


async def test_levels_count_embeddings_too(stored):
    level = Level("org", ("acme",), Limits(input_tokens_per_minute=8, requests_per_minute=5))
    caller, desk = Principal(key_id="k1", org="acme", levels=(level,)), stages(stored, ScriptedEmbedder())
    flight = flying(stored)
    await embed(EmbeddingRequest("r", "e", ("aaa", "bbb"), caller), flight, desk)
    assert flight.windows.input_tokens.remaining == 2
    assert desk.quota.num_open == 0
    with pytest.raises(RateLimitExceeded, match="input_tokens_per_minute of org acme is 8, 2 left, 4 asked"):
        await embed(EmbeddingRequest("r2", "e", ("aaaa",), caller), flying(stored), desk)
    with pytest.raises(InvalidRequest, match="9 asked, .* can never pass") as refused:
        await embed(EmbeddingRequest("r3", "e", ("aaaa", "aaaaa"), caller), flying(stored), desk)
    assert refused.value.param == "input"
    assert len(await stored.rows()) == 1
