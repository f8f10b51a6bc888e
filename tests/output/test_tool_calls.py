import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.tool_format import TOOL_FORMATS
from hitsend.serve.output.json_value import JsonScanner
from hitsend.serve.output.tool_calls import ONE_TOO_MANY, ToolCallParser
from hitsend.serve.output.xml_calls import as_json
from tests.output.reading import TOOLS, Read, pieces, read

F1, G2 = ("f", '{"x":1}'), ("g", '{"x":2}')
TWO = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>{}<tool_call>{"name":"g","arguments":{"x":2}}</tool_call>'
BARE = "<function={}>\n<parameter=x>\n1\n</parameter>\n</function>"
XML = "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n{}</function>\n</tool_call>"

WHOLE = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", (("f", '{"x": 1}'),)),
    ("hermes", TWO.replace("{}", ""), "", (F1, G2)),
    ("hermes", "a " + TWO.replace("{}", " b ") + " c", "a  b  c", (F1, G2)),
    ("hermes", "\n" + TWO.replace("{}", "\n\n") + "\n", "", (F1, G2)),
    ("hermes", '<tool_call>{"arguments": {"x":1}, "name": "f"}</tool_call>', "", (F1,)),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", (("g", "{}"),)),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", (("g", "{}"),)),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\":1}"}</tool_call>', "", (F1,)),
    ("hermes", '<tool_call>{"id": [1, {"a": "}"}], "name": "f", "arguments": {"x":1}}', "", (F1,)),
    (
        "hermes",
        '<tool_call>{"name":"write","arguments":{"text":"end with </tool_call> ok"}}</tool_call>',
        "",
        (("write", '{"text":"end with </tool_call> ok"}'),),
    ),
    (
        "hermes",
        '<tool_call>{"name":"write","arguments":{"text":"\\"}}</tool_call><tool_call>\\\\"}}</tool_call>',
        "",
        (("write", '{"text":"\\"}}</tool_call><tool_call>\\\\"}'),),
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"s":"Köln 東京 😀"}}</tool_call>',
        "",
        (("f", '{"s":"Köln 東京 😀"}'),),
    ),
    ("llama3", '{"name": "f", "parameters": {"x":1}}', "", (F1,)),
    ("llama3", ' {"type": "function", "name": "f", "parameters": {"x":1}}', "", (F1,)),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x":1}}; {"name":"g","parameters":{"x":2}}', "", (F1, G2)),
    ("llama3", '{"name": "f", "parameters": {"x":1}}\n{"name":"g","parameters":{"x":2}}', "", (F1, G2)),
    ("llama3", '{"name": "Bob", "parameters": {"x":1}}', '{"name": "Bob", "parameters": {"x":1}}', ()),
    ("llama3", '{"title": "f"}', '{"title": "f"}', ()),
    ("llama3", 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', ()),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x":1}}, {"name":"g","arguments":{"x":2}}]', "", (F1, G2)),
    ("mistral", 'ok[TOOL_CALLS]f[ARGS]{"x":1}[TOOL_CALLS]g[ARGS]{"x":2}', "ok", (F1, G2)),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x":1}', "", (F1,)),
    ("mistral", '[TOOL_CALLS]f{"x":1}[TOOL_CALLS]g{"x":2}', "", (F1, G2)),
    ("mistral", '[TOOL_CALLS]f {"x":1}', "", (F1,)),
    ("mistral", "[1, 2]", "[1, 2]", ()),
    ("pythonic", "[f(x=1), g(x=2)]", "", (F1, G2)),
    ("pythonic", "<|python_start|>[g()]<|python_end|>", "", (("g", "{}"),)),
    (
        "pythonic",
        "[g(a='it\\'s \"q\" \\u00e9\\n', b=[1, -2.5e3, {'k': None}], c={}, d=True, e=[])]",
        "",
        (("g", '{"a":"it\'s \\"q\\" é\\n","b":[1,-2.5e3,{"k":null}],"c":{},"d":true,"e":[]}'),),
    ),
    ("pythonic", "[1, 2]", "[1, 2]", ()),
    ("pythonic", "[other(x=1)]", "[other(x=1)]", ()),
    ("xml", XML.format("two\nlines", ""), "", (("write", '{"text":"two\\nlines"}'),)),
    ("xml", XML.format("", "<parameter=n>\n5\n</parameter>\n"), "", (("write", '{"text":"","n":5}'),)),
    (
        "xml",
        XML.format("a </parameter> b </tool_call>", ""),
        "",
        (("write", '{"text":"a </parameter> b </tool_call>"}'),),
    ),
    ("xml", "x <tool_call><function=g></function></tool_call> y", "x  y", (("g", "{}"),)),
    ("xml", XML.format("</parameter></parameter>", ""), "", (("write", '{"text":"</parameter></parameter>"}'),)),
    ("xml", BARE.format("f") + "\n", "", (F1,)),
    ("xml", BARE.format("f") + "\n</tool_call>", "", (F1,)),
    ("xml", "I look. " + BARE.format("f") + "\n" + BARE.format("f") + " done", "I look.  done", (F1, F1)),
    ("xml", BARE.format("nobody"), BARE.format("nobody"), ()),
    ("xml", "write <function=f> to call", "write <function=f> to call", ()),
    ("xml", "a <func b <function=", "a <func b <function=", ()),
    ("xml", "<tool_call>" + BARE.format("f").replace("</function>", "</tool_call>"), "", (F1,)),
]

