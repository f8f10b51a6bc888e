"""Grammars on the fake decoder with random logits at temperature 1: whatever ends, validates."""

import json
import re
from functools import cache

import jsonschema
import numpy as np
import pytest

from hitsend.core.constraint import ConstraintSpec, GrammarSource
from hitsend.core.request import SamplingParams
from hitsend.serve.chat.enforceable import enforceable
from hitsend.serve.chat.schema_check import check_schema
from hitsend.serve.engine.grammar import MAX_CACHED, Compiler, grammar_text
from hitsend.serve.engine.grammar_gate import GrammarGate
from hitsend.serve.loop.grammar import GrammarFailed
from hitsend.serve.loop.messages import Abort, Shutdown, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop
from hitsend.serve.loop.verify import PromptLookup
from hitsend.testing import FakeClock, FakeDecoder
from tests.engine.schemas import SCHEMAS, generated
from tests.loop.driven import Driven
from tests.loop.test_verify import eager, said

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
END = 0
MERGES = [
    '{"',
    '":',
    '", "',
    '"}',
    "ab",
    "true",
    "null",
    "北",
    "京",
    "é",
    "🙂",
    "    ",
    "\n\n",
    "123",
    "-0",
    '\\"',
    "}]",
    "},",
]
WORDS = (b"<end>", *(bytes([i]) for i in range(256)), *(merge.encode() for merge in MERGES))
ENDERS = [i for i, word in enumerate(WORDS) if word in (b'"', b"}", b"]", b'"}', b"}]", b"<end>")]


@cache
def compiler() -> Compiler:
    return Compiler(WORDS, {END}, {END}, lambda text: [1 + byte for byte in text])


def logits_of(tokens):
    """Random, with a liking for what closes things: byte soup would not end by itself."""
    row = np.random.default_rng((len(tokens), *tokens[-4:])).standard_normal(len(WORDS)).astype(np.float32)
    row[ENDERS] += 3
    return row


class Machine(Driven):
    """A driven loop with grammars."""

    def __init__(self, grammars=None, **decoder):
        super().__init__(
            vocab_size=len(WORDS), end_token_ids=frozenset({END}), logits_of=logits_of, cells_per_slot=600, **decoder
        )
        self.limits = LoopLimits(step_tokens=16, reserve_tokens=4, max_waiting=64)
        self.loop = Loop(self.decoder, self.limits, self.clock, grammars or compiler())

    def text(self, request_id, choice=0):
        return b"".join(WORDS[token] for token in self.tokens(request_id, choice)).decode("utf-8", "replace")


def submit(request_id, spec, seeds=(1, 2, 3), max_tokens=500, **sampling):
    return Submit(request_id, (5,), SamplingParams(**sampling), seeds, max_tokens, 60.0, constraint=spec)


@pytest.mark.parametrize(
    ("kind", "value", "is_sure"),
    [
        ("regex", "(ab12cdef){10,20}x", True),
        (
            "json_schema",
            {"type": "array", "items": {"enum": ["abab", "true", 123]}, "minItems": 6, "maxItems": 9},
            False,
        ),
    ],
)
def test_drafts_change_nothing(kind, value, is_sure):
    """Neither what is said, nor where it ends, nor what the grammar lets through."""
    spec = ConstraintSpec(grammar_text(GrammarSource(kind, value)))
    plain, drafting = Machine(), Machine()
    drafting.loop = Loop(drafting.decoder, drafting.limits, drafting.clock, compiler(), eager(PromptLookup()))
    for machine in (plain, drafting):
        machine.handle(*(submit(name, spec, seeds=(ord(name),), max_tokens=80) for name in "abcd"))
        machine.run()
    assert said(drafting) == said(plain)
    drafts = [row.drafted for report in drafting.of(StepReport) for row in report.rows if row.drafted]
    assert any(each.accepted for each in drafts)
    assert is_sure or any(each.accepted < each.proposed for each in drafts)


