"""Layers that differ: Ling 3, Kimi K3, Nemotron-NAS, Zamba2; and what is refused, with what to pass instead."""

import json
from fractions import Fraction

import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.config import checkpoint_of
from hitsend.plan.formats import weight_format, weights_name
from hitsend.plan.logs import read_logs
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.models import find_checkpoint
from hitsend.plan.quantised import weights_of
from tests.plan.asked import FACTS, known
from tests.plan.test_weights import gguf

HALF, NONE = {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.625}}, {"attention": {"no_op": True}}
LINEAR = {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}}
NAS = {
    "model_type": "nemotron-nas", "num_hidden_layers": 4, "hidden_size": 8192, "num_attention_heads": 64,
    "vocab_size": 128_256, "tie_word_embeddings": False, "max_position_embeddings": 131_072,
    "block_configs": [HALF, {**NONE, "ffn": {"ffn_mult": 1.0}}, LINEAR, {**NONE, "ffn": {"no_op": True}}],
}  # fmt: skip
ZAMBA = {
    "model_type": "zamba2", "num_hidden_layers": 54, "hidden_size": 2560, "num_attention_heads": 32,
    "ffn_hidden_size": 10_240, "vocab_size": 32_000, "mamba_d_state": 64, "mamba_expand": 2, "mamba_ngroups": 2,
    "mamba_headdim": 64, "n_mamba_heads": 80, "num_mem_blocks": 2, "lora_rank": 128, "max_position_embeddings": 4096,
    "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 9,
}  # fmt: skip


def test_ling_three_has_the_parameters_that_the_hub_counts():
    found = known("Ling-3.0-flash")
    drafts = sum(layer.params.total for layer in found.mtp_layers)
    assert found.params.total + drafts == 127_486_405_600
    attention = [index for index, layer in enumerate(found.layers) if layer.kv is not None]
    assert attention == [5, 11, 17, 23, 29, 35, 41]
    assert known("Ling-3.0-tiny").params.total / 1e9 == pytest.approx(7.89, abs=0.01)


def test_an_unfinished_group_is_attention_and_ling_two_is_refused():
    config = {**dict(next(model.config for model in FACTS.models if model.name.endswith("Ling-3.0-tiny")))}
    config["num_hidden_layers"] = 26
    kinds = [layer.kv is not None for layer in checkpoint_of(config, "c").layers]
    assert kinds[-3:] == [True, True, True]
    del config["short_conv_kernel_size"]
    with pytest.raises(ConfigError, match="'short_conv_kernel_size' is missing, so this is Ling 2.5"):
        checkpoint_of(config, "c")
    config["short_conv_kernel_size"], config["gated_attention_proj_granularity_type"] = 4, "rowwise"
    with pytest.raises(ConfigError, match="granularity_type is 'rowwise', known are head_wise and element_wise"):
        checkpoint_of(config, "c")


def test_kimi_linear_and_its_larger_relative():
    assert known("Kimi-Linear-48B-A3B").params.total == 49_122_681_728
    large = known("Kimi-K3")
    assert large.params.total / 1e12 == pytest.approx(2.78, abs=0.005)
    assert sum(layer.kv is not None for layer in large.layers) == 24
    # experts in 4 bits with a scale for 32: 1.45 TB of 1.56 on disk (a port's notes)
    assert large.weights == "mxfp4"
    assert large.params.routed_experts * 17 / 32 / 1e12 == pytest.approx(1.446, abs=0.001)


def test_a_searched_models_layers_are_as_each_says():
    found = checkpoint_of(NAS, "c")
    assert [layer.kv.kv_heads if layer.kv else 0 for layer in found.layers] == [8, 0, 0, 0]
    hidden = 8192
    widths = [14_336, 5632, 0, 0]  # two thirds of ffn_mult x hidden, up to a multiple of 256
    attention = [2 * hidden * hidden + 2 * hidden * 1024, 0, hidden * hidden, 0]
    assert [layer.params.attention for layer in found.layers] == attention
    linear = [0, 0, hidden * hidden, 0]
    assert [layer.params.mlp for layer in found.layers] == [
        3 * hidden * width + more for width, more in zip(widths, linear, strict=True)
    ]
    assert [layer.params.norms for layer in found.layers] == [2 * hidden, hidden, 2 * hidden, 0]
    assert found.intermediate == 14_336


def test_the_cache_of_nemotron_super():
    """49 of its 80 layers attend: 200,704 B a token in 16 bits, as a public test of another tool has it."""
    blocks = [HALF] * 49 + [{**NONE, "ffn": {"ffn_mult": 1.0}}] * 31
    found = checkpoint_of({**NAS, "num_hidden_layers": 80, "block_configs": blocks}, "c")
    kept = [layer.kv for layer in found.layers if layer.kv is not None]
    assert sum(kv.kv_heads * (kv.key_dim + kv.value_dim) * 2 for kv in kept) == 200_704


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (None, "the key 'block_configs' is missing"),
        ([HALF] * 3, "3 layer types for num_hidden_layers = 4"),
        ([HALF] * 3 + [{"attention": {"n_heads_in_group": 7}}], r"block_configs\[3\].attention.n_heads_in_group is 7"),
        ([HALF] * 3 + [{"attention": {"n_heads_in_group": 8}}], r"block_configs\[3\].ffn has ffn_mult None"),
        ([HALF] * 3 + [{}], r"block_configs\[3\].attention.n_heads_in_group is None"),
    ],
)
def test_a_block_that_says_nothing_is_named(blocks, said):
    with pytest.raises(ConfigError, match=said):
        checkpoint_of({**NAS, "block_configs": blocks}, "c")