BROKEN = [
    ("hermes", "<tool_call>f(x=1)</tool_call>", "<tool_call>f(x=1)</tool_call>", ()),
    ("hermes", '<tool_call>{"name": f}</tool_call>!', '<tool_call>{"name": f}</tool_call>!', ()),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', ()),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', ()),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x":1]}', "]}", (("f", '{"x":1'),)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x":1}}}</tool_call>', "}</tool_call>", (F1,)),
    ("hermes", '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', ()),
    ("hermes", '<tool_call>{"name":"w","arguments":{"t":"abc', "", (("w", '{"t":"abc'),)),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', ()),
    ("hermes", "hello <tool_c", "hello <tool_c", ()),
    ("hermes", "<tool_call>oops " + TWO.replace("{}", ""), "<tool_call>oops ", (F1, G2)),
    ("xml", '<tool_call>{"name":"f"}</tool_call>', '<tool_call>{"name":"f"}</tool_call>', ()),
    ("xml", "<tool_call>" + BARE.format("f") * 2 + "</tool_call>", "", (F1, F1)),
    ("xml", "<tool_call><function=write><parameter=text>\nabc", "", (("write", '{"text":"abc'),)),
    (
        "xml",
        "<tool_call><function=write><parameter=text>\nabc\n</parameter>\n</func",
        "\n</func",
        (("write", '{"text":"abc"'),),
    ),
    ("pythonic", "[f(x=1, y=open('a'))]", "open('a'))]", (("f", '{"x":1,"y":'),)),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", ()),
]


@pytest.mark.parametrize(("form", "output", "text", "calls"), WHOLE)
def test_calls_at_every_single_cut(form: str, output: str, text: str, calls: tuple[tuple[str, str], ...]):
    for cut in range(len(output)):
        seen = read(pieces(output, [cut]), form)
        assert (seen.text, seen.calls, seen.has_whole_calls) == (text, calls, bool(calls)), cut
    assert read(list(output), form) == read([output], form)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("form", "output", "text", "calls"), BROKEN)
def test_what_is_no_call_comes_back_and_what_was_sent_is_never_repaired(
    form: str, output: str, text: str, calls: tuple[tuple[str, str], ...]
):
    for cut in range(len(output)):
        seen = read(pieces(output, [cut]), form)
        assert (seen.text, seen.calls) == (text, calls), cut
    assert read(list(output), form) == read([output], form)


def test_five_calls_and_a_function_nobody_offered():
    output = "".join(f'<tool_call>{{"name":"h{i}","arguments":{{}}}}</tool_call>' for i in range(5))
    seen = read([output], "hermes")
    assert [name for name, _ in seen.calls] == ["h0", "h1", "h2", "h3", "h4"]
    assert seen.faults == ("5 calls name a function that was not offered",)


def test_faults_are_told_but_an_ordinary_json_answer_is_none():
    assert read(['<tool_call>{"name":"w","arguments":{"t":"abc'], "hermes").faults[0] == "the answer ends inside a call"
    assert read(["<tool_call>f()"], "hermes").faults
    assert not read(['{"name": "Bob"}'], "llama3").faults
    assert not read(["[1, 2]"], "pythonic").faults


def test_only_one_call_where_only_one_is_allowed():
    seen = read(list("a" + TWO.replace("{}", " ") + "b"), "hermes", is_parallel=False)
    assert seen == Read("a", "", (F1,), (ONE_TOO_MANY,), has_whole_calls=True)


def test_without_tools_everything_is_text():
    output = TWO.replace("{}", "")
    assert read([output], "hermes", tools=()).text == output


def test_arguments_are_sent_while_they_are_written():
    parser = ToolCallParser(TOOL_FORMATS["hermes"], TOOLS, lambda: "id")
    _, first = parser.feed('<tool_call>{"name": "f", "arguments": {"s": "ab')
    _, second = parser.feed("cd")
    assert first[0].arguments == '{"s": "ab'
    assert second[0].arguments == "cd"


