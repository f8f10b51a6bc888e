"""What runs batches, put together from what serves requests.

Enters: the routes, stages and services of this process. Leaves: a `BatchRunner`. Always true: a line's services differ
from those of a request in one thing only: the prices. Next: `runner.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec

from hitsend.serve.access.auth import Authenticator
from hitsend.serve.api.services import Services
from hitsend.serve.batching.gate import Gate, Lane
from hitsend.serve.batching.input import Limits
from hitsend.serve.batching.line import LineRunner, Paid
from hitsend.serve.batching.runner import BatchRunner
from hitsend.serve.embed import EmbeddingStages
from hitsend.serve.embed_elsewhere import embed_anywhere
from hitsend.serve.engine.protocol import Engine
from hitsend.serve.routed import Routing, run_named
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
    settings: Settings, services: Services, routing: Routing, embedding: EmbeddingStages, kept: Kept, *, is_shared: bool
) -> BatchRunner:
    """The one of this process. `is_shared`: `server.workers` of them share an engine."""
    stages, embedder = routing.stages, embedding.embedder
    only = next(iter(stages.engines), None) if len(stages.engines) == 1 else None

    def lane_of(model: str | None) -> Lane | None:
        if embedder is not None and model == embedder.model:
            return Lane("embeddings", EMBEDDING_LINES, 0, embedder.state()["waiting"])
        name = model or only or ""
        if name in routing.targets.routes:
            return _narrowest([stages.engines[one] for one in routing.targets.models_of(name)])
        engine = stages.engines.get(name) or embedding.elsewhere.get(name)
        return None if engine is None else _narrowest([engine])

    def drafts_of(model: str | None) -> tuple[str, ...]:
        route = routing.targets.routes.get(model or only or "")
        is_paying = route is not None and route.strategy == "cascade" and route.cascade.bills_drafts
        return route.engines if route is not None and is_paying else ()

    priced = partial(_priced, services, embedding=embedding)
    billed = priced(routing, prices=stages.prices.of_batches())
    unbilled = priced(routing, prices=Unbilled(stages.prices))

    def serving(paid: Paid) -> Services:
        if paid.drafts and not paid.is_answer:
            return priced(replace(routing, paid_drafts=paid.drafts), prices=stages.prices.of_batches())
        return unbilled if paid.is_answer else billed

    lines = LineRunner(serving, kept.auth.standing)
    gate = Gate(lane_of, settings.batches.slots_share, settings.server.workers if is_shared else 1)
    limits = Limits(settings.batches.max_lines, settings.access.max_body_bytes)
    return BatchRunner(
        kept.files,
        kept.batches,
        lines,
        gate,
        clock=stages.clock,
        limits=limits,
        owner=kept.ledger.owner,
        drafts_of=drafts_of,
    )


def _narrowest(engines: Sequence[Engine]) -> Lane:
    """Of a route: any of its engines may be asked, so its lines keep to what the smallest has, while nobody waits for
    any of them."""
    states = [engine.state() for engine in engines]
    least = min(range(len(engines)), key=lambda index: states[index].slots_total)
    waiting = sum(state.waiting for state in states)
    return Lane(engines[least].name, states[least].slots_total, states[least].running, waiting)


def _priced(services: Services, routing: Routing, *, embedding: EmbeddingStages, prices: PriceBook) -> Services:
    """The same services at other prices, for every name that is served: models, routes, embedding models anywhere."""
    routing = replace(routing, stages=replace(routing.stages, prices=prices))
    embedding = replace(embedding, prices=prices)
    return msgspec.structs.replace(
        services, pipeline=partial(run_named, routing), embed=partial(embed_anywhere, embedding)
    )
