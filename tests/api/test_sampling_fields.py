from typing import Any

import pytest

from hitsend.serve.api.sampling_fields import REFUSED, SamplingIn
from hitsend.serve.loop.filters import MAX_REPEAT
from tests.api.test_chat_request import parse, refusal
from tests.edge import chat_body


def test_the_fields_arrive():
    request, _ = parse(
        chat_body(
            typical_p=0.9,
            dry_multiplier=0.8,
            dry_base=1.5,
            dry_allowed_length=3,
            dry_sequence_breakers=["\n", "."],
            xtc_probability=0.5,
            xtc_threshold=0.2,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=[7, 8, 7],
            include_stop_str_in_output=True,
        )
    )
    asked = request.sampling
    assert (asked.typical_p, asked.dry_multiplier, asked.dry_base, asked.dry_allowed_length) == (0.9, 0.8, 1.5, 3)
    assert (asked.dry_sequence_breakers, asked.xtc_probability, asked.xtc_threshold) == (("\n", "."), 0.5, 0.2)
    assert (request.min_tokens, request.ignore_eos, request.stop_token_ids) == (2, True, (7, 8))
    assert request.include_stop


def test_silence_stays_silence():
    request, _ = parse(chat_body(**dict.fromkeys(SamplingIn.__struct_fields__)))
    assert (request.sampling.typical_p, request.sampling.dry_sequence_breakers) == (None, None)
    assert (request.min_tokens, request.ignore_eos, request.stop_token_ids, request.include_stop) == (
        0,
        False,
        (),
        False,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_allowed_length", MAX_REPEAT + 1),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x"] * 17),
        ("dry_sequence_breakers", "x"),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", list(range(129))),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any):
    assert (refusal(chat_body(**{field: value})).param or "").startswith(field)


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused_by_name_with_the_reason(field: str):
    error = refusal(chat_body(**{field: 1}))
    assert error.param == field
    assert REFUSED[field] in error.message


def test_mirostat_0_is_off():
    parse(chat_body(mirostat=0))
    assert refusal(chat_body(mirostat=2)).param == "mirostat"


def test_the_longest_repeat_that_can_be_allowed_is_the_longest_that_is_counted():
    parse(chat_body(dry_allowed_length=MAX_REPEAT))


def test_more_tokens_at_least_than_at_most_is_refused():
    assert refusal(chat_body(min_tokens=5, max_tokens=4)).param == "min_tokens"
    parse(chat_body(min_tokens=4, max_tokens=4))
