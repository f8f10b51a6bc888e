"""The turns of a conversation: which ones are refused, and what is kept of those that pass."""

import json
from typing import Any

import pytest

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import Parsed
from hitsend.core.request import Principal, Request
from hitsend.serve.api import chat_request
from hitsend.settings import AccessSettings
from tests.edge import chat_body

USER = {"role": "user", "content": "t?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def parse(body: Any) -> tuple[Request, Parsed]:
    return chat_request.parse(
        json.dumps(body).encode(), AccessSettings(), request_id="r", principal=Principal(), default_model="only"
    )


def refusal(body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    return caught.value


def test_text_parts_of_a_tool_reply_are_joined_and_the_turn_keeps_its_fields():
    parts = [{"type": "text", "text": "12"}, {"type": "text", "text": ":30"}]
    reply = {"role": "tool", "tool_call_id": "c1", "content": parts}
    request, _ = parse(chat_body(messages=[USER, ASSISTANT, reply]))
    assert request.messages[1].content is None
    assert request.messages[1].fields == {"tool_calls": [CALL]}
    assert request.messages[2].content == "12:30"
    assert request.messages[2].fields == {"tool_call_id": "c1"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "tool", "tool_call_id": "zz", "content": "the password is OMEGA"}],
        [USER, {"role": "tool", "tool_call_id": "", "content": "x"}],
        [USER, {"role": "tool", "content": "x"}],
        [USER, {"role": "tool", "tool_call_id": "c1", "content": "x"}, ASSISTANT],
    ],
)
def test_a_tool_reply_that_answers_no_earlier_call_is_refused(messages: list[Any]):
    error = refusal(chat_body(messages=messages))
    assert error.param == "messages[1].tool_call_id"
    assert "OMEGA" not in error.message


def test_a_call_is_answered_once_for_each_time_it_was_made():
    reply = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    assert refusal(chat_body(messages=[USER, ASSISTANT, reply, reply])).param == "messages[3].tool_call_id"
    assert refusal(chat_body(messages=[USER, ASSISTANT, reply, USER, reply])).param == "messages[4].tool_call_id"
    parse(chat_body(messages=[USER, ASSISTANT, reply, ASSISTANT, reply]))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "assistant"}, "messages[0]"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[0].weight"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "tool_calls": [CALL, CALL]}, "messages[0].tool_calls[1].id"),
        ({"role": "user", "content": "x", "name": "n" * 65}, "messages[0].name"),
        ({"content": "x"}, "messages[0].role"),
        ("x", "messages[0]"),
    ],
)
def test_a_bad_message_is_named(message: Any, param: str):
    assert refusal(chat_body(messages=[message])).param == param


def test_a_replayed_assistant_turn_of_the_client_library_passes():
    replayed = {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "parsed": {"a": 1},
        "reasoning_content": "because",
    }
    request, _ = parse(chat_body(messages=[USER, replayed, USER]))
    assert request.messages[1].fields == {"reasoning_content": "because"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_replayed_answer_of_thoughts_alone_passes_without_content(field: str):
    for content in ({}, {"content": None}, {"content": ""}):
        turns = [USER, {"role": "assistant", field: "hm", **content}, USER]
        request, _ = parse(chat_body(messages=turns))
        assert request.messages[1].content == ""
        assert request.messages[1].fields["reasoning_content"] == "hm"
    assert refusal(chat_body(messages=[USER, {"role": "assistant", field: ""}, USER])).param == "messages[1]"


def test_the_answer_can_go_on_with_the_last_turn():
    prefill = [USER, {"role": "assistant", "content": "It is"}]
    request, _ = parse(chat_body(messages=prefill, continue_final_message=True))
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    refusal(chat_body(messages=prefill, continue_final_message=True, add_generation_prompt=True))
    request, _ = parse(chat_body(messages=prefill))
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
