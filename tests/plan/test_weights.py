"""plan/weights.py: safetensors and GGUF headers."""

import json
import struct

import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.models import find_checkpoint
from hitsend.plan.sizes import Ranks
from hitsend.serve.engine.models import resolve
from hitsend.serve.engine.shape import memory_shape
from tests.engine.test_gguf_check import file, key, tensor
from tests.plan.asked import FACTS

TINY = {
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "intermediate_size": 16, "vocab_size": 10, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def shard(path, tensors):
    """A safetensors file: name → (dtype, shape, bytes)."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * at)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shard(tmp_path / "model-1.safetensors", {"embed": ("BF16", [10, 8], 160), "q": ("F8_E4M3", [8, 8], 64)})
    shard(tmp_path / "model-2.safetensors", {"scale": ("F32", [], 4), "packed": ("U8", [4, 4], 16)})
    index = {"weight_map": {"embed": "model-1.safetensors", "scale": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_folder_gives_every_tensor_its_exact_bytes(folder):
    found = find_checkpoint(str(folder), FACTS)
    assert found.file_bytes == 160 + 64 + 4 + 16
    assert {(one.name, one.dtype, one.elements) for one in found.tensors} == {
        ("embed", "BF16", 80), ("q", "F8_E4M3", 64), ("scale", "F32", 1), ("packed", "U8", 16)
    }  # fmt: skip
    plan = plan_memory(MemoryQuestion(checkpoint=found))
    assert plan.stage.weights_bytes == plan.whole_weights_bytes == 244


def test_a_file_is_divided_over_ranks_as_its_shapes_are(folder):
    found = find_checkpoint(str(folder), FACTS)
    half = plan_memory(MemoryQuestion(checkpoint=found, ranks=Ranks(2))).stage.weights_bytes
    assert 122 < half < 244


def test_a_shard_that_the_index_names_must_be_there(folder):
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"it names model-2.safetensors, which isn't there \(1 missing\)"):
        find_checkpoint(str(folder), FACTS)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 3) + b"{]}",
     struct.pack("<Q", 46) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'[:46]],
)  # fmt: skip
def test_broken_safetensors_are_named(folder, content):
    (folder / "model-1.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model-1.safetensors is not a safetensors file"):
        find_checkpoint(str(folder), FACTS)


@pytest.mark.parametrize(
    "entry",
    [("F32", [2], 4), ("F33", [1], 4), ("F32", ["x"], 4)],
)
def test_tensors_that_contradict_themselves_are_named(folder, entry):
    shard(folder / "model-1.safetensors", {"bad": entry})
    with pytest.raises(ConfigError, match="tensor 'bad'"):
        find_checkpoint(str(folder), FACTS)


def gguf(path, architecture, numbers, tensors=()):
    keys = [key("general.architecture", 8, "", architecture)]
    keys += [key(f"{architecture}.{name}", 4, "I", value) for name, value in numbers.items()]
    path.write_bytes(file(keys, list(tensors), b"\0" * 4096))
    return str(path)


HYBRID = {
    "block_count": 5, "nextn_predict_layers": 1, "embedding_length": 512, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256, "context_length": 1024,
    "ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 128, "ssm.group_count": 2, "ssm.time_step_rank": 4,
}  # fmt: skip


def test_a_hybrid_gguf_has_states_attention_and_a_draft_layer(tmp_path):
    from hitsend.gguf import read_header

    path = gguf(tmp_path / "a.gguf", "qwen35", HYBRID, [tensor("blk.0.ssm_out.weight", [32, 2], 0, 0)])
    found = find_checkpoint(path, FACTS)
    assert [layer.kv is not None for layer in found.layers] == [False, False, False, True]
    assert len(found.mtp_layers) == 1
    plan = plan_memory(MemoryQuestion(checkpoint=found, engine="hitsend"))
    shape = memory_shape(read_header(path))
    assert plan.stage.kv_bytes_per_token == shape.kv_bytes_per_cell
    assert plan.stage.state_bytes == shape.state_bytes_per_slot
    assert found.params.recurrent == 64


def test_a_gguf_in_parts_is_read_whole_or_not_at_all(tmp_path):
    keys = [key("general.architecture", 8, "", "llama"), key("split.count", 2, "H", 2)]
    numbers = {"block_count": 1, "embedding_length": 32, "attention.head_count": 2, "context_length": 64}
    keys += [key(f"llama.{name}", 4, "I", value) for name, value in numbers.items()]
    first, second = (tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    first.write_bytes(file(keys, [tensor("a", [32, 2], 0, 0)], b"\0" * 256))
    with pytest.raises(ConfigError, match=r"part m-00002-of-00002.gguf isn't there \(1 missing\)"):
        find_checkpoint(str(first), FACTS)
    second.write_bytes(file(keys, [tensor("b", [32, 4], 0, 0)], b"\0" * 512))
    assert find_checkpoint(str(first), FACTS).file_bytes == 256 + 512
    with pytest.raises(ConfigError, match="it is one of 2 parts; give the first"):
        find_checkpoint(str(second), FACTS)


LATENT = {
    "block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32, "attention.key_length": 24, "attention.value_length": 16, "rope.dimension_count": 8,
    "context_length": 128,
}  # fmt: skip


def test_a_latent_gguf_is_compressed_only_with_its_own_tensors(tmp_path):
    without = gguf(tmp_path / "a.gguf", "deepseek2", LATENT, [tensor("blk.0.attn_kv_b.weight", [32, 2], 0, 0)])
    having = gguf(tmp_path / "b.gguf", "deepseek2", LATENT, [tensor("blk.0.attn_k_b.weight", [32, 2], 0, 0)])
    each = [
        plan_memory(MemoryQuestion(checkpoint=find_checkpoint(path, FACTS), engine="llama.cpp")).stage
        for path in (without, having)
    ]
    assert [stage.kv_bytes_per_token for stage in each] == [2 * 4 * (24 + 16) * 2, 2 * (32 + 8) * 2]


def test_an_unknown_gguf_or_a_missing_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match="doesn't know the architecture 'rwkv6'"):
        find_checkpoint(gguf(tmp_path / "a.gguf", "rwkv6", {}), FACTS)
    with pytest.raises(ConfigError, match=r"llama\.block_count is missing"):
        find_checkpoint(gguf(tmp_path / "b.gguf", "llama", {}), FACTS)
    (tmp_path / "c.gguf").write_bytes(b"GGUX")
    with pytest.raises(ConfigError, match="is not a usable GGUF file"):
        find_checkpoint(str(tmp_path / "c.gguf"), FACTS)


PLAIN = {
    "block_count": 4, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
    "context_length": 128, "feed_forward_length": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "change", "said"),
    [
        ("llama", {"block_count": 0}, "block_count is 0, needed is more than the 0"),
        ("llama", {"block_count": 2**31}, "at most 10,000"),
        ("llama", {"embedding_length": 0}, "embedding_length is 0, needed is 1 or more"),
        ("llama", {"attention.head_count": 0}, "head_count is 0, needed is 1 or more"),
        ("llama", {"attention.head_count_kv": 3}, "head_count_kv is 3, which doesn't divide 4"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 99}, "expert_used_count is 99, there are 8"),
        ("gemma4", {"attention.shared_kv_layers": 4}, "shared_kv_layers is 4, needed is fewer than 4"),
        ("qwen35", HYBRID | {"nextn_predict_layers": 9}, "needed is more than the 9"),
        ("qwen35", HYBRID | {"ssm.time_step_rank": 0}, "time_step_rank is 0"),
    ],
)
def test_a_gguf_that_can_t_be_right_is_named(tmp_path, architecture, change, said):
    with pytest.raises(ConfigError, match=said):
        find_checkpoint(gguf(tmp_path / "a.gguf", architecture, PLAIN | change), FACTS)


@pytest.mark.model
def test_the_bundled_model_is_planned_as_the_engine_divides_it(tmp_path):
    from hitsend.gguf import read_header

    path = resolve("smollm2-135m", tmp_path).path
    found = find_checkpoint(path, FACTS)
    named = find_checkpoint("SmolLM2-135M-Instruct", FACTS)
    assert found.params.total == named.params.total == 134_515_008
    assert found.file_bytes == read_header(path).tensor_bytes
    plan = plan_memory(MemoryQuestion(checkpoint=found, engine="hitsend"))
    assert plan.stage.kv_bytes_per_token == memory_shape(read_header(path)).kv_bytes_per_cell
