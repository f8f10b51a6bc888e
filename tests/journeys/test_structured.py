"""Forced answers from the real model over a real socket, and grammars that nobody can keep."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.served import Served

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["child", "grown-up", "北京"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
LIST = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "maximum": 9, "minimum": 0},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
CYCLE = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
TWO = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


def asked(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "schema",
    [PERSON, {"enum": ["北京", 'a"b', "\\n"]}, {"type": "integer", "minimum": -5, "maximum": 9999}],
    ids=str,
)
def test_finished_answers_validate(served: Served, schema: Any) -> None:
    answer = served.chat(
        "Tell me something.", response_format=asked(schema), n=4, temperature=1, seed=1, max_tokens=160
    )
    finished = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert finished
    for choice in finished:
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_recursion_with_a_base_case(served: Served) -> None:
    """The model would go on with the list for ever: the way out is made likelier."""
    _, tokens, _ = served.post("/tokenize", {"model": served.model, "prompt": "null"})
    bias = {str(token): 12 for token in tokens["tokens"]}
    answer = served.chat("A list.", response_format=asked(LIST), n=4, seed=1, max_tokens=200, logit_bias=bias)
    finished = [choice["message"]["content"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert finished
    for content in finished:
        jsonschema.validate(json.loads(content), LIST)


def test_a_json_object(served: Served) -> None:
    answer = served.chat("A person as JSON.", response_format={"type": "json_object"}, temperature=0, max_tokens=200)
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].startswith("{")


def test_the_extension(served: Served) -> None:
    fields: dict[str, Any] = {"temperature": 1, "max_tokens": 20, "n": 4, "seed": 5}
    for wanted, pattern in (
        ({"choice": ["yes (sure)", "no", "北京"]}, r"yes \(sure\)|no|北京"),
        ({"regex": r"[a-c]{2}-\d{3}"}, r"[a-c]{2}-[0-9]{3}"),
        ({"lark": 'start: "<" /[0-9]+/ ">" | "none"'}, r"<[0-9]+>|none"),
        ({"json": {"type": "boolean"}}, r"true|false"),
    ):
        for choice in served.chat("Well?", structured_outputs=wanted, **fields)["choices"]:
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["message"]["content"])


def test_truncation_says_length(served: Served) -> None:
    answer = served.chat("Hi", response_format=asked(PERSON), max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_batch_mate_is_not_disturbed_and_a_seed_repeats(served: Served) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 40}
    first = served.chat("Hi", response_format=asked(PERSON), **fields)
    again = served.chat("Hi", response_format=asked(PERSON), **fields)
    assert first["choices"] == again["choices"]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (CYCLE, "$ref"),
        (TWO, "$ref"),
        ({"type": "object", "properties": {"x": {"type": "string", "enum": []}}, "required": ["x"]}, "x/enum"),
        ({"anyOf": []}, "anyOf"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "object", "properties": {}, "required": ["k"], "additionalProperties": False}, "required"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"$ref": "https://example.com/s.json"}, "$ref"),
        ({"not": {}}, "not"),
        ({"enum": [str(i) for i in range(20_000)]}, "enum"),
        ({"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for i in range(9)]} for j in range(9)]}, "large"),
        ({"anyOf": [{"type": "integer"}] * 6000}, "schema"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_kept_is_refused(served: Served, schema: Any, keyword: str) -> None:
    engine = served.state()["engine"]["pid"]
    body = {"model": served.model, "messages": [{"role": "user", "content": "x"}], "response_format": asked(schema)}
    status, answer, _ = served.post("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "response_format"
    assert keyword in answer["error"]["message"]
    assert served.state()["engine"]["pid"] == engine


@pytest.mark.parametrize(
    "wanted",
    [
        {"lark": "start: ("},
        {"lark": "start: " + "(" * 100_000},
        {"regex": "(" * 50_000 + "a" + ")" * 50_000},
        {"regex": "(?=a)"},
        {"lark": "start: missing"},
        {"lark": 'start: "a" start'},
        {"regex": "[^\\s\\S]"},
    ],
    ids=lambda value: str(value)[:30],
)
def test_hostile_grammars_are_refused(served: Served, wanted: Any) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "x"}], "structured_outputs": wanted}
    status, answer, _ = served.post("/v1/chat/completions", body | {"max_tokens": 3})
    assert status == 400
    assert answer["error"]["param"] == "structured_outputs"


class Point(pydantic.BaseModel):
    x: int
    label: str = pydantic.Field(max_length=12)


class Shape(pydantic.BaseModel):
    points: list[Point] = pydantic.Field(min_length=1, max_length=2)
    closed: bool


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="not-needed", max_retries=0) as made:
        yield made


def test_the_clients_parse(client: openai.OpenAI, served: Served) -> None:
    completion = client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": "A shape, please."}],
        response_format=Shape,
        max_tokens=300,
        temperature=0.5,
        seed=3,
    )
    assert isinstance(completion.choices[0].message.parsed, Shape)


def test_the_clients_stream(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(
        model=served.model,
        messages=[{"role": "user", "content": "A shape, please."}],
        response_format=Shape,
        max_tokens=300,
        temperature=0.5,
        seed=4,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Shape)
