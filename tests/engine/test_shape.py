"""engine/shape.py: bytes per cell, and how a budget becomes cells."""

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, GgufTensor
from hitsend.serve.engine.shape import MemoryShape, memory_shape, plan_cells
from hitsend.settings import EngineSettings


def header(architecture: str = "llama", **keys: object) -> GgufHeader:
    metadata = {f"{architecture}.{name.replace('__', '.')}": value for name, value in keys.items()}
    return GgufHeader({"general.architecture": architecture, **metadata}, {}, 0, 0)


SMOL = header(
    block_count=30, context_length=8192, embedding_length=576, attention__head_count=9, attention__head_count_kv=3
)


def test_smollm2_has_23040_bytes_a_cell() -> None:
    assert memory_shape(SMOL) == MemoryShape(23040, 0, 8192, 30, 30)


def test_quantised_keys_and_values_take_34_bytes_for_32_and_need_whole_blocks() -> None:
    assert memory_shape(SMOL, "q8_0").kv_bytes_per_cell == 23040 * 34 // 64
    odd = header(
        block_count=2, context_length=512, embedding_length=80, attention__head_count=4, attention__head_count_kv=4
    )
    with pytest.raises(ConfigError, match="engine.kv_type: q8_0 needs heads of a multiple of 32 values, here are 20"):
        memory_shape(odd, "q8_0")


def test_a_hybrid_counts_only_its_full_attention_layers_and_its_state_apart() -> None:
    shape = memory_shape(
        header(
            "qwen35",
            block_count=65,
            nextn_predict_layers=1,
            context_length=262144,
            embedding_length=5120,
            attention__head_count=24,
            attention__head_count_kv=4,
            attention__key_length=256,
            attention__value_length=256,
            full_attention_interval=4,
            ssm__inner_size=6144,
            ssm__state_size=128,
            ssm__group_count=16,
            ssm__conv_kernel=4,
        )
    )
    assert (shape.num_layers, shape.num_attention_layers) == (64, 16)
    assert shape.kv_bytes_per_cell == 16 * 4 * 512 * 2
    assert shape.state_bytes_per_slot == 48 * (3 * (6144 + 2 * 16 * 128) + 128 * 6144) * 4


