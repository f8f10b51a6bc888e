"""vLLM's block arithmetic: how a pool of bytes becomes blocks, and how many of them a request takes.

Enters: kinds of layers with their bytes, what is free, and the request's length. Leaves: a `BlockPlan`. Always true:
all kinds share one page size, so a hybrid's attention block grows until it holds a recurrent state; layers are
grouped, a group takes one page per block for each of its layers, and padding layers are paid for; what the log calls
"GPU KV cache size" is neither bytes nor bytes divided by bytes per token for such models. Source: kv_rules 3 and 4,
which reproduce vLLM 0.13 to 0.31 digit for digit; what changed between them is in `versions.py`. Next: `cells.py`.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError

BLOCK_TOKENS = 16
LATENT_BLOCK_TOKENS = 64
"""Latent-attention kernels on NVIDIA take blocks of 64."""


class LayerKind(msgspec.Struct, frozen=True):
    """Layers that cost the same. `bytes_per_token` of one layer on one rank; 0 for recurrent layers, which have
    `state_bytes` instead."""

    name: str
    layers: int
    bytes_per_token: Fraction = Fraction(0)
    window_tokens: int | None = None
    state_bytes: int = 0
    beside_bytes_per_token: Fraction = Fraction(0)
    """Of pages that stand beside the shared one and that a state doesn't fill: a pooled indexer's."""
    has_tail: bool = False
    """A block more for each request: the tokens that don't fill a pool yet."""


class BlockRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the arithmetic needs besides the layers."""

    available_bytes: int
    max_model_len: int
    in_flight_tokens: int
    """Tokens of one request that a step, or two, may have scheduled and not yet settled."""
    prefix_caching: bool = False
    drafts: int = 0
    base_block_tokens: int = BLOCK_TOKENS
    group_slack: Fraction = Fraction(3, 2)
    """See `versions.group_slack`."""


class BlockPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. `log_tokens_until_0_20` and `log_tokens_since`: what vLLM prints as its cache size."""

    page_bytes: Fraction
    group_layers: int
    groups: dict[str, int]
    block_tokens: dict[str, int]
    num_blocks: int
    blocks_per_request: dict[str, int]
    state_copies: int
    padding_layers: int
    max_model_len: int
    beside_bytes: Fraction = Fraction(0)
    """Of pages beside each shared one."""
    whole_request_blocks: int | None = None
    """Where groups' blocks differ in size: a request's bytes in blocks of the first group."""
    checked_bytes: Fraction | None = None
    """What vLLM wants to see free for one request when it starts, where that is another sum than the pool's."""

    @property
    def request_blocks(self) -> int:
        """Blocks of one request of the greatest length."""
        if self.whole_request_blocks is not None:
            return self.whole_request_blocks
        return sum(self.blocks_per_request.values())

    @property
    def needed_bytes(self) -> Fraction:
        """What must be free for one request of the greatest length, or vLLM doesn't start."""
        if self.checked_bytes is not None:
            return self.checked_bytes
        return self.request_blocks * self.group_layers * (self.page_bytes + self.beside_bytes)

    @property
    def max_concurrency(self) -> Fraction:
        """Requests of the greatest length that fit at once."""
        return Fraction(self.num_blocks, max(1, self.request_blocks))

    @property
    def log_tokens_since(self) -> int:
        """Newer than 0.20: int(max_concurrency * max_model_len)."""
        return math.floor(self.max_concurrency * self.max_model_len)

    @property
    def log_tokens_until_0_20(self) -> int:
        """Older: blocks divided by groups, times the smallest block."""
        blocks = [min(tokens, self.max_model_len) for tokens in self.block_tokens.values() if tokens]
        return self.num_blocks // max(1, sum(self.groups.values())) * min(blocks, default=0)


