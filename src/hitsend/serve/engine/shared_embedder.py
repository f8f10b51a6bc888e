"""One embedding child for several gateway processes.

Enters: each gateway's texts and batches. Leaves: the owner's answers to each. Always true: all gateways' orders stand
in the owner's one queue, in the order in which they came; an order that its gateway takes back, or whose gateway is
gone, is not computed unless the child has it in its hands already. Next: `embedder.py`.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import msgspec

from hitsend.core.errors import EngineFailed, EngineUnavailable, ServeError, from_code
from hitsend.serve.engine.embedder import Embedder, EmbeddingBatch
from hitsend.serve.engine.embedding_messages import EmbedBatch, EmbedderFacts, SplitTexts, TextIds, Vectors

Send = Callable[[bytes], object]
_A = TypeVar("_A", TextIds, Vectors)


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """An order of a gateway's."""

    number: int
    order: SplitTexts | EmbedBatch


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """That order isn't wanted any more. It is answered all the same: `Given` if it was too late."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """What the owner has."""

    facts: EmbedderFacts


class Given(msgspec.Struct, frozen=True, tag="given"):
    """The answer to an order."""

    number: int
    answer: TextIds | Vectors


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A ServeError instead of an answer."""

    number: int
    code: str
    message: str
    retry_after_s: float | None = None


_encode = msgspec.msgpack.Encoder().encode
_wanted = msgspec.msgpack.Decoder(Wanted | Withdrawn)
_told = msgspec.msgpack.Decoder(Loaded | Given | Failed)


