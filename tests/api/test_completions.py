"""The legacy completions route over a scripted pipeline: what is read, what is refused, what goes out."""

import json

import msgspec
import pytest

from hitsend.core.errors import EngineFailed
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import Delta, PromptToken, TextLogprob
from hitsend.serve.api.chat_request import ChatBody
from hitsend.serve.api.completion_logprobs import LegacyLogprobs
from hitsend.serve.api.completion_request import CHAT_ONLY, CompletionBody
from hitsend.settings import AccessSettings
from tests.edge import COMPLETED, STARTED, Edge, end, text


def chunks(body: bytes):
    frames = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


async def ask(edge: Edge, **fields):
    return await edge.ask("/v1/completions", {"model": "m", "prompt": "hi"} | fields)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ("ab",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),
    ],
)
async def test_each_shape_of_prompt_is_read(prompt, prompts):
    edge = Edge()
    assert (await ask(edge, prompt=prompt)).status == 200
    request = edge.pipeline.requests[0]
    assert request.prompts == prompts
    assert request.messages == ()
    assert request.max_tokens == 16


async def test_what_both_routes_know_is_read_alike():
    edge = Edge()
    shared = {"temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 4, "n": 2, "user": "u", "logit_bias": {"5": 1}}
    assert (await ask(edge, **shared, max_tokens=9, logprobs=2)).status == 200
    assert (await edge.chat(**shared, max_tokens=9, logprobs=True, top_logprobs=2)).status == 200
    legacy, chat = edge.pipeline.requests
    for name in ("sampling", "stop", "n", "user", "logit_bias", "max_tokens", "logprobs", "top_logprobs"):
        assert getattr(legacy, name) == getattr(chat, name)
    record = edge.flights.all[0].snapshot()
    limits = {one["name"]: one["value"] for one in record["limits"]}
    assert limits["max_prompts"] == 1
    assert "max_messages" not in limits


async def test_structured_outputs_hold_for_prompts_too():
    edge = Edge()
    assert (await ask(edge, structured_outputs={"choice": ["a", "b"]})).status == 200
    wanted = edge.pipeline.requests[0].output_format
    assert wanted is not None
    assert (wanted.kind, tuple(wanted.value)) == ("choice", ("a", "b"))


@pytest.mark.parametrize("field", sorted(CHAT_ONLY))
async def test_what_only_a_chat_knows_is_refused_by_name(field):
    answer = await ask(Edge(), **{field: 1})
    assert (answer.status, answer.error["param"]) == (400, field)


def test_every_field_of_a_chat_is_either_shared_or_refused_by_name():
    """A new field of a chat has to be put on one side."""
    chat = {field.name for field in msgspec.structs.fields(ChatBody)}
    shared = {field.name for field in msgspec.structs.fields(CompletionBody)}
    assert chat >= CHAT_ONLY
    assert chat - CHAT_ONLY <= shared


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [2, 2**31]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"suffix": "s"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_refusals_name_the_field(fields, param):
    edge = Edge()
    answer = await ask(edge, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert edge.pipeline.requests == []


async def test_harmless_defaults_that_clients_send_are_accepted():
    answer = await ask(Edge(), suffix="", best_of=1, echo=False, logprobs=None, messages=None, presence_penalty=0)
    assert answer.status == 200


async def test_a_whole_answer_numbers_choices_through_and_echoes_each_prompt():
    edge = Edge()
    answer = (await ask(edge, prompt=[[65], [66]], n=2, echo=True)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert [choice["text"] for choice in answer["choices"]] == ["Ahi", "Ahi", "Bhi", "Bhi"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert answer["usage"]["total_tokens"] == 10
    assert answer["hitsend"]["cost_microusd"] == 12


async def test_a_stream_ends_each_choice_once_then_usage_then_done():
    edge = Edge(STARTED, text("a"), text("b", 1), end(1, FinishReason.LENGTH), text("c"), end(0), COMPLETED)
    answer = await ask(edge, n=2, stream=True, stream_options={"include_usage": True}, echo=True)
    found = chunks(answer.body)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["prompt_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in found[:-1])
    choices = [choice for chunk in found for choice in chunk["choices"]]
    for index, whole, reason in ((0, "hiac", "stop"), (1, "hib", "length")):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == whole
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [reason]
        assert own[-1]["finish_reason"] == reason


async def test_usage_stays_away_where_nobody_asked():
    found = chunks((await ask(Edge(), stream=True)).body)
    assert all("usage" not in chunk for chunk in found)
    assert "hitsend" in found[-1]


async def test_an_error_after_the_start_is_one_frame_without_an_end():
    answer = await ask(Edge(STARTED, text("a"), EngineFailed("gone")), stream=True)
    assert answer.status == 200
    assert b"engine_failed" in answer.body
    assert b"[DONE]" not in answer.body
    assert b'"finish_reason":"' not in answer.body


async def test_an_error_before_the_start_has_a_status():
    assert (await ask(Edge(EngineFailed("gone")), stream=True)).status == 500


def scored(token_id: int, char: str, *top: PromptToken, logprob: float | None = None, rank: int | None = None):
    return PromptToken(token_id, TextLogprob(char, logprob or 0.0, tuple(char.encode())), logprob, rank, top)


PROMPT = (
    scored(104, "h"),
    scored(
        105, "i", scored(120, "x", logprob=-0.5, rank=1), scored(105, "i", logprob=-2.0, rank=2), logprob=-2.0, rank=2
    ),
)


async def test_the_prompt_s_own_logprobs_as_vllm_writes_them():
    edge = Edge(STARTED, Delta(0, prompt=PROMPT), text("a"), end(), text("b", 1), end(1), COMPLETED)
    answer = (await ask(edge, n=2, prompt_logprobs=1)).json()
    assert edge.pipeline.requests[0].prompt_logprobs == 1
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "x"}
    mine = {"logprob": -2.0, "rank": 2, "decoded_token": "i"}
    for choice in answer["choices"]:
        assert choice["prompt_logprobs"] == [None, {"105": mine, "120": best}]
        assert list(choice["prompt_logprobs"][1]) == ["105", "120"]
        assert choice["logprobs"] is None
    assert "prompt_logprobs" not in (await ask(Edge())).json()["choices"][0]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_echo_with_logprobs_has_those_of_the_prompt_first(is_stream):
    said = Delta(index=0, text="a", logprobs=(TextLogprob("a", -0.1, (97,)),))
    other = Delta(index=1, text="é", logprobs=(TextLogprob("é", -0.2, (0xC3, 0xA9)),))
    edge = Edge(STARTED, Delta(0, prompt=PROMPT), said, other, end(), end(1), COMPLETED)
    answer = await ask(edge, n=2, echo=True, logprobs=1, stream=is_stream)
    assert edge.pipeline.requests[0].prompt_logprobs == 1
    pieces = [c for chunk in chunks(answer.body) for c in chunk["choices"]] if is_stream else answer.json()["choices"]
    for index, (char, logprob) in enumerate((("a", -0.1), ("é", -0.2))):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["text"] for piece in mine) == "hi" + char
        joined = {
            name: [value for piece in mine for value in (piece["logprobs"] or {name: []})[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert joined == {
            "tokens": ["h", "i", char],
            "token_logprobs": [None, -2.0, logprob],
            "top_logprobs": [None, {"x": -0.5, "i": -2.0}, {char: logprob}],
            "text_offset": [0, 1, 2],
        }


async def test_logprobs_become_four_arrays():
    one = TextLogprob("é", -0.5, tuple("é".encode()), (TextLogprob("é", -0.5, tuple("é".encode())),))
    two = TextLogprob("b", float("-inf"), (98,), (TextLogprob("c", -0.1, (99,)),))
    script = (STARTED, Delta(0, "é", (one,)), Delta(0, "b", (two,)), end(), COMPLETED)
    answer = (await ask(Edge(*script), logprobs=1)).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"é": -0.5}, {"c": -0.1, "b": -9999.0}],
        "text_offset": [0, 1],
    }
    streamed = chunks((await ask(Edge(*script), logprobs=1, stream=True)).body)
    offsets = [c["logprobs"]["text_offset"] for chunk in streamed for c in chunk["choices"] if c["logprobs"]]
    assert offsets == [[0], [1]]


def test_a_token_that_is_no_text_is_named_by_its_bytes():
    logprobs = LegacyLogprobs()
    parts = [TextLogprob("\ufffd", -1.0, (byte,)) for byte in "€".encode()]
    found = logprobs.add([*parts, TextLogprob("<|im_end|>", -2.0, ()), TextLogprob("x", -3.0, (120,))])
    assert found.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|im_end|>", "x"]
    assert found.text_offset == [0, 0, 0, 1, 1]
    assert logprobs.all.tokens == found.tokens


async def test_the_number_of_prompts_is_a_setting():
    edge = Edge(access=AccessSettings(max_prompts=1))
    assert (await ask(edge, prompt=["a"])).status == 200
    answer = await ask(edge, prompt=["a", "b"])
    assert "limit 1 (access.max_prompts)" in answer.error["message"]
