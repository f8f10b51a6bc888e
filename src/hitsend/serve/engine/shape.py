"""How much memory a model's sequences take, and how many cells a budget buys.

Enters: a `GgufHeader` and the engine's settings. Leaves: a `MemoryShape` and a `CellPlan`. Always true: pure
arithmetic with the numbers in every refusal; a cell is one token's keys and values over all attention layers in the
type of `engine.kv_type`, and what a hybrid model keeps per sequence regardless of its length (recurrent and
convolution state, f32) is counted apart. Next: `llama_decoder.py`, which asks libllama for exactly this and compares.
"""

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader
from hitsend.settings import EngineSettings

CELL_STEP = 256
"""libllama rounds a sequence's cells to this."""

_F16_BYTES, _F32_BYTES = 2, 4
_Q8_BLOCK, _Q8_BYTES = 32, 34


class MemoryShape(msgspec.Struct, frozen=True):
    """Bytes per cell (0 for a model without attention) and fixed bytes per sequence (0 without recurrent layers)."""

    kv_bytes_per_cell: int
    state_bytes_per_slot: int
    context_train: int
    num_layers: int
    num_attention_layers: int


class CellPlan(msgspec.Struct, frozen=True):
    """What to ask libllama for. `num_cells` is the whole context; one sequence holds at most `cells_per_slot`.

    `is_unified`: one pool of cells for all slots, not a stream for each.
    """

    num_slots: int
    cells_per_slot: int
    num_cells: int
    is_unified: bool = False


def memory_shape(header: GgufHeader, kv_type: str = "f16") -> MemoryShape:
    """Read the shape from the metadata. Raises ConfigError where a needed key is missing or makes no sense."""
    layers = _number(header, "block_count")
    own_layers = layers - _number(header, "nextn_predict_layers", 0)
    heads = _heads_per_layer(header, own_layers)
    head_size = _number(header, "embedding_length") // max(1, _most(header, "attention.head_count"))
    sizes = [_number(header, f"attention.{name}_length", head_size) for name in ("key", "value")]
    return MemoryShape(
        kv_bytes_per_cell=sum(heads) * sum(_kv_bytes(size, kv_type) for size in sizes),
        state_bytes_per_slot=heads.count(0) * _state_values(header) * _F32_BYTES,
        context_train=_number(header, "context_length"),
        num_layers=own_layers,
        num_attention_layers=len(heads) - heads.count(0),
    )


def _kv_bytes(head_size: int, kv_type: str) -> int:
    """Of one head's keys or values of one token. Raises ConfigError where blocks don't fit."""
    if kv_type == "f16":
        return head_size * _F16_BYTES
    if head_size % _Q8_BLOCK:
        raise ConfigError(f"engine.kv_type: q8_0 needs heads of a multiple of {_Q8_BLOCK} values, here are {head_size}")
    return head_size // _Q8_BLOCK * _Q8_BYTES


def plan_cells(shape: MemoryShape, settings: EngineSettings) -> CellPlan:
    """Divide the budget. Raises ConfigError with the numbers where it can't hold what was asked for.

    `auto` takes streams, which decode faster, and one pool only where streams would be shorter than the context that
    was asked for: long requests then fit as long as the others are short.
    """
    modes = {"auto": (False, True), "per_stream": (False,), "unified": (True,)}[settings.kv_mode]
    longest = _round_up(shape.context_train)
    if settings.context:
        longest = min(longest, _round_up(settings.context))
    wanted = min(longest, _round_up(settings.context or CELL_STEP))
    for is_unified in modes:
        plan = _divided(shape, settings, longest, is_unified=is_unified)
        if plan.cells_per_slot >= wanted:
            return plan
    raise ConfigError(_too_small(shape, settings, wanted))


def _divided(shape: MemoryShape, settings: EngineSettings, longest: int, *, is_unified: bool) -> CellPlan:
    slots, budget = settings.num_slots, settings.kv_budget_bytes
    whole = slots * longest
    if budget and shape.kv_bytes_per_cell:
        left = budget - slots * shape.state_bytes_per_slot
        whole = min(whole, max(0, left) // shape.kv_bytes_per_cell)
    if is_unified:
        whole = whole // CELL_STEP * CELL_STEP
        return CellPlan(slots, min(longest, whole), whole, is_unified)
    per_slot = min(longest, whole // slots // CELL_STEP * CELL_STEP)
    return CellPlan(slots, per_slot, per_slot * slots, is_unified)


def _too_small(shape: MemoryShape, settings: EngineSettings, wanted: int) -> str:
    sharing = settings.num_slots if settings.kv_mode == "per_stream" else 1
    need = sharing * wanted * shape.kv_bytes_per_cell + settings.num_slots * shape.state_bytes_per_slot
    return (
        f"engine.kv_budget_bytes is {settings.kv_budget_bytes}, needed are {need}: {settings.num_slots} slots "
        f"(engine.num_slots), {wanted} tokens each, {shape.kv_bytes_per_cell} bytes a token and "
        f"{shape.state_bytes_per_slot} bytes of state a slot in mode {settings.kv_mode}; "
        "raise it or lower engine.num_slots or engine.context"
    )


def _heads_per_layer(header: GgufHeader, layers: int) -> list[int]:
    """KV heads of every layer; 0 where the layer is recurrent."""
    found = header.metadata.get(f"{header.architecture}.attention.head_count_kv")
    found = _number(header, "attention.head_count", 0) if found is None else found
    if isinstance(found, tuple):
        return [int(value) for value in found[:layers]]
    every = _number(header, "full_attention_interval", 0)
    if not every and header.architecture in {"qwen35", "qwen35moe", "qwen3next"}:
        every = 4
    return [int(found) if not every or (layer + 1) % every == 0 else 0 for layer in range(layers)]


def _state_values(header: GgufHeader) -> int:
    """Values that one recurrent layer keeps: the convolution's last inputs and the state matrix."""
    inner, state = _number(header, "ssm.inner_size", 0), _number(header, "ssm.state_size", 0)
    groups, kernel = _number(header, "ssm.group_count", 0), _number(header, "ssm.conv_kernel", 0)
    return max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner


def _number(header: GgufHeader, name: str, default: int | None = None) -> int:
    value = header.metadata.get(f"{header.architecture}.{name}", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ConfigError(
            f"engine.model: its metadata has {header.architecture}.{name} = {value!r}, not a usable number"
        )
    return value


def _most(header: GgufHeader, name: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{name}", 0)
    return max(value, default=0) if isinstance(value, tuple) else _number(header, name, 0)


def _round_up(tokens: int) -> int:
    return -(-tokens // CELL_STEP) * CELL_STEP