def plan_blocks(kinds: Sequence[LayerKind], wanted: BlockRequest) -> BlockPlan:
    """kv_rules 3 and 4. Raises ConfigError where no layer keeps anything."""
    kinds = _one_type([kind for kind in kinds if kind.layers])
    if not kinds:
        raise ConfigError("no layer keeps keys, values or state: there is no pool to divide")
    page = _page_bytes(kinds, wanted.base_block_tokens)
    group = _group_layers([kind.layers for kind in kinds], wanted.group_slack)
    groups = {kind.name: -(-kind.layers // group) for kind in kinds}
    copies = 1 + wanted.drafts + (1 if wanted.prefix_caching else 0)
    blocks = {kind.name: _block_tokens(kind, page) for kind in kinds}
    return BlockPlan(
        page_bytes=page,
        group_layers=group,
        groups=groups,
        block_tokens=blocks,
        num_blocks=math.floor(wanted.available_bytes / (group * (page + _beside_bytes(kinds, page)))),
        blocks_per_request={
            kind.name: groups[kind.name] * _blocks_of_one(kind, blocks[kind.name], wanted, copies) for kind in kinds
        }
        | ({"tail": 1} if any(kind.has_tail for kind in kinds) else {}),
        state_copies=copies if any(kind.state_bytes for kind in kinds) else 0,
        padding_layers=sum(groups[kind.name] * group - kind.layers for kind in kinds),
        max_model_len=wanted.max_model_len,
        beside_bytes=_beside_bytes(kinds, page),
    )


def _page_bytes(kinds: Sequence[LayerKind], base_block_tokens: int) -> Fraction:
    """The page that every kind must fill: the dearest attention's smallest block, grown until a state fits into it."""
    dearest = max((kind.bytes_per_token for kind in kinds), default=Fraction(0))
    state = max((kind.state_bytes for kind in kinds), default=0)
    if not dearest:
        return Fraction(state)
    if not state:
        return dearest * base_block_tokens
    steps = math.ceil(state / (dearest * BLOCK_TOKENS))
    steps = max(steps, base_block_tokens // BLOCK_TOKENS)
    if any(kind.has_tail for kind in kinds):
        # a page of the pooled indexer holds a whole number of the kernel's
        steps = -(-steps * BLOCK_TOKENS // base_block_tokens) * base_block_tokens // BLOCK_TOKENS
    return dearest * BLOCK_TOKENS * steps


def _beside_bytes(kinds: Sequence[LayerKind], page: Fraction) -> Fraction:
    return max(
        (page / kind.bytes_per_token * kind.beside_bytes_per_token for kind in kinds if kind.bytes_per_token),
        default=Fraction(0),
    )


def _one_type(kinds: list[LayerKind]) -> list[LayerKind]:
    """Layers that keep the same tokens at different costs are one group with pages of their own sizes: counted as one
    layer that costs what all of them do (vLLM's uniform type)."""
    windows = {kind.window_tokens for kind in kinds}
    if len(kinds) < 2 or len(windows) > 1 or any(kind.state_bytes or kind.has_tail for kind in kinds):
        return kinds
    whole = sum((kind.layers * kind.bytes_per_token for kind in kinds), Fraction(0))
    return [LayerKind(kinds[0].name, 1, whole, kinds[0].window_tokens)]


def _group_layers(counts: Sequence[int], slack: Fraction) -> int:
    """The smallest kind's number of layers, or the largest's where that is not much more."""
    least, most = min(counts), max(counts)
    return most if most < least * slack else least


def _block_tokens(kind: LayerKind, page: Fraction) -> int:
    return math.floor(page / kind.bytes_per_token) if kind.bytes_per_token else 0


def _blocks_of_one(kind: LayerKind, block: int, wanted: BlockRequest, copies: int) -> int:
    """One group's blocks for one request: all tokens, or the window and what one step may add, or copies of the
    state."""
    if not block:
        return copies
    if kind.window_tokens is None:
        return -(-wanted.max_model_len // block)
    tokens = min(kind.window_tokens - 1 + wanted.in_flight_tokens, wanted.max_model_len)
    return -(-tokens // block) + 1
