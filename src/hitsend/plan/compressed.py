"""DeepSeek-V4's attention: tokens compressed by a ratio per layer, the newest kept beside them as they are.

Enters: a config's keys; a stage's layers and what is free. Leaves: a `KvLayer`, its `Params`, and vLLM's blocks. Always
true: a ratio that no published layer has is refused; the pages are the ones that vLLM 0.20 to 0.26 and 0.31 logged,
digit for digit. Next: `blocks.py`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan import matrices
from hitsend.plan.blocks import BlockPlan, BlockRequest
from hitsend.plan.checkpoint import KvLayer, Params
from hitsend.plan.formats import DEEPSEEK_V4_ROW_BYTES, F32_BYTES, INDEXER_SCALE_BYTES
from hitsend.plan.keys import Keys
from hitsend.plan.versions import has_dense_pages, has_packed_pages

RATIOS = (4, 128)
BLOCK_TOKENS = 256
"""Of compressed layers: the block size that DeepSeek-V4 is served with."""
WINDOW_BLOCK_TOKENS = 64
COMPRESSOR_BLOCK_ROWS = {4: 4, 128: 8}
ALIGNMENT_BYTES = 576


def layer_of(keys: Keys, index: int) -> KvLayer:
    """One layer, by its entry in `compress_ratios`; 0: it reads its window only. Raises ConfigError."""
    ratios = keys.whole_numbers("compress_ratios")
    layers = keys.number("num_hidden_layers")
    if len(ratios) < layers:
        raise ConfigError(
            f"{keys.source}: compress_ratios has {len(ratios)} entries, needed is one per layer ({layers})"
        )
    ratio = ratios[index] if index < len(ratios) else 0
    if ratio > 1 and ratio not in RATIOS:
        known = " or ".join(map(str, RATIOS))
        raise ConfigError(f"{keys.source}: compress_ratios[{index}] is {ratio}, known are 0, {known}")
    dim, rope, window = keys.number("head_dim"), keys.number("qk_rope_head_dim"), keys.number("sliding_window")
    if rope >= dim:
        raise ConfigError(f"{keys.source}: qk_rope_head_dim is {rope}, needed is less than head_dim ({dim})")
    return KvLayer(
        kv_heads=1,
        heads=keys.number("num_attention_heads"),
        key_dim=dim,
        value_dim=dim,
        window_tokens=None if ratio > 1 else window,
        latent_dim=dim - rope,
        rope_dim=rope,
        indexer_dim=keys.number("index_head_dim") if ratio == matrices.OVERLAPPING else 0,
        compress_ratio=max(1, ratio),
        beside_window=window,
    )


def attention_of(keys: Keys, kv: KvLayer, hidden: int) -> Params:
    """The matrices of one layer. Raises ConfigError for a missing key."""
    if keys.flag("kv_only"):
        return Params()
    out = (keys.number("o_groups"), keys.number("o_lora_rank"))
    heads = keys.number("index_n_heads") if kv.indexer_dim else 0
    return matrices.compressed_attention(hidden, kv, keys.number("q_lora_rank"), out, heads)


def streams_of(keys: Keys, hidden: int) -> Params:
    """Hyper-connections (arXiv 2409.19606): before attention and before the MLP, a mix of `hc_mult` residual streams:
    (2 + n) * n values out of n * hidden, kept in f32 and so counted twice."""
    streams = keys.maybe("hc_mult")
    return Params(norms=2 * 2 * (2 + streams) * streams * streams * hidden) if streams else Params()


class _Cache(msgspec.Struct, frozen=True):
    """One of a layer's caches. `page_bytes` of a block, `rows` of a block, `window` 0: it keeps everything."""

    name: str
    page_bytes: int
    rows: int
    window: int = 0


def window_bytes(kv: KvLayer) -> int:
    """What a layer keeps of a long sequence beside its compressed tokens: its newest tokens, packed, and the sums that
    its compressors have begun (key and score in f32, for each of a group's tokens)."""
    if not kv.beside_window:
        return 0
    sums = kv.key_dim + kv.indexer_dim if kv.compress_ratio > 1 else 0
    width = matrices.overlap(kv)
    rows = width * kv.compress_ratio
    own = 0 if kv.window_tokens is not None else kv.beside_window * DEEPSEEK_V4_ROW_BYTES
    return own + rows * 2 * width * sums * F32_BYTES


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _caches(kv: KvLayer) -> list[_Cache]:
    ratio, width = kv.compress_ratio, matrices.overlap(kv)
    found = [
        _Cache("window", _aligned(WINDOW_BLOCK_TOKENS * DEEPSEEK_V4_ROW_BYTES), WINDOW_BLOCK_TOKENS, kv.beside_window)
    ]
    if ratio > 1:
        rows, block = COMPRESSOR_BLOCK_ROWS[ratio], BLOCK_TOKENS // ratio
        found.append(_Cache("compressed", _aligned(block * DEEPSEEK_V4_ROW_BYTES), BLOCK_TOKENS))
        sums = f"compressor {ratio}"
        found.append(_Cache(sums, _aligned(rows * 2 * width * kv.key_dim * F32_BYTES), rows, width * ratio))
        if kv.indexer_dim:
            key = kv.indexer_dim + INDEXER_SCALE_BYTES
            found.append(_Cache("compressed", _aligned(block * key), BLOCK_TOKENS))
            found.append(_Cache(sums, _aligned(rows * 2 * width * kv.indexer_dim * F32_BYTES), rows, width * ratio))
    return found


