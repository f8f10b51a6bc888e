import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.serve.stream import sse
from hitsend.testing import StreamViolation, check_stream


@given(st.text())
def test_a_frame_is_one_line_for_every_reader_and_keeps_its_text(text: str):
    framed = sse.frame(json.dumps({"t": text}, ensure_ascii=False).encode())
    assert framed.endswith(b"\n\n")
    lines = framed.decode()[:-2].splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0].removeprefix("data: ")) == {"t": text}


def chunk(index: int = 0, *, finish: str | None = None, **delta: str) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return sse.frame(json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode())


def last(index: int = 0) -> bytes:
    choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    document = {"object": "chat.completion.chunk", "choices": [choice], "hitsend": {}}
    return sse.frame(json.dumps(document).encode())


ROLE = chunk(role="assistant", content="")


def test_the_grammar_accepts_a_good_stream():
    seen = check_stream(sse.PING + ROLE + sse.PING + chunk(content="a") + last() + sse.DONE)
    assert (seen.texts, seen.finish_reasons, seen.num_pings) == ({0: "a"}, {0: "stop"}, 2)


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        ROLE + chunk(content="a"),
        ROLE + last(),
        chunk(content="a") + last() + sse.DONE,
        ROLE + ROLE + last() + sse.DONE,
        ROLE + sse.DONE,
        ROLE + chunk(finish="stop") + sse.DONE,
        ROLE + last() + chunk(content="late") + sse.DONE,
        ROLE + chunk(finish="stop") + last() + sse.DONE,
        ROLE + chunk(finish="cancelled") + last() + sse.DONE,
        ROLE + last() + sse.DONE + sse.DONE,
        ROLE + last() + sse.DONE + sse.PING,
        ROLE + last() + sse.DONE[:-1],
        ROLE + chunk(1, role="assistant") + last() + sse.DONE,
        ROLE + b"event: x\n\n" + last() + sse.DONE,
    ],
)
def test_the_grammar_refuses_a_bad_stream(stream: bytes):
    with pytest.raises(StreamViolation):
        check_stream(stream)
