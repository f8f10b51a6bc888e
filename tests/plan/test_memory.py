"""plan/memory.py: worked examples with known answers, each engine's own arithmetic, and refusals."""

from fractions import Fraction

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.blocks import BlockRequest, LayerKind, plan_blocks
from hitsend.plan.cells import window_cells
from hitsend.plan.explain import advise, document
from hitsend.plan.formats import kv_bytes
from hitsend.plan.versions import group_slack, has_new_log
from tests.plan.asked import GIB, answer, ask, whole

QWEN = "Qwen3.8-27B"


def per_token(model, **more):
    return whole(ask(model, **more).stage.kv_bytes_per_token)


def test_bytes_per_token_of_published_examples():
    assert per_token("Llama-3.1-70B") == answer("kv-llama31-70b-128k")["bytes_per_token"]
    assert per_token("Llama-3.1-70B") * 131_072 / GIB == answer("kv-llama31-70b-128k")["gib"]
    assert per_token("Llama-3.1-70B") * 128_000 / GIB == pytest.approx(answer("kv-llama31-70b-128000")["gib"], abs=0.01)
    assert per_token("Llama-3.1-405B") == answer("kv-llama31-405b-128k")["bytes_per_token"]
    assert per_token("Llama-3-8B") == answer("kv-llama3-8b")["bytes_per_token"]
    assert per_token("opt-13b", max_model_len=2048) == answer("kv-opt-13b")["bytes_per_token"]
    assert per_token("Llama-2-7b") == answer("kv-llama2-7b")["bytes_per_token"]
    assert per_token("DeepSeek-V3") == answer("kv-dsv3")["bytes_per_token"]
    assert per_token("DeepSeek-V3") * 163_840 / GIB == pytest.approx(answer("kv-dsv3")["gib_at_163840"], abs=0.01)
    assert per_token("Kimi-K2.5") * 262_144 / GIB == pytest.approx(answer("kv-kimi-k25")["gib"], abs=0.01)
    assert per_token(QWEN) == answer("kv-qwen35-27b")["bytes_per_token"]
    assert per_token("Qwen3-0.6B") * 40_960 / GIB == answer("kv-qwen3-0.6b")["gib"]


@pytest.mark.parametrize(("kv_dtype", "key"), [("bf16", "bf16"), ("fp8_ds_mla", "fp8_ds_mla"), ("fp8_e4m3", "fp8")])
def test_a_sparse_indexer_costs_132_bytes_a_token_and_layer(kv_dtype, key):
    assert per_token("DeepSeek-V3.2", kv_dtype=kv_dtype) == answer("kv-dsv32")[key]


def test_fp8_of_a_sparse_model_is_the_packed_row_but_on_blackwell():
    assert per_token("DeepSeek-V3.2", kv_dtype="fp8") == answer("kv-dsv32")["fp8_ds_mla"]
    assert per_token("DeepSeek-V3.2", kv_dtype="fp8", gpu="B200", tp=8, gib=100) == answer("kv-dsv32")["fp8"]


def test_a_latent_cache_is_on_every_rank_and_only_decode_context_divides_it():
    assert per_token("DeepSeek-V3", tp=8) == 70_272
    assert per_token("DeepSeek-V3", tp=8, dcp=8) == 70_272 // 8


def test_a_gguf_without_latent_tensors_keeps_every_head():
    plan = ask("DeepSeek-Coder-V2-Lite", engine="llama.cpp")
    assert whole(plan.stage.kv_bytes_per_token) == answer("kv-dscoder-nonmla")["mla_bytes_per_token"]
    packed = msgspec.structs.replace(plan.question.checkpoint, is_uncompressed_mla=True)
    from hitsend.plan.memory import plan_memory

    unpacked = plan_memory(msgspec.structs.replace(plan.question, checkpoint=packed))
    assert whole(unpacked.stage.kv_bytes_per_token) == answer("kv-dscoder-nonmla")["bytes_per_token"]