def test_shared_blocks_are_counted_once_and_keep_a_cache_at_every_use():
    found = checkpoint_of(ZAMBA, "c")
    assert found.params.total / 1e9 == pytest.approx(2.68, abs=0.01)  # 2.7 B (model card)
    uses = [layer for layer in found.layers if layer.kv is not None]
    assert len(uses) == 9
    assert all(layer.state is not None for layer in found.layers)
    assert {layer.kv.key_dim for layer in uses} == {160}
    sizes = [layer.params.total for layer in uses]
    assert sizes[0] == sizes[1] > 3 * sizes[2]
    assert len(set(sizes[2:])) == 1


def test_the_seven_billion_zamba():
    config = {**ZAMBA, "num_hidden_layers": 81, "hidden_size": 3584, "ffn_hidden_size": 14_336, "n_mamba_heads": 112}
    config["layers_block_type"] = (["mamba"] * 5 + ["hybrid"]) * 13 + ["mamba"] * 3
    assert checkpoint_of(config, "c").params.total / 1e9 == pytest.approx(7.36, abs=0.01)  # model card
    del config["layers_block_type"]
    with pytest.raises(ConfigError, match="the key 'layers_block_type' is missing, and zamba2 needs it"):
        checkpoint_of(config, "c")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek-ai/DeepSeek-V4.1-Flash", "no config.json of DeepSeek-V4.1 was found"),
        ("Qwen3.8-Flash-Next", "what its sparse attention keeps beside keys and values"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "cross-attention layers keep an image's tokens"),
    ],
)
def test_a_name_that_cant_be_planned_says_why_and_what_to_pass(name, said):
    with pytest.raises(ConfigError, match=said) as refused:
        find_checkpoint(name, FACTS)
    assert "--available-kv-gib" in str(refused.value)


def test_what_a_refusal_tells_to_pass_can_be_passed(tmp_path):
    with pytest.raises(ConfigError, match="cross-attention") as refused:
        checkpoint_of({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}, "c")
    text = str(refused.value)
    told = json.loads(text[text.index("{") : text.index("}") + 1])
    assert len(checkpoint_of(told, "c").layers) == 32


def test_mxfp4_by_its_format():
    told = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"num_bits": 4}}
    assert weights_of({"quantization_config": told}) == "mxfp4"


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_nextn_predict_layers": 2**39}, "num_nextn_predict_layers is 549,755,813,888, the most is 64"),
        ({"quantization_config": {"quant_method": "gptq", "bits": [4]}}, r"quantization_config.bits is \[4\]"),
        (
            {"model_type": "mamba2", "mamba_ssm_dtype": "float4"},
            "mamba_ssm_dtype is 'float4', known are auto, bfloat16",
        ),
        (
            {"model_type": "mamba2", "mamba_ssm_dtype": ["float32"]},
            r"mamba_ssm_dtype is \['float32'\], needed is a word",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.bits is 3, known are 4"),
        ({"quantization_config": {"quant_method": "awq", "bits": "4"}}, "quantization_config.bits is '4'"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "g": {"num_bits": 2, "type": "int"}}},
            "quantization_config has num_bits 2, known are 4 and 8",
        ),
    ],
)
def test_a_config_that_would_give_wrong_bytes_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        checkpoint_of({**LLAMA, **change}, "c")


def test_odd_widths_of_experts_are_no_traceback():
    assert weights_of({"expert_dtype": {"fp4": 1}}) is None


def test_formats_of_experts_where_there_are_none():
    assert weights_name("mxfp4", None, has_experts=True) == "mxfp4"
    assert weights_name(None, "mxfp4", has_experts=False) == "mxfp4-linear"
    assert weight_format("mxfp4-linear").bytes_per_param == Fraction(17, 32)
    with pytest.raises(ConfigError, match="--weights int4-experts: that is a format of experts, and the model has"):
        weights_name("int4-experts", None, has_experts=False)
    plan = plan_memory(MemoryQuestion(checkpoint=checkpoint_of(LLAMA, "c"), weights="mxfp4"))
    params = plan.question.checkpoint.params
    kept = params.embedding + params.head + params.norms
    assert plan.whole_weights_bytes == kept * 2 + (params.total - kept) * Fraction(17, 32)


def test_a_folder_of_gguf_files(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        find_checkpoint(str(tmp_path), FACTS)
    numbers = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "context_length": 512}
    gguf(tmp_path / "a.gguf", "llama", numbers)
    assert len(find_checkpoint(str(tmp_path), FACTS).layers) == 2
    gguf(tmp_path / "b.gguf", "llama", numbers)
    with pytest.raises(ConfigError, match=r"2 GGUF models lie there \(a.gguf, b.gguf\); give the file"):
        find_checkpoint(str(tmp_path), FACTS)


def test_a_file_without_a_log_is_refused(tmp_path):
    (tmp_path / "logs.json").write_text("[]")
    with pytest.raises(ConfigError, match="there is no log in it"):
        read_logs(tmp_path / "logs.json")
