"""Grammars over calls: what they force is a call of that format and nothing else."""

import ast
import json
import re
from functools import cache

import jsonschema
import numpy as np
import pytest

from hitsend.core.constraint import ConstraintSpec, GrammarSource
from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Message, OutputFormat, Request, Tool, ToolChoice
from hitsend.core.tool_format import HERMES, LLAMA3, MISTRAL, PYTHONIC, THINK, XML
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.constraints import constraint_spec, grammar_source, output_source
from hitsend.serve.chat.schema_check import check_schema
from hitsend.serve.engine.grammar import Compiler, grammar_text
from hitsend.serve.output.tool_calls import ToolCallParser

SPECIAL = (b"[TOOL_CALLS]", b"<|python_tag|>")
WORDS = (b"<end>", *(bytes([i]) for i in range(256)), *SPECIAL)
VOCABULARY = Vocabulary(WORDS, control_ids=frozenset({0, 257, 258}), end_ids=frozenset({0}))

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
NESTED = Tool(
    "get",
    parameters={
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
)
PARAMETERS = {tool.name: {"type": "object"} | tool.parameters for tool in (WEATHER, NESTED)}
REQUIRED = ToolChoice("required")


@cache
def compiler():
    return Compiler(WORDS, VOCABULARY.control_ids, VOCABULARY.end_ids, lambda text: [1 + byte for byte in text])


def request(*tools, **fields):
    return Request("r", "m", (Message("user", "x"),), tools=tools, **fields)


def compiled(wanted, form):
    source = grammar_source(wanted, form, VOCABULARY)
    for param, schema in source.schemas:
        check_schema(schema, param)
    text = grammar_text(source)
    assert compiler().check(text) is None
    return text


def written(text, seed, limit=400):
    """A random text of the grammar, with a liking for what closes things; None where it did not end."""
    rng = np.random.default_rng(seed)
    matcher, out = compiler().matcher(text), b""
    for _ in range(limit):
        may = np.flatnonzero(~matcher.forbidden())
        weights = np.array([8.0 if WORDS[i] in (b'"', b"}", b"]", b"<", b"<end>", b")") else 1.0 for i in may])
        token = int(rng.choice(may, p=weights / weights.sum()))
        if token == 0:
            return out.decode()
        matcher.accept(token)
        out += WORDS[token]
        if matcher.is_complete:
            return out.decode()
    return None


def accepts(text, spelled):
    """Whether the grammar lets this text through, byte by byte, special tokens as tokens."""
    matcher = compiler().matcher(text)
    specials = b"|".join(map(re.escape, SPECIAL))
    for part in re.findall(specials + b"|(?s:.)", spelled.encode()):
        token = WORDS.index(part)
        if matcher.forbidden()[token]:
            return False
        matcher.accept(token)
    return not matcher.forbidden()[0]


def json_calls(form, text):
    """The calls of a forced text, by a reader of its own."""
    if form is HERMES:
        assert re.fullmatch(r"(?s)(<tool_call>\n.*?\n</tool_call>\n?)+", text)
        return [json.loads(body) for body in re.findall(r"(?s)<tool_call>\n(.*?)\n</tool_call>", text)]
    if form is MISTRAL:
        return json.loads(text.removeprefix("[TOOL_CALLS]"))
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        call, at = decoder.raw_decode(text, at)
        calls.append(call)
        at += text[at : at + 1] == ";"
    return calls


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_forced_json_calls_are_valid(form, is_parallel):
    text = compiled(request(WEATHER, NESTED, tool_choice=REQUIRED, parallel_tool_calls=is_parallel), form)
    found = [answer for seed in range(12) if (answer := written(text, seed)) is not None]
    assert found
    names = set()
    for answer in found:
        calls = json_calls(form, answer)
        assert len(calls) == 1 or is_parallel
        for call in calls:
            names.add(call["name"])
            assert set(call) == {"name", form.argument_keys[0]}
            jsonschema.validate(call[form.argument_keys[0]], PARAMETERS[call["name"]])
    assert names == {"get", "get_weather"}


def test_a_named_function_is_the_only_one():
    text = compiled(request(WEATHER, NESTED, tool_choice=ToolChoice("required", ("get",))), HERMES)
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert accepts(text, call % ("get", '{"at": {"x": 5}}'))
    assert not accepts(text, call % ("get_weather", '{"city": "a", "unit": "C"}'))
    assert not accepts(text, "no")


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
def test_a_named_function_is_called_exactly_once(form):
    text = compiled(request(WEATHER, NESTED, tool_choice=ToolChoice("required", ("get",))), form)
    found = [answer for seed in range(12) if (answer := written(text, seed)) is not None]
    assert found
    assert {len(json_calls(form, answer)) for answer in found} == {1}


def test_forced_xml_calls():
    text = compiled(request(WEATHER, NESTED, tool_choice=REQUIRED), XML)
    head = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    rest = "</function>\n</tool_call>"
    assert accepts(text, head + "Bern\n</parameter>\n<parameter=unit>\nC\n</parameter>\n" + rest)
    assert not accepts(text, head + "Bern\n</parameter>\n<parameter=unit>\nK\n</parameter>\n" + rest)
    assert not accepts(text, head + "Bern\n</parameter>\n" + rest)
    plain = Tool("f", parameters={"properties": {"t": {"type": "string"}}, "required": ["t"]})
    text = compiled(request(plain, tool_choice=REQUIRED), XML)
    call = "<tool_call>\n<function=f>\n<parameter=t>\na <b>\n</p> c\n</parameter>\n" + rest
    assert accepts(text, call)
    assert not accepts(text, call + "x")


def test_forced_python_calls():
    text = compiled(request(WEATHER, tool_choice=REQUIRED), PYTHONIC)
    found = [answer for seed in range(12) if (answer := written(text, seed)) is not None]
    assert found
    for answer in found:
        (expression,) = ast.parse(answer.replace("\n", " ")).body
        for call in expression.value.elts:
            assert call.func.id == "get_weather"
            values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            jsonschema.validate(values, WEATHER.parameters)


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_strict_in_auto_leaves_text_free_and_holds_calls(form):
    strict = Tool("get", parameters=NESTED.parameters, strict=True)
    text = compiled(request(strict, tool_choice=ToolChoice("auto")), form)
    one = '{"name": "get", "arguments": {"at": {"x": %s}}}'
    call = f"<tool_call>\n{one}\n</tool_call>" if form is HERMES else f"[TOOL_CALLS][{one}]"
    assert accepts(text, "")
    assert accepts(text, "just <text> {")
    assert accepts(text, "first " + call % 7)
    assert not accepts(text, "first " + call % '"seven"')


def test_strict_in_auto_for_bare_calls():
    strict = Tool("get", parameters=NESTED.parameters, strict=True)
    text = compiled(request(strict), LLAMA3)
    assert accepts(text, '{"name": "get", "parameters": {"at": {"x": 7}}}')
    assert not accepts(text, '{"name": "got"')
    assert accepts(text, "Well {")
    assert accepts(text, 'Well <|python_tag|>{"name": "get", "parameters": {"at": {"x": 7}}}')
    assert not accepts(text, 'Well <|python_tag|>{"name": "get", "parameters": 7}')


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (OutputFormat("json_object"), '{"a": 1}', "[1]"),
        (OutputFormat("json_schema", {"enum": [1, 2]}), "2", "3"),
        (OutputFormat("choice", ["yes", "no"]), "no", "maybe"),
        (OutputFormat("regex", "a/b+"), "a/bb", "ab"),
        (OutputFormat("regex", r"a\/b+"), "a/b", "ab"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_format_beside_tools_is_either_of_them(wanted, good, bad):
    text = compiled(request(NESTED, output_format=wanted), HERMES)
    call = '<tool_call>\n{"name": "get", "arguments": {"at": {"x": 1}}}\n</tool_call>'
    assert accepts(text, good)
    assert accepts(text, call)
    assert not accepts(text, bad)


def test_what_nobody_forces_is_free():
    assert grammar_source(request(NESTED), HERMES, VOCABULARY) is None
    assert grammar_source(request(NESTED, tool_choice=ToolChoice("none")), HERMES, VOCABULARY) is None
    assert grammar_source(request(), None, VOCABULARY) is None


def test_a_format_alone():
    assert output_source(OutputFormat("json_object")) == GrammarSource("json_schema", {"type": "object"})
    assert output_source(OutputFormat("regex", "a")).param == "structured_outputs"
    none = request(NESTED, tool_choice=ToolChoice("none"), output_format=OutputFormat("regex", "a"))
    assert grammar_source(none, HERMES, VOCABULARY) == GrammarSource("regex", "a", "structured_outputs")


def test_wishes_that_exclude_each_other():
    with pytest.raises(InvalidRequest, match="Lark"):
        grammar_source(request(NESTED, output_format=OutputFormat("lark", "start: /a/")), HERMES, VOCABULARY)
    with pytest.raises(InvalidRequest, match="names no function"):
        grammar_source(request(NESTED, tool_choice=ToolChoice("required", ("x",))), HERMES, VOCABULARY)


def test_thoughts_are_waited_for_and_bounded():
    marked = Vocabulary((b"<end>", b"<think>", b"</think>", b"a"), frozenset({0}), frozenset({1, 2}))
    spec = constraint_spec
    assert spec(None, THINK, marked, is_open=True) is None
    assert spec(None, THINK, marked, budget=5) is None
    assert spec("g", None, marked, is_open=True, budget=5) == ConstraintSpec("g")
    assert spec("g", THINK, marked) == ConstraintSpec("g")
    assert spec("g", THINK, marked, is_open=True) == ConstraintSpec("g", (2,))
    assert spec("g", THINK, marked, may_open=True, budget=5) == ConstraintSpec("g", (2,), (1,), 5)
    assert spec(None, THINK, marked, is_open=True, budget=0) == ConstraintSpec(None, (2,), (), 0)
    plain = Vocabulary((b"<end>", b"</think>"), frozenset({0}))
    with pytest.raises(InvalidRequest) as refused:
        spec(None, THINK, plain, is_open=True, budget=1)
    assert refused.value.param == "thinking_token_budget"


DEFINITIONS = {"$defs": {"color": {"type": "string", "enum": ["red", "blue"]}}}
BETWEEN_TAGS = [
    # schema of the parameter, what may stand between the tags, what may not
    ({"type": "string", "maxLength": 3}, ["", "ab", '"a"', "a\nb"], ["abcd"]),
    ({"type": "string", "minLength": 2}, ["ab", "</b>"], ["a"]),
    ({"type": "string", "pattern": "^[a-z]/[0-9]{2}$"}, ["a/12"], ["a/1", "A/12", '"a/12"']),
    ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, ["abc", "null", "nul"], ["abcd", "[1]"]),
    ({"type": ["string", "null"]}, ["abc", "null", "a[1]"], ["[1]", " {}"]),
    ({"$ref": "#/$defs/color"}, ["red", "blue"], ['"red"', "green"]),
    ({"enum": ["a", 1, None, [2]]}, ["a", "null", "[2]"], ["1", '"a"']),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "integer"}]}, ["red"], ["5", '"red"']),
    ({"type": "boolean"}, ["true"], ["yes"]),
    ({}, ["anything [1]"], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), BETWEEN_TAGS, ids=str)