def test_elements_of_quantised_caches():
    assert kv_bytes("nvfp4") == answer("kv-nvfp4")["bytes_per_element"]
    assert kv_bytes("q8_0") == answer("kv-q8_0-q4_0")["q8_0"]
    assert kv_bytes("q4_0") == answer("kv-q8_0-q4_0")["q4_0"]
    with pytest.raises(ConfigError, match="--kv-dtype q9"):
        kv_bytes("q9")


def test_states_per_sequence():
    told = answer("state-qwen35-27b-llamacpp")
    assert ask(QWEN, engine="llama.cpp").stage.state_bytes == told["mib"] * 2**20
    assert ask(QWEN, engine="llama.cpp", drafts=2).stage.state_bytes == 3 * told["mib"] * 2**20
    told = answer("state-qwen35-27b-vllm")
    assert ask(QWEN).stage.state_bytes == 48 * told["bytes_per_layer"]
    assert ask("Qwen3-Coder-Next").stage.state_bytes == 39_518_208  # 16 bit: its config has no mamba_ssm_dtype
    assert ask("granite-4.0-h-tiny", engine="llama.cpp").stage.state_bytes == 58_060_800


def test_kv_heads_are_copied_once_there_are_fewer_than_ranks():
    assert per_token("Qwen3-235B-A22B", tp=4) == per_token("Qwen3-235B-A22B", tp=8) == 48_128


def test_an_fp8_checkpoint_keeps_a_16_bit_cache():
    assert per_token("Qwen3-235B-A22B-FP8") == per_token("Qwen3-235B-A22B")


def test_blocks_of_a_hybrid_on_two_ranks():
    told = answer("blk-qwen38-27b-tp2")
    plan = ask(QWEN, tp=2, gib=4.99, kv_dtype="fp8_e4m3", max_model_len=131_072, prefix_caching=True)
    assert plan.pool_tokens == told["tokens"]
    assert float(plan.stage.max_concurrency) == pytest.approx(told["concurrency"], abs=0.005)
    assert plan.stage.blocks.block_tokens["full"] == 1568


def test_blocks_with_drafts_have_padding_layers_and_more_copies():
    told = answer("blk-2xh200-27b-mtp")
    plan = ask("Qwen3.6-27B", tp=2, gib=110.59, max_model_len=184_320, prefix_caching=True, drafts=2)
    blocks = plan.stage.blocks
    assert (plan.pool_tokens, blocks.block_tokens["full"], blocks.request_blocks) == (told["tokens"], 800, 243)
    assert (blocks.padding_layers, blocks.state_copies) == (3, 4)


def test_blocks_of_windows_are_charged_for_a_whole_step():
    told = answer("blk-gemma4-31b")
    plan = ask("gemma-4-31B-it", gib=69.75, max_model_len=8192, engine_version="0.18.2")
    assert plan.stage.blocks.num_blocks == 28_569
    assert plan.pool_tokens == told["tokens_logged"]
    assert float(plan.stage.max_concurrency) == pytest.approx(told["concurrency"], abs=0.005)
    few = ask("gemma-4-31B-it", gib=69.75, max_model_len=8192, max_num_batched_tokens=1024)
    assert few.stage.max_concurrency > plan.stage.max_concurrency


def test_windows_keep_what_their_formula_says():
    gemma = ask("gemma-3-27b-it", engine="llama.cpp")
    held = gemma.stage.kv_bytes_per_token * 131_072 + gemma.stage.window_bytes
    assert held / GIB == pytest.approx(answer("kv-gemma3-27b")["gib"], abs=0.01)
    small = ask("gpt-oss-20b", engine="llama.cpp")
    held = 32 * (small.stage.kv_bytes_per_token * 8192 + small.stage.window_bytes)
    assert held / GIB == pytest.approx(answer("kv-gptoss20b-32x8192")["gib"], abs=0.01)
    large = ask("gpt-oss-120b", kv_dtype="fp8")
    held = large.stage.kv_bytes_per_token * 65_536 + large.stage.window_bytes
    assert held / GIB == pytest.approx(answer("kv-gptoss120b-65536-fp8")["gib"], abs=0.001)


