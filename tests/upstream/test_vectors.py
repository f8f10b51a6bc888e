"""Vectors as servers that call themselves compatible send them, and errors in their place."""

import json
import struct

import pytest

from hitsend.core.errors import ServeError
from hitsend.settings_upstreams import UpstreamSettings
from tests.upstream.asking import engine_of

SETTINGS = {"name": "s", "embedding_models": {"near": "far"}}
TWO = [[1.0, 0.0], [0.0, 1.0]]


async def embedded(mock, body, kind="application/json", **fields):
    async def script(call):
        await call.start(kind=kind)
        await call.raw(json.dumps(body).encode())

    mock.script = script
    async with engine_of(UpstreamSettings(**SETTINGS, base_url=mock.url, **fields)) as engine:
        asking = engine.embed("near", ("a", "b"), None, estimated=2)
        try:
            return [list(struct.unpack("<2f", one)) for one in await asking.vectors()]
        except ServeError as error:
            return error
        finally:
            await asking.aclose()


@pytest.mark.parametrize(
    ("numbers", "found"),
    [([0, 1], TWO), ([1, 0], TWO[::-1]), ([None, None], TWO), ([0, 0], TWO), ([1, 2], TWO), (["0", "1"], TWO)],
)
async def test_vectors_are_told_apart_by_their_numbers_or_else_by_their_order(mock, numbers, found):
    rows = [{"index": number, "embedding": row} for number, row in zip(numbers, TWO, strict=True)]
    assert await embedded(mock, {"data": rows}) == found
    assert await embedded(mock, {"data": rows}, kind="text/plain") == found


async def test_too_few_are_no_answer(mock):
    assert (await embedded(mock, {"data": [{"index": 0, "embedding": TWO[0]}]})).code == "engine_failed"
    assert "without JSON" in (await embedded(mock, {}, kind="text/html")).message


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        ({"message": "SECRET", "code": 429}, "rate_limit_exceeded", None),
        ({"message": "SECRET", "type": "invalid_request_error"}, "invalid_request", None),
        ({"message": "input is too long", "code": 400}, "context_length_exceeded", "input"),
        ("SECRET", "engine_unavailable", None),
    ],
)
async def test_an_error_in_place_of_vectors_is_the_status_that_it_stands_for(mock, error, code, param):
    found = await embedded(mock, {"error": error}, retry_share=0.0)
    assert (found.code, found.param, "SECRET" in found.message) == (code, param, False)
