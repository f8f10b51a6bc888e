"""`POST /v1/embeddings`: texts in, vectors out.

Enters: an authenticated exchange. Leaves: OpenAI's list of embeddings, and a closed flight record. Always true: the
number of inputs is bounded before any of them is looked at; an unknown field is refused by name; floats and base64 are
the same float32 bits, little-endian. Next: `../embed.py`.
"""

import array
import base64
import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hitsend.core.embedding import Embedded, EmbeddingRequest
from hitsend.core.errors import InvalidRequest
from hitsend.core.events import LimitCheck, Parsed
from hitsend.serve.api import strict_json
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.completion_request import read_texts
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.recorded import deliver, recorded

Label = Annotated[str, Meta(max_length=512)]


class EmbeddingsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wire's request. `input`: a string, token ids, or an array of either."""

    input: Any
    model: Label | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Label | None = None


class EmbeddingOut(msgspec.Struct, frozen=True):
    """One vector."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class UsageOut(msgspec.Struct, frozen=True):
    """Embedding makes no completion tokens."""

    prompt_tokens: int
    total_tokens: int


class Extension(msgspec.Struct, frozen=True):
    """hitsend's own object."""

    request_id: str
    cost_microusd: int
    timings: dict[str, float]
    warnings: tuple[str, ...]


class EmbeddingList(msgspec.Struct, frozen=True):
    """The whole answer."""

    data: list[EmbeddingOut]
    model: str
    usage: UsageOut
    hitsend: Extension
    object: Literal["list"] = "list"


async def embeddings(exchange: Exchange) -> None:
    """Serve one request. Raises what has to become an HTTP status."""
    services = exchange.services
    async with recorded(exchange) as flight:
        body = await read_json_body(exchange.receive, exchange.headers, services.access)
        tree, depth = strict_json.decode(body, services.access.max_json_depth)
        wire = strict_json.typed(tree, EmbeddingsBody)
        request = _request(exchange, wire)
        checks = (
            LimitCheck("max_body_bytes", len(body), services.access.max_body_bytes),
            LimitCheck("max_json_depth", depth, services.access.max_json_depth),
            LimitCheck("max_inputs", len(request.inputs), services.access.max_inputs),
        )
        flight.record(Parsed(len(body), 0, stream=False, n=1, limits=checks, warnings=request.warnings))

        async def answer() -> bytes:
            return _body(request, await services.embed(request, flight), wire.encoding_format or "float")

        await deliver(exchange, flight, body=answer)


def _request(exchange: Exchange, wire: EmbeddingsBody) -> EmbeddingRequest:
    limits = exchange.services.access
    inputs = read_texts(wire.input, "input", limits.max_inputs, "access.max_inputs")
    for index, text in enumerate(inputs):
        if not text:
            where = "input" if len(inputs) == 1 else f"input[{index}]"
            raise InvalidRequest(f"{where}: an empty string has no embedding", param=where)
    served = exchange.services.embedding_model
    warnings = () if wire.model else (f"model: not given, {served.id if served else 'none'} was used",)
    return EmbeddingRequest(
        request_id=exchange.request_id,
        model=wire.model or (served.id if served else ""),
        inputs=inputs,
        principal=exchange.principal,
        dimensions=wire.dimensions,
        user=wire.user,
        warnings=warnings,
    )


def _body(request: EmbeddingRequest, done: Embedded, encoding: str) -> bytes:
    shown = _as_base64 if encoding == "base64" else _as_floats
    return msgspec.json.encode(
        EmbeddingList(
            data=[EmbeddingOut(index, shown(vector)) for index, vector in enumerate(done.vectors)],
            model=request.model,
            usage=UsageOut(done.usage.prompt_tokens, done.usage.total_tokens),
            hitsend=Extension(request.request_id, done.cost_microusd, done.timings, request.warnings),
        )
    )


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _as_floats(vector: bytes) -> list[float]:
    floats = array.array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tolist()