def test_a_model_of_windows_alone_still_costs_something_a_token():
    plan = ask("Mistral-7B-v0.1")
    assert whole(plan.stage.kv_bytes_per_token) == 131_072
    assert plan.stage.window_bytes == 131_072 * 4096


@pytest.mark.parametrize(
    ("window", "sequences", "ubatch", "context", "cells"),
    [(128, 1, 512, 131_072, 768), (1024, 4, 512, 32_768, 4608), (128, 1, 128, 8192, 256), (512, 1, 512, 2**20, 1024),
     (4096, 4, 512, 8192, 8192)],
)  # fmt: skip
def test_llama_window_cells(window, sequences, ubatch, context, cells):
    assert window_cells(window, sequences, ubatch, context) == cells


def test_an_old_log_on_a_small_gpu():
    plan = ask("Llama-3.1-8B", gib=3.81, max_model_len=4096)
    assert plan.stage.blocks.num_blocks == pytest.approx(answer("max-seqs")["blocks_logged"], rel=0.002)
    assert int(plan.stage.max_concurrency) == answer("max-seqs")["seqs"]


def test_uneven_pipeline_stages_and_their_weights():
    plan = ask("Llama-3.1-405B", tp=8, pp=4, gpu="H200", gpu_memory_utilization=0.9)
    assert plan.stage.num_layers in (31, 32)
    assert plan.fits
    sizes = sum(
        whole_stage.weights_bytes for whole_stage in [plan.stage]
    )  # one stage of four holds about a quarter of an eighth
    assert sizes == pytest.approx(float(plan.whole_weights_bytes) / 32, rel=0.05)


def test_what_does_not_fit_says_what_breaks_and_what_would():
    found = document(ask("Llama-3.1-70B", gpu="H100", max_model_len=8192))
    assert found["fits"] is False
    assert found["max_concurrency"] == 0
    assert found["breaks_first"].startswith("the weights: 131.42 GiB")
    assert found["would_fit"] == {"longest_len": None, "smallest_tp": 2, "weights": "int4"}
    found = document(ask("Llama-3.1-8B", gib=1, max_model_len=131_072))
    assert found["breaks_first"] == "the cache: one sequence of 131,072 tokens doesn't fit into 1.00 GiB"
    assert found["would_fit"]["longest_len"] == 8192


def test_the_document_has_the_agreed_keys():
    found = document(ask(QWEN))
    assert {
        "weights_bytes", "kv_bytes_per_token", "state_bytes_per_sequence", "kv_pool_bytes", "kv_pool_tokens",
        "max_concurrency", "fits", "explain",
    } <= set(found)  # fmt: skip
    assert found["fits"] is None
    assert found["kv_pool_tokens"] is None
    assert found["weights_bytes"] == 2 * found["parameters"]["total"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"engine": "tgi"}, "--engine tgi"),
        ({"tp": 0}, "--tp is 0"),
        ({"tp": 7}, "doesn't divide the model's 24 attention heads"),
        ({"pp": 65}, "the model has 64 layers"),
        ({"tp": 4, "dcp": 3}, "--dcp is 3"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
        ({"max_model_len": 0}, "--max-model-len is 0"),
        ({"drafts": -2}, "--mtp is -2"),
        ({"weights": "int3"}, "--weights int3"),
        ({"weights": "gguf:Q9"}, "known GGUF types"),
    ],
)
def test_wrong_flags_are_named(more, said):
    with pytest.raises(ConfigError, match=said):
        ask(QWEN, **more)


