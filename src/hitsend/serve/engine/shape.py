"""How much memory a model's sequences take, and how many cells a budget buys.

Enters: a `GgufHeader` and the engine's settings. Leaves: a `MemoryShape` and a `CellPlan`. Always true: pure
arithmetic with the numbers in every refusal; a cell is one token's keys and values over all attention layers in the
type of `engine.kv_type`, and what a hybrid model keeps per sequence regardless of its length (recurrent and
convolution state, f32) is counted apart, once and once more per snapshot. Next: `llama_decoder.py`, which asks libllama
for exactly this and compares.
"""

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader
from hitsend.settings import EngineSettings

CELL_STEP = 256
"""libllama rounds a sequence's cells to this."""

SNAPSHOTS = (7, 5, 4, 3, 2, 1)
"""States that may be kept beside each sequence's own, so that as many tokens can be taken back."""

SNAPSHOT_SHARE = 4
"""They take at most one part in so many of the budget."""

SNAPSHOT_TIME = 0.02
"""So much longer a step that guesses nothing may take because of them, as a share."""

_COPY_TIME = 7.0
"""How many times as long it takes to copy a byte of the convolution's inputs, which is done for every snapshot of every
token, as to compute with a byte of weights: measured, 4 to 7 with models of 15 to 240 MB, for 1 and for 8 sequences."""

HEAD_CELLS = 1024
"""So far back an MTP head looks at most."""

HEAD_WINDOW = 256
"""Tokens of each sequence that wait to be shown to an MTP head."""

HEAD_ARCHITECTURES = frozenset({"qwen35"})
"""Whose heads were tried: the library ends the process over a graph that it can't build."""

_F16_BYTES, _F32_BYTES = 2, 4
_Q8_BLOCK, _Q8_BYTES = 32, 34


class MemoryShape(msgspec.Struct, frozen=True):
    """Bytes per cell (0 for a model without attention) and fixed bytes per sequence (0 without recurrent layers).

    `cheap_snapshots`: as many as keep to `SNAPSHOT_TIME`.
    """

    kv_bytes_per_cell: int
    state_bytes_per_slot: int
    context_train: int
    num_layers: int
    num_attention_layers: int
    cheap_snapshots: int = SNAPSHOTS[0]


class CellPlan(msgspec.Struct, frozen=True):
    """What to ask libllama for. `num_cells` is the whole context; one sequence holds at most `cells_per_slot`.

    `is_unified`: one pool of cells for all slots, not a stream for each. `num_snapshots`: recurrent states that are
    kept of each sequence beside its own.
    """

    num_slots: int
    cells_per_slot: int
    num_cells: int
    is_unified: bool = False
    num_snapshots: int = 0

    @property
    def head_cells(self) -> int:
        """Cells of one sequence in an MTP head's own cache."""
        return min(HEAD_CELLS, self.cells_per_slot)


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
        cheap_snapshots=_cheap_snapshots(header, heads.count(0), own_layers),
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
    was asked for: long requests then fit as long as the others are short. Snapshots come out of the same budget, as
    many as leave enough cells.
    """
    modes = {"auto": (False, True), "per_stream": (False,), "unified": (True,)}[settings.kv_mode]
    longest = _round_up(shape.context_train)
    if settings.context:
        longest = min(longest, _round_up(settings.context))
    wanted = min(longest, _round_up(settings.context or CELL_STEP))
    for is_unified in modes:
        for num_snapshots in _snapshots(shape, settings):
            plan = _divided(shape, settings, longest, is_unified=is_unified, num_snapshots=num_snapshots)
            if plan.cells_per_slot >= wanted:
                return plan
    raise ConfigError(_too_small(shape, settings, wanted))


def _snapshots(shape: MemoryShape, settings: EngineSettings) -> list[int]:
    """How many may be tried, most first."""
    if settings.speculation == "off" or not shape.state_bytes_per_slot:
        return [0]
    each = settings.num_slots * shape.state_bytes_per_slot
    most = shape.cheap_snapshots if settings.snapshots is None else settings.snapshots
    if settings.kv_budget_bytes:
        most = min(most, settings.kv_budget_bytes // SNAPSHOT_SHARE // each)
    return [*(count for count in SNAPSHOTS if count <= most), 0]


def _divided(
    shape: MemoryShape, settings: EngineSettings, longest: int, *, is_unified: bool, num_snapshots: int
) -> CellPlan:
    slots, budget = settings.num_slots, settings.kv_budget_bytes
    whole = slots * longest
    if budget and shape.kv_bytes_per_cell:
        left = budget - slots * (1 + num_snapshots) * shape.state_bytes_per_slot
        whole = min(whole, max(0, left) // shape.kv_bytes_per_cell)
    if is_unified:
        whole = whole // CELL_STEP * CELL_STEP
        return CellPlan(slots, min(longest, whole), whole, is_unified, num_snapshots)
    per_slot = min(longest, whole // slots // CELL_STEP * CELL_STEP)
    return CellPlan(slots, per_slot, per_slot * slots, is_unified, num_snapshots)


def num_states(plan: CellPlan, settings: EngineSettings) -> int:
    """Recurrent states in memory, snapshots among them.

    Where no snapshot fits, one sequence at a time has its state copied while it is guessed for.
    """
    return plan.num_slots * (1 + plan.num_snapshots) + int(not plan.num_snapshots and settings.speculation != "off")


def head_bytes(header: GgufHeader, plan: CellPlan, settings: EngineSettings) -> int:
    """What an MTP head's context holds: its cells, and hidden states on their way to it; 0 where none is run."""
    if not wants_head(header, settings):
        return 0
    waiting = HEAD_WINDOW * _number(header, "embedding_length") * _F32_BYTES
    return plan.num_slots * (plan.head_cells * _head_bytes_per_cell(header) + waiting)


