"""The grammar of completion streams: what the server sends keeps to it, and what breaks it is seen."""

import json

import pytest

from hitsend.core.errors import EngineFailed
from hitsend.testing import StreamViolation
from tests.edge import COMPLETED, STARTED, Edge, end, text
from tests.stream.completion_grammar import check_completion_stream

OBJECT = {"id": "c", "created": 1, "model": "m", "system_fingerprint": None, "object": "text_completion"}
DONE = b"data: [DONE]\n\n"


def frame(text: str = "", index: int = 0, reason: str | None = None, **fields) -> bytes:
    choice = {"text": text, "index": index, "logprobs": None, "finish_reason": reason}
    return b"data: " + json.dumps(OBJECT | {"choices": [choice]} | fields).encode() + b"\n\n"


LAST = frame("", reason="stop", hitsend={})


async def ask(edge: Edge, **fields):
    return (await edge.ask("/v1/completions", {"model": "m", "prompt": "hi", "stream": True} | fields)).body


async def test_whole_and_failed_streams_keep_to_it():
    script = (STARTED, text("a"), text("b", 1), end(1), text("c"), end(), COMPLETED)
    seen = check_completion_stream(await ask(Edge(*script), n=2, echo=True), n=2)
    assert seen.texts == {0: "hiac", 1: "hib"}
    seen = check_completion_stream(
        await ask(Edge(*script), n=2, stream_options={"include_usage": True}), n=2, include_usage=True
    )
    assert seen.usage is not None
    for script in ((STARTED, text("a"), EngineFailed("gone")), (STARTED, text("a"), end(), EngineFailed("gone"))):
        seen = check_completion_stream(await ask(Edge(*script)))
        assert seen.error is not None
        assert seen.error["code"] == "engine_failed"
        assert not seen.is_done
        assert seen.finish_reasons == {}


@pytest.mark.parametrize(
    "data",
    [
        frame("a"),
        frame("a") + DONE,
        LAST,
        LAST + DONE + DONE,
        LAST + LAST + DONE,
        frame(reason="stop") + DONE,
        frame("a", index=1) + LAST + DONE,
        LAST + frame("b") + DONE,
        frame("a", usage=None) + LAST + DONE,
        LAST + DONE[:-1],
        b"data: {}\n\n".replace(b"{}", b'{"error": {}}'),
        b'data: {"error": {"message": "", "type": "", "param": null, "code": ""}}\n\n' + DONE,
        b"event: x\n" + LAST + DONE,
    ],
)
def test_what_breaks_it_is_seen(data: bytes):
    assert check_completion_stream(frame("a") + LAST + DONE).is_done
    with pytest.raises(StreamViolation):
        check_completion_stream(data)


def test_only_a_cut_stream_may_lack_its_end():
    whole = frame("a") + LAST + DONE
    for size in range(len(whole)):
        check_completion_stream(whole[:size], is_cut=True)
        with pytest.raises(StreamViolation):
            check_completion_stream(whole[:size])
