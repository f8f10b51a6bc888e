"""Thousands of hostile bodies: never a 5xx, always a valid error that names no more than a field."""

import json
import random
from typing import Any

import pytest

from hitsend.serve.api.chat_request import ChatBody
from hitsend.serve.api.completion_request import OwnFields
from hitsend.serve.api.embeddings import EmbeddingsBody
from hitsend.serve.api.services import ServedModel
from tests.edge import Edge, chat_body

NUMBERS = [
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "-1",
        "0",
        "-0",
        "0.5",
        "1",
        "2",
        "2147483648",
        "1e308",
        "1e-320",
    ),
    *(
        "9007199254740993",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551616",
        "9" * 400,
        "0x10",
        "01",
    ),
]
OTHERS = [
    *("true", "false", "null", '""', '"a"', '"1"', "[]", "{}", '[""]', '["a","b"]', "[[]]", '{"a":1}', '{"":null}'),
    *(
        '"\\ud83d"',
        '"\\ud83d\\ude00"',
        '"\\u0000"',
        '["\\udfff"]',
        '{"\\ud800":1}',
        "[" * 80 + "]" * 80,
        '[{"type":"text"}]',
    ),
    *('{"type":"function"}', '[{"role":"user"}]', '[{"role":"tool","content":"x","tool_call_id":"\\ud800"}]', "}", ","),
]
FIELDS = [*ChatBody.__struct_fields__, "nonsense", "chat_template", "best_of", "__proto__"]


def with_field(base: str, field: str, value: str) -> bytes:
    return f'{base[:-1]},"{field}":{value}}}'.encode()


def mutated(chance: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data))
        action = chance.randrange(3)
        if action == 0:
            data[place] = chance.randrange(256)
        elif action == 1:
            del data[place : place + chance.randint(1, 5)]
        else:
            data[place:place] = chance.choice([b'"', b"{", b"]", b",", b"\\", b"\xff", b"\\ud800", b"1e999", b"NaN"])
    return bytes(data) or b" "


def bodies() -> list[bytes]:
    chance = random.Random(2)
    base = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    found = [with_field(base, field, value) for field in FIELDS for value in (*NUMBERS, *OTHERS)]
    rich: dict[str, Any] = chat_body(
        temperature=1, stop=["x"], logit_bias={"3": 1}, metadata={"k": "v"}, stream=True, stream_options={}, n=2
    )
    rich["messages"] += [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "é"}]},
    ]
    whole = json.dumps(rich).encode()
    found += [mutated(chance, whole) for _ in range(2000)]
    return found


def broken(chance: random.Random) -> bytes:
    """A good body with several things wrong with it, of every kind that parsers disagree on."""
    names = chance.sample(FIELDS, chance.randint(1, 4))
    fields = {field: chance.choice((*NUMBERS, *OTHERS)) if chance.random() < 0.6 else "null" for field in names}
    pairs = ['"model":"m"', '"messages":[{"role":"user","content":"hi"}]']
    pairs += [f'"{field}":{value}' for field, value in fields.items()]
    kind = chance.randrange(8)
    if kind == 0:
        pairs.append(chance.choice(pairs))  # a duplicate key
    depth = chance.choice([1, 63, 64, 65, 500, 20_000])
    if kind == 1:
        pairs.append(f'"metadata":{"[" * depth}{"]" * depth}')
    if kind == 2:
        pairs.append(f'"messages":{{"a":{"[" * depth}')
    chance.shuffle(pairs)
    whole = ("{" + ",".join(pairs) + "}").encode()
    if kind == 3:
        return whole + chance.choice([b"{}", b"\x00", b" x", b"\n\n", b"\xef\xbb\xbf", b","])
    return mutated(chance, whole) if kind == 4 else whole


async def test_no_body_is_ever_the_server_s_fault():
    asked = bodies()
    assert len(asked) > 3000
    served, refused = await refuse_or_serve(asked)
    assert served > 100
    assert refused > 2000


@pytest.mark.slow
async def test_twenty_thousand_bodies_are_never_the_server_s_fault():
    chance = random.Random(3)
    served, refused = await refuse_or_serve([broken(chance) for _ in range(20_000)])
    assert served > 500
    assert refused > 10_000


async def refuse_or_serve(asked: list[bytes]) -> tuple[int, int]:
    edge = Edge()
    served = 0
    for body in asked:
        answer = await edge.ask("/v1/chat/completions", body)
        if answer.status == 200:
            served += 1
            continue
        assert answer.status in (400, 403), body  # 403: a tier that this caller may not have
        error = answer.error
        assert isinstance(error["message"], str)
        assert error["code"] == {400: "invalid_request", 403: "permission_denied"}[answer.status]
    for request in edge.pipeline.requests:
        json.dumps([message.content for message in request.messages], ensure_ascii=False).encode()
    assert edge.flights.num_open == 0
    return served, len(asked) - served


@pytest.mark.parametrize(
    ("path", "base", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}, (*OwnFields.__struct_fields__, "n", "stop", "stream", "messages", "x")),
        ("/v1/embeddings", {"input": ["a", "b"]}, EmbeddingsBody.__struct_fields__),
        ("/v1/estimate", {"messages": [{"role": "user", "content": "hi"}]}, ("n", "model", "max_tokens")),
    ],
)
async def test_nor_is_one_on_the_other_routes(path: str, base: dict[str, Any], fields: tuple[str, ...]):
    chance = random.Random(3)
    edge = Edge(embedding_model=ServedModel(id="m", created=1, context=8))
    plain = json.dumps({"model": "m"} | base)
    missing = [json.dumps({"model": "m"} | {name: None}) for name in base]
    own = [with_field('{"model":"m"}', name, value) for name in base for value in (*NUMBERS, *OTHERS)]
    others = [with_field(plain, field, value) for field in fields for value in (*NUMBERS, *OTHERS)]
    spoiled = [mutated(chance, plain.encode()) for _ in range(500)]
    for body in (*(text.encode() for text in missing), *own, *others, *spoiled):
        answer = await edge.ask(path, body)
        assert answer.status in (200, 400, 404), body
        if answer.status != 200:
            assert isinstance(answer.error["message"], str)
    assert (await edge.ask(path, plain.encode())).status == 200
    assert edge.flights.num_open == 0
