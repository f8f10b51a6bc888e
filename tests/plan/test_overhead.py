"""plan/overhead.py: what a rank needs beside weights and cache, by engine version and GPU."""

import pytest

from hitsend.plan.hardware import find_gpu
from hitsend.plan.overhead import Step, default_batch_tokens, default_sequences, estimate_overhead, graph_bytes
from hitsend.plan.versions import default_share
from tests.plan.asked import FACTS, GIB, ask, known

LLAMA, QWEN, VISION = "Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B"


def activations(model, tokens, *, sequences=256, **more):
    return estimate_overhead(known(model), Step("vllm", tokens, sequences, **more)).activations


def test_a_steps_copies_and_its_logits_are_never_there_at_once():
    short, long = (activations(LLAMA, tokens, version="0.19.0") for tokens in (256, 20_000))
    assert short == round(256 * 128_256 * 16.4)  # the logits alone
    assert long == 20_000 * (4 * 4096 + 3 * 14_336) * 2  # the step alone
    assert activations(LLAMA, 300, version="0.19.0") == short


def test_an_encoders_batch_is_one_of_the_three():
    assert activations(VISION, 2048, version="0.20.1") == int(1.5 * GIB)
    assert activations(VISION, 100_000, version="0.20.1") > int(1.5 * GIB)


@pytest.mark.parametrize(("version", "each"), [("0.13.0", 38.6), ("0.17.1", 16.4), ("0.31.0", 6.5), (None, 6.5)])
def test_logits_took_more_when_sampling_sorted_them(version, each):
    assert activations(LLAMA, 256, version=version) == round(256 * 128_256 * each)


def test_the_second_runner_is_for_plain_dense_models():
    """One copy less graphs there; experts keep the first runner's."""
    step = Step("vllm", 16_384, 256, version="0.31.0")
    plain, experts = (estimate_overhead(known(name), step, graphs=GIB) for name in (LLAMA, QWEN))
    assert plain.activations == 16_384 * (4096 + 3 * 14_336) * 2
    assert (plain.graphs, experts.graphs) == (0, GIB)


@pytest.mark.parametrize(
    ("gpu", "version", "tokens", "sequences"),
    [
        ("H100", "0.19.0", 8192, 1024),
        ("H100", "0.27.1", 16_384, 1024),
        ("RTX 4090", "0.27.1", 2048, 256),
        ("A100 80GB", "0.19.0", 2048, 256),
        ("A100 80GB", "0.31.0", 16_384, 256),
        ("H100", "0.6.6", 4096, 1024),  # V0: the whole prompt
    ],
)
def test_a_steps_size_where_nobody_says(gpu, version, tokens, sequences):
    found = find_gpu(gpu, FACTS)
    assert default_batch_tokens("vllm", version, found, 4096) == tokens
    assert default_sequences("vllm", version, found) == sequences


def test_a_step_holds_an_image_whose_tokens_see_each_other():
    """vllm#42687: 2,048 failed to start; a log of 0.25.1 on an L40S has the pool that 2,496 give."""
    small, large = find_gpu("L40S", FACTS), find_gpu("H100", FACTS)
    mutual = [known(name).media_tokens for name in ("google/gemma-4-26B-A4B", "google/gemma-4-31B-it")]
    assert mutual == [2496, 2496]
    assert known("google/gemma-4-E4B-it").media_tokens == 0
    assert [default_batch_tokens("vllm", "0.25.1", gpu, 32_768, 2496) for gpu in (small, large)] == [2496, 8192]
    assert default_batch_tokens("sglang", None, small, 32_768, 2496) == 2048


def test_v0_computed_long_prompts_in_pieces():
    gpu = find_gpu("H100", FACTS)
    sizes = [default_batch_tokens("vllm", "0.6.6", gpu, length) for length in (1000, 32_768, 32_769)]
    assert sizes == [2048, 32_768, 2048]
    assert default_batch_tokens("vllm", "0.6.3", gpu, 131_072) == 512


def test_memory_shared_with_the_machine_counted_as_small_until_020():
    gpu = find_gpu("GB10", FACTS)
    assert [default_sequences("vllm", version, gpu) for version in ("0.13.0", "0.27.1")] == [256, 1024]


def test_ranks_keep_channels_and_some_versions_a_workspace():
    def links(**more):
        return estimate_overhead(known(QWEN), Step("vllm", 8192, 256, **more)).links / GIB

    assert links(version="0.20.0") == 0
    found = [links(tp=2, version=version) for version in ("0.13.0", "0.20.0", "0.26.0")]
    assert found == pytest.approx([0.8, 2.0, 0.8])
    assert links(tp=2, version="0.20.0", is_small=True) == pytest.approx(0.4)


def test_graphs_come_off_the_pool_since_021_and_the_share_rose_with_them():
    gpu = find_gpu("H100", FACTS)
    assert graph_bytes("vllm", "0.20.1", gpu) == 0
    assert graph_bytes("vllm", "0.21.0", gpu) > 0
    assert [default_share(version) for version in ("0.19.0", "0.21.0", None)] == [0.9, 0.92, 0.92]


def test_the_share_of_a_plan_is_its_versions():
    older, newer = (ask(LLAMA, gpu="L40S", engine_version=version) for version in ("0.19.0", "0.27.1"))
    assert newer.pool_tokens > older.pool_tokens