def outputs(schema, seeds=(1, 2, 3)):
    """The finished outputs for a schema."""
    check_schema(schema, "response_format")
    machine = Machine()
    grammar = grammar_text(GrammarSource("json_schema", enforceable(schema)))
    machine.handle(submit("r", ConstraintSpec(grammar), seeds))
    machine.run()
    done = [machine.done["r", choice] for choice in range(len(seeds))]
    assert {each.reason for each in done} <= {"stop", "length"}, (schema, done)
    return [machine.text("r", each.choice) for each in done if each.reason == "stop"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_what_finishes_validates(schema):
    found = outputs(schema)
    assert found
    for output in found:
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(output))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_what_finishes_validates_for_generated_schemas(block):
    finished = 0
    for seed in range(block * 50, block * 50 + 50):
        schema = generated(seed)
        found = outputs(schema, (seed, seed + 1))
        finished += len(found)
        for output in found:
            jsonschema.Draft202012Validator(schema).validate(json.loads(output))
    assert finished >= 60


def accepts(schema, text):
    matcher = compiler().matcher(grammar_text(GrammarSource("json_schema", enforceable(schema))))
    for byte in text.encode():
        if matcher.forbidden()[1 + byte]:
            return False
        matcher.accept(1 + byte)
    return matcher.is_complete or not matcher.forbidden()[END]


@pytest.mark.parametrize("pattern", ['^[^"]$', '^[^"\\\\]+$', '^[^\\n"]$', '^(a|[^"])$', "^[^ -~]$", '^\\w|[^"a-z]$'])
def test_a_class_without_the_quote_takes_no_quote(pattern):
    """The library takes a class of all control characters for one that has the quote and the backslash in it."""
    schema = {"type": "string", "pattern": pattern}
    assert not accepts(schema, '"\\""')
    assert accepts(schema, '"é"')


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        (GrammarSource("choice", ["a.b", "a", "(x|y)*", "北京", "two\nlines", "a/b#c~d"]), None),
        (GrammarSource("regex", r"[a-c]{2}(-\d+)?"), r"[a-c]{2}(-\d+)?"),
        (GrammarSource("lark", 'start: "(" start ")" | "x"'), r"\(*x\)*"),
    ],
    ids=lambda each: getattr(each, "kind", ""),
)
def test_texts(source, pattern):
    machine = Machine()
    machine.handle(submit("r", ConstraintSpec(grammar_text(source)), tuple(range(8))))
    machine.run()
    texts = [machine.text("r", i) for i in range(8) if machine.done["r", i].reason == "stop"]
    assert texts
    for text in texts:
        assert re.fullmatch(pattern, text) if pattern else text in source.value


def test_a_whole_answer_ends_without_an_end_token_and_a_cut_one_says_length():
    machine = Machine()
    grammar = grammar_text(GrammarSource("json_schema", {"const": "abc"}))
    machine.handle(submit("whole", ConstraintSpec(grammar), (1,)), submit("cut", ConstraintSpec(grammar), (1,), 2))
    machine.run()
    assert machine.text("whole") == '"abc"'
    assert machine.done["whole", 0].reason == "stop"
    assert machine.done["cut", 0].reason == "length"


def test_logprobs_stay_those_of_the_raw_row():
    machine = Machine()
    grammar = grammar_text(GrammarSource("json_schema", {"const": "a"}))
    machine.handle(submit("r", ConstraintSpec(grammar), (1,), logprobs=True, top_logprobs=3))
    machine.run()
    first = machine.sampled["r", 0][0]
    row = logits_of((5,)).astype(np.float64)
    assert first.logprob == pytest.approx(row[first.token_id] - np.log(np.exp(row).sum()), abs=1e-4)
    assert first.top[0].token_id == int(row.argmax())


def test_batch_mates_are_as_they_were_alone():
    spec = ConstraintSpec(grammar_text(GrammarSource("json_schema", SCHEMAS[-1])))

    def run(*submits):
        machine = Machine()
        machine.handle(*submits)
        machine.run()
        return machine

    free = submit("free", None, (9,), 40)
    held = submit("held", spec, (4, 5))
    together = run(free, held)
    assert together.tokens("free") == run(free).tokens("free")
    assert [together.tokens("held", i) for i in (0, 1)] == [run(held).tokens("held", i) for i in (0, 1)]


