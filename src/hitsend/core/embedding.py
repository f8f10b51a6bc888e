"""One request for embeddings, and its answer, in hitsend's own words.

Enters: what `api/` parsed. Leaves: frozen values. Always true: as in `request.py`. Next: `request.py`.
"""

import msgspec

from hitsend.core.request import Principal, Usage


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """Texts or token ids to embed. `dimensions` None: as many as the model has."""

    request_id: str
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    principal: Principal = Principal()
    dimensions: int | None = None
    user: str | None = None
    warnings: tuple[str, ...] = ()


class Embedded(msgspec.Struct, frozen=True):
    """The vectors in the order of the inputs, each as little-endian float32, and the settled bill."""

    vectors: tuple[bytes, ...]
    usage: Usage
    cost_microusd: int
    timings: dict[str, float]
