"""plan/families.py, dialects.py, states.py and the names in plan/models.py: what users type, file or name."""

import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.config import checkpoint_of
from hitsend.plan.explain import explain
from hitsend.plan.formats import weight_format
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.models import find_checkpoint
from tests.plan.asked import FACTS, GIB, ask, known
from tests.plan.test_weights import gguf

HEADS = {"hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096}
KV = {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 2048, "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("XiaomiMiMo/MiMo-V2-Flash", 309),
        ("ai21labs/Jamba-v0.1", 51.6),
        ("tiiuae/Falcon-H1-34B-Instruct", 33.6),
        ("LiquidAI/LFM2-1.2B", 1.17),
        ("LiquidAI/LFM2-8B-A1B", 8.3),
        ("arcee-ai/Trinity-Mini", 26.1),
        ("zai-org/GLM-4.7-Flash", 29.9),
        ("zai-org/GLM-4-32B-0414", 32.6),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.8),
        ("bigcode/starcoder2-15b", 16.0),
        ("microsoft/phi-2", 2.78),
        ("microsoft/Phi-3.5-MoE-instruct", 41.9),
        ("tiiuae/falcon-40b", 41.3),
        ("state-spaces/mamba-2.8b-hf", 2.77),
        ("mistralai/Mamba-Codestral-7B-v0.1", 7.29),
        ("allenai/OLMoE-1B-7B-0125", 6.92),
        ("openai-community/gpt2", 0.124),
        ("EleutherAI/gpt-neox-20b", 20.6),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.89),
    ],
)
def test_a_familys_matrices_add_up_to_what_its_makers_say(model, billions):
    assert known(model).params.total / 1e9 == pytest.approx(billions, rel=0.02)


def test_windows_may_have_heads_of_their_own():
    """MiMo-V2: four heads of 192 and 128 where everything is read, eight in a window of 128."""
    model = known("MiMo-V2-Flash")
    full, windowed = model.layers[0].kv, model.layers[1].kv
    assert (full.kv_heads, full.key_dim, full.value_dim, full.window_tokens) == (4, 192, 128, None)
    assert (windowed.kv_heads, windowed.key_dim, windowed.value_dim, windowed.window_tokens) == (8, 192, 128, 128)
    assert [layer.kv.window_tokens for layer in model.layers].count(None) == 9


def test_mambas_first_version_keeps_a_state_for_every_channel():
    state = known("Jamba-v0.1").layers[0].state
    assert state.conv_channels == 8192
    assert state.matrix_values == 8192 * 16
    assert [layer.kv is not None for layer in known("Jamba-v0.1").layers].count(True) == 4
    alone = ask("mamba-2.8b-hf", gib=10, max_model_len=2048)
    assert alone.stage.kv_bytes_per_token == 0
    assert alone.stage.state_bytes == 64 * (3 * 5120 + 5120 * 16) * 2
    assert alone.stage.blocks.num_blocks == 10 * 2**30 // alone.stage.state_bytes


def test_attention_and_a_state_can_stand_in_one_layer():
    plan = ask("Falcon-H1-7B-Instruct", gib=20, max_model_len=8192)
    assert all(layer.kv and layer.state for layer in known("Falcon-H1-7B-Instruct").layers)
    assert plan.stage.kv_bytes_per_token == 44 * 2 * 2 * 128 * 2
    assert set(plan.stage.blocks.groups.values()) == {1}


