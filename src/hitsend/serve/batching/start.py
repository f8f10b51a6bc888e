"""What runs batches, put together from what serves requests.

Enters: the stages and services of this process. Leaves: a `BatchRunner`. Always true: a line's services differ from
those of a request in one thing only: the prices. Next: `runner.py`.
"""

from dataclasses import replace
from typing import Protocol

import msgspec

from hitsend.serve.access.auth import Authenticator
from hitsend.serve.api.services import Services
from hitsend.serve.batching.gate import Gate, Lane
from hitsend.serve.batching.input import Limits
from hitsend.serve.batching.line import LineRunner
from hitsend.serve.batching.runner import BatchRunner
from hitsend.serve.embed import EmbeddingStages, embed
from hitsend.serve.pipeline import run
from hitsend.serve.stages import Stages
from hitsend.serve.usage.batches import BatchStore
from hitsend.serve.usage.files import FileStore
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.pricing import PriceBook, Unbilled
from hitsend.settings import Settings

EMBEDDING_LINES = 2
"""At once: one is computed while the next one's texts become tokens."""


class Kept(Protocol):
    """What batches need of `stores.py`."""

    @property
    def auth(self) -> Authenticator: ...  # noqa: D102  # as in `Stores`
    @property
    def ledger(self) -> Ledger: ...  # noqa: D102
    @property
    def files(self) -> FileStore: ...  # noqa: D102
    @property
    def batches(self) -> BatchStore: ...  # noqa: D102


def batch_runner(
    settings: Settings, services: Services, stages: Stages, embedding: EmbeddingStages, kept: Kept, *, is_shared: bool
) -> BatchRunner:
    """The one of this process. `is_shared`: `server.workers` of them share an engine."""
    embedder = embedding.embedder
    only = next(iter(stages.engines), None) if len(stages.engines) == 1 else None

    def lane_of(model: str | None) -> Lane | None:
        if embedder is not None and model == embedder.model:
            return Lane("embeddings", EMBEDDING_LINES, 0, embedder.state()["waiting"])
        engine = stages.engines.get(model or only or "")
        if engine is None:
            return None
        now = engine.state()
        return Lane(engine.name, now.slots_total, now.running, now.waiting)

    lines = LineRunner(
        _priced(services, stages, embedding, stages.prices.of_batches()),
        _priced(services, stages, embedding, Unbilled()),
        kept.auth.standing,
    )
    gate = Gate(lane_of, settings.batches.slots_share, settings.server.workers if is_shared else 1)
    limits = Limits(settings.batches.max_lines, settings.access.max_body_bytes)
    return BatchRunner(
        kept.files, kept.batches, lines, gate, clock=stages.clock, limits=limits, owner=kept.ledger.owner
    )


def _priced(services: Services, stages: Stages, embedding: EmbeddingStages, prices: PriceBook) -> Services:
    """The same services at other prices."""
    stages, embedding = replace(stages, prices=prices), replace(embedding, prices=prices)
    return msgspec.structs.replace(
        services,
        pipeline=lambda request, flight: run(request, flight, stages.of(request.model)),
        embed=lambda request, flight: embed(request, flight, embedding),
    )
