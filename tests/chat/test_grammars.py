"""Grammars in a real text child: what compiles comes back, what kills the compiler costs its own request."""

import os
import signal

import pytest

from hitsend.core.constraint import GrammarSource
from hitsend.core.errors import EngineFailed, InvalidRequest
from hitsend.serve.chat.grammars import MAX_CACHED, GrammarCache, end_reason, grammar_key
from hitsend.serve.chat.text import TextChild
from hitsend.serve.child import ChildExit
from hitsend.settings import ChatSettings
from tests.vocabularies import CHATML, write_bpe


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


NINE = range(9)
DOUBLING = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(60)) + 'a60: "x"'
HOSTILE = [
    GrammarSource("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}),
    GrammarSource("json_schema", {"properties": {"x": {"enum": []}}}),
    GrammarSource("json_schema", nested(100)),
    GrammarSource("json_schema", {"enum": [str(i) for i in range(20_000)]}),
    GrammarSource("json_schema", {"anyOf": [{}] * 6_000}),
    GrammarSource("json_schema", {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for i in NINE]} for j in NINE]}),
    GrammarSource("json_schema", {"type": "string", "pattern": "(" * 2000 + ")" * 2000}),
    GrammarSource("json_schema", {"type": "string", "pattern": "((a{1,999}){1,999}){1,999}b" * 9, "minLength": 9000}),
    GrammarSource("json_schema", {"x-guidance": {"lenient": True}, "not": {}}),
    GrammarSource("regex", "(" * 100_000 + "a" + ")" * 100_000, "structured_outputs"),
    GrammarSource("regex", "(?:", "structured_outputs"),
    GrammarSource("regex", "(a*)*" * 200 + "\\", "structured_outputs"),
    GrammarSource("lark", "start: " + "(" * 200_000, "structured_outputs"),
    GrammarSource("lark", 'start: "a" start', "structured_outputs"),
    GrammarSource("lark", DOUBLING, "structured_outputs"),
    GrammarSource("lark", "%json {", "structured_outputs"),
    GrammarSource("lark", "start: %json " + '{"items":' * 5000 + "1", "structured_outputs"),
    GrammarSource("choice", ["\ud800"], "structured_outputs"),
    GrammarSource("json_schema", {"const": 2**80}),
]  # fmt: skip


@pytest.fixture(params=[None])
async def child(tmp_path, request):
    """With the whole vocabulary, or with its first tokens only."""
    opened = TextChild(str(write_bpe(tmp_path / "v.gguf", template=CHATML, size=request.param)), ChatSettings())
    await opened.start()
    yield opened
    await opened.stop()


async def test_hostile_grammars_are_refused_and_the_next_one_compiles(child):
    good = GrammarSource("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    text = await child.compile(good)
    for source in HOSTILE:
        with pytest.raises(InvalidRequest) as refused:
            await child.compile(source)
        assert refused.value.param == source.param, refused.value.message
        assert await child.compile(GrammarSource("regex", f"a{len(refused.value.message)}"))
    assert await child.compile(good) == text


@pytest.mark.parametrize("child", [600], indirect=True)
async def test_a_grammar_that_compiled_is_remembered(child):
    source = GrammarSource("choice", ["a", "b"])
    text = await child.compile(source)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert await child.compile(source) == text
    finally:
        os.kill(child.pid, signal.SIGCONT)


def test_the_cache_forgets_the_oldest():
    cache = GrammarCache()
    for i in range(MAX_CACHED + 5):
        cache.put(grammar_key(GrammarSource("regex", f"a{i}")), "x" * i)
    assert len(cache) == MAX_CACHED
    assert cache.get(grammar_key(GrammarSource("regex", "a0"))) is None
    assert cache.get(grammar_key(GrammarSource("regex", "a50"))) == "x" * 50
    cache.put(b"large", "x" * 20_000_000)
    assert len(cache) == 1


@pytest.mark.parametrize(
    ("number", "source", "kind"),
    [
        (signal.SIGPROF, GrammarSource("regex", "a"), InvalidRequest),
        (signal.SIGSEGV, GrammarSource("regex", "a"), InvalidRequest),
        (signal.SIGABRT, GrammarSource("regex", "a"), InvalidRequest),
        (signal.SIGKILL, GrammarSource("regex", "a"), EngineFailed),
        (signal.SIGSEGV, None, EngineFailed),
        (signal.SIGPROF, None, InvalidRequest),
        (signal.SIGVTALRM, None, InvalidRequest),
    ],
)
def test_whose_fault_a_dead_child_was(number, source, kind):
    error = end_reason(ChildExit(1, None, number, ()), ChatSettings(), source)
    assert type(error) is kind
    if source is not None and kind is InvalidRequest:
        assert error.param == "response_format"