@pytest.mark.parametrize(
    ("config", "cost"),
    [
        (
            {"model_type": "chatglm", "num_layers": 4, "kv_channels": 128, "multi_query_attention": True}
            | {"multi_query_group_num": 2, "ffn_hidden_size": 2048, "padded_vocab_size": 1000, "seq_length": 4096},
            4 * 2 * 2 * 128 * 2,
        ),
        ({"model_type": "falcon", "num_hidden_layers": 4, "multi_query": True}, 4 * 2 * 128 * 2),
        ({"model_type": "falcon", "num_hidden_layers": 4, "new_decoder_architecture": True, "num_kv_heads": 4}, 8192),
        ({"model_type": "gpt2", "n_embd": 1024, "n_head": 8, "n_layer": 4, "n_positions": 1024}, 4 * 2 * 1024 * 2),
        ({"model_type": "gpt_bigcode", "n_embd": 1024, "n_head": 8, "n_layer": 4, "multi_query": True}, 4 * 2 * 256),
        ({"model_type": "bloom", "n_layer": 4, "n_head": 8, "hidden_size": 1024}, 4 * 2 * 1024 * 2),
        ({"model_type": "qwen", "num_hidden_layers": 4, "kv_channels": 128, "intermediate_size": 4096}, 4 * 4096),
        ({"model_type": "exaone", "num_layers": 4, "num_key_value_heads": 2, "intermediate_size": 9}, 4 * 1024),
        ({"model_type": "jamba", "attn_layer_period": 4, "mamba_d_conv": 4, "mamba_d_state": 16} | KV, 2 * 512),
        ({"model_type": "lfm2", "full_attn_idxs": [2, 5], "conv_L_cache": 3} | KV, 2 * 512),
        ({"model_type": "mimo_v2", "hybrid_layer_pattern": [0] * 7 + [1], "sliding_window_size": 128} | KV, 7 * 512),
        ({"model_type": "afmoe", "global_attn_every_n_layers": 4, "sliding_window": 128} | KV, 2 * 512),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG", "sliding_window": 128} | KV, 2 * 512),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"model_type": "qwen3"} | KV}}, 8 * 512),
    ],
)
def test_configs_that_use_other_names_mean_the_same(config, cost):
    found = checkpoint_of(HEADS | config, "config.json")
    assert plan_memory(MemoryQuestion(checkpoint=found)).stage.kv_bytes_per_token == cost


def test_a_pattern_that_is_not_known_is_refused():
    odd = HEADS | KV | {"model_type": "exaone4", "sliding_window_pattern": "LGLG", "sliding_window": 128}
    with pytest.raises(ConfigError, match="sliding_window_pattern is 'LGLG'"):
        checkpoint_of(odd, "config.json")
    with pytest.raises(ConfigError, match="3 layer types for num_hidden_layers = 8"):
        checkpoint_of(HEADS | KV | {"model_type": "mimo_v2", "hybrid_layer_pattern": [0, 1, 1]}, "config.json")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("gemma3:27b", "google/gemma-3-27b-it"),
        ("phi4", "microsoft/phi-4"),
        ("deepseek-r1:32b", "Qwen/Qwen2.5-32B"),
        ("google/gemma-3-12b-it-qat-q4_0-gguf", "google/gemma-3-12b-it"),
        ("unsloth/Llama-3.3-70B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-70B"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_names_as_they_are_typed_find_their_shapes(typed, meant):
    assert meant in find_checkpoint(typed, FACTS).name


@pytest.mark.parametrize(
    ("typed", "context"),
    [
        ("Qwen3-30B-A3B", 40_960),
        ("Qwen3-30B-A3B-Instruct-2507-FP8", 262_144),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 262_144),
        ("Mistral-Small-24B-Instruct-2501", 32_768),
        ("Mistral-Small-3.1-24B-Instruct-2503", 131_072),
        ("Devstral-Small-2505", 131_072),
        ("GLM-4.6", 202_752),
    ],
)
def test_later_releases_of_one_shape_have_their_own_context(typed, context):
    assert find_checkpoint(typed, FACTS).context == context


def test_a_fine_tune_says_whose_shapes_it_got_and_a_draft_head_gets_none():
    tuned = find_checkpoint("NousResearch/Hermes-3-Llama-3.1-8B", FACTS)
    assert "which its name ends in" in tuned.uncertain[-1]
    with pytest.raises(ConfigError, match="no model of that name is known"):
        find_checkpoint("someone/eagle3-Llama-3.1-8B", FACTS)


LAYERS = {"block_count": 8, "embedding_length": 1024, "attention.head_count": 8, "context_length": 1024}
SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 2048, "ssm.state_size": 16, "ssm.time_step_rank": 32}