def plan_compressed(layers: Sequence[KvLayer], wanted: BlockRequest, version: str | None) -> BlockPlan:
    """vLLM's groups for such a model (its `kv_cache_utils`, 0.20 on).

    All that grows is one group. Windows and compressors are padded to one of that group's page sizes, and divided into
    groups of at most so many layers as pads least. A block holds a page of every size for each layer of a group;
    from 0.23 on only as many of each size as some group has; from 0.27 on the largest group's pages, unpadded. A
    request's bytes in all groups, over the first group's bytes per block, are its blocks, and from 0.27 on simply its
    groups' blocks: windows and compressors count with a whole step's tokens, or two steps'. Before that the check at
    the start already took all groups' blocks, each with a page of every size for each layer.
    """
    counts = _by_name(layers)
    growing = counts.pop("compressed", None)
    if growing is None:
        raise ConfigError("compress_ratios: no layer of this stage compresses; how vLLM divides that is not known")
    sizes = sorted({cache.page_bytes for cache in growing})
    whole = {"compressed": _padded(growing, sizes)} | {name: _padded(own, sizes) for name, own in counts.items()}
    tuples = {name: max(own.values()) for name, own in whole.items()}
    width = _least_padding(list(tuples.values()), tuples["compressed"])
    groups = {name: -(-many // width) for name, many in tuples.items()}
    slots = dict.fromkeys(sizes, width)
    if has_packed_pages(version):
        slots = {size: max(-(-own[size] // groups[name]) for name, own in whole.items()) for size in sizes}
    page = sum(size * many for size, many in slots.items())
    if has_dense_pages(version):
        page = _dense_bytes({"compressed": growing} | counts, groups)
    first = sum(size * many for size, many in whole["compressed"].items())
    blocks = {"compressed": -(-wanted.max_model_len // BLOCK_TOKENS)}
    rows = {"compressed": BLOCK_TOKENS}
    for name, own in counts.items():
        cache = next(iter(own))
        rows[name] = cache.rows
        tokens = min(cache.window - 1 + wanted.in_flight_tokens, wanted.max_model_len)
        blocks[name] = -(-tokens // cache.rows) + 1
    taken = sum(blocks[name] * size * many for name, own in whole.items() for size, many in own.items())
    request, checked = sum(blocks[name] * groups[name] for name in groups), None
    if not has_dense_pages(version):
        request, checked = -(-taken // first), Fraction(request * width * sum(sizes))
    return BlockPlan(
        page_bytes=Fraction(page, width),
        group_layers=width,
        groups=groups,
        block_tokens=rows,
        num_blocks=math.floor(wanted.available_bytes / page),
        blocks_per_request=blocks,
        state_copies=0,
        padding_layers=sum(groups[name] * width - many for name, many in tuples.items()),
        max_model_len=wanted.max_model_len,
        whole_request_blocks=request,
        checked_bytes=checked,
    )


def _by_name(layers: Sequence[KvLayer]) -> dict[str, Counter[_Cache]]:
    found: dict[str, Counter[_Cache]] = {}
    for kv, many in Counter(layers).items():
        for cache in _caches(kv):
            found.setdefault(cache.name, Counter())[cache] += many
    return found


def _dense_bytes(caches: Mapping[str, Counter[_Cache]], groups: Mapping[str, int]) -> int:
    """The largest group's pages, one after the other."""
    return max(
        sum(cache.page_bytes * -(-many // groups[name]) for cache, many in own.items()) for name, own in caches.items()
    )


def _padded(own: Counter[_Cache], sizes: Sequence[int]) -> Counter[int]:
    """Layers by page size, each size the next one that grows."""
    found: Counter[int] = Counter()
    for cache, many in own.items():
        size = next((size for size in sizes if size >= cache.page_bytes), None)
        if size is None:
            raise ConfigError(
                f"head_dim: a page of {cache.name} takes {cache.page_bytes} B, the largest is {sizes[-1]}"
            )
        found[size] += many
    return found


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The group size, from `least` up, that pads fewest layers; the smallest of those."""
    return min(
        range(least, max(counts) + 1), key=lambda width: sum(-(-many // width) * width - many for many in counts)
    )
