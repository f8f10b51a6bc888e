"""One embedding request at an upstream: as a generation is read by the account, and the vectors.

Enters: texts or ids. Leaves: the vectors as little-endian float32, and the upstream's bill. Always true: as in
`upstream_generation.py`: asked at most twice, and again only where nothing of an answer came; leaving it closes the
connection; an answer with another number of vectors than inputs is an error. Next: `openai.py`.
"""

import asyncio
import base64
import binascii
import math
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import msgspec

from hitsend.core.errors import ContextLengthExceeded, EngineFailed, EngineTimeout, InvalidRequest, ServeError
from hitsend.core.events import Answered, Sent
from hitsend.core.request import Usage
from hitsend.serve.engine.breaker import Outcome
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.protocol import EngineEvent, Produced
from hitsend.serve.engine.refusals import Refusal, broken, instead, refusal_of
from hitsend.serve.engine.upstream import MAX_REFUSAL_BYTES
from hitsend.serve.engine.upstream_usage import usage_of

if TYPE_CHECKING:
    from hitsend.serve.engine.openai import OpenAIEngine

MAX_VECTORS_BYTES = 256 * 1024 * 1024


class _VectorIn(msgspec.Struct, frozen=True):
    embedding: list[float] | str
    index: Any = None


class _AnswerIn(msgspec.Struct, frozen=True):
    data: list[_VectorIn]
    usage: Any = None


class UpstreamEmbedding:
    """Await `vectors`, then look at `produced`. `estimated`: tokens, where the upstream doesn't say. `dimensions` need
    not be known there: what is longer is cut here, as the embedded engine does it."""

    def __init__(
        self, engine: "OpenAIEngine", body: bytes, num_inputs: int, dimensions: int | None, *, estimated: int
    ) -> None:
        self._engine = engine
        self._body = body
        self._num_inputs = num_inputs
        self._dimensions = dimensions
        self._estimated = estimated
        self._replica = engine.replicas.choose()
        self._ticket = self._replica.enter()
        self._is_over = False
        self._has_reached = False
        self._usage: Usage | None = None
        self.events: deque[Sent | Answered] = deque()

    async def vectors(self) -> tuple[bytes, ...]:
        """Raises EngineError, LimitError, ClientError."""
        for attempt in (1, 2):
            self.events.append(Sent(self._engine.clock.now(), attempt))
            self._has_reached = True
            found, status, refusal = await self._ask()
            if refusal is None:
                self.events.append(Answered(self._engine.clock.now(), status, "ok"))
                self._end("ok")
                return found
            self._has_reached = isinstance(refusal.error, EngineTimeout)
            will_retry = refusal.may_repeat and attempt == 1 and self._engine.retries.take()
            self.events.append(Answered(self._engine.clock.now(), status, refusal.error.code, will_retry))
            if not will_retry:
                raise self._failed(refusal)
        raise AssertionError  # the second attempt is never repeated

    def _failed(self, refusal: Refusal) -> ServeError:
        if refusal.closed_s is not None:
            self._engine.close_for(refusal.closed_s)
        self._end(refusal.outcome)
        if isinstance(refusal.error, ContextLengthExceeded):
            refusal.error.param = "input"
        return refusal.error

    async def _ask(self) -> tuple[tuple[bytes, ...], int | None, Refusal | None]:
        terms, name, status = self._engine.terms, self._engine.name, None
        try:
            answer = await self._replica.line.post(terms.profile.embeddings_path, self._body)
            status = answer.status
            wall = self._engine.clock.wall()
            refusal, body = await refusal_of(answer, name, terms.profile, wall=wall, wants_json=True), b""
            if refusal is None:
                body = await answer.read_whole(MAX_VECTORS_BYTES) or b""
                is_short = len(body) <= MAX_REFUSAL_BYTES  # an error in place of vectors is
                refusal = instead(body, name, terms.profile, wall=wall) if is_short else None
            return (() if refusal is not None else self._read(body)), status, refusal
        except LineFailed as failure:
            is_unanswered = failure.is_unanswered and status is None
            return (), status, Refusal(broken(failure, name), may_repeat=is_unanswered)
        except InvalidRequest as error:
            return (), status, Refusal(error, outcome="ok")
        except (msgspec.DecodeError, RecursionError, ValueError, binascii.Error, struct.error, OverflowError):
            return (), status, Refusal(EngineFailed(f"The upstream {name} sent what is no list of embeddings."))

    def _read(self, body: bytes) -> tuple[bytes, ...]:
        answer = msgspec.json.decode(body, type=_AnswerIn)
        self._usage = usage_of(answer.usage, has_output=False)
        rows = [_unpacked(row.embedding) for row in answer.data]
        numbers = [row.index for row in answer.data]
        if {type(number) for number in numbers} == {int} and set(numbers) == set(range(len(rows))):
            rows = [
                row for _, row in sorted(zip(numbers, rows, strict=True))
            ]  # else they are in order: some say 0 of all
        if len(rows) != self._num_inputs or len({len(row) for row in rows}) != 1:
            raise ValueError
        return tuple(_packed(self._cut(row)) for row in rows)

    def _cut(self, vector: list[float]) -> list[float]:
        """To the dimensions that were asked for, and back to length 1."""
        wanted = self._dimensions
        if wanted is None or wanted == len(vector):
            return vector
        if wanted > len(vector):
            text = f"dimensions: {wanted} asked, but the vectors of the upstream {self._engine.name} have {len(vector)}"
            raise InvalidRequest(text, param="dimensions")
        length = math.hypot(*vector[:wanted]) or 1.0
        return [value / length for value in vector[:wanted]]

    def _end(self, outcome: Outcome) -> None:
        if not self._is_over:
            self._is_over = True
            self._replica.leave(self._ticket, outcome)

    @property
    def produced(self) -> Produced:
        """The upstream's bill; without one the estimate, as far as it was asked."""
        usage = self._usage or Usage(self._estimated if self._has_reached else 0)
        return Produced(usage.prompt_tokens, (), usage, is_estimate=self._usage is None and self._has_reached)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineEvent:
        if not self.events:
            raise StopAsyncIteration
        return self.events.popleft()

    async def end_choice(self, choice: int) -> None:
        """There is none."""

    async def aclose(self) -> None:
        """Whoever was asking has been cancelled, which closed the connection."""
        await asyncio.sleep(0)
        self._end("left")


def embeddings_body(model: str, inputs: tuple[str | tuple[int, ...], ...], dimensions: int | None) -> bytes:
    """What is posted; `model` is the upstream's own name."""
    body: dict[str, Any] = {"model": model, "input": inputs, "encoding_format": "float"}
    if dimensions is not None:
        body["dimensions"] = dimensions
    return msgspec.json.encode(body)


def _unpacked(vector: list[float] | str) -> list[float]:
    """Raises ValueError, binascii.Error, struct.error, OverflowError."""
    if isinstance(vector, str):
        packed = base64.b64decode(vector, validate=True)
        vector = list(struct.unpack(f"<{len(packed) // 4}f", packed))
    if not vector or not all(map(math.isfinite, vector)):
        raise ValueError
    return vector


def _packed(vector: list[float]) -> bytes:
    """Raises OverflowError."""
    return struct.pack(f"<{len(vector)}f", *vector)