def test_a_model_of_unknown_widths_has_a_cache_and_no_weights():
    plan = ask("sarvam-105b", tp=2, gib=24.25, max_model_len=10_000)
    assert plan.stage.weights_bytes is None
    assert plan.pool_tokens == pytest.approx(706_256, rel=0.01)
    with pytest.raises(ConfigError, match="its widths aren't known"):
        ask("sarvam-105b", tp=2, gpu="H200")


def test_windows_keep_the_tokens_of_two_steps_since_0_26():
    """google/gemma-4-31B-it on a GB300 with 0.26.0: 182.37 GiB, 217,116 tokens, 13.25x; 0.25 had counted one step."""
    new, old = (
        ask("gemma-4-31B-it", gib=182.37, engine_version=version, max_model_len=16_384, max_num_batched_tokens=8192)
        for version in ("0.26.0", "0.25.1")
    )
    assert float(new.stage.max_concurrency) == pytest.approx(13.25, abs=0.005)
    assert float(old.stage.max_concurrency) == pytest.approx(21.99, abs=0.005)


@pytest.mark.parametrize(("version", "groups"), [("0.11.2", 3), ("0.17.1", 3), ("0.18.0", 2), (None, 2)])
def test_a_few_more_layers_of_one_kind_are_padded_to_later_versions(version, groups):
    """gpt-oss-20b with four draft layers: 12 windows and 17 that read everything (vllm#36684)."""
    kinds = [LayerKind("full", 17, Fraction(2048)), LayerKind("sliding", 12, Fraction(2048), 128)]
    slack = group_slack(version)
    plan = plan_blocks(
        kinds, BlockRequest(available_bytes=2**30, max_model_len=4096, in_flight_tokens=1, group_slack=slack)
    )
    assert sum(plan.groups.values()) == groups
    assert slack == (Fraction(1) if version == "0.11.2" else Fraction(5, 4) if version == "0.17.1" else Fraction(3, 2))


def test_layers_that_cost_different_amounts_but_keep_the_same_share_a_group():
    kinds = [LayerKind("full", 3, Fraction(2048)), LayerKind("full 2", 1, Fraction(512))]
    plan = plan_blocks(kinds, BlockRequest(available_bytes=2**30, max_model_len=4096, in_flight_tokens=1))
    assert plan.num_blocks == 2**30 // (16 * (3 * 2048 + 512))
    assert plan.request_blocks == 256


@pytest.mark.parametrize(
    ("version", "is_new"),
    [("0.20.0", False), ("0.20.1rc1.dev16+g7a1eb8ac2", False), ("v0.20.1", True), ("0.24.0", True)],
)
def test_the_log_changed_with_0_20_1(version, is_new):
    """club-3090#91 prints 619,479 tokens with 0.20.1, #46 67,728 with a build on the way to it."""
    assert has_new_log(version) is is_new
    asked = {"tp": 2, "kv_dtype": "fp8", "drafts": 3, "prefix_caching": True, "max_model_len": 262_144}
    plan = ask("Qwen3.6-27B", gib=10.98, engine_version=version, **asked)
    assert plan.stage.blocks.num_blocks == 423
    assert plan.pool_tokens == (619_479 if is_new else 423 // 4 * 1600)


def test_what_a_hybrid_needs_and_how_long_it_may_be():
    """vllm#46778 on a 5090: 9.29 GiB for 262,144 tokens, 9.28 free, 260,800 would fit. Blocks of 1,600: 3 drafts."""
    asked = {"kv_dtype": "fp8", "drafts": 3, "prefix_caching": True, "max_model_len": 262_144}
    plan = ask("Qwen3.6-27B", gib=9.28, **asked)
    assert plan.stage.blocks.block_tokens["full"] == 1600
    assert float(plan.stage.blocks.needed_bytes) / GIB == pytest.approx(9.29, abs=0.005)
    assert advise(plan).longest_len == 260_800
