"""plan/config.py, gemma.py, patterns.py, keys.py: uncommon architectures, and configs that can't be right."""

import json

import pytest
from typer.testing import CliRunner

from hitsend.cli.plan import app
from hitsend.core.errors import ConfigError
from hitsend.plan.config import checkpoint_of
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.models import find_checkpoint
from hitsend.plan.sizes import Ranks, expert_share
from tests.plan.asked import FACTS, ask, known

PLAIN = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "intermediate_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
GEMMA_3N = {
    "model_type": "gemma3n_text", "num_hidden_layers": 35, "hidden_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262_400, "intermediate_size": [16_384] * 35,
    "sliding_window": 512, "max_position_embeddings": 32_768, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
}  # fmt: skip
GEMMA_4_E2B = {
    "model_type": "gemma4_text", "num_hidden_layers": 35, "hidden_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262_144,
    "intermediate_size": 6144, "sliding_window": 512, "max_position_embeddings": 131_072,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}  # fmt: skip
# shapes as its training's command line, its modelling code's defaults (transformers) and its model card have them
BAMBA = {
    "model_type": "bamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "intermediate_size": 14_336, "mamba_d_conv": 4,
    "mamba_d_state": 128, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_n_groups": 1,
    "attn_layer_indices": [9, 18, 27], "tie_word_embeddings": False, "max_position_embeddings": 262_144,
}  # fmt: skip
# as an accelerator vendor's tests of the model have it; arXiv 2411.02265 rounds the vocabulary to 128 K
HUNYUAN = {
    "model_type": "hunyuan", "num_hidden_layers": 64, "hidden_size": 6400, "num_attention_heads": 80,
    "num_key_value_heads": 8, "vocab_size": 129_024, "intermediate_size": 18_304, "num_experts": 16, "moe_topk": 1,
    "num_shared_expert": 1, "use_cla": True, "cla_share_factor": 2, "max_position_embeddings": 131_072,
    "use_qk_norm": True, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        # Gemma 3n E4B: 7.85 in all with 0.3 of vision and 0.68 of audio; E2B: 5.44 (model cards, safetensors index)
        (GEMMA_3N, 6.87, None),
        (
            GEMMA_3N | {"num_hidden_layers": 30, "intermediate_size": [8192] * 30, "num_kv_shared_layers": 10},
            4.46,
            None,
        ),
        # Gemma 4 E2B: 2.3 effective, 5.1 with tables and towers (model card)
        (GEMMA_4_E2B, 4.65, 2.30),
        # Bamba-9B: 9.78 (model card)
        (BAMBA, 9.78, None),
        # Hunyuan-Large: 389 and 52 (arXiv 2411.02265)
        (HUNYUAN, 388.96, 51.58),
    ],
)
def test_parameters_are_what_their_makers_say(config, billions, active):
    params = checkpoint_of(config, "config.json").params
    assert params.total / 1e9 == pytest.approx(billions, abs=0.01)
    if active is not None:
        assert params.active / 1e9 == pytest.approx(active, abs=0.01)


def test_layers_that_share_keys_and_values_keep_nothing():
    shared = {**GEMMA_3N, "num_kv_shared_layers": 15}
    keeps = [layer.kv is not None and not layer.shares_kv for layer in checkpoint_of(shared, "c").layers]
    assert keeps == [True] * 20 + [False] * 15
    crossed = [layer.shares_kv for layer in checkpoint_of(HUNYUAN, "c").layers]
    assert crossed == [False, True] * 32


def test_query_heads_that_differ_from_layer_to_layer():
    # Laguna S 2.1: 118 B in all, 8 B of them active (model card)
    laguna = known("Laguna-S-2.1")
    assert laguna.params.total / 1e9 == pytest.approx(117.6, abs=0.1)
    assert laguna.params.active / 1e9 == pytest.approx(8.1, abs=0.1)
    assert {layer.kv.heads for layer in laguna.layers} == {48, 72}
    assert ask("Laguna-S-2.1", tp=8, max_model_len=8192).stage.kv_bytes_per_token == 12 * 2 * 128 * 2
    with pytest.raises(ConfigError, match="--tp is 16, which doesn't divide the model's 72 attention heads"):
        ask("Laguna-S-2.1", tp=16, max_model_len=8192)
    with pytest.raises(ConfigError, match="num_attention_heads_per_layer has no number above 0 for layer 2"):
        checkpoint_of(PLAIN | {"num_attention_heads_per_layer": [8, 8]}, "config.json")