def wants_head(header: GgufHeader, settings: EngineSettings) -> bool:
    """Whether the file has an MTP head that we can run, and the settings leave it on."""
    return settings.speculation in ("auto", "mtp") and not why_unusable_head(header)


def why_unusable_head(header: GgufHeader) -> str:
    """Empty where the file has a head of a kind that we can run."""
    count = _number(header, "nextn_predict_layers", 0)
    if count == 0:
        return "the model has no MTP head"
    if count > 1 or header.architecture not in HEAD_ARCHITECTURES:
        return f"{count} MTP heads of {header.architecture} aren't supported"
    return ""


def _head_bytes_per_cell(header: GgufHeader) -> int:
    """Keys and values of its one layer, always f16."""
    found = header.metadata.get(f"{header.architecture}.attention.head_count_kv", 0)
    heads = found[-1] if isinstance(found, tuple) else found
    sizes = [_number(header, f"attention.{name}_length", 0) for name in ("key", "value")]
    return int(heads) * sum(sizes) * _F16_BYTES


def _too_small(shape: MemoryShape, settings: EngineSettings, wanted: int) -> str:
    is_own = settings.kv_mode == "per_stream"
    sharing = settings.num_slots if is_own else 1
    need = sharing * wanted * shape.kv_bytes_per_cell + settings.num_slots * shape.state_bytes_per_slot
    each = f"{wanted} tokens each" if is_own else f"{wanted} tokens in a pool that they share"
    lower = "engine.num_slots or engine.context" if is_own or shape.state_bytes_per_slot else "engine.context"
    return (
        f"engine.kv_budget_bytes is {settings.kv_budget_bytes}, needed are {need}: {settings.num_slots} slots "
        f"(engine.num_slots), {each}, {shape.kv_bytes_per_cell} bytes a token and "
        f"{shape.state_bytes_per_slot} bytes of state a slot in mode {settings.kv_mode}; "
        f"raise it or lower {lower}"
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
    return _conv_values(header) + state * inner


def _conv_values(header: GgufHeader) -> int:
    inner, state = _number(header, "ssm.inner_size", 0), _number(header, "ssm.state_size", 0)
    groups, kernel = _number(header, "ssm.group_count", 0), _number(header, "ssm.conv_kernel", 0)
    return max(0, kernel - 1) * (inner + 2 * groups * state)


def _cheap_snapshots(header: GgufHeader, recurrent_layers: int, layers: int) -> int:
    copied = recurrent_layers * _conv_values(header) * _F32_BYTES * _COPY_TIME
    return int(SNAPSHOT_TIME * _pass_bytes(header, layers) / copied) if copied else SNAPSHOTS[0]


def _pass_bytes(header: GgufHeader, layers: int) -> float:
    """Weights that one token is computed with: of experts those that are used, and the words once."""
    sizes = {tensor.name: tensor.num_bytes for tensor in header.tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight", None)
    heads = tuple(f"blk.{layer}." for layer in range(layers, _number(header, "block_count")))
    experts = _number(header, "expert_count", 0)
    used = _number(header, "expert_used_count", 0) / experts if experts else 1.0
    own = ((name, size) for name, size in sizes.items() if not (heads and name.startswith(heads)))
    return sum(size * (used if "_exps" in name else 1.0) for name, size in own)


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