class EmbedderDesk:
    """The owner's side."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self._gateways: dict[int, Send] = {}
        self._batches: dict[tuple[int, int], EmbeddingBatch] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._is_loaded = False

    async def start(self) -> None:
        """Load the model, and tell everybody. Raises ConfigError or EngineUnavailable."""
        await self.embedder.start()
        self._is_loaded = True
        for gateway in tuple(self._gateways):
            self._tell(gateway, Loaded(self.embedder.facts))

    async def stop(self) -> None:
        """End the child; whoever waits gets an error. Safe to call twice."""
        await self.embedder.stop()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def join(self, gateway: int, send: Send) -> None:
        """Another gateway: `send` takes its answers."""
        self._gateways[gateway] = send
        if self._is_loaded:
            self._tell(gateway, Loaded(self.embedder.facts))

    def leave(self, gateway: int) -> None:
        """It is gone, and nobody waits for its orders."""
        self._gateways.pop(gateway, None)
        for (asker, _), batch in tuple(self._batches.items()):
            if asker == gateway:
                batch.withdraw()
        for task, asker in tuple(self._tasks.items()):
            if asker == gateway:
                task.cancel()

    def receive(self, gateway: int, body: bytes) -> None:
        """What a gateway wants. Raises msgspec.ValidationError for what is nothing of that kind."""
        wanted = _wanted.decode(body)
        if isinstance(wanted, Withdrawn):
            batch = self._batches.get((gateway, wanted.number))
            if batch is not None:
                batch.withdraw()
            return
        try:
            batch = None
            if isinstance(wanted.order, EmbedBatch):
                batch = self.embedder.submit(wanted.order.inputs, wanted.order.dimensions)
                self._batches[gateway, wanted.number] = batch
        except ServeError as error:
            self._tell(gateway, Failed(wanted.number, error.code, error.message, error.retry_after_s))
            return
        task = asyncio.get_running_loop().create_task(self._answer(gateway, wanted, batch))
        self._tasks[task] = gateway
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _answer(self, gateway: int, wanted: Wanted, batch: EmbeddingBatch | None) -> None:
        try:
            if batch is not None:
                answer: TextIds | Vectors = await batch.vectors()
            else:
                assert isinstance(wanted.order, SplitTexts)
                answer = TextIds(await self.embedder.tokenize(wanted.order.texts))
            self._tell(gateway, Given(wanted.number, answer))
        except ServeError as error:
            self._tell(gateway, Failed(wanted.number, error.code, error.message, error.retry_after_s))
        except asyncio.CancelledError:
            # withdrawn, which cancels the order itself; or its gateway is gone, and this reaches nobody
            self._tell(gateway, Failed(wanted.number, EngineFailed.code, "the batch was withdrawn"))
        finally:
            self._batches.pop((gateway, wanted.number), None)

    def _tell(self, gateway: int, word: Loaded | Given | Failed) -> None:
        send = self._gateways.get(gateway)
        if send is not None:
            send(_encode(word))


class RemoteBatch:
    """See `protocol.EmbeddingBatch`."""

    def __init__(self, answer: "asyncio.Future[TextIds | Vectors]", withdraw: Callable[[], None]) -> None:
        self._answer = answer
        self._withdraw = withdraw

    async def vectors(self) -> Vectors:
        """The vectors. May be cancelled and asked again. Raises EngineError, also when it was withdrawn in time."""
        return _checked(await asyncio.shield(self._answer), Vectors)

    def withdraw(self) -> bool:
        """Take it back. Always False: whether that was in time is known by what `vectors` gives."""
        self._withdraw()
        return False


class RemoteEmbedder:
    """A gateway's side: see `protocol.EmbeddingModel`. `send` hands a frame to the owner, False when that is gone."""

    def __init__(self, model: str, start_timeout_s: float, send: Callable[[bytes], bool]) -> None:
        self.model = model
        self.name = "embedding"
        self._start_timeout_s = start_timeout_s
        self._send = send
        self._facts: EmbedderFacts | None = None
        self._loaded = asyncio.Event()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[TextIds | Vectors]] = {}

    @property
    def facts(self) -> EmbedderFacts:
        """What is loaded. Raises EngineUnavailable before the first start."""
        if self._facts is None:
            raise EngineUnavailable("the embedding model is being loaded", retry_after_s=1.0)
        return self._facts

    def state(self) -> dict[str, Any]:
        """What this process knows; the owner knows the rest."""
        return {"model": self.model, "dimensions": self.facts.dimensions, "max_tokens": self.facts.max_tokens}

    async def start(self) -> None:
        """Wait until the owner has loaded it. Raises EngineUnavailable."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            raise EngineUnavailable("the embedding model was not loaded in time") from None

    async def stop(self) -> None:
        """Whoever waits gets an error."""
        self.lose()

    async def tokenize(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Ids of each text, special tokens included. Raises EngineError, ServerOverloaded."""
        return _checked(await self._order(SplitTexts(texts))[1], TextIds).token_ids

    def submit(self, inputs: tuple[tuple[int, ...], ...], dimensions: int) -> RemoteBatch:
        """Hand in one batch, which must keep to the limits in `facts`. Raises EngineUnavailable."""
        number, answer = self._order(EmbedBatch(inputs, dimensions))
        return RemoteBatch(answer, lambda: self._withdraw(number))

    def receive(self, body: bytes) -> None:
        """What the owner tells. Raises msgspec.ValidationError."""
        told = _told.decode(body)
        if isinstance(told, Loaded):
            self._facts = told.facts
            self._loaded.set()
            return
        future = self._waiting.pop(told.number, None)
        if future is None or future.done():
            return
        if isinstance(told, Given):
            future.set_result(told.answer)
        else:
            future.set_exception(from_code(told.code, told.message, retry_after_s=told.retry_after_s))
            future.exception()  # whoever left doesn't look

    def lose(self) -> None:
        """The owner is gone."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EngineFailed("the process that owns the embedding model has ended"))
                future.exception()

    def _order(self, order: SplitTexts | EmbedBatch) -> "tuple[int, asyncio.Future[TextIds | Vectors]]":
        number = next(self._numbers)
        if not self._send(_encode(Wanted(number, order))):
            raise EngineUnavailable("the embedding model is not running", retry_after_s=5.0)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, future

    def _withdraw(self, number: int) -> None:
        if number in self._waiting:
            self._send(_encode(Withdrawn(number)))


def _checked(answer: TextIds | Vectors, kind: type[_A]) -> _A:
    if isinstance(answer, kind):
        return answer
    raise EngineFailed("the embedding model gave another answer than was asked for")