def test_a_recurrent_head_that_the_config_leaves_to_the_code():
    told, left = (BAMBA | {"mamba_d_head": value} for value in (64, None))
    assert checkpoint_of(told, "c").layers == checkpoint_of(left, "c").layers == checkpoint_of(BAMBA, "c").layers
    with pytest.raises(ConfigError, match="mamba_d_head is 'auto', and 8192 / 100 is no whole number"):
        checkpoint_of(BAMBA | {"mamba_n_heads": 100}, "c")
    with pytest.raises(ConfigError, match="mamba_head_dim is 'wide'"):
        checkpoint_of(BAMBA | {"mamba_d_head": "wide"}, "c")
    without = {key: value for key, value in BAMBA.items() if key not in {"mamba_d_head", "mamba_expand"}}
    with pytest.raises(ConfigError, match="'mamba_head_dim' is missing"):
        checkpoint_of(without, "c")


def test_a_table_that_is_only_looked_up_is_held_and_not_multiplied():
    with_table, without = (
        checkpoint_of(GEMMA_4_E2B | {"hidden_size_per_layer_input": width}, "c").params for width in (256, 0)
    )
    table = 262_144 * 256 * 35
    assert with_table.other == table
    assert with_table.active - without.active < 0.05 * table


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, the most is 10,000"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which doesn't divide the 8"),
        ({"num_key_value_heads": 16}, "num_key_value_heads is 16"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, needed is fewer than the 4"),
        ({"text_config": [1]}, "text_config is \\[1\\], needed is an object"),
        ({"quantization_config": [1]}, "quantization_config is \\[1\\], needed is an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0"),
        ({"attn_layer_indices": [4]}, "attn_layer_indices names layer 4 of 4"),
        ({"attn_layer_indices": "all"}, "attn_layer_indices is all, needed is a list"),
        ({"intermediate_size": [512, 512]}, "intermediate_size has no whole number for layer 2"),
        ({"intermediate_size": [512, 512, 0, 512]}, "intermediate_size\\[2\\] is 0"),
        ({"linear_attn_config": {"full_attn_layers": "all"}}, "full_attn_layers is all"),
        ({"model_type": "qwen3_next", "full_attention_interval": 0}, "full_attention_interval is 0"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3},
            "mlp_only_layers",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9, there are 8",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [1]},
            "moe_layer_freq",
        ),
        ({"model_type": "mllama"}, "'mllama' and won't guess"),
    ],
)
def test_what_can_t_be_right_is_named(change, said):
    with pytest.raises(ConfigError, match=said):
        checkpoint_of(PLAIN | change, "config.json")


def test_experts_in_some_layers_only():
    some = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 0, 1]}
    found = checkpoint_of(PLAIN | some, "c")
    assert [bool(layer.params.routed_experts) for layer in found.layers] == [False, True, False, True]


MOES = ("DeepSeek-V3", "Qwen3-235B-A22B", "gpt-oss-120b")


@pytest.mark.parametrize("model", MOES)
@pytest.mark.parametrize("tp", [1, 2])
def test_groups_of_ranks_divide_experts_and_nothing_else(model, tp):
    asked = MemoryQuestion(checkpoint=known(model), ranks=Ranks(tp))
    plans = [plan_memory(_with(asked, Ranks(tp, dp=dp, ep=ep))) for dp in (1, 2, 4, 8) for ep in (False, True)]
    held = [plan.stage.weights_bytes for plan in plans[::2]]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4
    one = plans[0]
    for plan in plans:
        ranks = plan.question.ranks
        assert plan.stage.kv_bytes_per_token == one.stage.kv_bytes_per_token
        # experts divide evenly over so many ranks, so that whole ones take what parts of all take
        routed = (one.stage.weights_bytes - plan.stage.weights_bytes) / (
            1 - expert_share(Ranks(1, dp=ranks.dp), 1) or 1
        )
        assert ranks.dp == 1 or routed == (one.stage.weights_bytes - plans[2].stage.weights_bytes) * 2
        assert plan.whole_weights_bytes == one.whole_weights_bytes


