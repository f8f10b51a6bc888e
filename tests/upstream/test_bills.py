"""Where in a stream a bill may stand: it is taken wherever it comes, and nobody waits for one that doesn't. Real
sockets."""

import asyncio
import json

import pytest

from tests.mock_upstream import USAGE

pytestmark = pytest.mark.slow  # waits for sockets

OTHER = {"prompt_tokens": 8, "completion_tokens": 4}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
BILL = {"choices": [], "usage": USAGE}
DONE = "[DONE]"


def tells(*events, pause_s=0.02, stays=False):
    """A word, then these in packets of their own."""

    async def script(call):
        await call.start()
        await call.say("Hi")
        for event in events:
            await asyncio.sleep(pause_s)
            await call.event(event)
        if stays:
            await call.has_left.wait()

    return script


PLACES = {
    "with the finish reason": (END | {"usage": USAGE}, DONE),
    "behind it": (END, BILL, DONE),
    "behind [DONE]": (END, DONE, BILL),
    "behind [DONE], and [DONE] again": (END, DONE, BILL, DONE),
    "twice, the last one counts": (END | {"usage": OTHER}, BILL, DONE),
    "before and behind the end": ({"choices": [], "usage": OTHER}, END, BILL, DONE),
    "before the last word and behind [DONE]": (
        {"choices": [], "usage": OTHER},
        {"choices": [{"index": 0, "delta": {"content": "!"}}]},
        END,
        DONE,
        BILL,
    ),
    "twice, the last one unreadable": (END | {"usage": USAGE}, {"choices": [], "usage": {"prompt_tokens": -1}}, DONE),
    "in the choice": ({"choices": [END["choices"][0] | {"usage": USAGE}]}, DONE),
    "without [DONE]": (END, BILL),
}


CASES = [(place, False) for place in PLACES] + [(place, True) for place in PLACES if place != "without [DONE]"]
"""Where the connection stays open, only [DONE] ends an answer."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("place", "stays"), CASES)
async def test_it_is_taken_wherever_it_stands(gate, place, stream, stays):
    gate.mock.script = tells(*PLACES[place], stays=stays)
    status, body, answer = await gate.answer(stream=stream, stream_options={"include_usage": True} if stream else None)
    row = (await gate.record(answer.headers["x-request-id"]))["ledger"]
    assert (status, row["prompt_tokens"], row["completion_tokens"], row["is_estimate"]) == (200, 7, 3, False)
    shown = body["usage"] if not stream else json.loads(body.split("data: ")[-2])["usage"]
    assert (shown["prompt_tokens"], shown["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize("behind", [(), ("no JSON",), ({"error": {"code": 500}},)])
async def test_one_that_never_comes_is_waited_for_a_moment_and_the_text_not_at_all(gate, behind):
    gate.mock.script = tells(END, DONE, *behind, stays=True, pause_s=0.0)
    loop, seen = asyncio.get_running_loop(), []
    async with gate.ask(stream=True) as answer:
        async for line in answer.content:
            seen.append((loop.time(), line))
    said = next(at for at, line in seen if b'"content":"Hi"' in line)
    done = next(at for at, line in seen if b"[DONE]" in line)
    assert done - said < 1.0, "0.1 s and what a busy machine adds"
    if not behind:
        assert done - said > 0.05, "the text didn't wait"
    row = (await gate.record(answer.headers["x-request-id"]))["ledger"]
    assert (row["completion_tokens"], row["is_estimate"]) == (1, True)
    async with asyncio.timeout(10):
        await gate.mock.calls[0].has_left.wait()


async def test_an_answer_that_ends_without_one_is_not_waited_for(gate):
    gate.mock.script = tells(END, DONE, pause_s=0.0)
    times = []
    for _ in range(5):
        began = asyncio.get_running_loop().time()
        status, _, _ = await gate.answer()
        times.append(asyncio.get_running_loop().time() - began)
        assert status == 200
    assert min(times) < 0.1
