"""One embedding request from parsed to settled: the short sister of `pipeline.py`.

Enters: an `EmbeddingRequest` and the `Flight` that records it. Leaves: an `Embedded`. Always true: nothing is cut to
fit, a text that is too long is refused with both numbers before anything is held; one hold and one row, however many
inputs; a request that is cancelled pays for the batches that were computed, the one among them that the model had in
hand when the client left; each batch is a step in the record.
Next: `account.py`.
"""

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hitsend.core.clock import Clock
from hitsend.core.embedding import Embedded, EmbeddingRequest
from hitsend.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, ServeError
from hitsend.core.events import Routed, Step, Tokenized
from hitsend.core.lifecycle import State
from hitsend.core.record import Flight
from hitsend.serve.access.quota import Quota
from hitsend.serve.access.rights import check_model, may_use
from hitsend.serve.account import Account
from hitsend.serve.engine.convert_minilm import PACKAGED, converted
from hitsend.serve.engine.embedder import Embedder
from hitsend.serve.engine.embedding_messages import Vectors
from hitsend.serve.engine.models import resolve
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.protocol import EmbeddingBatch, EmbeddingModel, EngineEvent, Produced
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.usage.rows import HoldRequest
from hitsend.settings import EngineSettings

Ids = tuple[int, ...]

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class EmbeddingStages:
    """What an embedding request passes through; built once by `app.py`. `embedder` None: no model is configured.

    `elsewhere` are the engines of upstreams' embedding models, by their names here.
    """

    clock: Clock
    embedder: EmbeddingModel | None
    prices: PriceBook
    ledger: Ledger
    quota: Quota
    elsewhere: dict[str, OpenAIEngine] = field(default_factory=dict)


def find_embedder(settings: EngineSettings, models_dir: Path) -> Embedder | None:
    """The embedding model, where one is configured; the packaged one is converted at its first start.

    May take long. Raises ConfigError.
    """
    wanted = settings.embedding_model
    if wanted is None:
        return None
    if wanted.lower() == PACKAGED:
        return Embedder(settings, str(converted(models_dir)), model=PACKAGED)
    found = resolve(wanted, models_dir, where="engine.embedding_model")
    return Embedder(settings, found.path, model=found.name)


async def embed(request: EmbeddingRequest, flight: Flight, stages: EmbeddingStages) -> Embedded:
    """Live through one request. Raises ServeErrors; those before the hold cost nothing."""
    embedder = _route(request, flight, stages)
    dimensions = _dimensions(request, embedder)
    inputs = await _tokenize(request, flight, stages.clock, embedder)
    flight.enter(State.PREPARED)
    hold = HoldRequest(
        request_id=request.request_id,
        principal=request.principal,
        model=request.model,
        engine=embedder.name,
        price=stages.prices.find(request.model, is_local=True),
        input_tokens=sum(map(len, inputs)),
        output_tokens=0,
    )
    work = _Work()
    vectors: list[bytes] = []
    account = Account(stages.ledger, hold, flight, stages.clock, quota=stages.quota, input_param="input")
    async with account:
        account.watch(work, ())
        for batch in batches(inputs, embedder.facts.max_batch_tokens, embedder.facts.max_batch_inputs):
            answer = await work.compute(batch, embedder.submit(batch, dimensions))
            flight.enter(State.RUNNING)
            while work.steps:
                flight.record(work.steps.popleft())
            size = dimensions * _FLOAT_BYTES
            vectors += [answer.data[at : at + size] for at in range(0, len(answer.data), size)]
    flight.enter(State.FINISHED)
    return Embedded(tuple(vectors), flight.usage, flight.cost_microusd, flight.timings())


def batches(inputs: Sequence[Ids], max_tokens: int, max_inputs: int) -> list[tuple[Ids, ...]]:
    """The inputs in their order, in portions that keep to both limits. Each input alone must keep to the first."""
    found: list[tuple[Ids, ...]] = []
    portion: list[Ids] = []
    num_tokens = 0
    for ids in inputs:
        if portion and (num_tokens + len(ids) > max_tokens or len(portion) == max_inputs):
            found.append(tuple(portion))
            portion, num_tokens = [], 0
        portion.append(ids)
        num_tokens += len(ids)
    return [*found, tuple(portion)]