def _with(question, ranks):
    return MemoryQuestion(checkpoint=question.checkpoint, ranks=ranks)


def test_whole_experts_that_don_t_divide_lie_heavier_on_one_rank():
    assert expert_share(Ranks(3), 8) < expert_share(Ranks(3, ep=True), 8) * 8 / 8
    assert expert_share(Ranks(3, ep=True), 8) * 8 == 3


def test_a_dense_model_in_groups_is_copies():
    one, four = (plan_memory(MemoryQuestion(checkpoint=known("Llama-3.1-8B"), ranks=Ranks(2, dp=dp))) for dp in (1, 4))
    assert one.stage == four.stage


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("memory --dp 0", "--dp is 0, needed is 1 to 4,096"),
        ("memory --tp 99999999", "--tp is 99999999, needed is 1 to 4,096"),
        ("memory --ep", "--ep: meta-llama/Llama-3.1-8B has no experts"),
        ("memory --tp 2 --dcp 2", "--dcp is 2: meta-llama/Llama-3.1-8B has no latent cache"),
        ("memory --available-kv-gib nan", "--available-kv-gib is nan"),
        ("memory --available-kv-gib 1e300", "--available-kv-gib is 1e+300"),
        ("memory --max-num-seqs 0", "--max-num-seqs is 0"),
        ("memory --mtp 1000", "--mtp is 1000, needed is 0 to 64"),
        ("memory --max-model-len 99999999999999999999", "--max-model-len is 99999999999999999999"),
        ("speed --gpu H100 --drafts 1000", "--drafts is 1000, needed is 0 to 64"),
        ("speed --gpu H100 --draft-cost nan", "--draft-cost is nan, needed is 0 to 1"),
        ("speed --gpu H100 --batch 99999999999999", "--batch is 99999999999999"),
    ],
)
def test_flags_that_can_t_work_are_named_with_their_limit(words, said):
    ran = CliRunner().invoke(app, [*words.split(), "--model", "Llama-3.1-8B"])
    assert isinstance(ran.exception, ConfigError)
    assert said in str(ran.exception)


@pytest.mark.parametrize(
    "flag", ["--peak-rps inf", "--cold-start nan", "--cold-start 1e9", "--timing nan,1,1", "--safety 0"]
)
def test_a_fleet_s_flags_are_bounded(flag):
    words = {"--peak-rps": "1", "--slo-ttft": "1s", "--slo-tpot": "40ms", "--timing": "1,1,1"}
    name, value = flag.split()
    given = [word for pair in (words | {name: value}).items() for word in pair]
    ran = CliRunner().invoke(app, ["fleet", *given])
    assert isinstance(ran.exception, ConfigError)
    assert name in str(ran.exception)


def test_groups_are_in_the_document():
    words = "memory --model DeepSeek-V3 --weights fp8 --gpu H200 --dp 8 --ep --max-model-len 8192 --json"
    found = json.loads(CliRunner().invoke(app, words.split()).stdout)
    assert found["gpus"] == 8
    assert found["max_concurrency_whole"] == pytest.approx(8 * found["max_concurrency"], rel=1e-4)
    assert any("whole experts" in line for line in found["explain"])
    assert ask("DeepSeek-V3", tp=8).stage.weights_bytes < found["weights_bytes"] * 2


def test_an_index_that_names_nothing_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    (tmp_path / "model-1.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ConfigError, match="header is no object"):
        find_checkpoint(str(tmp_path), FACTS)
    index = tmp_path / "model.safetensors.index.json"
    for told in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}):
        index.write_text(json.dumps(told))
        with pytest.raises(ConfigError, match="weight_map is"):
            find_checkpoint(str(tmp_path), FACTS)
