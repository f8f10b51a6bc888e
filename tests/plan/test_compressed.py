"""plan/compressed.py and the pooled indexer in plan/blocks.py: DeepSeek-V4 and GLM-5.3-Flash, as vLLM logged them."""

from fractions import Fraction

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.config import checkpoint_of
from hitsend.plan.explain import advise, document, explain
from hitsend.plan.memory import MemoryQuestion, plan_memory
from hitsend.plan.roofline import attention_flops
from hitsend.plan.sizes import latent_row_bytes
from tests.plan.asked import FACTS, GIB, ask, known

V4 = next(model.config for model in FACTS.models if model.name.endswith("V4-Flash"))


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    # the makers' own 1.6 T and 49 B, 284 B and 13 B (model cards)
    [("DeepSeek-V4-Pro", 1573, 48.9), ("DeepSeek-V4-Flash", 284, 13.3)],
)
def test_parameters_are_what_their_makers_say(model, billions, active):
    params = known(model).params
    assert params.total / 1e9 == pytest.approx(billions, rel=0.005)
    assert params.active / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("model", "version", "gib", "length", "batch", "tokens"),
    [
        ("DeepSeek-V4-Pro", "v0.20.2", 21.4705, 800_000, 512, 3_731_334),
        ("DeepSeek-V4-Pro", "v0.20.2", 13.848, 8192, 8192, 27_042),
        # a report about compressors' sizes on eight RTX PRO 5000
        ("DeepSeek-V4-Flash", "0.22.1rc1", 37.9325, 256_000, 8192, 2_497_693),
        # a guide to five models on eight H100: two steps of 8,192 tokens are in flight
        ("DeepSeek-V4-Flash-0731", "0.31.1rc1.dev50", 47.4289, 262_144, 8192, 1_728_531),
    ],
)
def test_compressed_pools_are_the_logged_ones(model, version, gib, length, batch, tokens):
    """The free bytes are printed with two decimals; these are within them."""
    plan = ask(
        model,
        tp=8,
        gib=gib,
        engine_version=version,
        kv_dtype="fp8",
        max_model_len=length,
        max_num_batched_tokens=batch,
    )
    assert plan.pool_tokens == tokens
    assert set(plan.stage.blocks.groups) == {"compressed", "window", "compressor 4", "compressor 128"}
    assert sum(plan.stage.blocks.groups.values()) == 5


@pytest.mark.parametrize(
    ("version", "gib", "length", "tokens"),
    [("0.26.0", 7.7124, 121_344, 150_992), ("0.25.0", 7.0065, 912_128, 1_009_661)],
)
def test_the_older_sum_holds_until_0_26_with_two_steps_in_flight(version, gib, length, tokens):
    """vllm#51041, two H20 with MTP. The second pool's version isn't 0.26.0, as is said there, but an older one's."""
    shape = {"kv_dtype": "fp8", "max_model_len": length, "max_num_batched_tokens": 8192, "drafts": 1}
    assert ask("DeepSeek-V4-Flash", tp=2, gib=gib, engine_version=version, **shape).pool_tokens == tokens


def test_the_check_at_the_start_takes_all_groups_blocks():
    """vllm#44376: 6.66 GiB for 30,000 tokens where 5.44 are free, and 13,528 would fit; steps of 16,384."""
    shape = {"kv_dtype": "fp8", "engine_version": "0.22.0", "max_num_batched_tokens": 16_384}
    refused = ask("DeepSeek-V4-Flash", tp=2, gib=5.4415, max_model_len=30_000, **shape)
    assert float(refused.stage.blocks.needed_bytes) / GIB == pytest.approx(6.66, abs=0.005)
    assert refused.fits is False
    assert advise(refused).longest_len == 13_528
    assert "at its start vLLM wants 6.66 GiB for it" in "\n".join(explain(refused))
    # the pool's own sum would say that more fit
    assert refused.stage.max_concurrency > 0.9
    fits = ask("DeepSeek-V4-Flash", tp=2, gib=5.4415, max_model_len=13_528, **shape)
    assert fits.fits


def test_the_number_of_blocks_is_the_one_that_was_allocated():
    """The same report prints it beside the exact bytes."""
    asked = MemoryQuestion(
        checkpoint=known("DeepSeek-V4-Flash"),
        engine_version="0.22.1rc1",
        max_model_len=256_000,
        available_kv_bytes=42_566_892_135,
    )
    assert plan_memory(asked).stage.blocks.num_blocks == 40_471
    # later versions leave out the pages that no group fills
    later = plan_memory(msgspec.structs.replace(asked, engine_version="0.23.0")).stage.blocks
    assert later.num_blocks == 42_566_892_135 // 1_039_680
    # and since 0.27 a block is as large as its largest group: the stride that a report of August 2026 printed
    dense = plan_memory(msgspec.structs.replace(asked, engine_version="0.27.1")).stage.blocks
    assert dense.num_blocks == 42_566_892_135 // 1_002_240


def test_the_stride_of_pro_is_the_one_that_its_authors_measured():
    """vllm#48993: 1,315,008 bytes with an indexer of 68 bytes a key; ours has 132, so 30 pages of 8,640 for 4,608."""
    plan = ask("DeepSeek-V4-Pro", gib=100, engine_version="0.31.0", max_model_len=8192).stage.blocks
    assert plan.page_bytes * plan.group_layers == 1_315_008 + 30 * (8640 - 4608)


