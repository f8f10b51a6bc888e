"""Judging drafts: what is asked of an answer before it may be sent."""

import asyncio
import json

import pytest

from hitsend.core.errors import ConfigError
from hitsend.core.request import Delta, FinishReason, Message, Request, TextLogprob
from hitsend.serve.cascade import Draft, Scorers, json_fault
from hitsend.serve.routed import drafts_of
from hitsend.settings import CascadeSettings, RouteSettings

REQUEST = Request("r", "auto", (Message("user", "2 + 2?"),))


def judge(text, *, logprobs=(), is_whole=True, **rule):
    route = RouteSettings(model="auto", engines=("a", "b"), cascade=CascadeSettings(**rule))
    return asyncio.run(Scorers(route, None).judge(REQUEST, Draft(text, tuple(logprobs), is_whole), None))


@pytest.mark.parametrize(
    ("rule", "text", "logprobs", "accepted"),
    [
        ({"min_logprob": -0.5}, "4", (-0.4, -0.6), True),
        ({"min_logprob": -0.5}, "4", (-0.4, -0.7), False),
        ({"min_logprob": -0.5}, "4", (), False),
        ({"regex": r"\d+"}, "44", (), True),
        ({"regex": r"\d+"}, "it is 44", (), False),
        ({"schema": "json"}, "[1]", (), True),
        ({"schema": "json"}, "Sure: [1]", (), False),
        ({"schema": '{"type": "object", "required": ["x"]}'}, '{"x": 1}', (), True),
        ({"schema": '{"type": "object", "required": ["x"]}'}, "{}", (), False),
        ({"regex": r"\d+", "min_logprob": -0.5}, "44", (-0.9,), False),
    ],
)
def test_every_rule_that_is_set_must_accept(rule, text, logprobs, accepted):
    assert judge(text, logprobs=logprobs, **rule).accepted is accepted


def test_an_answer_that_was_cut_off_is_rejected():
    verdict = judge("44", is_whole=False, regex=r"\d+")
    assert not verdict.accepted
    assert "length" in verdict.verdicts


def knows(question, answer):
    return (question, answer) == ("2 + 2?", "4")


def breaks(_question, _answer):
    raise KeyError("secret")


def says_nearly(_question, _answer):
    return "true"


@pytest.mark.parametrize(
    ("function", "text", "accepted"),
    [("knows", "4", True), ("knows", "5", False), ("breaks", "4", False), ("says_nearly", "4", False)],
)
def test_the_operators_code_judges(function, text, accepted):
    verdict = judge(text, code=f"{__name__}:{function}")
    assert verdict.accepted is accepted
    assert "secret" not in str(verdict)


@pytest.mark.parametrize("code", ["nowhere", "no.such.module:f", f"{__name__}:nothing", "json:__name__"])
def test_code_that_is_not_there_stops_the_start(code):
    with pytest.raises(ConfigError, match="code"):
        judge("4", code=code)


@pytest.mark.parametrize("schema", ["{", "[]", '{"pattern": "x"}', '{"type": "text"}', '{"items": {"not": {}}}'])
def test_a_schema_that_would_be_passed_over_in_part_stops_the_start(schema):
    with pytest.raises(ConfigError, match="schema"):
        judge("4", schema=schema)


@pytest.mark.parametrize(
    ("value", "schema", "fault"),
    [
        (True, {"type": "integer"}, "$"),
        (2.0, {"type": "integer"}, None),
        ({"a": {"b": "x"}}, {"properties": {"a": {"properties": {"b": {"type": "number"}}}}}, "$.a.b"),
        ([1, "x"], {"items": {"type": "integer"}}, "$[1]"),
        ({"z": 1}, {"properties": {}, "additionalProperties": False}, "$.z"),
        ("blue", {"enum": ["red"]}, "$"),
        (None, {"type": ["string", "null"]}, None),
    ],
)
def test_a_fault_says_where_it_is(value, schema, fault):
    found = json_fault(json.dumps(value), schema)
    assert (found is None) if fault is None else found.startswith(f"{fault} ")


@pytest.mark.parametrize("text", ["[" * 200_000, "[" * 200_000 + "]" * 200_000, '{"a":' * 200_000])
def test_json_too_deep_to_be_read_is_a_rejected_draft(text):
    assert json_fault(text, {"type": "object"}) == "not JSON"


def test_a_draft_is_what_each_choice_came_to():
    sure = TextLogprob("x", -0.25, (120,))
    deltas = [
        Delta(1, "b"),
        Delta(0, "x", logprobs=(sure,)),
        Delta(1, finish_reason=FinishReason.LENGTH),
        Delta(0, "y", finish_reason=FinishReason.STOP),
    ]
    first, second = drafts_of(deltas, 2)
    assert (first.text, first.mean_logprob, first.is_whole) == ("xy", -0.25, True)
    assert (second.text, second.mean_logprob, second.is_whole) == ("b", None, False)
