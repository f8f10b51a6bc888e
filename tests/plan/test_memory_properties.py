"""plan/memory.py: what must grow grows, what must be conserved is conserved."""

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hitsend.plan.blocks import BlockRequest, LayerKind, plan_blocks
from hitsend.plan.memory import ENGINES, plan_memory
from hitsend.plan.sizes import stages
from tests.plan.asked import ask

MODELS = st.sampled_from(
    [
        "Llama-3.1-70B",
        "Qwen3.8-27B",
        "Qwen3.5-35B-A3B",
        "gemma-3-27b-it",
        "DeepSeek-V3.2",
        "gpt-oss-120b",
        "Mistral-7B-v0.1",
    ]
)
LENGTHS = st.integers(1, 131_072)


@settings(max_examples=25, deadline=None)
@given(MODELS, st.sampled_from(ENGINES), LENGTHS, LENGTHS, st.floats(0.5, 200))
def test_longer_sequences_are_never_more_at_once(model, engine, one, other, gib):
    short, long = sorted((one, other))
    first, second = (ask(model, engine=engine, gib=gib, max_model_len=length) for length in (short, long))
    assert first.stage.max_concurrency >= second.stage.max_concurrency
    assert not (second.fits and not first.fits)


@settings(max_examples=25, deadline=None)
@given(MODELS, st.sampled_from(ENGINES), LENGTHS, st.floats(0.5, 100), st.floats(0, 100))
@example("Qwen3.8-27B", "llama.cpp", 1, 5.0, 1.0)
def test_more_bytes_never_hold_less(model, engine, length, gib, more):
    less, greater = (ask(model, engine=engine, gib=size, max_model_len=length) for size in (gib, gib + more))
    assert less.stage.max_concurrency <= greater.stage.max_concurrency
    has_own = greater.stage.cells is not None and greater.stage.state_bytes + greater.stage.window_bytes > 0
    if has_own and less.stage.max_concurrency < greater.stage.max_concurrency:
        return  # one more sequence keeps a state or a window of its own where tokens were: 30 share more than 37
    assert less.pool_tokens <= greater.pool_tokens


@settings(max_examples=25, deadline=None)
@given(MODELS, st.integers(1, 16_384), st.integers(0, 16_384))
def test_a_larger_batch_never_leaves_more(model, batch, more):
    plans = [ask(model, gpu="H200", tp=4, max_num_batched_tokens=size) for size in (batch, batch + more)]
    assert plans[0].stage.available_bytes >= plans[1].stage.available_bytes


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["Llama-3.1-70B", "Qwen3-32B", "Qwen2.5-72B"]), st.sampled_from([1, 2, 4, 8]))
def test_tensor_parallel_ranks_together_hold_what_one_would(model, tp):
    plan = ask(model, tp=tp)
    assert plan.stage.kv_bytes_per_token * tp == plan.whole_kv_bytes_per_token
    norms = plan.question.checkpoint.params.norms * 2 * (tp - 1)
    assert plan.stage.weights_bytes * tp == plan.whole_weights_bytes + norms


@settings(max_examples=25, deadline=None)
@given(MODELS, st.sampled_from([1, 2, 4, 8]))
def test_more_ranks_never_hold_more_each(model, tp):
    if model == "Qwen3.8-27B":
        tp = min(tp, 4)
    one, many = ask(model), ask(model, tp=tp)
    assert many.stage.kv_bytes_per_token <= one.stage.kv_bytes_per_token
    assert many.stage.weights_bytes <= one.stage.weights_bytes
    assert many.stage.state_bytes <= one.stage.state_bytes


@given(st.integers(1, 200), st.integers(1, 200))
def test_pipeline_stages_hold_every_layer_once(layers, pp):
    if pp > layers:
        return
    found = stages(layers, pp)
    assert [index for stage in found for index in stage] == list(range(layers))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@settings(max_examples=25, deadline=None)
@given(MODELS, st.integers(0, 4), LENGTHS)
def test_drafts_never_make_room(model, drafts, length):
    plain, drafted = (ask(model, gib=20, max_model_len=length, drafts=count) for count in (0, drafts))
    assert plain.stage.max_concurrency >= drafted.stage.max_concurrency


@settings(max_examples=25, deadline=None)
@given(MODELS, st.floats(0.5, 100), LENGTHS)
def test_blocks_never_take_more_than_there_is(model, gib, length):
    blocks = ask(model, gib=gib, max_model_len=length).stage.blocks
    assert blocks.num_blocks * blocks.group_layers * blocks.page_bytes <= int(gib * 2**30)
    assert sum(blocks.groups.values()) * blocks.group_layers >= 1


@given(st.integers(1, 100), st.integers(1, 4096), st.integers(1, 10_000))
def test_a_plain_model_is_bytes_divided_by_bytes(layers, bytes_per_token, tokens):
    kind = LayerKind("full", layers, bytes_per_token)
    available = layers * bytes_per_token * tokens
    plan = plan_blocks([kind], BlockRequest(available_bytes=available, max_model_len=16, in_flight_tokens=16))
    assert plan.num_blocks == tokens // 16
    assert plan.log_tokens_until_0_20 == plan.log_tokens_since == tokens // 16 * 16


def test_measured_weights_go_before_counted_ones():
    plan = ask("Llama-3.1-8B", gpu="H200")
    heavier = plan_memory(msgspec.structs.replace(plan.question, weights_bytes=20 * 2**30))
    assert heavier.stage.weights_bytes == 20 * 2**30
    assert heavier.stage.available_bytes < plan.stage.available_bytes
