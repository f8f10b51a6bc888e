import asyncio
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Completed, Delta, TextLogprob, Usage
from hitsend.testing import check_stream
from tests.edge import COMPLETED, STARTED, Edge, end, text

BOTH = (STARTED, text("a", 1), text("b", 0), end(1), text("c", 0), end(0, FinishReason.LENGTH), COMPLETED)


async def test_a_stream_of_two_choices_ends_each_once_then_usage_then_done():
    answer = await Edge(*BOTH).chat(stream=True, n=2, stream_options={"include_usage": True})
    assert answer.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    seen = check_stream(answer.body, n=2, include_usage=True)
    assert seen.texts == {0: "bc", 1: "a"}
    assert seen.finish_reasons == {0: "length", 1: "stop"}
    assert seen.usage == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert seen.hitsend == {
        "request_id": answer.headers[b"x-request-id"].decode(),
        "cost_microusd": 12,
        "timings": {"wall_ms": 5.0},
        "warnings": ["w"],
        "matched_stops": [None, None],
    }


async def test_without_usage_asked_for_every_chunk_has_a_choice_and_the_last_one_the_bill():
    answer = await Edge(*BOTH).chat(stream=True, n=2)
    seen = check_stream(answer.body, n=2)
    assert seen.usage is None
    assert seen.hitsend is not None
    assert seen.hitsend["cost_microusd"] == 12
    assert b'"choices":[]' not in answer.body


async def test_a_whole_answer_says_the_same_as_its_stream():
    whole = (await Edge(*BOTH).chat(n=2)).json()
    assert whole["object"] == "chat.completion"
    assert whole["id"].startswith("chatcmpl-")
    assert (whole["created"], whole["model"]) == (1_700_000_000, "m")
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["bc", "a"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None, None]
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "bc",
        "refusal": None,
        "annotations": [],
    }
    assert whole["usage"]["total_tokens"] == 10
    assert whole["hitsend"]["cost_microusd"] == 12


async def test_each_chunk_of_text_is_what_an_encoder_would_make_of_all_of_it():
    pieces = ('"content":""', "\u2028 \x85 \u2029", 'a"b\\c\n', "\x00é🦜")
    script = (STARTED, *(text(piece, index) for piece in pieces for index in (0, 1)), end(0), end(1), COMPLETED)
    asked = {"n": 2, "stream": True, "stream_options": {"include_usage": True}, "service_tier": "default"}
    answer = await Edge(*script).chat(**asked)
    frames = [json.loads(each.removeprefix("data: ")) for each in answer.body.decode().split("\n\n")[:-2]]
    assert len(answer.body.decode().splitlines()) == 2 * len(frames) + 2
    common = {key: value for key, value in frames[0].items() if key != "choices"}
    found = [frame for frame in frames if frame["choices"] and frame["choices"][0]["delta"].get("content")]
    wanted = [
        common | {"choices": [{"index": index, "delta": {"content": piece}, "logprobs": None, "finish_reason": None}]}
        for piece in pieces
        for index in (0, 1)
    ]
    assert found == wanted
    assert {"usage", "service_tier"} <= common.keys()


async def test_a_matched_stop_is_told():
    script = (STARTED, end(0, matched="\nUser:"), COMPLETED)
    assert (await Edge(*script).chat()).json()["hitsend"]["matched_stops"] == ["\nUser:"]
    seen = check_stream((await Edge(*script).chat(stream=True)).body)
    assert seen.hitsend is not None
    assert seen.hitsend["matched_stops"] == ["\nUser:"]


async def test_logprobs_carry_bytes_and_never_an_infinity():
    top = (TextLogprob("é", -0.5, (0xC3, 0xA9)), TextLogprob("<end>", -math.inf, ()))
    delta = Delta(index=0, text="é", logprobs=(TextLogprob("é", -0.5, (0xC3, 0xA9), top),))
    script = (STARTED, delta, end(), COMPLETED)
    whole = (await Edge(*script).chat(logprobs=True, top_logprobs=2)).json()
    entry = whole["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("é", [195, 169], -0.5)
    assert entry["top_logprobs"][1] == {"token": "<end>", "logprob": -9999.0, "bytes": None}
    assert whole["choices"][0]["logprobs"]["refusal"] is None
    seen = check_stream((await Edge(*script).chat(stream=True, logprobs=True)).body)
    assert seen.logprob_tokens == {0: ["é"]}


async def test_tokens_without_text_at_the_end_still_show_their_logprobs():
    ending = Delta(
        index=0, logprobs=(TextLogprob("x", -1.0, (120,)),), finish_reason=FinishReason.STOP, matched_stop="x"
    )
    seen = check_stream((await Edge(STARTED, ending, COMPLETED).chat(stream=True, logprobs=True)).body)
    assert (seen.texts, seen.logprob_tokens) == ({0: ""}, {0: ["x"]})


@pytest.mark.parametrize(
    "script",
    [
        (STARTED, text("a")),
        (STARTED, text("a"), COMPLETED),
        (STARTED, end(), text("late"), COMPLETED),
        (STARTED, end(reason=FinishReason.ERROR), COMPLETED),
        (text("a"), end(), COMPLETED),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_answer_that_is_not_whole_is_an_error_and_never_a_stop(script: tuple, is_stream: bool):
    answer = await Edge(*script).chat(stream=is_stream)
    if answer.status == 200:
        seen = check_stream(answer.body)
        assert seen.error is not None
        assert seen.error["code"] == "internal_error"
        assert not seen.is_done
    else:
        assert (answer.status, answer.error["code"]) == (500, "internal_error")


pieces = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=12)


@given(pieces, st.permutations([0, 1, 2]), st.booleans(), st.booleans(), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_any_order_of_deltas_is_a_good_stream(
    deltas: list[tuple[int, str]], order: list[int], usage: bool, breaks: bool, place: int
):
    script = [STARTED, *(text(piece, index) for index, piece in deltas), *map(end, order)]
    script += [Completed(Usage(1, 2), 3, {})]
    if breaks:
        script.insert(1 + place % len(script), ValueError("broken"))
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = asyncio.run(Edge(*script).chat(stream=True, n=3, **options))
    seen = check_stream(answer.body, n=3, include_usage=usage)
    assert (seen.error is not None, seen.is_done) == (breaks, not breaks)
    if seen.is_done:
        whole = {index: "".join(piece for at, piece in deltas if at == index) for index in range(3)}
        assert seen.texts == whole
