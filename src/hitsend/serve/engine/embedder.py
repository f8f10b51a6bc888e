"""The embedding child, edge's side: orders are queued here, and the child is restarted when it had to die.

Enters: texts and token ids. Leaves: ids and vectors. Always true: the child has one order in its hands, so its death
fails exactly that one; an order whose caller has gone is never sent; orders go in the order of their arrival, and since
a large request sends one batch after the other, a small one waits for one batch, not for all of them. Next:
`embedding_worker.py`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hitsend.core.errors import (
    ConfigError,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    ServeError,
    ServerOverloaded,
)
from hitsend.serve.child import Child, ChildExit, ChildGone
from hitsend.serve.engine.embedding_messages import (
    Answer,
    EmbedBatch,
    EmbedderFacts,
    EmbedderRefused,
    OpenEmbedder,
    SplitTexts,
    TextIds,
    Vectors,
    answer_decoder,
    encode,
)
from hitsend.settings import EngineSettings

ANSWER_S = 60.0
"""A batch takes a fraction of a second; a child that needs so long hangs."""

_LONGEST_PAUSE_S = 30.0
_log = logging.getLogger(__name__)
_A = TypeVar("_A", TextIds, Vectors)


class _Job(msgspec.Struct, eq=False):
    """One order on its way."""

    body: bytes
    answer: "asyncio.Future[Answer]"


class EmbeddingBatch:
    """One batch that was handed in. Whoever stops waiting for it withdraws it, or else it is computed all the same."""

    def __init__(self, job: _Job, is_computed: Callable[[_Job], bool]) -> None:
        self._job = job
        self._is_computed = is_computed

    async def vectors(self) -> Vectors:
        """The vectors. May be cancelled and asked again. Raises EngineError."""
        return _checked(await asyncio.shield(self._job.answer), Vectors)

    def withdraw(self) -> bool:
        """Take it back from the queue. False: too late, the child has it in its hands, or its answer is there."""
        if self._job.answer.done() or self._is_computed(self._job):
            return False
        return self._job.answer.cancel()


class Embedder:
    """One embedding model. Build it, then `start`."""

    def __init__(self, settings: EngineSettings, model_path: str, *, model: str, name: str = "embedding") -> None:
        self._settings = settings
        self._order = OpenEmbedder(model_path, settings.libllama, settings.num_threads, settings.embedding_context)
        self.model = model
        self.name = name
        self.restarts = 0
        self._child: Child | None = None
        self._facts: EmbedderFacts | None = None
        self._opened: asyncio.Future[None] | None = None
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None
        self._backstop: asyncio.TimerHandle | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_stopping = False
        self._failures = 0

    @property
    def facts(self) -> EmbedderFacts:
        """What is loaded. Raises EngineUnavailable before the first start."""
        if self._facts is None:
            raise EngineUnavailable("the embedding model is being loaded", retry_after_s=1.0)
        return self._facts

    def state(self) -> dict[str, Any]:
        """For `/inspect/state`."""
        facts = self.facts
        return {
            "model": self.model,
            "is_ready": self._is_open,
            "pid": self._child.pid if self._child is not None else None,
            "restarts": self.restarts,
            "waiting": len(self._waiting),
            "dimensions": facts.dimensions,
            "max_tokens": facts.max_tokens,
        }

    async def start(self) -> None:
        """Load the model. Raises ConfigError or EngineUnavailable."""
        try:
            await self._open()
        except (ConfigError, ServeError):
            await self.stop()
            raise
        wanted, most = self._settings.embedding_context, self.facts.max_tokens
        if wanted > most:
            _log.warning("engine.embedding_context is %d, %s was trained on %d tokens", wanted, self.model, most)

    async def stop(self) -> None:
        """End the child; whoever waits gets an error. Safe to call twice."""
        self._is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
        if self._child is not None:
            await self._child.stop()
        self._fail_waiting("the embedding model has been stopped")

    async def tokenize(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Ids of each text, special tokens included. Raises EngineError, ServerOverloaded."""
        return _checked(await self._hand_in(SplitTexts(texts)).answer, TextIds).token_ids

    def submit(self, inputs: tuple[tuple[int, ...], ...], dimensions: int) -> EmbeddingBatch:
        """Hand in one batch, which must keep to the limits in `facts`. Raises EngineUnavailable, ServerOverloaded."""
        return EmbeddingBatch(self._hand_in(EmbedBatch(inputs, dimensions)), lambda job: job is self._current)

    def _hand_in(self, order: SplitTexts | EmbedBatch) -> _Job:
        if self._is_stopping or (not self._is_open and self._failures > 1):
            raise EngineUnavailable("the embedding model is not running", retry_after_s=5.0)
        if len(self._waiting) >= self._settings.max_waiting:
            limit = f"limit {self._settings.max_waiting} (engine.max_waiting)"
            raise ServerOverloaded(f"{len(self._waiting)} batches wait to be embedded, {limit}", retry_after_s=1.0)
        job = _Job(encode(order), asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._pump()
        return job

    def _pump(self) -> None:
        """Hand the next order over, if the child is free."""
        while self._is_open and self._current is None and self._waiting and self._child is not None:
            job = self._waiting.popleft()
            if job.answer.done():
                continue
            try:
                self._child.send(job.body)
            except ChildGone:
                # Its exit is on the way, and with it the next child.
                self._is_open = False
                self._waiting.appendleft(job)
                return
            self._current = job
            self._backstop = asyncio.get_running_loop().call_later(ANSWER_S, self._overdue, job)

    def _overdue(self, job: _Job) -> None:
        if job is self._current and self._child is not None:
            if not job.answer.done():
                job.answer.set_exception(EngineTimeout(f"the embedding model did not answer within {ANSWER_S:g} s"))
            self._child.kill()

    async def _open(self) -> None:
        self._opened = asyncio.get_running_loop().create_future()
        arguments = ["-m", "hitsend.serve.engine.embedding_worker"]
        self._child = Child(arguments, on_message=self._on_message, on_exit=self._on_exit)
        try:
            await self._child.start()
            with contextlib.suppress(ChildGone):
                self._child.send(encode(self._order))
            async with asyncio.timeout(self._settings.start_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            self._child.kill()
            limit = f"{self._settings.start_timeout_s:g} s (engine.start_timeout_s)"
            raise EngineUnavailable(f"the embedding model was not loaded within {limit}") from None
        except OSError as error:
            raise EngineUnavailable(f"the embedding process can't be started: {error}") from error
        finally:
            self._opened.cancel()

    def _on_message(self, body: bytes) -> None:
        answer = answer_decoder.decode(body)
        if self._opened is not None and not self._opened.done():
            if isinstance(answer, EmbedderFacts):
                self._facts, self._is_open = answer, True
                self._opened.set_result(None)
            elif isinstance(answer, EmbedderRefused):
                self._opened.set_exception(ConfigError(answer.message))
        else:
            self._failures = 0
            job = self._finish()
            if job is not None and not job.answer.done():
                job.answer.set_result(answer)
        self._pump()

    def _finish(self) -> _Job | None:
        job, self._current = self._current, None
        if self._backstop is not None:
            self._backstop.cancel()
            self._backstop = None
        return job

    def _on_exit(self, end: ChildExit) -> None:
        self._is_open = False
        self._failures += 1
        job = self._finish()
        if job is not None and not job.answer.done():
            job.answer.set_exception(EngineFailed(f"the embedding process ended ({end.how}) while it worked on this"))
        if self._opened is not None and not self._opened.done():
            words = " | ".join(end.lines[-3:])
            self._opened.set_exception(ConfigError(f"engine.embedding_model: its process ended ({end.how}) {words}"))
        if self._facts is not None and not self._is_stopping:
            _log.error("the embedding process %d ended (%s)", end.pid, end.how)
            if self._restarting is None or self._restarting.done():
                self._restarting = asyncio.get_running_loop().create_task(self._restart(), name="embedder restart")

    async def _restart(self) -> None:
        """Start another child, with growing pauses while children die without an answer."""
        while not self._is_open:
            if self._failures > 1:
                self._fail_waiting("the embedding model can't be restarted")
                await asyncio.sleep(min(_LONGEST_PAUSE_S, 0.25 * 2.0 ** min(self._failures, 10)))
            self.restarts += 1
            try:
                await self._open()
            except (ConfigError, EngineUnavailable) as error:
                _log.error("the embedding process could not be restarted: %s", error)

    def _fail_waiting(self, why: str) -> None:
        jobs = [*self._waiting, *([job] if (job := self._finish()) else [])]
        self._waiting.clear()
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(EngineUnavailable(why, retry_after_s=5.0))


def _checked(answer: Answer, kind: type[_A]) -> _A:
    """The answer, if it is of the kind that was asked for. Raises EngineFailed."""
    if isinstance(answer, kind):
        return answer
    words = answer.message if isinstance(answer, EmbedderRefused) else "it gave another answer than was asked for"
    raise EngineFailed(f"the embedding model: {words}")