def a_hybrid(weights_bytes: int, **more: object) -> GgufHeader:
    """Of 24 layers, 18 of them recurrent, with the words of another and a head beside these weights."""
    keys = {
        "block_count": 25,
        "nextn_predict_layers": 1,
        "context_length": 1000,
        "embedding_length": 1024,
        "attention__head_count": 8,
        "full_attention_interval": 4,
        "ssm__inner_size": 2048,
        "ssm__state_size": 128,
        "ssm__group_count": 16,
        "ssm__conv_kernel": 4,
    }
    names = {"blk.3.ffn_up.weight": 1, "token_embd.weight": 9, "output.weight": 1, "blk.24.ffn_up.weight": 5}
    tensors = tuple(GgufTensor(name, 0, part * weights_bytes // 2, 0, 0) for name, part in names.items())
    return msgspec.structs.replace(header("qwen35", **keys | more), tensors=tensors)


def test_snapshots_are_as_many_as_cost_a_fiftieth_of_a_step() -> None:
    """Copied is what the convolutions saw last: 18 layers of 3 times 6,144 values, 7 times as dear as weights."""
    each = 18 * 3 * 6144 * 4 * 7
    for count in (0, 1, 2, 5):
        shape = memory_shape(a_hybrid(50 * count * each + 1000))
        assert shape.cheap_snapshots == count
        assert plan_cells(shape, EngineSettings(num_slots=2)).num_snapshots == count
    assert plan_cells(memory_shape(a_hybrid(10**12)), EngineSettings(num_slots=2)).num_snapshots == 7
    assert plan_cells(shape, EngineSettings(num_slots=2, snapshots=3)).num_snapshots == 3
    assert plan_cells(memory_shape(a_hybrid(1)), EngineSettings(num_slots=2, snapshots=7)).num_snapshots == 7
    assert plan_cells(shape, EngineSettings(num_slots=2, speculation="off")).num_snapshots == 0


def test_of_experts_those_that_are_used_count() -> None:
    names = {"blk.3.ffn_up_exps.weight": 8_000_000, "output.weight": 1_000_000}
    tensors = tuple(GgufTensor(name, 0, 100 * size, 0, 0) for name, size in names.items())
    found = msgspec.structs.replace(a_hybrid(0, expert_count=64, expert_used_count=8), tensors=tensors)
    assert memory_shape(found).cheap_snapshots == int(0.02 * 200_000_000 / (18 * 3 * 6144 * 4 * 7))


def test_kv_heads_may_be_given_per_layer() -> None:
    shape = memory_shape(
        header(
            block_count=3,
            context_length=100,
            embedding_length=64,
            attention__head_count=4,
            attention__head_count_kv=(2, 0, 4),
        )
    )
    assert (shape.kv_bytes_per_cell, shape.num_attention_layers) == (6 * 32 * 2, 2)


@pytest.mark.parametrize("value", [None, -1, "many", True, 2**40])
def test_a_senseless_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"llama\.block_count"):
        memory_shape(header(block_count=value, context_length=1, embedding_length=1))


SHAPE = MemoryShape(23040, 0, 8192, 30, 30)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (EngineSettings(), (32, 2816, 90112)),
        (EngineSettings(kv_mode="unified"), (32, 8192, 93184 // 256 * 256)),
        (EngineSettings(num_slots=1), (1, 8192, 8192)),
        (EngineSettings(num_slots=4, context=1000), (4, 1024, 4096)),
        (EngineSettings(num_slots=4, context=1000, kv_mode="unified"), (4, 1024, 4096)),
        (EngineSettings(kv_budget_bytes=0), (32, 8192, 32 * 8192)),
    ],
)
def test_a_budget_becomes_cells(settings: EngineSettings, expected: tuple[int, int, int]) -> None:
    plan = plan_cells(SHAPE, settings)
    assert (plan.num_slots, plan.cells_per_slot, plan.num_cells) == expected
    assert plan.num_cells * SHAPE.kv_bytes_per_cell <= settings.kv_budget_bytes or not settings.kv_budget_bytes


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"needed are 188743680: 32 slots .* 256 tokens each, 23040 bytes") as failure:
        plan_cells(SHAPE, EngineSettings(kv_budget_bytes=1000, kv_mode="per_stream"))
    assert "engine.num_slots" in str(failure.value)
    with pytest.raises(ConfigError, match="8192 tokens each"):
        plan_cells(SHAPE, EngineSettings(context=8192, kv_mode="per_stream"))
    with pytest.raises(ConfigError, match=r"needed are 5898240: .* 256 tokens in a pool that they share") as failure:
        plan_cells(SHAPE, EngineSettings(kv_budget_bytes=1000))  # fewer slots wouldn't help
    assert str(failure.value).endswith("raise it or lower engine.context")


@pytest.mark.parametrize(
    ("settings", "is_unified"),
    [
        (EngineSettings(), False),
        (EngineSettings(context=2816), False),
        (EngineSettings(context=2817), True),
        (EngineSettings(context=8192), True),
        (EngineSettings(context=8192, num_slots=11), False),
        (EngineSettings(context=8192, kv_budget_bytes=0), False),
        (EngineSettings(kv_mode="unified"), True),
    ],
)
def test_auto_is_unified_only_where_streams_would_be_shorter_than_the_context(
    settings: EngineSettings, is_unified: bool
) -> None:
    plan = plan_cells(SHAPE, settings)
    assert plan.is_unified == is_unified
    assert plan.cells_per_slot >= settings.context


def test_recurrent_state_comes_out_of_the_same_budget() -> None:
    shape = MemoryShape(1000, 500_000, 4096, 8, 2)
    plan = plan_cells(shape, EngineSettings(num_slots=4, kv_budget_bytes=4_000_000))
    assert plan.cells_per_slot == 256
