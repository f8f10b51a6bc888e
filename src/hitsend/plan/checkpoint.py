"""What a checkpoint is made of, as far as memory, time and money depend on it.

Enters: numbers that `config.py` or `weights.py` read. Leaves: a `Checkpoint`: one `Layer` after the other, with what
each keeps per token, what it keeps per sequence, and its parameters by component. Always true: nothing here is
guessed; parameters are counted from the shapes of the matrices; where a shape isn't known, the parameters are None and
whoever needs them refuses. Next: `config.py`.
"""

from collections.abc import Iterable

import msgspec


class KvLayer(msgspec.Struct, frozen=True):
    """What one attention layer keeps per token. Dimensions are elements, not bytes.

    With `latent_dim` it is multi-head latent attention: one vector of `latent_dim + rope_dim` for all heads (arXiv
    2405.04434, section 2.1), and `heads`, `key_dim` and `value_dim` say what it would be uncompressed.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    heads: int = 0
    window_tokens: int | None = None
    """Sliding window: no older token is read."""
    chunk_tokens: int | None = None
    """Chunked local attention: windows that don't overlap."""
    latent_dim: int | None = None
    rope_dim: int = 0
    indexer_dim: int = 0
    """Keys of a sparse-attention indexer, kept beside the latent vector (DeepSeek-V3.2)."""
    indexer_pool: int = 1
    """Tokens that one of the indexer's keys stands for (GLM-5.3-Flash)."""
    compress_ratio: int = 1
    """Tokens that one latent vector stands for, and one of the indexer's keys (DeepSeek-V4)."""
    beside_window: int = 0
    """Newest tokens that are kept as they are beside compressed ones (DeepSeek-V4)."""


class StateLayer(msgspec.Struct, frozen=True):
    """What one recurrent layer keeps per sequence, however long that is.

    Gated DeltaNet and Mamba-2 keep the same two things: the last `kernel - 1` inputs of a convolution over `2 * groups
    * key_dim + value_heads * value_dim` channels, and one `key_dim x value_dim` matrix per value head (arXiv
    2412.06464; arXiv 2405.21060, where key_dim is called the state size).
    """

    kind: str
    kernel: int
    groups: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: str | None = None
    """What the config says the matrix is kept in; None: it doesn't say."""

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.groups * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix_values(self) -> int:
        """Elements of all heads' matrices."""
        return self.value_heads * self.key_dim * self.value_dim


class Params(msgspec.Struct, frozen=True):
    """Parameters by component. `active` counts what one token is multiplied with (experts not chosen are left out)."""

    embedding: int = 0
    attention: int = 0
    recurrent: int = 0
    mlp: int = 0
    routed_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    head: int = 0
    other: int = 0
    """Vision towers and the like: held in memory, not used by a text token."""
    active_experts: int = 0
    """Those of `routed_experts` that one token uses."""
    replicated: int = 0
    """Those of `attention` that tensor parallelism doesn't divide."""

    def __add__(self, other: "Params") -> "Params":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Params(*(mine + its for mine, its in pairs))

    def times(self, count: int) -> "Params":
        """So many layers of it."""
        return Params(*(value * count for value in msgspec.structs.astuple(self)))

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.embedding
            + self.attention
            + self.recurrent
            + self.mlp
            + self.routed_experts
            + self.shared_experts
            + self.router
            + self.norms
            + self.head
            + self.other
        )

    @property
    def active(self) -> int:
        """What one token is multiplied with: without the table it is looked up in, unless that is the head too."""
        idle = self.routed_experts - self.active_experts + self.other
        return self.total - idle - (self.embedding if self.head else 0)


class Layer(msgspec.Struct, frozen=True):
    """One block. `kv` None: it keeps nothing per token. `shares_kv`: it reads an earlier layer's keys and values."""

    kv: KvLayer | None = None
    state: StateLayer | None = None
    shares_kv: bool = False
    params: Params | None = None


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a weights file."""

    name: str
    dtype: str
    elements: int
    num_bytes: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `source` and `as_of` say where the numbers are from; `uncertain` what nobody has re-read."""

    name: str
    architecture: str
    source: str
    layers: tuple[Layer, ...]
    as_of: str | None = None
    mtp_layers: tuple[Layer, ...] = ()
    """Layers that only speculation uses (multi-token prediction)."""
    hidden: int | None = None
    vocab: int | None = None
    context: int | None = None
    top: Params | None = None
    """Embedding, head and final norm. None: the shapes aren't known, and no parameters are counted."""
    intermediate: int | None = None
    """The MLP's width, for the activation estimate; so are the next two."""
    experts_per_token: int = 0
    expert_width: int = 0
    expert_hidden: int = 0
    """Where experts work in a smaller space than the hidden one (LatentMoE)."""
    media_tokens: int = 0
    """Of the largest image, where its tokens see each other: a step must hold them all."""
    weights: str | None = None
    """What the checkpoint itself is quantised to (`fp8`, `int4`, `gguf:Q4_K` …); None: 16 bit."""
    tensors: tuple[Tensor, ...] = ()
    """Where a weights file was read: every tensor, with its exact size."""
    is_uncompressed_mla: bool = False
    """A GGUF of a latent-attention model without the tensors for it: every head's keys and values are kept."""
    uncertain: tuple[str, ...] = ()

    @property
    def params(self) -> Params | None:
        """Everything but the speculation layers; None where a shape isn't known."""
        if self.top is None:
            return None
        return add_params((self.top, *(layer.params for layer in self.layers)))

    @property
    def file_bytes(self) -> int | None:
        """Exact bytes of the tensors that were read; None where no weights file was."""
        return sum(tensor.num_bytes for tensor in self.tensors) if self.tensors else None


def add_params(parts: Iterable[Params | None]) -> Params | None:
    """The sum, or None if any part isn't known."""
    total = Params()
    for part in parts:
        if part is None:
            return None
        total += part
    return total
