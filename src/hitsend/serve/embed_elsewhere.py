"""One embedding request whose model is an upstream's, from parsed to settled: the sister of `embed.py`.

Enters: an `EmbeddingRequest`, the `Flight` that records it, and the engine that has the model. Leaves: an `Embedded`.
Always true: what is held for the texts is a bound, since nobody here can count them; what is billed is the upstream's
usage, else a guess from the bytes, flagged; one hold and one row. Next: `engine/upstream_embeddings.py`.
"""

from hitsend.core.embedding import Embedded, EmbeddingRequest
from hitsend.core.events import Routed
from hitsend.core.lifecycle import State
from hitsend.core.record import Flight
from hitsend.serve.access.rights import check_model
from hitsend.serve.account import Account
from hitsend.serve.chat.handover import BYTES_PER_TOKEN
from hitsend.serve.embed import EmbeddingStages, embed
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.usage.rows import HoldRequest


async def embed_anywhere(stages: EmbeddingStages, request: EmbeddingRequest, flight: Flight) -> Embedded:
    """Here or elsewhere, by the model's name."""
    engine = stages.elsewhere.get(request.model)
    if engine is None:
        return await embed(request, flight, stages)
    return await embed_elsewhere(request, flight, stages, engine)


async def embed_elsewhere(
    request: EmbeddingRequest, flight: Flight, stages: EmbeddingStages, engine: OpenAIEngine
) -> Embedded:
    """Live through one request. Raises ServeErrors; those before the hold cost nothing."""
    check_model(request.principal, request.model, (request.model,))
    flight.model = request.model
    flight.record(Routed(engine.name, request.model, "the only engine that has this embedding model"))
    engine.shed(request.principal.tenant, 1)
    flight.enter(State.PREPARED)
    texts = sum(len(each.encode()) for each in request.inputs if isinstance(each, str))
    ids = sum(len(each) for each in request.inputs if not isinstance(each, str))
    hold = HoldRequest(
        request_id=request.request_id,
        principal=request.principal,
        model=request.model,
        engine=engine.name,
        price=stages.prices.find(request.model, is_local=False),
        input_tokens=texts + ids + 2 * len(request.inputs),  # and a beginning and an end of each
        output_tokens=0,
        neurons_limit_micro=engine.neurons_limit_micro,
    )
    account = Account(stages.ledger, hold, flight, stages.clock, quota=stages.quota, input_param="input")
    async with account:
        estimated = ids + -(-texts // BYTES_PER_TOKEN)
        work = engine.embed(request.model, request.inputs, request.dimensions, estimated=estimated)
        account.watch(work, ())
        vectors = await work.vectors()
        while work.events:
            flight.record(work.events.popleft())
    flight.enter(State.FINISHED)
    return Embedded(vectors, flight.usage, flight.cost_microusd, flight.timings())
