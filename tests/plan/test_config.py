"""plan/config.py and plan/models.py: shapes to layers and parameters, names to shapes."""

import json

import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.config import checkpoint_of
from hitsend.plan.families import FAMILIES
from hitsend.plan.models import find_checkpoint
from hitsend.plan.quantised import weights_of
from tests.plan.asked import FACTS

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
COUNTED = [model for model in FACTS.models if model.total_params]
# an indexer's matrices are counted here and weren't there
EXTRA = {"deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5.2", "moonshotai/Kimi-K2-Instruct"}
ROUNDED = {"ibm-granite/granite-4.0-h-tiny", "MiniMaxAI/MiniMax-M2.5"}  # 6.94 B; norms left out


@pytest.mark.parametrize("model", COUNTED, ids=lambda model: model.name)
def test_parameters_add_up_to_what_others_counted(model):
    found = find_checkpoint(model.name, FACTS).params
    more = found.total - model.total_params
    more -= found.other if more == found.other else 0  # a vision tower that they left out
    tolerance = 0.002 if model.name in EXTRA | ROUNDED else 0
    assert abs(more) <= tolerance * model.total_params


@pytest.mark.parametrize("model", FACTS.models, ids=lambda model: model.name)
def test_every_known_model_can_be_read_by_its_names(model):
    for name in (model.name, *model.aliases):
        assert find_checkpoint(name, FACTS).layers, name


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"model_type", "num_key_value_heads", "tie_word_embeddings"}))
def test_a_missing_key_is_named(key):
    if key == "max_position_embeddings":
        assert checkpoint_of({k: v for k, v in LLAMA.items() if k != key}, "config.json").context is None
        return
    with pytest.raises(ConfigError, match=f"config.json: the key '{key}' is missing, and llama needs it"):
        checkpoint_of({k: v for k, v in LLAMA.items() if k != key}, "config.json")


@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True, 2**50])
def test_a_number_that_is_none_is_named(value):
    with pytest.raises(ConfigError, match="num_hidden_layers is"):
        checkpoint_of(LLAMA | {"num_hidden_layers": value}, "config.json")


@pytest.mark.parametrize("kind", ["deepseek_v5", "mllama", "", None, "rwkv7"])
def test_an_unknown_architecture_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match="doesn't know the architecture"):
        checkpoint_of(LLAMA | {"model_type": kind}, "config.json")


def test_unknown_layer_types_and_lists_of_the_wrong_length_are_refused():
    with pytest.raises(ConfigError, match="unknown layer types hyena"):
        checkpoint_of(LLAMA | {"layer_types": ["full_attention"] * 31 + ["hyena"]}, "config.json")
    with pytest.raises(ConfigError, match="31 layer types for num_hidden_layers = 32"):
        checkpoint_of(LLAMA | {"layer_types": ["full_attention"] * 31}, "config.json")


def test_query_heads_stand_in_for_kv_heads_only_where_the_family_does_that():
    rest = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert checkpoint_of(rest, "config.json").layers[0].kv.kv_heads == 32
    with pytest.raises(ConfigError, match="'num_key_value_heads' is missing"):
        checkpoint_of(rest | {"model_type": "mistral"}, "config.json")


def test_the_text_part_of_a_multimodal_config_counts_and_its_tower_is_weighed():
    tower = {"depth": 2, "hidden_size": 10, "intermediate_size": 40}
    outer = {"model_type": "qwen3_vl", "text_config": LLAMA | {"model_type": "qwen3"}, "vision_config": tower}
    found = checkpoint_of(outer | {"tie_word_embeddings": False}, "config.json")
    assert found.params.other == 2 * (4 * 100 + 2 * 400)
    assert "vision tower" in found.uncertain[0]


def test_kv_sharing_and_cross_layer_attention():
    shared = checkpoint_of(LLAMA | {"num_kv_shared_layers": 12}, "config.json")
    assert [layer.shares_kv for layer in shared.layers] == [False] * 20 + [True] * 12
    crossed = checkpoint_of(LLAMA | {"use_cla": True, "cla_share_factor": 2}, "config.json")
    assert [layer.shares_kv for layer in crossed.layers] == [False, True] * 16


@pytest.mark.parametrize(
    ("quantised", "weights"),
    [
        (None, None),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "fp8"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
            "int4",
        ),
    ],
)
def test_weights_are_read_from_the_config(quantised, weights):
    assert weights_of({"quantization_config": quantised}) == weights


def test_an_unknown_quantisation_is_refused():
    with pytest.raises(ConfigError, match="'hqq'"):
        weights_of({"quantization_config": {"quant_method": "hqq"}})


@pytest.mark.parametrize(
    ("name", "shapes", "weights"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.1-70B", "fp8-dynamic"),
        ("qwen3.8-27b", "Qwen/Qwen3.5-27B", None),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B", "int4"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b", "mxfp4"),
        ("nvidia/DeepSeek-V3.2-NVFP4", "deepseek-ai/DeepSeek-V3.2", "nvfp4"),
    ],
)
def test_names_lead_to_shapes_and_weights(name, shapes, weights):
    found = find_checkpoint(name, FACTS)
    assert shapes in found.name
    assert found.weights == weights


def test_an_unknown_name_is_refused_with_what_is_near():
    with pytest.raises(ConfigError, match=r"no model of that name is known; near it are .*Qwen3-14B"):
        find_checkpoint("Qwen/Qwen3-15B", FACTS)
    with pytest.raises(ConfigError, match="there is no such file"):
        find_checkpoint("nowhere/config.json", FACTS)


def test_a_config_is_read_from_a_file_and_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for place in (tmp_path, tmp_path / "config.json"):
        assert find_checkpoint(str(place), FACTS).params.total == 8_030_261_248
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        find_checkpoint(str(tmp_path), FACTS)


def test_every_family_says_what_it_needs_when_given_nothing():
    for kind in FAMILIES:
        with pytest.raises(ConfigError, match=r"is missing"):
            checkpoint_of({"model_type": kind}, "config.json")