@pytest.mark.parametrize(
    ("typed", "weights", "gib"),
    [
        ("Qwen3-32B-Q4_K_M", "gguf:Q4_K_M", 18.65),
        ("qwen3:32b-q4_K_M", "gguf:Q4_K_M", 18.65),
        ("unsloth/Qwen3-32B-GGUF:UD-Q4_K_XL", "gguf:Q4_K_M", 18.65),
        ("Qwen3-32B-UD-IQ2_XXS", "gguf:IQ2_XXS", 9.08),
        ("Qwen/Qwen3-32B-GGUF:Q8_0", "gguf:Q8_0", 32.42),
        ("Qwen3-32B-FP8", "fp8", 31.96),
    ],
)
def test_a_file_type_in_a_name_is_the_format_of_the_weights(typed, weights, gib):
    plan = ask(typed, engine="llama.cpp")
    assert plan.weights == weights
    assert plan.stage.weights_bytes / GIB == pytest.approx(gib, rel=0.005)
    is_sure = not any("the nearest known" in said for said in plan.question.checkpoint.uncertain)
    assert is_sure is ("XL" not in typed)


def test_a_file_type_is_a_weight_format_with_and_without_its_prefix():
    assert weight_format("q4_k_m") == weight_format("gguf:Q4_K_M")
    with pytest.raises(ConfigError, match="--weights Q9_Z: known GGUF types"):
        weight_format("Q9_Z")


def test_what_an_engine_has_not_is_said_beside_the_plan():
    said = "\n".join(explain(ask("Qwen3-32B", kv_dtype="q8_0", drafts=1)))
    assert "vllm has no cache in q8_0" in said
    assert "no layers that draft" in said
    said = "\n".join(explain(ask("Qwen3.8-27B", engine="llama.cpp", kv_dtype="q8_0", drafts=1)))
    assert "has no cache" not in said
    assert "no layers that draft" not in said


@pytest.mark.parametrize(
    ("architecture", "numbers", "cost", "state"),
    [
        ("mamba", {"attention.head_count": 0} | SSM, 0, 8 * (3 * 2048 + 2048 * 16) * 4),
        ("falcon-h1", {"attention.head_count_kv": 2, "ssm.group_count": 1} | SSM, 8192, 8 * (3 * 2080 + 32768) * 4),
        ("lfm2", {"attention.head_count_kv": 0, "shortconv.l_cache": 3}, 0, 8 * 2 * 1024 * 4),
        ("jamba", {"attention.head_count_kv": 0} | SSM, 0, 8 * (3 * 2048 + 2048 * 16) * 4),
        ("olmo2", {"attention.head_count_kv": 2}, 8 * 1024, 0),
    ],
)
def test_ggufs_of_these_families_keep_what_libllama_keeps(tmp_path, architecture, numbers, cost, state):
    found = find_checkpoint(gguf(tmp_path / "a.gguf", architecture, LAYERS | numbers), FACTS)
    plan = plan_memory(MemoryQuestion(checkpoint=found, engine="llama.cpp"))
    assert (plan.stage.kv_bytes_per_token, plan.stage.state_bytes) == (cost, state)


def test_layers_that_share_and_layers_in_chunks_in_a_gguf(tmp_path):
    gemma = {"block_count": 30, "attention.head_count_kv": 2, "attention.sliding_window": 512}
    found = find_checkpoint(gguf(tmp_path / "a.gguf", "gemma3n", LAYERS | gemma), FACTS)
    assert [layer.shares_kv for layer in found.layers] == [False] * 20 + [True] * 10
    assert [layer.kv.window_tokens for layer in found.layers[:5]] == [512] * 4 + [None]
    llama = {"attention.head_count_kv": 2}
    chunked = find_checkpoint(gguf(tmp_path / "b.gguf", "llama4", LAYERS | llama), FACTS)
    assert [layer.kv.window_tokens for layer in chunked.layers[:4]] == [8192] * 3 + [None]