def test_a_preempted_sequence_goes_on_in_its_grammar():
    schema = {"type": "string", "minLength": 25, "maxLength": 30}
    spec = ConstraintSpec(grammar_text(GrammarSource("json_schema", schema)))
    machine = Machine(num_cells=60)
    machine.handle(*(submit(str(i), spec, (i,), 60) for i in range(4)))
    machine.run()
    assert any(type(report).__name__ == "WasPreempted" for report in machine.reports)
    for i in range(4):
        if machine.done[str(i), 0].reason == "stop":
            jsonschema.validate(json.loads(machine.text(i)), schema)


def test_a_bad_grammar_ends_its_own_request_only():
    machine = Machine()
    machine.handle(
        submit("bad", ConstraintSpec('{"grammars": [{"lark_grammar": "start: ("}]}')), submit("ok", None, (1,), 5)
    )
    machine.run()
    assert [machine.done["bad", i].code for i in range(3)] == ["invalid_request"] * 3
    assert machine.done["ok", 0].reason in {"stop", "length"}


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("lark", "start: ("),
        GrammarSource("lark", "start: missing"),
        GrammarSource("lark", 'start: "a" start'),
        GrammarSource("lark", "start: " + "(" * 50_000),
        GrammarSource("regex", "(?=a)"),
        GrammarSource("regex", "(" * 20_000 + ")" * 20_000),
        GrammarSource("json_schema", {"type": "strin"}),
        GrammarSource("json_schema", {"type": "object", "not": {}}),
        GrammarSource("json_schema", {"const": 1, "type": "string"}),
    ],
    ids=lambda source: str(source.value)[:30],
)
def test_the_check_says_what_is_wrong(source):
    assert compiler().check(grammar_text(source))


def test_the_cache_is_bounded():
    fresh = Compiler(WORDS, {END}, {END}, list)
    for i in range(MAX_CACHED + 20):
        fresh.matcher(grammar_text(GrammarSource("json_schema", {"const": i})))
    assert len(fresh._cache) == MAX_CACHED
    assert fresh._cached_bytes == sum(size for _, size in fresh._cache.values())


def test_a_model_without_an_end_token_has_no_grammars():
    with pytest.raises(GrammarFailed, match="no end token"):
        Compiler(WORDS, set(), set(), list).matcher(grammar_text(GrammarSource("regex", "a")))


class Gate:
    def __init__(self):
        self.compiler = Compiler(WORDS, {END}, {END}, list)
        self.seen = []
        self.gate = GrammarGate(self.compiler, self.seen.append)

    def wait(self):
        for future, _ in [*self.gate._held.values()]:
            future.exception(timeout=20)
        self.gate.let_pass()


def test_the_gate_keeps_the_order_of_one_request_and_lets_others_pass():
    made = Gate()
    held = submit("held", ConstraintSpec(grammar_text(GrammarSource("regex", "a+"))))
    free, abort = submit("free", None), Abort("held")
    for command in (held, abort, free):
        made.gate.handle(command)
    assert made.seen[:1] == [free]
    made.wait()
    assert made.seen == [free, held, abort]
    assert made.gate.is_empty
    again = submit("again", held.constraint)
    made.gate.handle(again)
    assert made.seen[-1] is again


def test_after_a_shutdown_the_gate_keeps_nothing():
    made = Gate()
    held = submit("held", ConstraintSpec(grammar_text(GrammarSource("regex", "b+"))))
    made.gate.handle(held)
    made.gate.handle(Shutdown())
    assert made.seen == [Shutdown(), held]
    assert made.gate.is_empty


def test_the_fake_knows_no_grammars_unless_given():
    loop = Loop(FakeDecoder(), LoopLimits(), FakeClock())
    loop.handle(submit("r", ConstraintSpec("x"), (1,)))
    assert loop.step()[0].code == "engine_failed"