def test_what_is_forced_between_tags_is_read_as_what_the_schema_allows(schema, good, bad):
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"]} | DEFINITIONS
    tool = Tool("f", parameters=parameters, strict=True)
    text = compiled(request(tool, tool_choice=REQUIRED), XML)
    call = "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"
    for value in good:
        assert accepts(text, call.replace("{}", value)), value
        parser = ToolCallParser(XML, (tool,), lambda: "id")
        left, calls = parser.feed(call.replace("{}", value))
        assert left == ""
        jsonschema.validate(json.loads("".join(each.arguments for each in calls)), parameters)
    for value in bad:
        assert not accepts(text, call.replace("{}", value)), value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a|b"},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "allOf": [{"maxLength": 3}]},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^x$"}]},
    ],
    ids=str,
)
def test_texts_that_cannot_be_forced_between_tags_are_refused_for_strict_tools(schema):
    parameters = {"properties": {"p": schema}, "required": ["p"]}
    with pytest.raises(InvalidRequest, match=r"f\.p"):
        compiled(request(Tool("f", parameters=parameters, strict=True), tool_choice=REQUIRED), XML)
    compiled(request(Tool("f", parameters=parameters), tool_choice=REQUIRED), XML)


@pytest.mark.parametrize("name", ["a>b", " a", "'a'"])
def test_names_that_would_be_read_as_others_are_no_parameters_between_tags(name):
    tool = Tool("f", parameters={"properties": {name: {"type": "null"}}})
    with pytest.raises(InvalidRequest, match="between tags"):
        compiled(request(tool, tool_choice=REQUIRED), XML)


def test_a_boolean_that_is_fixed_is_fixed_in_python_too():
    tool = Tool("f", parameters={"properties": {"b": {"type": "boolean", "const": True}}, "required": ["b"]})
    text = compiled(request(tool, tool_choice=REQUIRED), PYTHONIC)
    assert accepts(text, "[f(b=true)]")
    assert not accepts(text, "[f(b=False)]")
    assert not accepts(text, "[f(b=false)]")