def test_what_a_token_costs_where_tokens_are_compressed():
    plan = ask("DeepSeek-V4-Flash", tp=8, max_model_len=8192)
    assert plan.stage.kv_bytes_per_token == Fraction(584 + 132, 4) * 21 + Fraction(584, 128) * 20
    assert plan.whole_kv_bytes_per_token == plan.stage.kv_bytes_per_token
    assert "(584 B (packed) + 128 + 4 B indexer) / 4 tokens" in "\n".join(document(plan)["explain"])
    # two layers have a window alone, the others one beside what is compressed, and sums that have begun
    windows = 43 * 128 * 584
    sums = 21 * 8 * 2 * 2 * (512 + 128) * 4 + 20 * 128 * 2 * 512 * 4
    assert plan.stage.window_bytes == windows + sums


def test_compressed_tokens_are_read_once_for_several():
    model = known("DeepSeek-V4-Flash")
    prompt = 2**20
    width = 64 * 1024
    reach = prompt / 2
    read = 2 * 128 + 21 * (reach / 4 + 128) + 20 * (reach / 128 + 128)
    assert attention_flops(model, prompt) == pytest.approx(2 * prompt * read * width)
    # a prompt shorter than the window is read as it is
    assert attention_flops(model, 64) == pytest.approx(2 * 64 * 32 * 43 * width)
    assert latent_row_bytes(model.layers[2].kv, "auto") == 584


def test_a_longer_sequence_or_a_bigger_batch_never_takes_less():
    def blocks(length, batch):
        plan = ask("DeepSeek-V4-Flash", gib=30, max_model_len=length, max_num_batched_tokens=batch)
        return plan.stage.blocks.request_blocks

    lengths = [blocks(length, 2048) for length in (256, 4096, 65_536, 1_048_576)]
    batches = [blocks(131_072, batch) for batch in (256, 2048, 8192, 32_768)]
    assert lengths == sorted(lengths)
    assert batches == sorted(batches)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compress_ratios": [4] * 42}, "compress_ratios has 42 entries, needed is one per layer \\(43\\)"),
        ({"compress_ratios": [4] * 42 + [16]}, "compress_ratios\\[42\\] is 16, known are 0, 4 or 128"),
        ({"compress_ratios": None}, "compress_ratios has 0 entries"),
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"index_head_dim": None}, "'index_head_dim' is missing"),
        ({"o_lora_rank": None}, "'o_lora_rank' is missing"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim is 512, needed is less than head_dim"),
    ],
)
def test_what_a_compressed_config_lacks_is_named(change, said):
    with pytest.raises(ConfigError, match=said):
        checkpoint_of(V4 | change, "config.json")


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"engine": "sglang"}, "--engine sglang: how it keeps the compressed tokens"),
        ({"kv_dtype": "bf16"}, "--kv-dtype bf16: .* needed is fp8 or auto"),
        ({"dcp": 2, "tp": 2}, "--dcp is 2"),
    ],
)
def test_what_is_not_known_of_a_compressed_cache_is_refused(question, said):
    with pytest.raises(ConfigError, match=said):
        ask("DeepSeek-V4-Flash", max_model_len=8192, **question)


def test_a_stage_that_compresses_nothing_is_refused():
    plain = checkpoint_of(V4 | {"compress_ratios": [0] * 43}, "config.json")
    with pytest.raises(ConfigError, match="no layer of this stage compresses"):
        plan_memory(MemoryQuestion(checkpoint=plain, max_model_len=8192, available_kv_bytes=2**34))


@pytest.mark.parametrize(
    ("tp", "gib", "length", "caching", "tokens", "blocks"),
    [
        (8, 81.793, 131_072, True, 7_228_559, 205 + 4 * 2 + 1),
        # the same model without prefix caching
        (8, 28.73, 262_144, False, 2_618_281, 410 + 4 + 1),
    ],
)
def test_a_pooled_indexer_beside_recurrent_layers_is_as_logged(tp, gib, length, caching, tokens, blocks):
    plan = ask("GLM-5.3-Flash", tp=tp, gib=gib, max_model_len=length, prefix_caching=caching, engine_version="0.28.1")
    assert plan.pool_tokens == tokens
    assert plan.stage.blocks.request_blocks == blocks


@pytest.mark.parametrize(
    ("tp", "kv_dtype", "block"), [(8, "auto", 640), (4, "auto", 1152), (1, "auto", 4352), (4, "fp8", 1664)]
)
def test_its_blocks_are_the_ones_that_the_log_says(tp, kv_dtype, block):
    plan = ask("GLM-5.3-Flash", tp=tp, gib=40, kv_dtype=kv_dtype, max_model_len=131_072, engine_version="0.28.1")
    assert plan.stage.blocks.block_tokens["full"] == block


def test_its_tokens_and_states():
    plan = ask("GLM-5.3-Flash", tp=8, gib=40, max_model_len=131_072)
    assert plan.stage.kv_bytes_per_token == 11 * (512 * 2 + Fraction(132, 4))
    assert plan.stage.state_bytes == 34 * (3 * 3 * 8 * 128 * 2 + 8 * 128 * 128 * 4)
    assert "(128 + 4 B indexer) / 4 tokens" in "\n".join(document(plan)["explain"])
    # as loaded: 38.24 GiB of each of eight
    assert float(plan.stage.weights_bytes) / 2**30 == pytest.approx(38.24, rel=0.02)