def _route(request: EmbeddingRequest, flight: Flight, stages: EmbeddingStages) -> EmbeddingModel:
    embedder = stages.embedder
    if embedder is None:
        raise ModelNotFound(
            "no embedding model is configured: set engine.embedding_model to all-minilm-l6-v2 or to an embedding "
            "model's GGUF file",
            param="model",
        )
    if request.model != embedder.model:
        shown = request.model[:100]
        usable = embedder.model if may_use(request.principal, embedder.model) else "none"
        raise ModelNotFound(f"{shown!r} is no embedding model here; served: {usable}", param="model")
    check_model(request.principal, request.model, (embedder.model,))
    flight.model = request.model
    flight.record(Routed(embedder.name, request.model, "the only embedding model"))
    return embedder


def _dimensions(request: EmbeddingRequest, embedder: EmbeddingModel) -> int:
    most = embedder.facts.dimensions
    if request.dimensions is not None and request.dimensions > most:
        raise InvalidRequest(f"dimensions: {request.dimensions}, this model has {most}", param="dimensions")
    return request.dimensions or most


async def _tokenize(
    request: EmbeddingRequest, flight: Flight, clock: Clock, embedder: EmbeddingModel
) -> tuple[Ids, ...]:
    """Ids of every input, checked. What the caller sent as ids is taken as it is, without special tokens around it."""
    started_at = clock.now()
    texts = tuple(each for each in request.inputs if isinstance(each, str))
    split = iter(await embedder.tokenize(texts) if texts else ())
    inputs = tuple(next(split) if isinstance(each, str) else each for each in request.inputs)
    facts = embedder.facts
    for index, ids in enumerate(inputs):
        where = "input" if len(inputs) == 1 else f"input[{index}]"
        if len(ids) > facts.max_tokens:
            raise ContextLengthExceeded(
                f"{where}: {len(ids)} tokens; this model's maximum context length is {facts.max_tokens} tokens, "
                "nothing is cut off",
                param=where,
            )
        if (beyond := max(ids, default=0)) >= facts.vocab_size:
            text = f"{where}: {beyond} is no token id of this model (0 to {facts.vocab_size - 1})"
            raise InvalidRequest(text, param=where)
    flight.record(
        Tokenized(
            started_at=started_at,
            ended_at=clock.now(),
            num_tokens=sum(map(len, inputs)),
            num_control_tokens=0,
            spans=(),
            prompt_token_ids=tuple(token for ids in inputs for token in ids) if flight.keep_text else None,
        )
    )
    return inputs


def _step(batch: Sequence[Ids], number: int, started_at: float, ended_at: float) -> Step:
    num_tokens = sum(map(len, batch))
    return Step(
        step=number,
        started_at=started_at,
        ended_at=ended_at,
        prefill_tokens=num_tokens,
        decode_tokens=0,
        batch_prefill_tokens=num_tokens,
        batch_decode_tokens=0,
        batch_sequences=len(batch),
    )


class _Work:
    """The counts of a running request, as the account reads them of a generation. One batch at a time.

    `steps` are those that were not recorded yet; iterating gives them too, without waiting.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_batches = 0
        self.steps: deque[Step] = deque()
        self._in_hand: tuple[tuple[Ids, ...], EmbeddingBatch] | None = None

    async def compute(self, batch: tuple[Ids, ...], order: EmbeddingBatch) -> Vectors:
        """Wait for a batch and count it. Raises EngineError."""
        self._in_hand = batch, order
        return await self._finish(batch, order)

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self

    async def __anext__(self) -> EngineEvent:
        if not self.steps:
            raise StopAsyncIteration
        return self.steps.popleft()

    async def end_choice(self, choice: int) -> None:
        """There is none."""

    async def aclose(self) -> None:
        """Take back the batch that still waits; one that is being computed is waited for and counted."""
        if self._in_hand is None:
            return
        batch, order = self._in_hand
        if not order.withdraw():
            with contextlib.suppress(ServeError):  # it broke: there is nothing to count
                await self._finish(batch, order)
        self._in_hand = None

    @property
    def produced(self) -> Produced:
        """The tokens of the batches that were computed."""
        return Produced(self._num_tokens, ())

    async def _finish(self, batch: tuple[Ids, ...], order: EmbeddingBatch) -> Vectors:
        answer = await order.vectors()
        self._in_hand = None
        self._num_tokens += sum(map(len, batch))
        self._num_batches += 1
        self.steps.append(_step(batch, self._num_batches, answer.started_at, answer.ended_at))
        return answer