SNIPPETS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=f>", "<function=write>", "</function>", "<parameter=x>", "/", "1"),
        *("<parameter=text>", "</parameter>", '{"name":"f","arguments":', '{"name":"f","parameters":', '{"x":1}', "}"),
        *(
            "{",
            "[",
            "]",
            "\\",
            '"',
            "'",
            "\n",
            " ",
            ";",
            ",",
            "[TOOL_CALLS]",
            "[ARGS]",
            "f",
            "f(",
            ")",
            "x=",
            "True",
            "é",
        ),
        *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>", "<", '"name"', ":", "😀"),
        '"arguments"',
    ]
)


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(SNIPPETS, max_size=25).map("".join),
    st.lists(st.integers(0, 1000), max_size=12),
    st.booleans(),
)
def test_any_cuts_of_anything_give_the_same(form: str, output: str, cuts: list[int], is_parallel: bool):
    whole = read([output], form, "think", is_parallel=is_parallel)
    assert read(pieces(output, cuts), form, "think", is_parallel=is_parallel) == whole
    assert read(list(output), form, "think", is_parallel=is_parallel) == whole


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(SNIPPETS, max_size=25).map("".join))
def test_whole_calls_have_json_objects_as_arguments(form: str, output: str):
    seen = read([output], form)
    if seen.has_whole_calls:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in seen.calls)
    if not seen.calls:
        assert seen.text == output


XML_TEXT = "<tool_call><function=write><parameter=text>"
HOSTILE = {
    "hermes": ("<tool_call>", "<", "<tool_call", '<tool_call>{"name":"f","arguments":{"s":"', " ", "[", '{"a":', "\n<"),
    "xml": (XML_TEXT, "</parameter>", "</parameter>\n", "\n", "</parameter>" + " " * 70),
    "llama3": ("{", '{"name":', ";", " ", '{"id":"', '{"name":"f","parameters":{}};'),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]f", "[", "[TOOL_CALLS][", "[ARGS]"),
    "pythonic": ("[f(x=", "[", "'", "[f(x='\\", "[f(x=[", "f(),", "9"),
}


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize(("form", "snippet"), [(form, text) for form, texts in HOSTILE.items() for text in texts])
def test_work_grows_no_faster_than_the_output(form: str, snippet: str, size: int):
    def work(length: int) -> int:
        opening = {"llama3": '{"name":"f","parameters":{"s":"', "xml": XML_TEXT}.get(form, "")
        total = 0
        for start in ("", opening):
            text = (start + snippet * (length // len(snippet) + 1))[:length]
            parser = ToolCallParser(TOOL_FORMATS[form], TOOLS, lambda: "id")
            for at in range(0, length, size):
                parser.feed(text[at : at + size])
            parser.finish()
            total += parser.work
        return total

    small, large = work(1 << 12), work(1 << 13)
    assert large <= 2.5 * small
    assert large <= 200 * (1 << 13)


def test_a_value_is_what_the_schema_says_or_text():
    long = "9" * 5000
    cases = [
        *(("5", {"integer"}, "5"), ("5.0", {"integer"}, "5.0"), ("x", {"integer"}, '"x"'), ("5", {"string"}, '"5"')),
        *(("5", {"string", "integer"}, '"5"'), ("null", {"string", "null"}, "null"), ("True", {"boolean"}, "true")),
        *(
            ('{"a": [1, "é"]}', {"object"}, '{"a":[1,"é"]}'),
            ("NaN", {"number"}, '"NaN"'),
            (long, {"integer"}, f'"{long}"'),
        ),
        (r'{"a": "\ud83d"}', {"object"}, r'{"a":"\ud83d"}'),
        (r'["\ud83d\ude00"]', {"array"}, '["\U0001f600"]'),
        *(("1e999", {"number"}, '"1e999"'), ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"')),
    ]
    for text, types, expected in cases:
        assert as_json(text, frozenset(types)) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def is_json(text: str) -> bool:
    scanner = JsonScanner()
    end = scanner.scan(text, 0)
    if not (scanner.is_done or scanner.is_failed):
        scanner.end()
    return scanner.is_done and end == len(text)


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
def test_the_scanner_takes_all_json(value: object, ensure_ascii: bool, indent: int | None):
    assert is_json(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent))


@given(JSON, st.lists(st.tuples(st.integers(0, 200), st.sampled_from(list('{}[]",:\\u0a1-.es+ trx'))), max_size=2))
def test_the_scanner_takes_nothing_else(value: object, changes: list[tuple[int, str]]):
    text = json.dumps(value)
    for at, char in changes:
        text = text[: at % len(text)] + char + text[at % len(text) + 1 :]
    text = text.strip()
    try:
        json.loads(text, parse_constant=lambda name: int(f"no number: {name}"))
        expected = bool(text)
    except ValueError:
        expected = False
    assert is_json(text) == expected


def test_ids_and_indices_of_a_batch():
    ids = itertools.count()
    parser = ToolCallParser(TOOL_FORMATS["hermes"], TOOLS, lambda: f"call_{next(ids)}")
    _, calls = parser.feed(TWO.replace("{}", ""))
    assert [(call.index, call.id, call.name) for call in calls] == [(0, "call_0", "f"), (1, "call_1", "g")]
