"""Limits in tokens and the sampling values that are used. Case: val-overlong-prompt."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.errors import ContextLengthExceeded, InvalidRequest
from hitsend.core.events import LimitCheck
from hitsend.core.request import Request, SamplingAsked, SamplingParams
from hitsend.serve.chat.budget import Budget, allowed_output, resolve_sampling
from hitsend.serve.chat.presets import Defaults, resolve_defaults
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.loop.messages import EngineFacts
from hitsend.settings import ModelSettings, SamplingPreset
from tests.chat.conftest import Desk, system, user

CONTEXT, VOCABULARY = 512, 1000


def request(max_tokens: int | None = None, **fields: Any) -> Request:
    return Request(request_id="r", model="m", messages=(user("q"),), max_tokens=max_tokens, **fields)


def prompt(num_tokens: int) -> Prompt:
    return Prompt(
        prompt_token_ids=(),
        num_tokens=num_tokens,
        num_control_tokens=0,
        spans=(),
        num_chars=0,
        template_sha256="",
        render_started_at=0.0,
        render_ended_at=0.0,
        tokenize_started_at=0.0,
        tokenize_ended_at=0.0,
    )


FACTS = EngineFacts(
    model="m",
    architecture="llama",
    library="",
    vocab_size=VOCABULARY,
    context_train=CONTEXT,
    num_slots=1,
    num_cells=CONTEXT,
    cells_per_slot=CONTEXT,
    kv_mode="per_stream",
    kv_bytes_per_cell=1,
    state_bytes_per_slot=0,
    weights_bytes=1,
    num_threads=1,
    is_hybrid=False,
)


def fit(ask: Request, num_tokens: int, *, defaults: Defaults | None = None, **fields: Any):
    return Budget(defaults or Defaults(), lambda: 7, **fields).fit(ask, prompt(num_tokens), FACTS)


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1, CONTEXT + 88, 10**9])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(num_tokens: int, max_tokens: int | None):
    with pytest.raises(ContextLengthExceeded) as refused:
        fit(request(max_tokens), num_tokens)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert str(num_tokens) in refused.value.message
    assert f"This model's maximum context length is {CONTEXT} tokens" in refused.value.message  # clients look for it


def test_one_free_token_is_enough_for_one_token_of_answer():
    assert fit(request(None), CONTEXT - 1).max_tokens == 1
    assert fit(request(1), CONTEXT - 1).max_tokens == 1


def test_an_answer_without_a_length_is_as_long_as_the_callers_levels_can_hold():
    budget = Budget(Defaults(), lambda: 7, ceiling=200)
    fitted = budget.fit(request(None), prompt(100), FACTS, 50)
    assert fitted.max_tokens == 50
    assert fitted.limits[-1] == LimitCheck("max_tokens_of_levels", 50, 50)
    assert budget.fit(request(None), prompt(100), FACTS, 300).max_tokens == 200
    assert budget.fit(request(None), prompt(100), FACTS).max_tokens == 200


def test_an_answer_that_can_not_fit_is_refused_with_both_counts_and_never_lowered():
    assert fit(request(412), 100).max_tokens == 412
    with pytest.raises(ContextLengthExceeded) as refused:
        fit(request(413), 100)
    for number in ("100", "413", "513", "512", "At most 412"):
        assert number in refused.value.message


def test_silence_means_what_is_left_up_to_the_ceiling():
    assert fit(request(None), 100).max_tokens == 412
    assert fit(request(None), 100, ceiling=64).max_tokens == 64
    assert fit(request(None), 500, ceiling=64).max_tokens == 12


def test_a_conversation_longer_than_the_context_is_refused_whole(chatml: Desk):
    messages = (system("Answer only in French."), user("word " * 600), user("What is your rule?"))
    whole = chatml.prompt(*messages)
    with pytest.raises(ContextLengthExceeded, match=f"{whole.num_tokens} tokens"):
        Budget(Defaults(), lambda: 0).fit(request(None), whole, FACTS)


@given(st.integers(0, 2000), st.one_of(st.none(), st.integers(1, 2000)), st.one_of(st.none(), st.integers(1, 2000)))
def test_prompt_and_answer_never_exceed_the_context(num_tokens: int, max_tokens: int | None, ceiling: int | None):
    try:
        allowed = allowed_output(max_tokens, num_prompt_tokens=num_tokens, context=CONTEXT, ceiling=ceiling)
    except ContextLengthExceeded:
        assert num_tokens + (max_tokens or 1) > CONTEXT
        return
    assert 1 <= allowed <= CONTEXT - num_tokens
    assert max_tokens is None or allowed == max_tokens


def test_the_limits_are_in_the_event_with_value_and_limit():
    checks = {check.name: (check.value, check.limit) for check in fit(request(50), 100).limits}
    assert checks == {"prompt_tokens": (100, 511), "prompt_and_max_tokens": (150, 512)}


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
def test_a_bias_for_a_token_that_does_not_exist_is_refused(token: int):
    with pytest.raises(InvalidRequest, match=f"logit_bias: {token} ") as refused:
        fit(request(logit_bias=((5, 1.0), (token, 1.0))), 10)
    assert refused.value.param == "logit_bias"
    assert fit(request(logit_bias=((0, 1.0), (VOCABULARY - 1, -1.0))), 10).sampling.logit_bias[1][0] == VOCABULARY - 1


def test_what_nobody_sets_is_neutral_and_says_so():
    fitted = fit(request(), 10)
    assert fitted.sampling == SamplingParams(seed=7)
    assert fitted.sources.pop("seed") == "drawn"
    assert set(fitted.sources.values()) == {"default"}
    assert len(fitted.sources) == 14


def test_a_seed_is_drawn_only_where_none_was_sent():
    assert fit(request(sampling=SamplingAsked(seed=0)), 10).sampling.seed == 0
    assert fit(request(sampling=SamplingAsked(seed=-5)), 10).sources["seed"] == "client"
    sampling, _ = resolve_sampling(request(), Defaults(), lambda: 2**40 + 3)
    assert sampling.seed == 3


def qwen(name: str, metadata: dict[str, str] | None = None, **fields: Any) -> Defaults:
    return resolve_defaults((name, "qwen35"), metadata or {}, **fields)


THINKING_ROW, PLAIN_ROW = (1.0, 0.95, 20, 0.0, 0.0), (0.7, 0.8, 20, 0.0, 1.5)


def row(defaults: Defaults, **kwargs: Any) -> tuple[float, ...]:
    s, _ = resolve_sampling(request(template_kwargs=kwargs), defaults, lambda: 0)
    assert (s.frequency_penalty, s.repetition_penalty) == (0.0, 1.0)
    return (s.temperature, s.top_p, s.top_k, s.min_p, s.presence_penalty)


@pytest.mark.parametrize(
    ("name", "thinking", "plain"),
    [
        ("Qwen3.8-27B-Q4_0", THINKING_ROW, PLAIN_ROW),
        ("qwen3_8 27b", THINKING_ROW, PLAIN_ROW),
        ("Qwen3.6-35B-A3B", THINKING_ROW, PLAIN_ROW),
        ("Qwen3.5-9B", (1.0, 0.95, 20, 0.0, 1.5), PLAIN_ROW),
        ("somebody's finetune", THINKING_ROW, PLAIN_ROW),
    ],
)
def test_qwen_gets_what_its_model_card_recommends(name: str, thinking: tuple[float, ...], plain: tuple[float, ...]):
    defaults = qwen(name)
    assert row(defaults) == row(defaults, enable_thinking=True) == thinking
    assert row(defaults, enable_thinking=False) == plain


def test_the_older_qwen3_has_its_own_row():
    defaults = resolve_defaults(("Qwen3-0.6B", "qwen3"), {})
    assert row(defaults) == (0.6, 0.95, 20, 0.0, 0.0)
    assert row(defaults, enable_thinking=False) == (0.7, 0.8, 20, 0.0, 0.0)


def test_a_template_that_does_not_think_by_itself_gets_the_other_row():
    assert row(qwen("Qwen3.8-27B", thinking_default=False)) == PLAIN_ROW
    assert row(qwen("Qwen3.8-27B", thinking_default=True)) == THINKING_ROW


def test_client_beats_settings_beats_card_beats_file_beats_neutral():
    preset = SamplingPreset(temperature=0.2, top_k=5)
    defaults = qwen(
        "Qwen3.8-27B",
        {"general.sampling.temp": "0.9", "general.sampling.min_p": "0.5"},
        settings=(ModelSettings(match="QWEN3.8", thinking=preset),),
    )
    asked = SamplingAsked(temperature=0.0)
    sampling, sources = resolve_sampling(request(sampling=asked), defaults, lambda: 0)
    assert (sampling.temperature, sources["temperature"]) == (0.0, "client")
    assert (sampling.top_k, sources["top_k"]) == (5, "settings")
    assert (sampling.top_p, sources["top_p"]) == (0.95, "model_card")
    assert (sampling.min_p, sources["min_p"]) == (0.0, "model_card")


def test_the_checkpoints_own_values_are_used_where_no_preset_speaks():
    metadata = {
        "general.sampling.temp": "0.6",
        "general.sampling.top_k": "40",
        "general.sampling.penalty_repeat": "1.1",
    }
    config = {"temperature": 0.1, "top_p": 0.9, "repetition_penalty": 1.3}
    defaults = resolve_defaults(("Other", "llama"), metadata, generation_config=config)
    sampling, sources = resolve_sampling(request(), defaults, lambda: 0)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.6, 40, 0.9, 1.1)
    assert (sources["temperature"], sources["top_p"], sources["min_p"]) == ("gguf", "generation_config", "default")


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x", "", "1e400"])
def test_values_that_make_no_sense_are_passed_over(value: str):
    defaults = resolve_defaults(("m",), {"general.sampling.temp": value})
    _, sources = resolve_sampling(request(), defaults, lambda: 0)
    assert sources["temperature"] == "default"


@pytest.mark.parametrize(
    "config", [{"do_sample": False, "temperature": 0.3}, {"temperature": True}, {"temperature": [1]}]
)
def test_a_generation_config_that_does_not_sample_says_nothing(config: dict[str, Any]):
    _, sources = resolve_sampling(request(), resolve_defaults(("m",), {}, generation_config=config), lambda: 0)
    assert sources["temperature"] == "default"


def test_logprobs_and_bias_are_handed_on():
    ask = request(logprobs=True, top_logprobs=3, logit_bias=((1, 2.0),))
    sampling = fit(ask, 10).sampling
    assert (sampling.logprobs, sampling.top_logprobs, sampling.logit_bias) == (True, 3, ((1, 2.0),))


def test_the_same_request_and_seed_fit_the_same_way():
    draw = partial(int, 99)
    budget = Budget(qwen("Qwen3.8"), draw)
    assert budget.fit(request(), prompt(5), FACTS) == budget.fit(request(), prompt(5), FACTS)


def test_what_only_clients_ask_for_has_a_value_and_a_source():
    asked = request(4, sampling=SamplingAsked(dry_multiplier=0.8), min_tokens=3, ignore_eos=True, stop_token_ids=(5,))
    fitted = fit(asked, 10)
    assert (fitted.sampling.dry_multiplier, fitted.sampling.typical_p) == (0.8, 1.0)
    assert (fitted.sources["dry_multiplier"], fitted.sources["typical_p"]) == ("client", "default")
    assert (fitted.sampling.min_tokens, fitted.sampling.ignore_eos, fitted.sampling.stop_token_ids) == (3, True, (5,))


def test_a_stop_token_that_does_not_exist_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        fit(request(4, stop_token_ids=(FACTS.vocab_size,)), 10)
    assert caught.value.param == "stop_token_ids"


def test_more_tokens_at_least_than_fit_are_refused():
    with pytest.raises(InvalidRequest) as caught:
        fit(request(None, min_tokens=30), FACTS.cells_per_slot - 10)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(("asked", "num_tokens"), [(0, 50), (1, 50), (5, 10)])
def test_so_many_log_probabilities_of_a_prompt_may_be_asked_for(asked: int, num_tokens: int):
    found = fit(request(5, prompt_logprobs=asked), num_tokens, max_prompt_logprobs=50)
    assert found.sampling.prompt_logprobs == asked
    assert found.limits[-1] == LimitCheck("max_prompt_logprobs", 50, 50)


@pytest.mark.parametrize(("asked", "num_tokens", "value"), [(0, 51, 51), (6, 10, 60)])
def test_too_many_log_probabilities_of_a_prompt_are_refused_with_numbers(asked: int, num_tokens: int, value: int):
    with pytest.raises(InvalidRequest, match="prompt_logprobs: .* are .* limit 50 .*max_prompt_logprobs") as refused:
        fit(request(5, prompt_logprobs=asked), num_tokens, max_prompt_logprobs=50)
    assert refused.value.param == "prompt_logprobs"
    assert f"are {value}, limit" in refused.value.message
