"""Judging drafts: what is asked of an answer before it may be sent."""

import asyncio
import json
import signal
import threading

import pytest

from hitsend.core.errors import ConfigError
from hitsend.core.request import Delta, FinishReason, Message, Request, TextLogprob, ToolCallDelta
from hitsend.serve.cascade import Draft, Scorers, json_fault, says_yes
from hitsend.serve.routed import drafts_of
from hitsend.serve.verdicts import Busy, CodeThreads
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


async def test_who_judges_by_reading_sees_the_calls():
    pieces = (ToolCallDelta(0, "c1", "look"), ToolCallDelta(0, arguments='{"at":"it"}'), ToolCallDelta(1, "c2", "wait"))
    (draft,) = drafts_of([Delta(0, "Well:"), *(Delta(0, tool_calls=(piece,)) for piece in pieces)], 1)
    shown = 'Well:\n{"call": "look", "arguments": "{\\"at\\":\\"it\\"}"}\n{"call": "wait", "arguments": ""}'
    assert (draft.text, draft.shown) == ("Well:", shown)
    rule = CascadeSettings(code="tests.routes.test_cascade:calls_it")
    route = RouteSettings(model="auto", engines=("a", "b"), cascade=rule)
    for calls, accepted in (((("look", "{}"),), True), ((), False)):
        verdict = await Scorers(route, None).judge(REQUEST, Draft("", (), True, calls), None)
        assert verdict.accepted is accepted


def calls_it(_question, answer):
    return answer == '{"call": "look", "arguments": "{}"}'


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


NO_SCHEMAS = [
    *("{", "[]", '{"pattern": "x"}', '{"type": "text"}', '{"items": {"not": {}}}', "[" * 50_000),
    *(
        '{"properties": []}',
        '{"type": 5}',
        '{"type": ["text", 5]}',
        '{"enum": 5}',
        '{"required": "x"}',
        '{"required": [5]}',
    ),
]


@pytest.mark.parametrize("schema", NO_SCHEMAS)
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


def leaves(_question, _answer):
    raise SystemExit(3)


def interrupts(_question, _answer):
    raise KeyboardInterrupt


def closes(_question, _answer):
    raise GeneratorExit


def stops(_question, _answer):
    raise StopIteration


@pytest.mark.parametrize("function", ["leaves", "interrupts", "closes", "stops"])
def test_code_that_raises_what_ends_programs_only_rejects(function):
    verdict = judge("4", code=f"{__name__}:{function}")
    assert verdict.verdicts["code"].startswith("rejected: raised")


async def test_code_that_never_comes_back_takes_no_thread_of_anybody_and_is_bounded():
    threads, release = CodeThreads(most=2), threading.Event()

    def hangs(_question, _answer):
        return release.wait(60)

    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await threads.call(hangs, "q", "a")
    with pytest.raises(Busy):
        await threads.call(hangs, "q", "a")
    waiting = [one for one in threading.enumerate() if one.name == "cascade code"]
    assert len(waiting) == 2
    assert all(one.daemon for one in waiting), "the server's end waits for none of them"
    release.set()
    for one in waiting:
        one.join(10)
    assert await threads.call(knows, "2 + 2?", "4") is True


def test_a_pattern_that_goes_round_in_circles_is_given_up():
    verdict = judge("A" * 40 + "!", regex=r"(A+)+B")
    assert verdict.verdicts == {"regex": "rejected: the pattern takes too long"}
    assert judge("A" * 40 + "B", regex=r"(A+)+B").accepted
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


@pytest.mark.parametrize("text", ['{"x": NaN}', "Infinity", "-Infinity", "[NaN]"])
def test_what_python_alone_reads_is_no_json(text):
    assert json_fault(text, True) == "not JSON"


@pytest.mark.parametrize(
    ("value", "listed", "is_one"),
    [(True, 1, False), (0, False, False), (1, 1.0, True), ([True], [1], False), ({"a": 0}, {"a": False}, False)],
)
def test_true_is_not_1(value, listed, is_one):
    for schema in ({"enum": [listed]}, {"const": listed}):
        assert (json_fault(json.dumps(value), schema) is None) is is_one


@pytest.mark.parametrize(
    ("text", "is_yes"),
    [
        ("yes", True),
        ("Yes.", True),
        (" **YES**", True),
        ('"yes, it is"', True),
        ("yesterday", False),
        ("yes_but", False),
        ("No, yes is wrong", False),
        ("", False),
    ],
)
def test_a_judge_says_yes_by_that_word_alone(text, is_yes):
    assert says_yes(text) is is_yes
