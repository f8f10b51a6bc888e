"""The words between the edge and the embedding child.

Enters: orders from the edge, one at a time. Leaves: one answer to each. Always true: the first order is `OpenEmbedder`
and its answer `EmbedderFacts` or `EmbedderRefused`; every struct is tagged and typed, no pickle anywhere; vectors are
little-endian float32, one after the other. Next: `embedding_worker.py`.
"""

import msgspec


class OpenEmbedder(msgspec.Struct, frozen=True, tag="open"):
    """What to load. `context` bounds the tokens of one text, 0: as the model was trained."""

    model_path: str
    libllama: str | None
    num_threads: int
    context: int


class SplitTexts(msgspec.Struct, frozen=True, tag="split"):
    """Turn texts into ids, with the special tokens that the model wants around them."""

    texts: tuple[str, ...]


class EmbedBatch(msgspec.Struct, frozen=True, tag="embed"):
    """One pass through the model. `dimensions` cuts each vector, which is then brought back to length 1."""

    inputs: tuple[tuple[int, ...], ...]
    dimensions: int


class EmbedderFacts(msgspec.Struct, frozen=True, tag="facts"):
    """What was loaded, and what one batch may hold."""

    architecture: str
    library: str
    vocab_size: int
    dimensions: int
    max_tokens: int
    max_batch_tokens: int
    max_batch_inputs: int


class TextIds(msgspec.Struct, frozen=True, tag="ids"):
    """The answer to SplitTexts."""

    token_ids: tuple[tuple[int, ...], ...]


class Vectors(msgspec.Struct, frozen=True, tag="vectors"):
    """The answer to EmbedBatch. Instants are `Clock.now()` seconds."""

    data: bytes
    started_at: float
    ended_at: float


class EmbedderRefused(msgspec.Struct, frozen=True, tag="refused"):
    """It can't be done; `message` is for the operator where it answers OpenEmbedder."""

    message: str


Order = OpenEmbedder | SplitTexts | EmbedBatch
Answer = EmbedderFacts | TextIds | Vectors | EmbedderRefused

encode = msgspec.msgpack.Encoder().encode
order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
