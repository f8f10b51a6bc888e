"""plan/training.py: the literature's numbers, and what must hold for any question."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.plan.training import (
    ALGORITHMS,
    CHINCHILLA_RATIO,
    DOUBLE_QUANT_BITS,
    OPTIMIZERS,
    SINGLE_QUANT_BITS,
    Chinchilla,
    TrainQuestion,
    adapter_params,
    base_bytes,
    lifetimes,
    plan_train,
    shape_of_model,
    shape_of_params,
    training_flops,
    training_hours,
    zero2_offload,
)
from tests.plan.asked import answer, known

GB, GIB = 10**9, 2**30
P75 = shape_of_params(7_500_000_000)
GPT3 = shape_of_params(175_000_000_000, layers=96, hidden=12_288, heads=96)


@pytest.mark.parametrize(("example", "gpus"), [("zero-7.5b-8", 8), ("zero-7.5b-64", 64)])
def test_zero_of_the_paper(example, gpus):
    told = answer(example)
    for stage, key in enumerate(("ddp", "stage1", "stage2", "stage3")):
        plan = plan_train(TrainQuestion(shape=P75, zero=stage, gpus=gpus))
        assert float(plan.memory.states) / GB == pytest.approx(told[key], rel=0.02)


def test_bytes_per_parameter():
    told = answer("adam-bytes")
    found = {"mixed": "adamw", "fp32": "adamw-fp32", "bf16": "adamw-bf16", "mixed_8bit": "adamw-8bit"}
    assert {key: OPTIMIZERS[name].total for key, name in found.items()} == told


def test_deepspeeds_own_estimate():
    told, params = answer("ds-zero2-est"), 2_851_000_000
    offloaded, kept = (zero2_offload(params, 8, offload=offload) for offload in (True, False))
    assert float(offloaded.gpu) / GIB == pytest.approx(told["gpu_offload_gb"], rel=0.01)
    assert float(offloaded.cpu) / GIB == pytest.approx(told["cpu_offload_gb"], rel=0.01)
    assert float(kept.gpu) / GIB == pytest.approx(told["gpu_no_offload_gb"], rel=0.01)


def test_activations_of_gpt3():
    told = answer("megatron-act")
    for checkpointing, key in (("none", "total_gib"), ("selective", "selective_gib"), ("full", "full_gib")):
        plan = plan_train(TrainQuestion(shape=GPT3, checkpointing=checkpointing, flash=False))
        assert float(plan.memory.activations) / GIB == pytest.approx(told[key], rel=0.01)


def test_lora_of_gpt3_and_qlora_of_65b():
    told = answer("lora-gpt3")
    lora = plan_train(TrainQuestion(shape=GPT3, method="lora", rank=4, checkpointing="full"))
    assert float(lora.memory.states) / GB == pytest.approx(told["lora_gb"], rel=0.01)
    full = plan_train(TrainQuestion(shape=shape_of_params(65_000_000_000), optimizer="adam-no-master"))
    assert float(full.memory.states) / GB == answer("qlora-65b")["full16_gb_more_than"]
    shape = shape_of_params(65_000_000_000, layers=80, hidden=8192, heads=64)
    small = plan_train(TrainQuestion(shape=shape, method="qlora", checkpointing="full", rank=64))
    assert float(small.memory.total) / GB < answer("qlora-65b")["fits_gb"]
    constants = answer("qlora-constants")
    assert float(SINGLE_QUANT_BITS) == constants["single_bit"]
    assert float(DOUBLE_QUANT_BITS) == pytest.approx(constants["double_bit"], abs=0.001)


def test_adapters_of_real_shapes():
    # Llama-3.1-8B, rank 16, all four attention matrices: 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    shape = shape_of_model(known("Llama-3.1-8B"))
    assert adapter_params(shape, 16) == 32 * 16 * (2 * 8192 + 2 * 5120)
    assert base_bytes(8, "lora") == 16


@pytest.mark.parametrize(
    ("example", "params", "tokens"),
    [
        ("chinchilla-flops", 70 * GB, 1400 * GB),
        ("gpt3-flops", 175 * GB, 300 * GB),
        ("llama3-405b-flops", 405 * GB, 15_600 * GB),
    ],
)
def test_six_n_d(example, params, tokens):
    found = training_flops(params, tokens)
    assert found == pytest.approx(answer(example)["flops"], rel=0.001)
    assert found == pytest.approx(answer(example)["paper"], rel=0.03)


def test_llama3s_own_time():
    """16,384 H100 at 38 to 43 %: 54 days (arXiv 2407.21783)."""
    hours = training_hours(3.8e25, gpus=16_384, peak_flops=989.4e12, mfu=0.4)
    assert 54 < hours / 24 < 80


def test_chinchillas_ratio_and_a_smaller_model_for_longer():
    assert answer("chinchilla-ratio")["ratio"] == CHINCHILLA_RATIO
    law = Chinchilla()
    loss = law.loss(70e9, 1.4e12)
    assert law.tokens_for(70e9, loss) == pytest.approx(1.4e12)
    idle, busy = (lifetimes(70 * GB, 1400 * GB, served, (1.0, 0.5)) for served in (0.0, 1e13))
    assert busy[1].total_flops < busy[0].total_flops
    assert idle[1].tokens > idle[0].tokens
    assert law.tokens_for(1e6, 1.8) is None


@pytest.mark.parametrize(("algorithm", "models"), [("sft", 1), ("dpo", 2), ("grpo", 2), ("ppo", 4)])
def test_copies_of_an_algorithm(algorithm, models):
    copies = ALGORITHMS[algorithm]
    assert copies.trained + copies.frozen == models
    plan = plan_train(TrainQuestion(shape=P75, algorithm=algorithm))
    assert plan.memory.states == 7_500_000_000 * (16 * copies.trained + 2 * copies.frozen)


def test_the_reference_of_an_adapter_is_the_base_itself():
    shape = shape_of_model(known("Llama-3.1-8B"))
    sft, dpo = (plan_train(TrainQuestion(shape=shape, method="lora", algorithm=name)) for name in ("sft", "dpo"))
    assert sft.memory.total == dpo.memory.total


@settings(max_examples=40, deadline=None)
@given(
    gpus=st.integers(1, 512),
    zero=st.integers(0, 2),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    method=st.sampled_from(("full", "lora", "qlora")),
)
def test_more_division_never_needs_more(gpus, zero, optimizer, method):
    shape = shape_of_params(GB, layers=10, hidden=1024, heads=8)
    less, more = (
        plan_train(TrainQuestion(shape=shape, zero=stage, gpus=gpus, optimizer=optimizer, method=method))
        for stage in (zero, zero + 1)
    )
    assert more.memory.total <= less.memory.total
    wider = plan_train(TrainQuestion(shape=shape, zero=zero, gpus=gpus + 1, optimizer=optimizer, method=method))
    assert wider.memory.total <= less.memory.total
    assert wider.communicated_bytes >= less.communicated_bytes


def test_what_is_sent():
    sent = [plan_train(TrainQuestion(shape=P75, zero=stage, gpus=64)).communicated_bytes for stage in range(4)]
    assert sent[0] == sent[1] == sent[2]
    assert sent[3] == sent[2] * 3 / 2


def test_questions_that_mean_nothing_are_refused():
    for more in ({"method": "half"}, {"optimizer": "magic"}, {"zero": 4}, {"gpus": 0}, {"algorithm": "x"}):
        with pytest.raises(ConfigError, match="--"):
            plan_train(TrainQuestion(shape=P75, **more))
    with pytest.raises(ConfigError, match="--mfu"):
        training_hours(1.0, gpus=1, peak_flops=1.0, mfu=0)
